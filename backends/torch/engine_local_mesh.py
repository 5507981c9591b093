"""The `local` engine on a mesh: a thread for each place along the axes beside the stages', each with all stages.

Threads share the artifacts, and meet in the collectives of their tasks.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from plait.backends.replicas import Counted, interleave, own_part
from plait.backends.runtime import Spans, StepInputs, StepOutputs
from plait.backends.torch.engine_local import LocalEngine
from plait.backends.torch.shards import Shards
from plait.backends.torch.threads import Threads
from plait.core_ir.arrays import array_type
from plait.core_ir.mesh import Layout, Mesh, axes_of, part_of, whole_type
from plait.core_ir.program import Program
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.times import Times
from plait.core_ir.shards import shard_layout


class LocalMeshEngine:
    """Runs all ranks of a mesh in this process."""

    def __init__(
        self,
        mesh: Mesh,
        layouts: Mapping[str, Layout],
        program: Program,
        schedule: Schedule,
        *,
        device: torch.device,
        codegen: str,
    ) -> None:
        self._counted = Counted(program, mesh, layouts)
        self._mesh, self._layouts = mesh, layouts
        self._types = {**program.param_types, **program.buffer_types}
        self._ranks = [n for n, place in enumerate(mesh.places()) if place[mesh.stage_axis] == 0]
        self._places = [mesh.place(rank) for rank in self._ranks]
        self._program = program
        self._shards = [Shards(program, place) for place in self._places]
        axis, _ = program.shard_axis or (None, 1)
        named = (*mesh.named_axes, axis) if axis else mesh.named_axes
        self._threads = Threads(self._places, {each: mesh.axes[each] for each in named})
        self._threads.enter()
        self._local = LocalEngine(program, schedule, device=device, codegen=codegen)
        self.stages, self.arrays = self._local.stages, self._local.arrays
        self.compile_seconds = self._local.compile_seconds

    def reschedule(self, schedule: Schedule) -> None:
        """Go on under another order of the same tasks."""
        self._local.reschedule(schedule)

    def agree(self, error: Exception | None) -> None:
        """Raise `error`."""
        if error is not None:
            raise error

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One step of all ranks."""
        found = self._threads.run(lambda number: self._local.run(self._own(inputs, number)))
        is_first = [self._counts(place, self._mesh.data_axes) for place in self._places]
        parts = [outputs for outputs, first in zip(found, is_first, strict=True) if first]
        loss = None
        for outputs in parts:
            if outputs.loss is not None:
                loss = outputs.loss if loss is None else loss + outputs.loss
        aux = {
            name: interleave([outputs.aux[name] for outputs in parts], self.arrays)
            for name in parts[0].aux
        }
        grads = {
            name: self._gradient(name, [outputs.grads[name] for outputs in found])
            for name in found[0].grads
        }
        totals = {
            name: self._buffer(name, [outputs.buffers[name] for outputs in found])
            for name in found[0].buffers
        }
        buffers = self._counted.added(totals, inputs.buffers, self.arrays)
        return StepOutputs(loss, grads, buffers, aux)

    def profile(self, inputs: StepInputs) -> Times:
        """As the first rank does beside the others."""
        return self._threads.run(lambda number: self._local.profile(self._own(inputs, number)))[0]

    def measure(self, inputs: StepInputs) -> Spans:
        """As the first rank does beside the others."""
        return self._threads.run(lambda number: self._local.measure(self._own(inputs, number)))[0]

    def _own(self, inputs: StepInputs, number: int) -> StepInputs:
        own = own_part(inputs, self._mesh, self._mesh.part(self._ranks[number]))
        place = self._places[number]
        buffers = {name: self._part(name, x, place) for name, x in own.buffers.items()}
        own = self._counted.from_zero(replace(own, buffers=buffers))
        return replace(
            own,
            params={
                name: self._shard(name, self._part(name, x, place), number)
                for name, x in own.params.items()
            },
        )

    def _shard(self, name: str, part: Any, number: int) -> Any:
        shards = self._shards[number]
        if name not in shards:
            return part
        return shards.padded(name, self.arrays.move(shards.own(name, part), 0))

    def _part(self, name: str, array: Any, place: Mapping[str, int]) -> Any:
        return part_of(array, self._layouts.get(name, ()), self._mesh.axes, place)

    def _counts(self, place: Mapping[str, int], along: Collection[str]) -> bool:
        """Whether a rank stands for those that give the same: the first along all axes but these."""
        return all(place[axis] == 0 for axis in self._mesh.other_axes if axis not in along)

    def _gradient(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of a parameter that is given whole, from what each rank has of it."""
        layout, (shards, _) = self._layouts.get(name, ()), self._program.shard_axis or (None, 1)
        if shards and name in self._program.shard_types:
            layout = shard_layout(layout, shards)
        summed = {*self._mesh.summed_axes(name, layout)}
        if name in self._program.reduced_params and shards not in axes_of(layout):
            summed.discard(shards)  # all have the sum
        whole = self._whole(parts, layout, summed)
        if name not in self._program.shard_types:
            return whole
        # What each part of dim 0 ends with only fills its last shard up.
        num_rows = self._program.param_types[name].shape[0]
        num_parts = math.prod(self._mesh.axes[each] for each in layout[0] if each != shards)
        by_part = whole.reshape(num_parts, -1, *whole.shape[1:])[:, :num_rows]
        return by_part.reshape(-1, *whole.shape[1:])

    def _buffer(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of what each rank has left of it, or has counted."""
        summed = self._mesh.replica_axes if name in self._counted.names else ()
        return self._whole(parts, self._layouts.get(name, ()), summed)

    def _whole(
        self, parts: Sequence[torch.Tensor], layout: Layout, summed: Collection[str]
    ) -> torch.Tensor:
        """The sum over some axes, and the parts along axes that cut the array, joined."""
        cut, axes = axes_of(layout), self._mesh.axes
        sums: dict[tuple[int, ...], torch.Tensor] = {}
        for place, part in zip(self._places, parts, strict=True):
            if self._counts(place, {*cut, *summed}):
                key = tuple(place[axis] for axis in cut)
                sums[key] = sums[key] + part if key in sums else part
        if not cut:
            return sums[()]
        whole = parts[0].new_empty(whole_type(array_type(parts[0]), layout, axes).shape)
        for key, part in sums.items():
            part_of(whole, layout, axes, dict(zip(cut, key, strict=True))).copy_(part)
        return whole
