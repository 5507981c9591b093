"""Arrays in and out of an spmd program: packed where each rank's stages run, and the results taken apart there."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from plait.backends.jax.arrays import content
from plait.backends.jax.compile import compile_function
from plait.backends.jax.private import shape_struct
from plait.backends.jax.spmd.layout import pack, unpack
from plait.backends.jax.spmd.plan import Plan
from plait.backends.jax.spmd.pools import INPUT_POOLS
from plait.backends.jax.spmd.program import RESULT_POOLS, Fields
from plait.backends.jax.submesh import Spreads, Submesh, entries, joined
from plait.backends.runtime import StepInputs
from plait.core_ir.graph import Port
from plait.core_ir.types import TensorType

Item: TypeAlias = tuple[Port, int]
"""A port and the microbatch it is for (0 where it is for all)."""


def input_types(plan: Plan, sharding: NamedSharding) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
    """The input pools of the whole program, `[devices, rows, *field]`."""
    return {
        pool: tuple(
            shape_struct(
                (sharding.mesh.size, plan.num_rows[pool], *t.shape), t.dtype.numpy, sharding
            )
            for t in plan.layouts[pool].fields
        )
        for pool in INPUT_POOLS
        if pool in plan.layouts
    }


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
        num_fields = sum(len(plan.layouts[pool].fields) for pool in self._rows)
        gives = [spreads.rows] * num_fields
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
        gives = [
            spreads.of(Port("buffer", name)) if pool == "state" else spreads.by_device
            for pool, _, name in self._names
        ]
        reads = [spreads.rows] * len(types)
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


def gather(sharding: NamedSharding, parts: list[dict[str, Fields]]) -> dict[str, Fields]:
    """The pools of all ranks as arrays over the whole mesh, from each rank's part in order."""
    return {
        pool: tuple(
            joined([entry for piece in pieces for entry in entries(piece)], sharding)
            for pieces in zip(*(part[pool] for part in parts), strict=True)
        )
        for pool in parts[0]
    }


def scatter(
    results: Mapping[str, Fields], submeshes: Sequence[Submesh], spreads: Spreads
) -> Iterator[dict[str, Fields]]:
    """The part of each pool that lies on each submesh."""
    on_devices = {
        pool: [{s.device: s.data for s in x.addressable_shards} for x in fields]
        for pool, fields in results.items()
    }
    for submesh in submeshes:
        sharding = submesh.sharding(spreads.rows)
        yield {
            pool: tuple(joined([x[d] for d in submesh.devices], sharding) for x in fields)
            for pool, fields in on_devices.items()
        }
