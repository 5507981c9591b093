"""A user's own function by its path: what can be told of it without running its module."""

from pathlib import Path

import pytest

from plait.core_ir.errors import UsageError
from plait.workloads.imported import check_path


@pytest.mark.parametrize(
    "text",
    [
        "def build(): raise ValueError",
        "build = lambda: 1",
        "from os import path as build",
        "from os.path import *",
        "globals()['bu' + 'ild'] = print",
        "raise ValueError  # build may be anything",
        "for build in (print,): pass",
        "def __getattr__(name): return print",
        "this is no Python",
    ],
)
def test_nothing_is_said_of_what_only_running_tells(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    if "may be anything" in text:  # it is not named at all
        with pytest.raises(UsageError, match="module 'own' has no function 'build'"):
            check_path("own:build")
    else:
        check_path("own:build")


def test_a_package_that_raises_is_left_to_whoever_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/__init__.py").write_text("raise ValueError('no such data set')")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_path("broken.own:build")
    with pytest.raises(UsageError, match="no module 'nowhere_at_all'"):
        check_path("nowhere_at_all.own:build")
