"""Arrays in and out of an spmd program: packed on each rank's own device, and the results taken apart there."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from plait.backends.jax.compile import COMPILER_OPTIONS
from plait.backends.jax.private import shape_struct, spec
from plait.backends.jax.spmd.layout import pack, unpack
from plait.backends.jax.spmd.plan import Plan
from plait.backends.jax.spmd.pools import INPUT_POOLS
from plait.backends.jax.spmd.program import RESULT_POOLS, Fields
from plait.backends.runtime import StepInputs
from plait.core_ir.arrays import is_torch, to_numpy
from plait.core_ir.graph import Port
from plait.core_ir.types import TensorType

Item: TypeAlias = tuple[Port, int]
"""A port and the microbatch it is for (0 where it is for all)."""


def input_types(plan: Plan, sharding: NamedSharding) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
    """The input pools of the whole program, `[ranks, rows, *field]`."""
    return {
        pool: tuple(
            shape_struct((plan.num_ranks, plan.num_rows[pool], *t.shape), t.dtype.numpy, sharding)
            for t in plan.layouts[pool].fields
        )
        for pool in INPUT_POOLS
        if pool in plan.layouts
    }


class Packer:
    """Packs what the stages of one rank are given into the rows of its input pools."""

    def __init__(
        self, plan: Plan, placement: tuple[int, ...], rank: int, device: jax.Device
    ) -> None:
        self._plan, self._rank, self._device = plan, rank, device
        self._rows = {
            pool: list(_rows_of(plan, placement, pool, rank))
            for pool in INPUT_POOLS
            if pool in plan.layouts
        }
        self._items = list(
            dict.fromkeys(
                (port, m) for rows in self._rows.values() for _, m, ports in rows for port in ports
            )
        )
        types = {
            (port, m): type_
            for rows in self._rows.values()
            for _, m, ports in rows
            for port, type_ in ports.items()
        }
        self._types = [types[item] for item in self._items]
        self._pack = _compile(self._trace, self._types, device)

    def __call__(self, inputs: StepInputs) -> dict[str, Fields]:
        """The rank's part of each input pool, `[1, rows, *field]`, on its device."""
        arrays = [
            _given(inputs, *item, type_)
            for item, type_ in zip(self._items, self._types, strict=True)
        ]
        packed: dict[str, Fields] = self._pack(*jax.device_put(arrays, self._device))
        return packed

    def _trace(self, *arrays: jax.Array) -> dict[str, Fields]:
        known = dict(zip(self._items, arrays, strict=True))
        return {pool: self._pool(pool, known) for pool in self._rows}

    def _pool(self, pool: str, known: Mapping[Item, jax.Array]) -> Fields:
        layout = self._plan.layouts[pool]
        rows = []
        for owner, m, ports in self._rows[pool]:
            places = [self._plan.pools.place(pool, owner, port) for port in ports]
            rows.append(pack(layout, places, [known[port, m] for port in ports]))
        empty = [lax.full(t.shape, 0, t.dtype.numpy) for t in layout.fields]
        rows += [empty] * (self._plan.num_rows[pool] - len(rows))
        return tuple(
            lax.expand_dims(jax.numpy.stack(column), (0,)) for column in zip(*rows, strict=True)
        )


def _rows_of(
    plan: Plan, placement: tuple[int, ...], pool: str, rank: int
) -> Iterator[tuple[int, int, dict[Port, TensorType]]]:
    """Owner, microbatch and ports of each row of a rank, in the order of rows."""
    owners = plan.pools.bundles[pool]
    if pool == "microbatch":
        ports = owners.get(rank, {})
        yield from ((rank, m, ports) for m in range(plan.num_microbatches) if ports)
        return
    yield from ((s, 0, owners[s]) for s in sorted(owners) if placement[s] == rank)


