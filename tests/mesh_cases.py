"""Named models over meshes, as the command line builds them, against the same models on one device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

import plait
from plait.core_ir.numerics import gradient_errors, relative_error, tolerance
from plait.extras import load
from plait.passes import Passes
from plait.workloads.workload import Sizes, Workload, load_workload

NUM_MICROBATCHES = 4
SMALL: Mapping[str, Any] = {"num_layers": 4, "seq_len": 8, "dim": 32}
APART = Passes(scheduled=())
"""B, then F, where a schedule pairs them."""


@dataclass(frozen=True)
class Case:
    """A model over a mesh of two stages' ranks, two stages on each, in a V."""

    model: str
    axes: Mapping[str, int]

    @property
    def mesh(self) -> dict[str, int]:
        return {"stage": 2, **self.axes}

    @property
    def num_ranks(self) -> int:
        return 2 ** len(self.mesh)

    def workload(self, frontend: str) -> Workload:
        sizes = Sizes("tiny", "f32", 4 * NUM_MICROBATCHES, 4, self.mesh, SMALL)
        return load_workload(self.model, frontend, sizes)


CASES = {
    "data": Case("deepseek_v3", {"data": 2}),
    "expert": Case("deepseek_v3", {"expert": 2}),
    "data-expert": Case("deepseek_v3", {"data": 2, "expert": 2}),
    "data-tensor": Case("llama", {"data": 2, "tensor": 2}),
}


def compiled(case: Case, workload: Workload, **options: Any) -> plait.Pipeline:
    """Under DualPipeV."""
    return plait.compile(
        workload.loss_fn,
        workload.model,
        workload.batch,
        split=workload.split,
        schedule="dualpipev",
        num_microbatches=NUM_MICROBATCHES,
        mesh=case.mesh,
        **options,
    )


def run(pipeline: plait.Pipeline, workload: Workload) -> tuple[Any, dict[str, Any]]:
    """Loss, and gradients by name, whole."""
    params = None
    if workload.framework == "torch" and pipeline.options.engine != "distributed":
        assert workload.plain is not None
        params = {n: p.detach() for n, p in workload.plain[1].named_parameters()}
    loss, grads = pipeline.loss_and_grads(workload.batch, params, step=0)
    return plait.to_numpy(loss), _reference(workload).named_gradients(grads)


def check(
    workload: Workload, pipeline: plait.Pipeline, loss: Any, grads: dict[str, Any], purpose: Any
) -> None:
    """AssertionError unless they are those of the model on one device, and what its routers have counted."""
    assert workload.plain is not None
    wanted = _reference(workload).reference(
        *workload.plain, workload.batch, num_microbatches=NUM_MICROBATCHES
    )
    allowed = tolerance("f32", purpose)
    assert relative_error(loss, wanted.loss) <= allowed.loss
    errors = gradient_errors(grads, wanted.grads, partial=True)
    assert errors
    assert max(errors.values()) <= allowed.grads, errors
    counts = buffers(pipeline)
    here = {
        name for stage in pipeline.engine.stages for name in pipeline.program.stages[stage].buffers
    }
    for name in here:
        if name.endswith("counts"):
            assert wanted.buffers[name].any()
            np.testing.assert_array_equal(counts[name], wanted.buffers[name], err_msg=name)


def buffers(pipeline: plait.Pipeline) -> dict[str, Any]:
    """The changed buffers that the last step left, by name."""
    if pipeline.captured.framework == "torch" or pipeline.state is None:
        return {name: plait.to_numpy(x) for name, x in (pipeline.state or {}).items()}
    flat = nnx.to_flat_state(pipeline.state)
    return {".".join(map(str, path)): plait.to_numpy(leaf[...]) for path, leaf in flat}


def same_bits(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def _reference(workload: Workload) -> Any:
    return load(workload.framework, f"frontends.{workload.framework}.reference")
