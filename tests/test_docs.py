"""Runs the Python of README and of every page in docs/ and compares what it prints with the text block behind it."""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Example:
    """One block of Python and what it has to print (None: not shown)."""

    code: str
    line: int
    expected: str | None = None
    span: tuple[int, int] = (0, 0)


def examples(text: str) -> list[Example]:
    found: list[Example] = []
    for match in BLOCK.finditer(text):
        if match[1] == "python":
            found.append(Example(match[2], text.count("\n", 0, match.start()) + 1))
        elif found:
            found[-1].expected = match[2]
            found[-1].span = match.span(2)
    return found


PAGES = sorted(
    page
    for page in [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    if "```python" in page.read_text()
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page: Path, update_golden: bool) -> None:
    text = page.read_text()
    scope: dict[str, Any] = {"__name__": page.stem}
    renewed = text
    for example in examples(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * example.line + example.code, str(page), "exec"), scope)
        output = printed.getvalue().rstrip("\n")
        output = output + "\n" if output else ""
        if example.expected is None:
            assert not output, f"{page.name}:{example.line} prints, and no text block shows what"
        elif update_golden:
            start = len(text) - example.span[0]
            end = len(text) - example.span[1]
            renewed = renewed[: len(renewed) - start] + output + renewed[len(renewed) - end :]
        else:
            assert output == example.expected, f"{page.name}:{example.line}"
    if update_golden:
        page.write_text(renewed)


def test_there_are_pages() -> None:
    assert [page.stem for page in PAGES] == [
        "README",
        "gated_mlp",
        "moe",
        "parallel",
        "passes",
        "schedules",
    ]
