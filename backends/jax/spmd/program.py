"""The program that all ranks run: a scan over the ticks of a table, in each a loop of at most one trip for every kind
of task.

NOTE: the form is what keeps XLA from undoing it. A loop of no or one trip owns the pools it writes, so that they are
updated in place; a `switch` over them would copy them in every branch. Inside it, a switch over the branches returns
the new values alone. Everything the loop reads passes a barrier together with the table's row, which the loop changes:
otherwise its body would be invariant, and XLA would hoist it and run it on every tick. A task stands between two
barriers, so that it is compiled as it is alone, and gives the same bits.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import numpy as np
from jax import lax

from plait.backends.jax.emit import emit
from plait.backends.jax.private import barrier, constrain, permute
from plait.backends.jax.spmd.layout import Place, pack, unpack
from plait.backends.jax.spmd.plan import Plan
from plait.backends.jax.spmd.pools import INPUT_POOLS
from plait.backends.jax.spmd.wiring import Body, Wired
from plait.core_ir import mesh

Fields: TypeAlias = tuple[jax.Array, ...]
State: TypeAlias = dict[str, Fields]
"""The arrays of each pool, `[rows, *field]`; an outbox has no rows and goes by `outbox(pool)`."""

RESULT_POOLS = ("loss", "aux", "grads.I", "grads.W", "state")


def outbox(pool: str) -> str:
    """The name of what is to be sent into a pool of another rank."""
    return f"outbox of {pool}"


def rank_program(plan: Plan, axis: str) -> Callable[[jax.Array, State], dict[str, Fields]]:
    """What one rank does in a step, to be mapped over `axis`: table `[1, ticks, columns]` and input pools
    `[1, rows, *field]` -> the pools of results, likewise."""

    def run(table: jax.Array, given: State) -> dict[str, Fields]:
        local = {pool: tuple(_drop_rank(x) for x in fields) for pool, fields in given.items()}
        fixed = {pool: fields for pool, fields in local.items() if pool != "state"}
        start = {**_empty_state(plan), **{p: f for p, f in local.items() if p == "state"}}

        def tick(state: State, row: jax.Array) -> tuple[State, None]:
            arrived: dict[str, Fields] = {}
            for kind in plan.kinds:
                state, row = _phase(plan, kind, fixed, state, row)
                arrived.update(_exchange(plan, kind, state, axis))
            return _receive(plan, state, arrived, row), None

        state, _ = lax.scan(tick, start, _drop_rank(table))
        return {
            pool: tuple(lax.expand_dims(x, (0,)) for x in state[pool])
            for pool in RESULT_POOLS
            if pool in state
        }

    return run


def _drop_rank(x: jax.Array) -> jax.Array:
    return lax.squeeze(x, (0,))


def _empty_state(plan: Plan) -> dict[str, Fields]:
    state: dict[str, Fields] = {}
    for pool, layout in plan.layouts.items():
        if pool in INPUT_POOLS:
            continue
        rows = plan.num_rows[pool]
        state[pool] = tuple(
            _placed(lax.full((rows, *t.shape), 0, t.dtype.numpy), cut[1:])
            for t, cut in zip(layout.fields, plan.pools.cuts(pool), strict=True)
        )
        if plan.is_remote(pool):
            fields = (lax.full(t.shape, 0, t.dtype.numpy) for t in layout.fields)
            state[outbox(pool)] = tuple(fields)
    return state


def _phase(
    plan: Plan, kind: Body, fixed: State, state: State, row: jax.Array
) -> tuple[State, jax.Array]:
    """Run the task of this kind that the row asks for, if it asks for one.

    The row comes back as it was, but known only once the task has run: what depends on it stands behind the task.
    """
    owned = [outbox(p) if plan.is_remote(p) else p for p in plan.written[kind]]
    read = {r.pool for task in plan.branches[kind] for r in task.reads}
    seen = {p: f for p, f in {**fixed, **state}.items() if p in read and p not in owned}
    branches = [_branch(plan, task) for task in plan.branches[kind]]
    column = plan.columns["branch", kind]

    def body(
        loop: tuple[jax.Array, jax.Array, dict[str, Fields]],
    ) -> tuple[jax.Array, jax.Array, dict[str, Fields]]:
        pending, entry, own = loop
        entry, visible = _together(entry, seen)
        fresh = lax.switch(entry[column], branches, entry, {**visible, **own})
        own = {
            name: _store(plan, kind, pool, own[name], new, entry)
            for name, pool, new in zip(owned, plan.written[kind], fresh, strict=True)
        }
        return pending - 1, entry + 1, own

    runs = row[plan.columns["run", kind]]
    start = (runs, row, {name: state[name] for name in owned})
    _, row, own = lax.while_loop(lambda loop: loop[0] > 0, body, start)
    return {**state, **own}, row - runs


def _together(entry: jax.Array, seen: State) -> tuple[jax.Array, dict[str, Fields]]:
    leaves, tree = jax.tree.flatten(dict(seen))
    entry, *leaves = barrier((entry, *leaves))
    return entry, jax.tree.unflatten(tree, leaves)


def _branch(plan: Plan, task: Wired) -> Callable[[jax.Array, State], tuple[Fields, ...]]:
    """A task as a function of the table's row and the pools: the fields it has for each pool its kind writes."""
    function = emit(task.graph, is_alone=False)

    def run(entry: jax.Array, pools: State) -> tuple[Fields, ...]:
        rows: dict[tuple[str, int], Fields] = {}
        values = []
        for read in task.reads:
            key = (read.pool, read.column)
            if key not in rows:
                at = entry[plan.columns["read", task.kind, *key]]
                rows[key] = tuple(_row(x, at) for x in pools[read.pool])
            values.append(_placed(unpack(read.place, read.type, rows[key]), read.placement))
        operands = barrier(values)
        everything = (*operands, *barrier(function(*operands)))
        fresh = []
        for pool in plan.written[task.kind]:
            writes = [w for w in task.writes if w.pool == pool]
            places: list[Place] = [w.place for w in writes]
            arrays = [_placed(everything[w.value], w.placement) for w in writes]
            fresh.append(tuple(pack(plan.layouts[pool], places, arrays)))
        return tuple(fresh)

    return run


