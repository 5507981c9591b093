"""The order of pairs of MoE layers in the wrapper that Inductor writes: what a rank runs, line by line.

Inductor hands kernels and collectives to the device in the order of these lines. gloo exchanges on threads of its own
meanwhile; NCCL does on a stream of its own, for which the stream that computes waits where `wait_tensor` stands.
"""

import moe_pairs
import pytest
from moe_pairs import in_graph, in_wrapper, unhidden
from ranks_in_name import ranks_in_name_only
from torch._inductor import config
from torch._inductor.graph import GraphLowering

from plait.backends.torch.compile import compile_task
from plait.backends.torch.mesh_groups import name_axis_group, release_axis
from plait.core_ir.errors import UnsupportedError
from plait.core_ir.graph import Graph


class Written(Exception):
    """The wrapper is written, and nothing is to be compiled."""


def wrapper(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> str:
    """What Inductor writes for a task."""
    written: list[str] = []

    def stop(code: str) -> None:
        written.append(code)
        raise Written

    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(stop))
    with config.patch({"fx_graph_cache": False}), pytest.raises(UnsupportedError, match="Written"):
        compile_task(graph, codegen="inductor", device="cpu")
    (code,) = written
    return code


@pytest.mark.parametrize(("source", "hardware"), [("torch", "cpu-core"), ("flax", "h100")])
def test_beside_every_exchange_runs_a_product_of_the_other_half(
    source: str, hardware: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, parts = moe_pairs.parts(source, hardware)
    num_exchanges = 0
    with ranks_in_name_only(moe_pairs.MESH.axes) as mesh:
        devices = mesh[moe_pairs.AXIS]
        name_axis_group(moe_pairs.AXIS, devices.get_group())
        for part in parts:
            events = in_wrapper(wrapper(part.graph, monkeypatch), part)
            assert not unhidden(events)
            assert events == in_graph(part)
            num_exchanges += sum(event.kind == "start" for event in events)
        release_axis(moe_pairs.AXIS)
    assert num_exchanges == 4 == sum(eqn.op.name == "all_to_all" for eqn in pair.eqns)