def _given(inputs: StepInputs, port: Port, microbatch: int, type_: TensorType) -> Any:
    match port.role:
        case "param":
            array = inputs.params[port.name]
        case "buffer":
            array = inputs.buffers[port.name]
        case "batch":
            array = inputs.microbatches[microbatch][port.name]
        case "rng_key":
            return np.asarray(inputs.keys[microbatch], np.uint32)
        case "loss_grad":
            return np.full(type_.shape, inputs.loss_grad, type_.dtype.numpy)
    return to_numpy(array) if is_torch(array) else array


class Unpacker:
    """Takes the rows of one rank's result pools apart."""

    def __init__(
        self, plan: Plan, placement: tuple[int, ...], rank: int, device: jax.Device
    ) -> None:
        self._plan = plan
        self._pools = {
            pool: [s for s in sorted(plan.pools.bundles[pool]) if placement[s] == rank]
            for pool in RESULT_POOLS
            if pool in plan.layouts
        }
        self._names = list(self._named())
        types = [
            TensorType(t.dtype, (1, plan.num_rows[pool], *t.shape))
            for pool in self._pools
            for t in plan.layouts[pool].fields
        ]
        self._unpack = _compile(self._trace, types, device)

    def __call__(self, results: Mapping[str, Fields]) -> dict[tuple[str, int, str], jax.Array]:
        """By pool, stage and name of the port: of `loss` and `aux` all microbatches, stacked."""
        if not self._names:
            return {}
        arrays = self._unpack(*(x for pool in self._pools for x in results[pool]))
        return dict(zip(self._names, arrays, strict=True))

    def _named(self) -> Iterator[tuple[str, int, str]]:
        for pool, stages in self._pools.items():
            for stage in stages:
                yield from ((pool, stage, port.name) for port in self._plan.pools.held(pool, stage))

    def _trace(self, *arrays: jax.Array) -> list[jax.Array]:
        rest = list(arrays)
        out: list[jax.Array] = []
        for pool, stages in self._pools.items():
            num_fields = len(self._plan.layouts[pool].fields)
            fields, rest = rest[:num_fields], rest[num_fields:]
            for ordinal, stage in enumerate(stages):
                out.extend(self._stage(pool, ordinal, stage, fields))
        return out

    def _stage(
        self, pool: str, ordinal: int, stage: int, fields: list[jax.Array]
    ) -> Iterator[jax.Array]:
        num = self._plan.num_microbatches
        for port, type_ in self._plan.pools.held(pool, stage).items():
            place = self._plan.pools.place(pool, stage, port)
            if pool in ("loss", "aux"):
                rows = range(ordinal * num, (ordinal + 1) * num)
                yield jax.numpy.stack(
                    [unpack(place, type_, [x[0, r] for x in fields]) for r in rows]
                )
            else:
                yield unpack(place, type_, [x[0, ordinal] for x in fields])


def gather(mesh: Mesh, axis: str, parts: list[dict[str, Fields]]) -> dict[str, Fields]:
    """The pools of all ranks as arrays over the mesh, from each rank's part in order."""
    sharding = NamedSharding(mesh, spec(axis))
    return {
        pool: tuple(
            jax.make_array_from_single_device_arrays(
                (len(parts), *pieces[0].shape[1:]), sharding, list(pieces)
            )
            for pieces in zip(*(part[pool] for part in parts), strict=True)
        )
        for pool in parts[0]
    }


def part_of(results: Mapping[str, Fields], device: jax.Device) -> dict[str, Fields]:
    """The part of each pool that lies on a device."""
    return {pool: tuple(_shard(x, device) for x in fields) for pool, fields in results.items()}


def _shard(x: jax.Array, device: jax.Device) -> jax.Array:
    data: jax.Array = next(s.data for s in x.addressable_shards if s.device == device)
    return data


def _compile(
    function: Callable[..., Any], types: list[TensorType], device: jax.Device
) -> jax.stages.Compiled:
    sharding = SingleDeviceSharding(device)
    operands = [shape_struct(t.shape, t.dtype.numpy, sharding) for t in types]
    jitted = jax.jit(function, keep_unused=True, out_shardings=sharding)
    return jitted.lower(*operands).compile(compiler_options=COMPILER_OPTIONS)
