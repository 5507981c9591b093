"""The root folders are one package: four links, one import name, nothing else at the root."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("core_ir", "frontends", "backends", "models")
LISTED = {*LINKED, "plait", "tests", "docs", "examples", "benchmarks"}
GENERATED = {"build", "dist", "out", "__pycache__"}


@pytest.mark.parametrize("name", LINKED)
def test_package_part_is_a_relative_link_to_the_root_folder(name: str) -> None:
    link = ROOT / "plait" / name
    assert link.is_symlink(), (
        f"plait/{name} is not a link: clone with git on Linux or macOS, "
        "or set `git config core.symlinks true` and check out again"
    )
    assert link.readlink() == Path("..") / name


@pytest.mark.parametrize("name", LINKED)
def test_bare_import_is_refused_and_names_the_right_one(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert f"ImportError: import plait.{name}, not {name}" in run.stderr


def test_no_module_is_imported_under_its_bare_name() -> None:
    for name in LINKED:
        import_module(f"plait.{name}")
    bare = {name for name in sys.modules if name.partition(".")[0] in LINKED}
    assert bare == set()


def test_root_holds_nothing_but_the_listed_folders() -> None:
    found = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.suffix != ".egg-info"
    }
    assert found - GENERATED <= LISTED


def test_tests_are_no_packages() -> None:
    # An __init__.py below tests/ would let folders named torch and jax shadow the frameworks.
    assert list((ROOT / "tests").rglob("__init__.py")) == []
