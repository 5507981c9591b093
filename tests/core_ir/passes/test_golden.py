"""Each pass on small graphs, as text: before, and golden after."""

from collections.abc import Callable
from pathlib import Path

import pytest
from golden import cases, check

from plait.core_ir.graph import Graph
from plait.core_ir.passes.clean_bodies import clean_bodies
from plait.core_ir.passes.eliminate_dead_code import eliminate_dead_code
from plait.core_ir.passes.fold_constants import fold_constants
from plait.core_ir.passes.fold_exchanges import fold_exchanges
from plait.core_ir.passes.fold_transposes import fold_transposes
from plait.core_ir.passes.merge_common_subexpressions import merge_common_subexpressions
from plait.core_ir.passes.sort_equations import sort_equations


def fold(graph: Graph) -> Graph:
    """What folding leaves dead is of no interest in a golden file."""
    return eliminate_dead_code(fold_transposes(graph))


def fold_rows(graph: Graph) -> Graph:
    return eliminate_dead_code(fold_exchanges(graph))


PASSES: dict[str, Callable[[Graph], Graph]] = {
    "clean_bodies": clean_bodies,
    "eliminate_dead_code": eliminate_dead_code,
    "fold_constants": fold_constants,
    "fold_exchanges": fold_rows,
    "fold_transposes": fold,
    "merge_common_subexpressions": merge_common_subexpressions,
    "sort_equations": sort_equations,
}
CASES = [(name, path) for name in PASSES for path in cases(name)]


@pytest.mark.parametrize(("name", "path"), CASES, ids=[f"{n}-{p.stem}" for n, p in CASES])
def test_golden(name: str, path: Path, update_golden: bool) -> None:
    check(path, PASSES[name], update_golden)