def _placed(x: jax.Array, placement: mesh.Layout) -> jax.Array:
    """x, laid over auto axes; as it is where nothing is known of it."""
    return constrain(x, [over or None for over in placement]) if any(placement) else x


def _row(x: jax.Array, at: jax.Array, *, keepdims: bool = False) -> jax.Array:
    row: jax.Array = lax.dynamic_index_in_dim(
        x, at, 0, keepdims=keepdims, allow_negative_indices=False
    )
    return row


def _put(x: jax.Array, update: jax.Array, at: jax.Array) -> jax.Array:
    starts: list[jax.Array | np.int32] = [at, *[np.int32(0)] * (x.ndim - 1)]
    return lax.dynamic_update_slice(x, update, starts, allow_negative_indices=False)


def _store(
    plan: Plan, kind: Body, pool: str, own: Fields, fresh: Fields, entry: jax.Array
) -> Fields:
    """The pool with the new values in the row that the table names: added there if it holds sums."""
    if plan.is_remote(pool):
        return fresh
    at = entry[plan.columns["write", kind, pool]]
    rows = [lax.expand_dims(x, (0,)) for x in fresh]
    if pool.startswith("grads"):
        # The row keeps its dimension, or XLA would not add in place where the pool has this row alone.
        rows = [lax.add(_row(x, at, keepdims=True), new) for x, new in zip(own, rows, strict=True)]
    return tuple(_put(x, new, at) for x, new in zip(own, rows, strict=True))


def _exchange(plan: Plan, kind: Body, state: State, axis: str) -> dict[str, Fields]:
    """Send what tasks made for other ranks, behind the last kind that can have made it; what arrives, by pool."""
    arrived = {}
    for pool in plan.sent_by(kind):
        offset = plan.pools.offsets[pool]
        pairs = [(rank, (rank + offset) % plan.num_ranks) for rank in plan.senders[pool]]
        arrived[pool] = tuple(permute(x, axis, pairs) for x in state[outbox(pool)])
    return arrived


def _receive(plan: Plan, state: State, arrived: dict[str, Fields], row: jax.Array) -> State:
    """Store what arrived in the row that the table names, a spare one where nothing did.

    `row` comes from behind all tasks of the tick: a pool that one of them may still read would be copied.
    """
    after = dict(state)
    for pool, fields in arrived.items():
        at = row[plan.columns["arrive", pool]]
        after[pool] = tuple(
            _put(x, lax.expand_dims(new, (0,)), at)
            for x, new in zip(after[pool], fields, strict=True)
        )
    return after
