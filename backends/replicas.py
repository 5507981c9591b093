"""Data parallelism: the same pipeline several times, each on its part of every microbatch.

What `compile` calls a microbatch is cut into as many parts as there are places along the data axes of the mesh; part d
of microbatch m is number m * count + d of all parts, and replica d runs the parts with its number. So the results are
those of a pipeline with so many more microbatches: losses, gradients and what buffers count are summed over replicas,
once a step, and random keys go by the number of the part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from plait.backends.runtime import Arrays, Engine, Spans, StepInputs, StepOutputs
from plait.core_ir.mesh import Layout, Mesh
from plait.core_ir.passes.counters import counters
from plait.core_ir.program import Program
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.times import Times


def own_part(inputs: StepInputs, mesh: Mesh, part: int) -> StepInputs:
    """What one replica runs of a step."""
    count = mesh.num_parts
    return replace(
        inputs, microbatches=inputs.microbatches[part::count], keys=inputs.keys[part::count]
    )


class Counted:
    """The buffers of a program in which each replica counts from zero.

    UnsupportedError for a buffer that changes in another way, where there are replicas.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh | None,
        layouts: Mapping[str, Layout] = MappingProxyType({}),
    ) -> None:
        self.names = frozenset[str]() if mesh is None else counters(program, mesh, layouts)
        self._types = program.buffer_types
        self.stages = {
            name: stage.index
            for stage in program.stages
            for name, _ in stage.tasks["F"].outputs_of("buffer_update")
            if name in self.names
        }

    def from_zero(self, inputs: StepInputs) -> StepInputs:
        """What a replica reads in a step."""
        zeros = {
            name: np.zeros(self._types[name].shape, self._types[name].dtype.numpy)
            for name in self.names.intersection(inputs.buffers)
        }
        return replace(inputs, buffers={**inputs.buffers, **zeros})

    def added(
        self, totals: Mapping[str, Any], before: Mapping[str, Any], arrays: Arrays
    ) -> dict[str, Any]:
        """What a step leaves of all buffers: of these what was there before and what all replicas counted."""
        return {
            name: arrays.add(total, arrays.move(before[name], self.stages[name]))
            if name in self.names
            else total
            for name, total in totals.items()
        }


class ReplicatedEngine:
    """Replicas in one process, one engine for each, or one for all."""

    def __init__(self, mesh: Mesh, program: Program, build: Callable[[int], Engine]) -> None:
        self._mesh, self._counted = mesh, Counted(program, mesh)
        engines: dict[int, Engine] = {}
        self._engines: list[Engine] = []
        for replica in range(mesh.num_parts):
            engine = build(replica)
            self._engines.append(engines.setdefault(id(engine), engine))
        self.stages = self._engines[0].stages

    @property
    def compile_seconds(self) -> float:
        """What compiling the tasks took."""
        return sum(engine.compile_seconds for engine in dict.fromkeys(self._engines))

    @property
    def arrays(self) -> Arrays:
        """The arrays of the first replica."""
        return self._engines[0].arrays

    def agree(self, error: Exception | None) -> None:
        """Raise `error`."""
        if error is not None:
            raise error

    def reschedule(self, schedule: Schedule) -> None:
        """Go on under another order, in every replica."""
        for engine in dict.fromkeys(self._engines):
            engine.reschedule(schedule)

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One step of all replicas; sums in the order of replicas."""
        own_inputs = self._counted.from_zero(inputs)
        found = [
            engine.run(own_part(own_inputs, self._mesh, replica))
            for replica, engine in enumerate(self._engines)
        ]
        last = self.stages[-1]
        loss = None
        for own in found:
            if own.loss is not None:
                part = self.arrays.move(own.loss, last)
                loss = part if loss is None else self.arrays.add(loss, part)
        grads, totals = dict(found[0].grads), dict(found[0].buffers)
        for own in found[1:]:
            for name, grad in own.grads.items():
                grads[name] = self.arrays.add(grads[name], grad)
            for name, stage in self._counted.stages.items():
                part = self.arrays.move(own.buffers[name], stage)
                totals[name] = self.arrays.add(totals[name], part)
        aux = {
            name: interleave([self.arrays.move(own.aux[name], last) for own in found], self.arrays)
            for name in found[0].aux
        }
        buffers = self._counted.added(totals, inputs.buffers, self.arrays)
        return StepOutputs(loss, grads, buffers, aux)

    def profile(self, inputs: StepInputs) -> Times:
        """As the first replica's engine does."""
        return self._engines[0].profile(own_part(inputs, self._mesh, 0))

    def measure(self, inputs: StepInputs) -> Spans:
        """As the first replica's engine does, alone."""
        return self._engines[0].measure(own_part(inputs, self._mesh, 0))


def interleave(of_replicas: Sequence[Any], arrays: Arrays) -> Any:
    """What replicas stacked by microbatch, [M, ...] each, as one stack by part, [M * replicas, ...]."""
    parts = [stacked[m] for m in range(len(of_replicas[0])) for stacked in of_replicas]
    return arrays.stack(parts)
