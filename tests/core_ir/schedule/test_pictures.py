"""Pictures: what stands in them is what the timeline says."""

import json
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule import (
    Memory,
    Schedule,
    Timeline,
    Times,
    build,
    draw,
    draw_spans,
    render_html,
    render_svg,
    render_trace,
)
from plait.core_ir.schedule.kinds import KINDS, F, I, W
from plait.core_ir.schedule.palette import COLORS, IDLE_COLOR, MESSAGE_COLOR, color_of, ink_on, rgb
from plait.core_ir.schedule.picture import panels_of
from plait.core_ir.schedule.svg import tick
from plait.core_ir.schedule.text import parse_action

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    times = Times(1, 1, 1, comm=0.25, transfer=0.5, fb=2.5, optimizer=1)
    return build("dualpipev", 2, 6).simulate(times, Memory(1.0, 0.5, parameters=3))


def test_colored_text_names_microbatches_and_shows_bubbles():
    picture = draw(build("1f1b", 2, 2).simulate(Times(1, 1, 1)), color=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", picture).splitlines()
    assert plain[:2] == ["rank 0  0▕1▕....0  ▕..1  ▕", "rank 1  ..0▕0  ▕1▕1  ▕...."]
    assert plain[2].startswith(" F▕")
    colors = re.findall(r"48;2;(\d+);(\d+);(\d+)", picture.splitlines()[0])
    found = ["#" + "".join(f"{int(part):02x}" for part in color) for color in colors]
    assert found == [COLORS[F], COLORS[F], COLORS[I], COLORS[I]]


def test_spans_of_a_row_make_the_plain_picture():
    timeline = build("zb-h1", 3, 4).simulate(Times(1, 2, 1))
    rows = draw_spans(timeline, microbatch_only=False)
    assert "\n".join("".join(s.text for s in row).rstrip() for row in rows) == draw(timeline)
    for row in rows:
        assert all((span.color is None) == (set(span.text) <= {"."}) for span in row[1:])


def test_no_spans_of_nothing():
    nothing = build("1f1b", 1, 1).simulate(Times(0, 0, 0))
    assert draw_spans(nothing) == []


def test_what_is_no_timeline_is_an_error():
    with pytest.raises(ScheduleError, match="what is drawn must be a Timeline, got 3"):
        draw(3)
    with pytest.raises(ScheduleError, match="what is drawn must be a sequence, got 3"):
        render_svg(3)


def test_kinds_have_colors_of_their_own_and_later_stages_darker_ones():
    seen = {color_of(parse_action(f"0{kind}0"), (0,)) for kind in (F, I, W)}
    assert len(seen) == 3
    placement = (0, 1, 1, 0)
    assert color_of(parse_action("0F0"), placement) == color_of(parse_action("1F0"), placement)
    assert color_of(parse_action("3F0"), placement) < color_of(parse_action("0F0"), placement)
    assert color_of(parse_action("0UNSHARD"), placement).startswith("#")


def test_labels_can_be_read_however_many_stages_a_rank_has():
    assert (ink_on("#ffffff"), ink_on("#000000")) == ("#000000", "#ffffff")
    shades = [color_of(parse_action(f"{stage}F0"), (0,) * 12) for stage in range(12)]
    assert len(set(shades)) == 12
    assert all(rgb(darker) < rgb(lighter) for lighter, darker in pairwise(shades))
    assert rgb(shades[-1])[2] > 0.3 * rgb(shades[0])[2]
    assert (ink_on(shades[0]), ink_on(shades[-1])) == ("#000000", "#ffffff")
    assert f'fill="{ink_on(shades[-1])}"' in render_svg(one_rank(12))


def one_rank(num_stages: int) -> Timeline:
    """A microbatch forward and backward through stages of one rank."""
    words = [f"{s}F0" for s in range(num_stages)] + [f"{s}B0" for s in reversed(range(num_stages))]
    actions = [[parse_action(word) for word in words]]
    schedule = Schedule.from_actions("one", [0] * num_stages, 1, actions)
    return schedule.simulate(Times(1, 1, 1))


def boxes(svg: str, color: str | None = None) -> list[ET.Element]:
    root = ET.fromstring(svg)
    found = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    return [r for r in found if color is None or r.get("fill") == color]


def test_svg_has_every_task_where_and_as_long_as_it_runs(timeline):
    svg = render_svg(timeline, width=1000)
    tasks = [t for t in timeline.tasks if t.end > t.start]
    drawn = [box for box in boxes(svg) if box.get("fill") != MESSAGE_COLOR]
    assert len(drawn) == len(tasks)
    scale = (1000 - 64 - 16) / timeline.makespan
    for box, task in zip(drawn, tasks, strict=True):
        assert float(box.get("x")) == pytest.approx(64 + task.start * scale, abs=0.01)
        assert float(box.get("width")) == pytest.approx((task.end - task.start) * scale, abs=0.01)
        assert box.get("fill") == color_of(task.action, timeline.schedule.placement)
        assert f": {task.start:g} to {task.end:g}" in box.find(f"{SVG}title").text
    messages = boxes(svg, MESSAGE_COLOR)
    assert len(messages) == timeline.transfers.num_messages
    assert "rank 0: activation 0 of stage 0 to stage 1, rank 1: 1 to 1.75" in svg


def test_svg_shows_bubbles_behind_the_tasks(timeline):
    root = ET.fromstring(render_svg(timeline, width=1000))
    rows = [r for r in root.iter(f"{SVG}rect") if r.get("fill") == IDLE_COLOR]
    # One in the legend, one a rank.
    assert [float(r.get("width")) for r in rows] == [12.0, 920.0, 920.0]


def test_several_timelines_have_one_scale():
    short, long = (build("1f1b", 2, m).simulate(Times(1, 1, 1)) for m in (2, 8))
    svg = render_svg([("measured <first>", short), ("simulated", long)])
    widths = [float(box.get("width")) for box in boxes(svg, COLORS[F])]
    assert len(widths) == 4 + 16
    assert max(widths) == pytest.approx(min(widths), abs=0.02)
    assert "measured &lt;first&gt;" in svg
    with pytest.raises(ScheduleError, match="at least one timeline"):
        render_svg([])


def test_a_measured_timeline_starts_at_0_and_has_no_messages():
    simulated = build("zb-h1", 2, 3).simulate(Times(1, 1, 1))
    schedule = simulated.schedule
    measured = Timeline(schedule, simulated.start + 100, simulated.end + 100)
    (panel,), (expected,) = panels_of(measured), panels_of(simulated)
    assert panel.tasks == expected.tasks
    assert panel.memory == expected.memory
    assert panel.messages == ()
    assert measured.transfers is None


def test_memory_freed_and_taken_at_one_time_is_no_dip():
    """By hand: rank 1 of `1f1b` holds one microbatch from its first F to its last B."""
    (panel,) = panels_of(build("1f1b", 2, 3).simulate(Times(1, 1, 1)))
    assert panel.memory[1] == ([0, 1, 2, 4, 5, 7, 8, 10], [0, 1, 1, 1, 1, 1, 1, 0])
    assert panel.memory_unit == "stage activations"


def test_summary_counts_and_has_units():
    one = build("gpipe", 1, 1).simulate(Times(1, 1, 1))
    (panel,) = panels_of(one, unit="ms")
    assert panel.summary == (
        "1 rank, 1 stage, 1 microbatch; makespan 3 ms (bubble 0.0%); longest span of a rank 3 ms"
        " (bubble 0.0%); at most 1 stage activation on a rank"
    )
    several = panels_of(build("1f1b", 2, 4).simulate(Times(1, 1, 1)))[0].summary
    assert several.startswith("2 ranks, 2 stages, 4 microbatches; makespan 15 (bubble 20.0%);")


@pytest.mark.parametrize(
    ("end", "step"), [(1, 0.1), (12, 1), (13, 2), (51, 5), (100, 10), (999, 100), (0.03, 0.005)]
)
def test_ticks_are_round(end, step):
    assert tick(end) == pytest.approx(step)


def page_data(html: str) -> dict:
    return json.loads(re.search(r"const DATA = (\{.*?\});\n", html).group(1))


def test_html_holds_both_lanes_and_memory(timeline):
    html = render_html([("simulated </script>", timeline), ("again", timeline)], title="a < b")
    assert html.count("</script>") == 1
    assert "<title>a &lt; b</title>" in html
    assert "http" not in html
    data = page_data(html)
    first, second = data["panels"]
    assert first == second
    assert first["memoryUnit"] == ""  # of a Memory in a unit of the caller's
    tasks = [t for t in timeline.tasks if t.end > t.start]
    assert [[t.rank, t.start, t.end] for t in tasks] == [entry[:3] for entry in first["tasks"]]
    colors = [data["colors"][entry[5]] for entry in first["tasks"]]
    assert colors == [color_of(t.action, timeline.schedule.placement) for t in tasks]
    assert len(first["messages"]) == timeline.transfers.num_messages
    for rank, (times, amounts) in enumerate(first["memory"]):
        assert all(earlier < later for earlier, later in pairwise(times))
        expected = dict(zip(*(part.tolist() for part in timeline.held(rank)), strict=True))
        assert dict(zip(times, amounts, strict=True)) == expected
    assert first["end"] == timeline.makespan


def test_html_escapes_names_and_tells_units():
    schedule = replace(build("1f1b", 2, 2), name="""<i>&"x'</script>""")
    page = render_html(schedule.simulate(Times(1, 1, 1)), unit="ms")
    assert "<title>&lt;i&gt;&amp;&quot;x&#x27;&lt;/script&gt;</title>" in page
    assert "<i>&" not in page
    assert page.count("</script>") == 1
    assert page_data(page)["unit"] == "ms"
    assert "makespan 9 ms (bubble" in page
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", page)
    ET.fromstring(render_svg(schedule.simulate(Times(1, 1, 1))))


def test_trace_has_an_event_for_every_task_and_message(timeline):
    events = json.loads(render_trace(timeline))["traceEvents"]
    runs = [e for e in events if e["ph"] == "X" and e["cat"] == "task"]
    tasks = [t for t in timeline.tasks if t.end > t.start]
    assert [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in runs] == [
        (t.rank + 1, t.rank + 1, 1000 * t.start, 1000 * t.end) for t in tasks
    ]
    sent = [e for e in events if e["ph"] == "X" and e["cat"] == "message"]
    assert len(sent) == timeline.transfers.num_messages
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1"}
    counters = [e["args"]["held"] for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert max(counters) == timeline.peak_memory[0]


def test_events_of_a_thread_do_not_overlap():
    """As viewers demand, which drop them otherwise: here many messages are on their way at once."""
    timeline = build("zb-h1", 4, 8).simulate(Times(1 / 3, 0.1, 0.7, comm=2.5))
    events = json.loads(render_trace(timeline))["traceEvents"]
    runs = [e for e in events if e["ph"] == "X"]
    assert all(type(e[key]) is int for e in runs for key in ("ts", "dur", "pid", "tid"))
    assert all(e["pid"] > 0 and e["tid"] > 0 for e in events)
    threads = defaultdict(list)
    for event in sorted(runs, key=lambda event: event["ts"]):
        threads[event["tid"]].append(event)
    for own in threads.values():
        assert len({event["pid"] for event in own}) == 1
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(own))
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads.keys() == names.keys()
    assert len(names) > 2 * 4


def test_arrows_of_a_trace_lead_from_a_message_to_the_task_that_reads_it():
    timeline = build("1f1b", 2, 3).simulate(Times(1, 1, 1, comm=0.5))
    events = json.loads(render_trace(timeline))["traceEvents"]
    runs = {(e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    ends = {mark: {e["id"]: e for e in events if e["ph"] == mark} for mark in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    found = {
        (runs[tail["tid"], tail["ts"]], runs[ends["f"][number]["tid"], ends["f"][number]["ts"]])
        for number, tail in ends["s"].items()
    }
    assert found == {
        *((f"activation {m} of stage 0 to stage 1, rank 1", f"F{m}") for m in range(3)),
        *((f"gradient {m} of stage 1 to stage 0, rank 0", f"B{m}") for m in range(3)),
    }


def test_traces_of_several_timelines_have_processes_of_their_own(timeline):
    events = json.loads(render_trace([("a", timeline), ("b", timeline)]))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "a: rank 0", 2: "a: rank 1", 3: "b: rank 0", 4: "b: rank 1"}
    processes = {(e["tid"], e["pid"]) for e in events}
    assert len(processes) == len(dict(processes))


def test_actions_without_microbatch_are_drawn_by_name():
    rows = [[parse_action(word) for word in ("0F0", "0B0", "OPT")]]
    schedule = Schedule.from_actions("one", [0], 1, rows)
    (panel,) = panels_of(schedule.simulate(Times(1, 1, 1, optimizer=2)))
    assert [(box.label, box.name) for box in panel.tasks] == [
        ("0", "F0"),
        ("0", "B0"),
        ("OPT", "OPT"),
    ]
    assert {box.color for box in panel.tasks} <= set(COLORS.values())
    assert len(KINDS) > len(COLORS)
