"""What stands outside the submeshes of a mesh: what a step is given, whole, and what it gives, whole again.

A microbatch of the schedule is cut into as many microbatches as it has parts: part d of D of microbatch m is number
m D + d. Losses and gradients are sums over parts, in their order.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plait.backends.jax.arrays import Given, JaxArrays, on_host
from plait.backends.jax.compile import CompiledTask, compile_task
from plait.backends.jax.sharded import Sharded
from plait.backends.jax.submesh import Spread, Spreads, Submesh, entries
from plait.backends.replicas import Counted
from plait.backends.runtime import StepInputs
from plait.core_ir.arrays import array_type
from plait.core_ir.build import Builder
from plait.core_ir.errors import UsageError
from plait.core_ir.graph import Graph
from plait.core_ir.mesh import Mesh, axes_of, whole_type
from plait.core_ir.ops.collective import all_reduce, wait
from plait.core_ir.program import Program
from plait.core_ir.types import TensorType


class Whole:
    """Spreads what the stages of a program are given over their submeshes, and takes together what they give."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        spreads: Spreads,
        submeshes: Sequence[Submesh],
        counted: Counted,
    ) -> None:
        self._mesh, self._spreads, self._counted = mesh, spreads, counted
        self._submeshes = submeshes
        self._arrays = JaxArrays(submeshes, spreads)
        self._first_of_part = _first_of_parts(mesh)
        self._types = _value_types(program)
        self._program, self.sharded = program, Sharded(program, spreads)
        self._sums: dict[int, tuple[tuple[str, ...], CompiledTask]] = {}
        for stage, types in _gradients_by_stage(program).items():
            types = {name: program.shard_types.get(name, type) for name, type in types.items()}
            axes = {name: self._summed_axes(name) for name in types}
            graph = sum_over_ranks(types, axes, mesh)
            reads = [self._summed(name) for name in types]
            gives = [self._given(name) for name in types]
            task = compile_task(graph, submesh=submeshes[stage], reads=reads, gives=gives)
            self._sums[stage] = tuple(types), task
        self._totals: dict[int, tuple[tuple[str, ...], CompiledTask]] = {}
        for stage, names in _counted_by_stage(counted).items():
            types = {name: self._types[name] for name in names}
            graph = sum_over_ranks(types, dict.fromkeys(names, mesh.replica_axes), mesh)
            reads, gives = [spreads.by_device] * len(names), [spreads.param(n) for n in names]
            task = compile_task(graph, submesh=submeshes[stage], reads=reads, gives=gives)
            self._totals[stage] = names, task

    def inputs(self, inputs: StepInputs) -> StepInputs:
        """Those of a step, whole, as arrays that know how they are spread. UsageError for a part of a parameter."""
        count = self._mesh.num_parts
        return replace(
            inputs,
            params={name: self._value(name, x) for name, x in inputs.params.items()},
            buffers={name: self._buffer(name, x) for name, x in inputs.buffers.items()},
            microbatches=[
                self._parts(inputs.microbatches[first : first + count])
                for first in range(0, len(inputs.microbatches), count)
            ],
            keys=inputs.keys.reshape(-1, count, *inputs.keys.shape[1:]),
        )

    def gradients(self, grads: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Each device's gradients summed over the data axes that do not cut the parameter, spread as that is."""
        found: dict[str, jax.Array] = {}
        for stage, (names, task) in self._sums.items():
            if names[0] in grads:  # else nothing ran backward
                own = [self._gradient(name, grads[name], stage) for name in names]
                for name, grad in zip(names, task(own), strict=True):
                    found[name] = self.sharded.unpadded(name, grad)
        return found

    def buffers(self, left: Mapping[str, jax.Array], inputs: StepInputs) -> dict[str, jax.Array]:
        """What a step leaves of all buffers, whole; `inputs` are those that it was given."""
        found = dict(left)
        for stage, (names, task) in self._totals.items():
            own = [self._arrays.move(left[name], stage) for name in names]
            found.update(zip(names, task(own), strict=True))
        before = {name: self._value(name, inputs.buffers[name]) for name in self._counted.names}
        return self._counted.added(found, before, self._arrays)

    def _buffer(self, name: str, array: Any) -> Given:
        if name not in self._counted.names:
            return self._value(name, array)
        stage, spread = self._counted.stages[name], self._spreads.by_device
        type_ = self._submeshes[stage].type(self._types[name], spread)
        return Given(np.zeros(type_.shape, type_.dtype.numpy), spread)

    def _summed_axes(self, name: str) -> tuple[str, ...]:
        """The axes over which the gradient of a parameter is still to be added up."""
        axes = self._mesh.summed_axes(name, self._spreads.layout(name))
        is_reduced = name in self._program.reduced_params
        return tuple(a for a in axes if not (is_reduced and a == self._spreads.shard_axis))

    def _gradient(self, name: str, grad: jax.Array, stage: int) -> jax.Array:
        if self._spreads.has_auto:  # so far it may lie as the compiler chose
            return self._arrays.put(grad, stage, self._summed(name))
        return self._arrays.move(grad, stage)

    def _summed(self, name: str) -> Spread:
        """How the gradients lie that are summed."""
        is_reduced = name in self._program.reduced_params
        return self._spreads.by_device if is_reduced else self._spreads.gradient(name)

    def _given(self, name: str) -> Spread:
        """How a parameter lies that a step is given, and its gradient in the end."""
        is_sharded = name in self._program.shard_types
        return self._spreads.shard(name) if is_sharded else self._spreads.param(name)

    def loss(self, loss: jax.Array) -> jax.Array:
        """The sum of the losses of all parts."""
        total = functools.reduce(operator.add, self._of_parts(loss))
        return total.reshape(loss.shape[1:])

    def aux(self, stacked: jax.Array) -> jax.Array:
        """What each part has stacked by microbatch, as one stack."""
        whole = jnp.concatenate(self._of_parts(stacked))
        return whole.swapaxes(0, 1).reshape(-1, *whole.shape[2:])

    def _of_parts(self, x: jax.Array) -> list[jax.Array]:
        """The entry of each part of a microbatch, all on the first one's device: on other axes they are alike."""
        of_devices = entries(x)
        found = [of_devices[number] for number in self._first_of_part]
        return [jax.device_put(entry, found[0].sharding) for entry in found]

    def _value(self, name: str, array: Any) -> Given:
        array = on_host(array)
        layout = self._spreads.layout(name)
        if axes_of(layout):
            wanted = whole_type(self._types[name], layout, self._mesh.axes)
            if array_type(array) != wanted:
                raise UsageError(
                    f"{name!r} is cut over {', '.join(axes_of(layout))} and has to be given whole, as {wanted}; got "
                    f"{array_type(array)}"
                )
        return Given(self.sharded.padded(name, array), self._given(name))

    def _parts(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Given]:
        """The leaves of all parts of one microbatch, each in one array."""
        return {
            name: Given(_stacked([on_host(part[name]) for part in parts]), self._spreads.by_part)
            for name in parts[0]
        }


def sum_over_ranks(
    types: Mapping[str, TensorType], axes: Mapping[str, Sequence[str]], mesh: Mesh
) -> Graph:
    """Each gradient, or count, as a device has it -> the sum over its axes."""
    b = Builder("sum_over_ranks")
    for name, type in types.items():
        total = b.input(type, "param_grad", name)
        for axis in axes[name]:
            started = b(all_reduce, total, axis=axis, size=mesh.axes[axis], reduction="sum")
            total = b(wait, started)
        b.output(total, "param_grad", name)
    return b.build()


def _counted_by_stage(counted: Counted) -> dict[int, tuple[str, ...]]:
    found: dict[int, list[str]] = {}
    for name, stage in counted.stages.items():
        found.setdefault(stage, []).append(name)
    return {stage: tuple(names) for stage, names in found.items()}


def _stacked(parts: Sequence[Any]) -> Any:
    """Arrays of NumPy, or of JAX, along a new dim 0."""
    are_ours = any(isinstance(part, jax.Array) for part in parts)
    return jnp.stack(parts) if are_ours else np.stack(parts)


def _first_of_parts(mesh: Mesh) -> tuple[int, ...]:
    """For each part of a microbatch the number of the first entry of a submesh's values that is of it."""
    (submesh, *_) = mesh.groups(mesh.manual_axes)
    found: dict[int, int] = {}
    for number, rank in enumerate(submesh):
        found.setdefault(mesh.part(rank), number)
    return tuple(found[part] for part in sorted(found))


def _gradients_by_stage(program: Program) -> dict[int, dict[str, TensorType]]:
    """The parameters whose gradient, or its sum over stages, a stage has: of a shared one the first that gives any."""
    found: dict[int, dict[str, TensorType]] = {}
    seen = set[str]()
    for stage in program.stages:
        for graph in stage.tasks.values():
            for name, value in graph.outputs_of("param_grad"):
                if name not in seen:
                    seen.add(name)
                    found.setdefault(stage.index, {})[name] = value.type
    return found


def _value_types(program: Program) -> dict[str, TensorType]:
    """What a device holds of each parameter and buffer."""
    return {
        name: value.type
        for stage in program.stages
        for graph in stage.tasks.values()
        for role in ("param", "buffer")
        for name, value in graph.inputs_of(role)
    }
