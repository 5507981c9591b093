"""`plait compare --simulate`: figures of a model that is never run."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from plait.cli import main
from plait.compare.plan import Request
from plait.compare.simulate import simulate_rows, with_experts
from plait.core_ir.errors import UsageError
from plait.core_ir.hardware import to_json
from plait.core_ir.named_hardware import CPU_CORE, H100, H800
from plait.core_ir.types import bf16
from plait.models.llama.config import CONFIGS
from plait.workloads.workload import FRONTENDS

HERE = Path(__file__).parent


def rows(request: Request, hardware: Any = H100) -> list[dict[str, Any]]:
    return [row for row, _ in simulate_rows(request, hardware, lambda what, done, total: None)]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    code = caught.value.code
    assert isinstance(code, int)
    return code, out, err


# Llama 7b, whose figures follow from its sizes.

RANKS, MICROBATCHES, T = 8, 32, 4096


@pytest.fixture(scope="module")
def llama() -> dict[str, Any]:
    request = Request(
        "llama",
        config="7b",
        frontends=("torch",),
        num_ranks=RANKS,
        microbatches=(MICROBATCHES,),
        batch_size=MICROBATCHES,
        dtype="bf16",
    )
    (row,) = rows(request)
    return row


def test_flops_are_those_of_the_closed_formula(llama: dict[str, Any]) -> None:
    config = CONFIGS["7b"]
    d, h = config.dim, config.hidden_dim
    weights = config.num_layers * (4 * d * d + 3 * d * h) + d * config.vocab_size
    # Two flops a weight and token; scores and values of the keys that each query sees.
    forward = 2 * T * weights + config.num_layers * 2 * 2 * d * T * (T + 1) // 2
    model = 3 * MICROBATCHES * forward
    possible = RANKS * llama["simulated_step_seconds"] * H100.peak(bf16)
    assert llama["model_flops_utilisation"] == pytest.approx(model / possible, rel=1e-12)
    # 6 N D, as training is often counted, leaves the attention out.
    assert 1.0 < model / (6 * weights * T * MICROBATCHES) < 1.2


def test_tokens_and_memory_follow_from_sizes(llama: dict[str, Any]) -> None:
    config = CONFIGS["7b"]
    step = llama["simulated_step_seconds"]
    assert llama["tokens_per_second"] == pytest.approx(MICROBATCHES * T / step)
    assert llama["stages"] == RANKS
    assert llama["hardware"] == to_json(H100)
    layer = 4 * config.dim**2 + 3 * config.dim * config.hidden_dim + 2 * config.dim
    table = config.vocab_size * config.dim
    held = [4 * layer + table, *[4 * layer] * 6, 4 * layer + table + config.dim]
    parameters = [16 * n for n in held]  # bf16, its gradient, and three f32
    peaks = llama["peak_memory_bytes"]
    per_microbatch = peaks[6] - parameters[6]  # rank 6 of 1F1B holds two
    assert per_microbatch > 0
    for rank in range(1, 7):  # equal stages
        expected = parameters[rank] + (RANKS - rank) * per_microbatch / 2
        assert peaks[rank] == pytest.approx(expected, rel=1e-12)
    assert llama["fits"] == (max(peaks) <= 80e9)


def test_no_schedule_beats_its_work(llama: dict[str, Any]) -> None:
    assert 0 < llama["bubble_rate"] < 1
    assert llama["model_flops_utilisation"] < H100.product_efficiency * (1 - llama["bubble_rate"])
    # 1F1B idles (p - 1) / (m + p - 1) with equal stages; the last one, with the head, takes longer.
    assert llama["bubble_rate"] > (RANKS - 1) / (MICROBATCHES + RANKS - 1)


# The command.

SMALL = ("compare", "mlp", "--simulate", "--ranks", "2", "--microbatches", "4")


def test_a_table_and_the_same_rows_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, page = tmp_path / "rows.json", tmp_path / "page.html"
    code, out, err = run(
        capsys,
        *(*SMALL, "--schedule", "1f1b,zbv,dualpipev", "--hardware", "h800"),
        *("--json", str(file), "--timeline", str(page)),
    )
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines() if "%" in line and " to " in line] == [
        ["1f1b", "2"],
        ["zbv", "4"],
        ["dualpipev", "4"],
    ]
    assert "20 of 132 units" in " ".join(out.split())
    assert "dualpipev with 4 microbatches" in err
    written = json.loads(file.read_text())["rows"]
    assert [row["schedule"] for row in written] == ["1f1b", "zbv", "dualpipev"]
    assert {row["hardware"]["name"] for row in written} == {H800.name}
    assert all(len(row["peak_memory_bytes"]) == 2 for row in written)
    assert "zbv" in page.read_text()


def test_rows_before_an_error_are_shown_and_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> Any:
        yield next(simulate_rows(*arguments))
        raise UsageError("the second cannot be had")

    monkeypatch.setattr("plait.cli_compare.simulate_rows", failing)
    file = tmp_path / "rows.json"
    code, out, err = run(capsys, *SMALL, "--schedule", "1f1b,gpipe", "--json", str(file))
    assert code == 1
    assert err.splitlines()[-1] == "error: the second cannot be had"
    assert "mlp tiny, simulated: 2 ranks" in out
    assert [row["schedule"] for row in json.loads(file.read_text())["rows"]] == ["1f1b"]


def test_too_little_memory_is_marked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "poor.json"
    file.write_text(json.dumps({**to_json(CPU_CORE), "name": "poor", "memory_bytes": 10}))
    for schedule in ("1f1b", "auto"):
        _, out, _ = run(capsys, *SMALL, "--hardware", str(file), "--schedule", schedule)
        assert "too much" in out
    _, out, _ = run(capsys, *SMALL, "--hardware", "cpu-core")
    assert "too much" not in out


def test_auto_keeps_the_memory_there_is() -> None:
    """What it would rather hold, it does without."""
    request = Request("mlp", schedules=("1f1b", "auto"), microbatches=(8,), num_ranks=2)
    least, free = (max(row["peak_memory_bytes"]) for row in rows(request, CPU_CORE))
    assert free > least
    tight = replace(CPU_CORE, memory_bytes=least)
    assert [row["fits"] for row in rows(request, tight)] == [True, True]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_experts(frontend: str) -> None:
    request = Request("deepseek_v3", frontends=(frontend,), schedules=("dualpipev",), num_ranks=2)
    (row,) = rows(request, H800)
    assert row["stages"] == 4
    assert 0 < row["model_flops_utilisation"] < 1


def test_rows_over_frontends_and_microbatches() -> None:
    request = Request("mlp", frontends=tuple(FRONTENDS), microbatches=(2, 4), batch_size=8)
    found = [(row["frontend"], row["microbatches"]) for row in rows(request)]
    assert found == [("torch", 2), ("flax", 2), ("torch", 4), ("flax", 4)]
    one = rows(Request("mlp", microbatches=(2,)))
    assert [row["frontend"] for row in one] == ["torch"]


def test_both_frontends_cost_alike() -> None:
    """The same mathematics, in IR that is all but equal."""
    torch, flax = rows(Request("mlp", frontends=tuple(FRONTENDS), microbatches=(4,)), CPU_CORE)
    assert torch["model_flops_utilisation"] == pytest.approx(
        flax["model_flops_utilisation"], rel=0.2
    )


def test_a_model_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    request = Request("builds:working", split=("2",), microbatches=(4,), num_ranks=2)
    (row,) = rows(request)
    assert (row["config"], row["dtype"], row["stages"]) == (None, None, 2)
    assert row["simulated_step_seconds"] > 0


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("backend", ("--backend", "jax")),
        ("engine", ("--engine", "mpmd")),
        ("codegen", ("--codegen", "eager")),
        ("device", ("--device", "cpu")),
        ("train", ("--train", "3")),
    ],
)
def test_options_of_a_run_are_refused(
    capsys: pytest.CaptureFixture[str], option: str, arguments: tuple[str, ...]
) -> None:
    code, _, err = run(capsys, *SMALL, *arguments)
    assert code == 2
    assert f"--simulate runs nothing, so --{option} has no meaning" in err


def test_errors_say_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *SMALL, "--hardware", "abacus")
    assert (code, "there are: cpu-core, a100, h100, h200, h800" in err) == (2, True)
    code, _, err = run(capsys, "compare", "mlp", "--hardware", "h100")
    assert (code, "add --simulate" in err) == (2, True)
    code, _, err = run(capsys, *SMALL, "--schedule", "dualpipev", "--ranks", "4")
    assert code == 2
    assert "8" in err


def test_what_a_schedule_cannot_have_is_left_out_with_a_note(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, schedules = tmp_path / "rows.json", "1f1b,dualpipev"
    arguments = ("--schedule", schedules, "--microbatches", "2,4", "--ranks", "2")
    code, out, _ = run(capsys, *SMALL, *arguments, "--json", str(file))
    assert code == 0
    assert "note: dualpipev with 2 microbatches is left out: schedule 'dualpipev' on 2 ranks" in out
    found = json.loads(file.read_text())["rows"]
    assert [(row["schedule"], row["microbatches"]) for row in found] == [
        ("1f1b", 2),
        ("1f1b", 4),
        ("dualpipev", 4),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "data=2,tensor=2", "--shard", "tensor"), "llama itself is cut over that axis"),
        (("--mesh", "data=2", "--shard", "tensor"), "--shard tensor names no axis of --mesh"),
        (("--set", "seq_len=8.5"), "seq_len must be of type int, got 8.5"),
        (("--mesh", "tensor=4"), "2 key-value heads do not divide over 4 ranks"),
        (
            ("--mesh", "data=3", "--batch-size", "4"),
            "4 equal microbatches, each of 3 parts over data",
        ),
    ],
)
def test_options_are_checked_before_the_model_is_captured(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    unbuilt = "plait.compare.simulate.load_abstract"
    monkeypatch.setattr(unbuilt, lambda *_: pytest.fail("a model is built"))
    code, _, err = run(
        capsys,
        *("compare", "llama", "--simulate", "--ranks", "2", "--microbatches", "4"),
        *arguments,
    )
    assert code == 2
    assert message in err


def test_a_model_with_experts_has_an_axis_to_shard_over(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys,
        *("compare", "deepseek_v3", "--simulate", "--frontend", "torch", "--ranks", "2"),
        *("--microbatches", "2", "--schedule", "1f1b", "--shard", "expert"),
    )
    assert code == 0
    assert "parameters sharded over expert" in " ".join(out.split())


def test_a_split_that_does_not_fit_the_schedule() -> None:
    with pytest.raises(UsageError, match=r"do not fill|layers"):
        rows(Request("mlp", schedules=("zbv",), num_ranks=64, microbatches=(1,)))


# Experts over a mesh, step by step.


@pytest.fixture(scope="module")
def experts() -> list[dict[str, Any]]:
    request = Request(
        "deepseek_v3",
        config="tiny",
        frontends=("flax",),
        schedules=("1f1b", "zbv", "dualpipev"),
        num_ranks=2,
        microbatches=(8,),
        changes={"num_layers": 4, "seq_len": 16},
    )
    return rows(with_experts(request, replace(H800, ranks_per_node=2)), H800)


def test_experts_lie_over_a_node_and_all_else_is_sharded_there(experts: list[Any]) -> None:
    for row in experts:
        assert row["mesh"] == {"stage": 2, "expert": 2}
        assert row["axis_roles"] == {"expert": "the model's own"}
        assert row["sharded_over"] == "expert"
        assert row["changes"]["capacity_factor"] == 1.0


def test_an_axis_that_the_model_does_not_know_is_one_of_data() -> None:
    request = Request("mlp", schedules=("1f1b",), num_ranks=2, axes={"tensor": 2})
    (row,) = rows(request, CPU_CORE)
    assert row["axis_roles"] == {"tensor": "data parallel"}


def test_each_transformation_shortens_the_step_or_leaves_it(experts: list[Any]) -> None:
    for row in experts:
        steps = row["steps"]
        assert list(steps) == ["baseline", "+ split", "+ sharding", "+ multiplex", "+ overlap"]
        times = list(steps.values())
        assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))
        assert steps["+ overlap"] == pytest.approx(row["simulated_step_seconds"], rel=1e-12)
    one_f_one_b, zbv, dualpipev = (row["steps"] for row in experts)
    assert one_f_one_b["+ split"] == pytest.approx(
        one_f_one_b["baseline"]
    )  # it has no W of its own
    assert zbv["+ split"] < zbv["baseline"]
    assert dualpipev["+ overlap"] < dualpipev["+ multiplex"]


def test_an_axis_that_leaves_a_node_is_warned_about_and_slower(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    steps = {}
    for ranks_per_node in (2, 1):
        file = tmp_path / f"{ranks_per_node}.json"
        hardware = replace(H800, ranks_per_node=ranks_per_node)
        file.write_text(json.dumps(to_json(hardware)))
        arguments = (
            "--mesh",
            "expert=2",
            "--ranks",
            "2",
            "--microbatches",
            "2",
            "--schedule",
            "1f1b",
        )
        small = ("--set", "num_layers=2,seq_len=16", "--frontend", "flax")
        out = tmp_path / "rows.json"
        code, text, err = run(
            *(capsys, "compare", "deepseek_v3", "--simulate", "--hardware", str(file)),
            *(*arguments, *small, "--json", str(out)),
        )
        assert code == 0, err
        warned = "collectives inside tasks run between nodes of 1, over expert" in text
        assert warned == (ranks_per_node == 1)
        (row,) = json.loads(out.read_text())["rows"]
        steps[ranks_per_node] = row["steps"]["baseline"]
    assert steps[1] > steps[2]


def test_what_is_asked_for_stays() -> None:
    asked = Request("deepseek_v3", axes={"data": 2}, changes={"capacity_factor": 2.0})
    assert with_experts(asked, H800) == asked
    chosen = with_experts(replace(asked, axes={}), H800)
    assert (chosen.axes, chosen.shard, chosen.changes["capacity_factor"]) == (
        {"expert": 8},
        "expert",
        2.0,
    )
    assert with_experts(Request("llama"), H800) == Request("llama")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "data"), "--mesh takes the axes beside that of the stages"),
        (("--mesh", "stage=2"), "--mesh takes the axes beside that of the stages"),
        (("--set", "depth=2"), "config 'tiny' of llama has no field 'depth'; it has: vocab_size"),
        (("--set", "num_layers=two"), "--set num_layers=two: 'two' is no number"),
        (
            ("--shard", "data", "--ranks", "2"),
            "--shard data names no axis of --mesh; write --mesh data=SIZE too",
        ),
    ],
    ids=str,
)
def test_mistakes_about_meshes(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "compare", "llama", "--simulate", "--frontend", "torch", *arguments)
    assert code == 2
    assert re.search(message, err), err
