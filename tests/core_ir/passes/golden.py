"""Golden files of a pass: the text of the IR before it, a line of dashes, the text after it.

A file `golden/<pass>/<case>.txt` is a case; its second line says what it shows.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from plait.core_ir.graph import Graph
from plait.core_ir.parse import parse_graph, parse_program
from plait.core_ir.program import Program
from plait.core_ir.text import print_graph, print_program
from plait.core_ir.verify import verify, verify_program

FOLDER = Path(__file__).resolve().parent / "golden"
ARROW = "-" * 80 + "\n"


def cases(name: str) -> list[Path]:
    """The golden files of a pass."""
    found = sorted((FOLDER / name).glob("*.txt"))
    assert found, f"no golden file of {name}"
    return found


def check(path: Path, one: Callable[[Graph], Graph | Program], update: bool) -> None:
    """Compare what a pass makes of the first half of a file with its second half; or write it there."""
    text = path.read_text()
    before = text.partition(ARROW)[0]
    after = one(verify(parse_graph(before)))
    if isinstance(after, Graph):
        printed = print_graph(verify(after))
        assert print_graph(parse_graph(printed)) == printed
    else:
        printed = print_program(replace(verify_program(after), notes=()))
        assert print_program(parse_program(printed)) == printed
    expected = before + ARROW + printed
    if update:
        path.write_text(expected)
    assert text == expected or update, (
        f"{path} differs; see the diff of --update-golden:\n{printed}"
    )
