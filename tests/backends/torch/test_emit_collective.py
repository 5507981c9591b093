"""Collectives between gloo ranks, against their meaning on all ranks; what an emitted graph says of ranks."""

import os
from pathlib import Path

import pytest
from collective_cases import RanksCase, cases, overlapped_pair
from process_group import run_ranks
from torch import Tensor

from plait.backends.torch.emit import trace
from plait.backends.torch.mesh_groups import release_axis
from plait.core_ir.text import print_graph

SCRIPT = Path(__file__).with_name("collective_runs.py")


@pytest.mark.parametrize(
    ("num_ranks", "codegen"),
    [(2, "eager"), (3, "eager"), (4, "eager"), (2, "inductor"), (3, "inductor")],
)
def test_collectives_between_ranks(
    num_ranks: int, codegen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((tests, os.environ.get("PYTHONPATH", ""))))
    for rank, finished in enumerate(run_ranks(SCRIPT, [codegen], num_ranks)):
        assert finished.status == 0, f"rank {rank}:\n{finished.stderr}"
        assert finished.stdout.endswith("done\n")


def test_inductor_keeps_the_order_of_an_overlapped_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = overlapped_pair()
    order = [eqn.op.name for eqn in pair.eqns if eqn.op.name != "tanh"]
    # Between each half's first start and its wait stands a product of the other half.
    assert order[:5] == ["dot_general", "all_to_all", "dot_general", "all_to_all", "wait"]
    file = tmp_path / "pair.txt"
    file.write_text(print_graph(pair))
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", str(tmp_path)
    )  # what is found there is not written anew
    for finished in run_ranks(Path(__file__).with_name("order_runs.py"), [str(file)], 2):
        assert finished.status == 0, finished.stderr
        *found, end = finished.stdout.splitlines()
        assert end == "done"
        assert found == order


def test_a_graph_names_groups_by_axis_and_holds_no_rank() -> None:
    (case,) = (case for case in cases(2) if case.name == "overlapped")
    code = trace(case.graph, "cpu").module.code
    assert code.count("'plait:data'") == 4  # three collectives and the place of the rank
    assert "plait.axis_index.default('plait:data'" in code


def test_forgetting_an_axis_that_nobody_knows_is_no_error() -> None:
    release_axis("nowhere")


@pytest.mark.parametrize("case", cases(2), ids=lambda case: case.name)
def test_collectives_are_emitted_for_cuda_without_a_gpu(case: RanksCase) -> None:
    module = trace(case.graph, "cuda").module
    values = [n.meta["val"] for n in module.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert {value.device.type for value in values} == {"cuda"}
