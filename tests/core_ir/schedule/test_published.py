"""The published figures: data/zero_bubble_table5.csv, and the closed forms the schedules declare.

The table holds the bubble rates of Zero Bubble Pipeline Parallelism (arXiv 2401.10241), Table 5,
with the task times of its Table 9; t_b there is the time of our I.
"""

import csv
from itertools import product
from pathlib import Path

import pytest

from plait.core_ir.schedule import Memory, Times, build, find

COLUMNS = {"1f1b": "1f1b", "zb-h1": "zb_h1", "zb-h2": "zb_h2"}
SEARCHED = {"zb-1p": "zb_1p", "zb-2p": "zb_2p"}
# Hidden size, attention heads, sequence length.
MODELS = {"1.5B": (2304, 24, 1024), "6.2B": (4096, 32, 1024)}


def published_rows() -> list[dict[str, str]]:
    path = Path(__file__).parent / "data" / "zero_bubble_table5.csv"
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("row", published_rows(), ids=lambda row: f"{row['model']}-m{row['m']}")
def test_bubble_rate_is_the_published_one(row, name):
    f, i, w, comm = (float(row[key]) for key in ("t_f", "t_b", "t_w", "t_comm"))
    timeline = build(name, int(row["p"]), int(row["m"])).simulate(Times(f, i, w, comm=comm))
    assert timeline.span_bubble_rate == pytest.approx(float(row[COLUMNS[name]]), abs=5e-5)


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("row", published_rows(), ids=lambda row: f"{row['model']}-m{row['m']}")
def test_searched_bubble_rate_is_no_worse_than_published(row, name):
    h, a, s = MODELS[row["model"]]
    memory = Memory(34 * h + 5 * a * s, 32 * h)
    f, i, w, comm = (float(row[key]) for key in ("t_f", "t_b", "t_w", "t_comm"))
    times = Times(f, i, w, comm=comm)
    p, m = int(row["p"]), int(row["m"])
    schedule = build(name, p, m, times=times, memory=memory)
    timeline = schedule.simulate(times, memory)
    assert timeline.span_bubble_rate <= float(row[SEARCHED[name]]) + 5e-5
    limit = {"zb-1p": p, "zb-2p": 2 * p}[name] * memory.activation
    assert max(timeline.peak_memory) <= limit * (1 + 1e-9)


@pytest.mark.parametrize("row", published_rows(), ids=lambda row: f"{row['model']}-m{row['m']}")
def test_interleaved_bubble_is_the_closed_form_and_the_order_exposes_more_messages(row):
    v = {"1.5B": 3, "6.2B": 4}[row["model"]]
    f, i, w, comm = (float(row[key]) for key in ("t_f", "t_b", "t_w", "t_comm"))
    p, m = int(row["p"]), int(row["m"])
    work = m * (f + i + w)
    closed = (p - 1) * (f + i + w) / v + (2 * p * v - p - 2) * comm
    assert closed / (work + closed) == pytest.approx(float(row["interleaved_1f1b"]), abs=5e-5)

    times = Times(f / v, i / v, w / v, comm=comm)
    timeline = build("interleaved-1f1b", p, m, stages_per_rank=v).simulate(times)
    assert timeline.longest_span - work == pytest.approx(closed + p * comm)


def evaluate(formula: str, p: int, m: int, f: int = 1, i: int = 1, w: int = 1) -> int:
    names = {"p": p, "m": m, "v": 1, "F": f, "I": i, "W": w, "min": min, "max": max}
    return eval(formula, {"__builtins__": {}}, names)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_bubble_is_the_declared_closed_form(name, p):
    formula = find(name).bubble
    for m, f, i in product((2 * p - 1, 2 * p, 4 * p + 1), (2, 3), (2, 4)):
        for w in (1, 2):
            timeline = build(name, p, m).simulate(Times(f, i, w))
            assert timeline.longest_span - m * (f + i + w) == evaluate(formula, p, m, f, i, w)


@pytest.mark.parametrize(
    ("name", "bubble"),
    [
        ("gpipe", lambda p, f, i, w: (p - 1) * (f + i + w)),
        ("1f1b", lambda p, f, i, w: (p - 1) * (f + i + w)),
        ("zb-h1", lambda p, f, i, w: (p - 1) * (f + i - w)),
        ("zb-h2", lambda p, f, i, w: (p - 1) * (f + i - 2 * w)),
    ],
)
def test_declared_closed_form_is_that_of_the_paper(name, bubble):
    for p, f, i, w in product((1, 2, 5), (1, 3), (1, 4), (1, 2)):
        assert evaluate(find(name).bubble, p, 9, f, i, w) == bubble(p, f, i, w)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("gpipe", lambda p, m: m),
        ("1f1b", lambda p, m: min(p, m)),
        ("zb-h1", lambda p, m: min(p, m)),
        ("zb-h2", lambda p, m: min(2 * p - 1, m)),
    ],
)
def test_peak_activations_are_the_declared_and_published_ones(name, peak):
    for p, m in product(range(1, 7), (1, 2, 3, 5, 8, 13)):
        peaks = build(name, p, m).simulate(Times(1, 1, 1)).peak_activations
        assert max(peaks) == peak(p, m) == evaluate(find(name).memory, p, m)


def test_one_f_one_b_holds_less_on_later_ranks():
    peaks = build("1f1b", 4, 8).simulate(Times(1, 1, 1)).peak_activations
    assert peaks.tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("name", "orders"),
    [
        ("gpipe", ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
        ("1f1b", ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        ("zb-h1", ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]),
        ("zb-h2", ["0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"]),
    ],
)
def test_golden_order_of_two_ranks(name, orders):
    schedule = build(name, 2, 3)
    assert [" ".join(map(str, schedule.rank(rank))) for rank in (0, 1)] == orders


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_fewer_microbatches_than_ranks(name, num_ranks, num_microbatches):
    schedule = build(name, num_ranks, num_microbatches)
    schedule.validate(ordered_forward=range(num_ranks))
    schedule.lower().validate()
    forward = schedule.forward_only()
    forward.validate(forward_only=True)
    forward.lower().validate(forward_only=True)
