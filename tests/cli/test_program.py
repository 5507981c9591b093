"""`plait program` prints IR that parses back to the same text."""

import re
from pathlib import Path

import pytest

import plait
from plait.cli import main
from plait.core_ir.parse import parse_graph, parse_program
from plait.core_ir.text import print_graph, print_program


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    code = caught.value.code
    assert isinstance(code, int)
    return code, out, err


def test_task_round_trips(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "program", "llama", "--stage", "1", "--task", "W")
    assert code == 0
    graph = parse_graph(text)
    assert print_graph(graph) == text
    assert graph.name.endswith("stage1.backward_weight")
    assert {port.role for port in graph.output_ports} == {"param_grad"}


def graphs(text: str) -> list[str]:
    return re.findall(r"^graph @joint.(\S+?)\(", text, re.MULTILINE)


def test_a_stage_is_all_its_tasks_and_a_task_is_that_of_all_stages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, stage, _ = run(capsys, "program", "mlp", "--stage", "1")
    kinds = ("forward", "backward", "backward_input", "backward_weight")
    assert graphs(stage) == [f"stage1.{kind}" for kind in kinds]
    _, task, _ = run(capsys, "program", "mlp", "--task", "F")
    assert graphs(task) == ["stage0.forward", "stage1.forward"]
    _, one, _ = run(capsys, "program", "mlp", "--stage", "1", "--task", "F")
    assert one in stage
    assert one in task


@pytest.mark.parametrize("frontend", ["torch", "flax"])
def test_program_round_trips(capsys: pytest.CaptureFixture[str], frontend: str) -> None:
    code, text, _ = run(capsys, "program", "mlp", "--frontend", frontend, "--stages", "4")
    assert code == 0
    program = parse_program(text)
    assert program.num_stages == 4
    without_notes = "".join(
        line for line in text.splitlines(keepends=True) if not line.startswith("//")
    )
    assert print_program(program) == without_notes


def test_source_stands_behind_each_equation(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("program", "mlp", "--stage", "0", "--task", "F")
    _, plain, _ = run(capsys, *arguments)
    _, text, _ = run(capsys, *arguments, "--source")
    equations = [line for line in text.splitlines() if " = " in line]
    assert equations
    assert all("  // " in line for line in equations)
    assert "models/mlp/torch.py" in text
    assert print_graph(parse_graph(text)) == plain


def test_split_says_where_to_cut(capsys: pytest.CaptureFixture[str]) -> None:
    for frontend in ("torch", "flax"):
        _, text, _ = run(
            capsys,
            *("program", "mlp", "--frontend", frontend, "--split", "layers.3"),
            *("--stage", "1", "--task", "F"),
        )
        assert text.count("dot_general(") == 3  # one layer of four


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("program", "gpt"), "error: unknown model 'gpt'; there are: deepseek_v3, llama, mlp"),
        (("program", "mlp", "--stage", "7"), "error: there is no stage 7; stages are 0 to 1"),
        (("program", "mlp", "--stage", "0", "--task", "X"), "error: unknown task 'X'"),
        (
            ("program", "builds:raising_at_once"),
            "error: builds:raising_at_once raised ValueError: no",
        ),
        (("program", "builds:needing"), "error: builds:needing needs arguments (rows)"),
        (("program", "builds:uneven"), "error: the batch has 7 rows"),
        (("compare", "mlp", "--schedule", "broken.csv"), "error: broken.csv, row 1, column 2"),
        (
            ("compare", "mlp", "--schedule", "absent.csv"),
            "error: absent.csv: no schedule can be read",
        ),
        (("program", "mlp", "--stages", "9"), "error: the model has 4 layers"),
        (("program", "mlp", "--split", "layers.9"), "error: "),
        (("program", "no_such_module:build"), "error: there is no module 'no_such_module'"),
        (("program", "json:nothing"), "error: module 'json' has no function 'nothing'"),
        (("schedule", "show", "2f2b"), "error: unknown schedule '2f2b'"),
        (("schedule", "simulate", "1f1b", "--f", "x"), "error: --f takes numbers"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.chdir(tmp_path)
    Path("broken.csv").write_text("0F0,what\n")
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stage", "2"), "there is no stage 2; stages are 0 to 1"),
        (
            ("--split", "layers.1,layers.2", "--stage", "3"),
            "there is no stage 3; stages are 0 to 2",
        ),
        (("--schedule", "2f2b"), "unknown schedule '2f2b'"),
        (
            ("--schedule", "zbv", "--stages", "3"),
            "puts 2 stages on each rank, which 3 stages cannot",
        ),
        (("--schedule", "dualpipev", "--stages", "4", "--microbatches", "2"), "at least 4 microb"),
        (
            ("--schedule", "mine.csv"),
            "is for 4 stages and 8 microbatches; asked for are 2 stages and 8",
        ),
        (("--set", "num_layers=1.5"), "num_layers must be of type int, got 1.5"),
    ],
)
def test_options_are_checked_before_the_model_is_captured(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    plait.schedule("1f1b", 4, 8).to_csv("mine.csv")
    monkeypatch.setattr("plait.cli.load_abstract", lambda *_: pytest.fail("a model is built"))
    code, _, err = run(capsys, "program", "mlp", *arguments)
    assert code == 2
    assert message in err


def test_a_pair_holds_both_halves(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "program", "mlp", "--task", "F&B", "--stages", "4")
    assert code == 0
    names = re.findall(r"^graph @(\S+?)\(", text, re.MULTILINE)
    assert names == [
        f"joint.stage{b}.backward_joint.stage{f}.forward"
        for f, b in [(0, 3), (1, 2), (2, 1), (3, 0)]
    ]
    pair = parse_graph("plait.ir 1" + text.split("plait.ir 1")[1])
    assert {p.name.partition(".")[0] for p in pair.input_ports} == {"backward", "forward"}
    _, whole, _ = run(capsys, "program", "mlp", "--stages", "4", "--schedule", "dualpipev")
    assert list(parse_program(whole).pairs) == [(0, 3), (1, 2), (2, 1), (3, 0)]


def test_hardware_says_in_which_order_tasks_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("program", "deepseek_v3", "--frontend", "flax", "--mesh", "expert=2")
    programs = []
    for hardware in ("cpu-core", "h100"):
        options = ("--stages", "4", "--schedule", "dualpipev", "--hardware", hardware)
        programs.append(parse_program(run(capsys, *arguments, *options)[1]))
        _, text, _ = run(capsys, *arguments, *options, "--task", "F&B", "--stage", "1")
        assert "us are hidden" in text
        assert print_graph(programs[-1].pairs[1, 2]) == print_graph(parse_graph(text))
    for kind in ("F", "B"):
        one, other = (print_graph(program.task(1, kind)) for program in programs)
        assert one != other
    one, other = (print_graph(program.pairs[1, 2]) for program in programs)
    assert one != other


def test_a_schedule_without_pairs_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "program", "mlp", "--task", "F&B", "--schedule", "1f1b")
    assert (code, text) == (0, "")
