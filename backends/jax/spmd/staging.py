"""Arrays in and out of an spmd program: packed where each rank's stages run, and the results taken apart there."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from plait.backends.jax.arrays import content
from plait.backends.jax.compile import compile_function
from plait.backends.jax.private import shape_struct, spec
from plait.backends.jax.spmd.layout import pack, unpack
from plait.backends.jax.spmd.plan import Plan
from plait.backends.jax.spmd.pools import INPUT_POOLS
from plait.backends.jax.spmd.program import RESULT_POOLS, Fields
from plait.backends.jax.submesh import Spread, Spreads, Submesh
from plait.backends.runtime import StepInputs
from plait.core_ir.graph import Port, Role
from plait.core_ir.mesh import Layout, axes_of
from plait.core_ir.types import TensorType

_ROLES: Mapping[str, Role] = MappingProxyType(
    {"state": "buffer", "grads.I": "param_grad", "grads.W": "param_grad"}
)
"""The role of what stands in a pool of results."""

Item: TypeAlias = tuple[Port, int]
"""A port and the microbatch it is for (0 where it is for all)."""


def pool_types(
    plan: Plan, devices: Mesh, rows: Spread, pools: Sequence[str]
) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
    """Those of these pools that there are as arrays over all devices, `[devices, rows, *field]`.

    rows: how dim 0 is cut. Along auto axes all devices have one entry.
    """
    count = math.prod(devices.shape[axis] for axis in axes_of(rows.layout))

    def field(pool: str, type_: TensorType, cut: Layout) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(devices, spec(*replace(rows, placement=cut).cuts))
        return shape_struct((count, plan.num_rows[pool], *type_.shape), type_.dtype.numpy, sharding)

    return {
        pool: tuple(
            field(pool, t, cut)
            for t, cut in zip(plan.layouts[pool].fields, plan.pools.cuts(pool), strict=True)
        )
        for pool in pools
        if pool in plan.layouts
    }


def _of_fields(plan: Plan, pools: Iterable[str], spreads: Spreads) -> list[Spread]:
    """How the fields of these pools are spread over a submesh."""
    return [replace(spreads.rows, placement=cut) for pool in pools for cut in plan.pools.cuts(pool)]


class Packer:
    """Packs what the stages of one rank are given into the rows of its input pools."""

    def __init__(
        self,
        plan: Plan,
        placement: tuple[int, ...],
        rank: int,
        submesh: Submesh,
        spreads: Spreads,
    ) -> None:
        self._plan = plan
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
        reads = [spreads.of(port) for port, _ in self._items]
        self._where = [submesh.where(spread) for spread in reads]
        gives = _of_fields(plan, self._rows, spreads)
        self._pack = compile_function(self._trace, self._types, submesh, reads, gives)

    def __call__(self, inputs: StepInputs) -> dict[str, Fields]:
        """The rank's part of each input pool, `[its devices, rows, *field]`."""
        arrays = [
            _given(inputs, *item, type_)
            for item, type_ in zip(self._items, self._types, strict=True)
        ]
        packed = iter(self._pack(*jax.device_put(arrays, self._where)))
        return {
            pool: tuple(itertools.islice(packed, len(self._plan.layouts[pool].fields)))
            for pool in self._rows
        }

    def _trace(self, *arrays: jax.Array) -> Fields:
        """All fields of the pools, one pool after the other."""
        known = dict(zip(self._items, arrays, strict=True))
        return tuple(field for pool in self._rows for field in self._pool(pool, known))

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
    return content(array)


class Unpacker:
    """Takes the rows of one rank's result pools apart."""

    def __init__(
        self,
        plan: Plan,
        placement: tuple[int, ...],
        rank: int,
        submesh: Submesh,
        spreads: Spreads,
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
        gives = [spreads.of(Port(_ROLES.get(pool, "aux"), name)) for pool, _, name in self._names]
        reads = _of_fields(plan, self._pools, spreads)
        self._unpack = compile_function(self._trace, types, submesh, reads, gives)

    def __call__(self, results: Mapping[str, Fields]) -> dict[tuple[str, int, str], jax.Array]:
        """By pool, stage and name of the port, spread: of `loss` and `aux` all microbatches, stacked."""
        if not self._names:
            return {}
        arrays = self._unpack(*(x for pool in self._pools for x in results[pool]))
        return dict(zip(self._names, arrays, strict=True))

    def _named(self) -> Iterator[tuple[str, int, str]]:
        for pool, stages in self._pools.items():
            for stage in stages:
                yield from ((pool, stage, port.name) for port in self._plan.pools.held(pool, stage))

    def _trace(self, *arrays: jax.Array) -> Fields:
        rest = list(arrays)
        out: list[jax.Array] = []
        for pool, stages in self._pools.items():
            num_fields = len(self._plan.layouts[pool].fields)
            fields, rest = rest[:num_fields], rest[num_fields:]
            for ordinal, stage in enumerate(stages):
                out.extend(self._stage(pool, ordinal, stage, fields))
        return tuple(out)

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


def gather(
    types: Mapping[str, Sequence[jax.ShapeDtypeStruct]],
    parts: Sequence[Mapping[str, Fields]],
    submeshes: Sequence[Submesh],
) -> dict[str, Fields]:
    """The pools of all ranks as arrays over the whole mesh, from each rank's part in order."""

    def joined(pieces: Sequence[jax.Array], type_: jax.ShapeDtypeStruct) -> jax.Array:
        own = [
            held
            for piece, submesh in zip(pieces, submeshes, strict=True)
            for held in _on_devices(piece, submesh)
        ]
        whole: jax.Array = jax.make_array_from_single_device_arrays(
            type_.shape, type_.sharding, own
        )
        return whole

    return {
        pool: tuple(
            joined(pieces, type_)
            for *pieces, type_ in zip(*(part[pool] for part in parts), types[pool], strict=True)
        )
        for pool in parts[0]
    }


def _on_devices(x: jax.Array, submesh: Submesh) -> list[jax.Array]:
    """What each device of a submesh holds of an array over it."""
    if submesh.mesh is None:
        return [x]
    held = {shard.device: shard.data for shard in x.addressable_shards}
    return [held[device] for device in submesh.devices]


def scatter(
    plan: Plan, results: Mapping[str, Fields], submeshes: Sequence[Submesh], spreads: Spreads
) -> Iterator[dict[str, Fields]]:
    """The part of each pool that lies on each submesh."""
    on_devices = {
        pool: [{s.device: s.data for s in x.addressable_shards} for x in fields]
        for pool, fields in results.items()
    }

    def part(pool: str, number: int, cut: Layout, submesh: Submesh) -> jax.Array:
        whole = results[pool][number]
        own: list[jax.Array] = [on_devices[pool][number][d] for d in submesh.devices]
        if submesh.mesh is None:
            return own[0]
        shape = (whole.shape[0] // len(submeshes), *whole.shape[1:])
        sharding = submesh.sharding(replace(spreads.rows, placement=cut))
        joined: jax.Array = jax.make_array_from_single_device_arrays(shape, sharding, own)
        return joined

    for submesh in submeshes:
        yield {
            pool: tuple(
                part(pool, number, cut, submesh) for number, cut in enumerate(plan.pools.cuts(pool))
            )
            for pool in results
        }
