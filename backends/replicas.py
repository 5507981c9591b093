"""Data parallelism: the same pipeline several times, each on its part of every microbatch.

What `compile` calls a microbatch is cut into as many parts as there are places along the data axes of the mesh; part d
of microbatch m is number m * count + d of all parts, and replica d runs the parts with its number. So the results are
those of a pipeline with so many more microbatches: losses and gradients are summed over replicas, once a step, and
random keys go by the number of the part.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from plait.backends.runtime import Arrays, Engine, Spans, StepInputs, StepOutputs
from plait.core_ir.errors import UnsupportedError
from plait.core_ir.mesh import Mesh
from plait.core_ir.program import Program
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.times import Times


def own_part(inputs: StepInputs, mesh: Mesh, part: int) -> StepInputs:
    """What one replica runs of a step."""
    count = mesh.num_parts
    return replace(
        inputs, microbatches=inputs.microbatches[part::count], keys=inputs.keys[part::count]
    )


def check_replicable(program: Program) -> None:
    """UnsupportedError for a program whose microbatches depend on each other."""
    for stage in program.stages:
        for name, _ in stage.tasks["F"].outputs_of("buffer_update"):
            raise UnsupportedError(
                f"buffer {name!r} changes from microbatch to microbatch, and each replica of the model would have its "
                "own; keep it fixed (eval mode, or a norm without running statistics), or leave the mesh to the stages"
            )


class ReplicatedEngine:
    """Replicas in one process, one engine for each, or one for all."""

    def __init__(self, mesh: Mesh, program: Program, build: Callable[[int], Engine]) -> None:
        check_replicable(program)
        self._mesh = mesh
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
        found = [
            engine.run(own_part(inputs, self._mesh, replica))
            for replica, engine in enumerate(self._engines)
        ]
        last = self.stages[-1]
        loss = None
        for own in found:
            if own.loss is not None:
                part = self.arrays.move(own.loss, last)
                loss = part if loss is None else self.arrays.add(loss, part)
        grads = dict(found[0].grads)
        for own in found[1:]:
            for name, grad in own.grads.items():
                grads[name] = self.arrays.add(grads[name], grad)
        aux = {
            name: interleave([self.arrays.move(own.aux[name], last) for own in found], self.arrays)
            for name in found[0].aux
        }
        return StepOutputs(loss, grads, {}, aux)

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
