"""Lowering rules: calls (inlined), loops of unknown length (kept), recomputation, boundary markers."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from plait.core_ir.build import Builder
from plait.core_ir.graph import Value
from plait.core_ir.op import Op
from plait.core_ir.ops import control as ops
from plait.core_ir.ops.elementwise import select
from plait.core_ir.ops.reduce import reduce_or
from plait.core_ir.types import i32
from plait.frontends.jax.jaxpr import closed
from plait.frontends.jax.lower_annotation import annotated
from plait.frontends.jax.lower_extern import extern
from plait.frontends.jax.lower_flow import refuse_cut
from plait.frontends.jax.marks import BOUNDARY, COTANGENT, TANGENT
from plait.frontends.jax.sharded import Operand, like, part
from plait.frontends.jax.site import Rule, Site


def _call(param: str) -> Rule:
    """A primitive that calls the jaxpr in `param` on its operands: inlined."""

    def rule(b: Builder, site: Site, *operands: Operand) -> list[Operand]:
        return site.lowering.inline(b, closed(site.params[param]), *operands)

    return rule


def _remat(b: Builder, site: Site, *operands: Operand) -> list[Operand]:
    body = closed(site.params["jaxpr"])
    if not site.params["differentiated"]:
        return site.lowering.inline(b, body, *operands)
    # One barrier for each value of the forward: a stage, or a part of a backward, takes those it needs.
    backward = site.lowering.marks.backward
    fresh = [x if part(x) in backward else like(x, b(ops.barrier, part(x))) for x in operands]
    return site.lowering.recompute(b, body, *fresh)


def _linear_solve(b: Builder, site: Site, *operands: Value) -> list[Operand]:
    lengths, solve = site.params["const_lengths"], site.params["jaxprs"].solve
    first = lengths.matvec + lengths.vecmat
    consts = operands[first : first + lengths.solve]
    rhs = operands[first + lengths.solve + lengths.transpose_solve :]
    return site.lowering.inline(b, closed(solve), *consts, *rhs)


def _platform_index(b: Builder, site: Site) -> list[Value]:
    """Which platform runs: read by `cond` alone, which takes its default branch."""
    platforms = site.params["platforms"]
    return [b.literal(platforms.index(None) if None in platforms else 0, i32)]


def _while(b: Builder, site: Site, *operands: Value) -> tuple[Value, ...]:
    p = site.params
    cond, body = p["cond_jaxpr"], p["body_jaxpr"]
    refuse_cut(site, cond, body)
    if cond.out_avals[0].shape:
        return _batched_while(b, site, *operands)
    return b.emit(
        ops.while_,
        *operands,
        cond=site.lowering.body("cond", cond).graph,
        body=site.lowering.body("body", body).graph,
        cond_nconsts=int(p["cond_nconsts"]),
        body_nconsts=int(p["body_nconsts"]),
    )


def _batched_while(b: Builder, site: Site, *operands: Value) -> tuple[Value, ...]:
    """A loop under `vmap`, whose members end at different times: until the last has, the others stand still."""
    p = site.params
    num_cond, num_body = int(p["cond_nconsts"]), int(p["body_nconsts"])
    cond_consts, body_consts = operands[:num_cond], operands[num_cond : num_cond + num_body]
    carry = operands[num_cond + num_body :]

    cond = Builder("cond")
    inputs = [cond.input(x.type) for x in (*cond_consts, *carry)]
    (running,) = site.lowering.inline_whole(cond, p["cond_jaxpr"], *inputs)
    cond.output(cond(reduce_or, running, dims=tuple(range(running.type.rank))))

    body = Builder("body")
    inputs = [body.input(x.type) for x in (*cond_consts, *body_consts, *carry)]
    old = inputs[num_cond + num_body :]
    (running,) = site.lowering.inline_whole(body, p["cond_jaxpr"], *inputs[:num_cond], *old)
    for before, after in zip(
        old, site.lowering.inline_whole(body, p["body_jaxpr"], *inputs[num_cond:]), strict=True
    ):
        mine = body.expand(running, after.type.shape, range(running.type.rank))
        body.output(body(select, mine, after, before))
    return b.emit(
        ops.while_,
        *cond_consts,
        *cond_consts,
        *body_consts,
        *carry,
        cond=cond.build(),
        body=body.build(),
        cond_nconsts=num_cond,
        body_nconsts=num_cond + num_body,
    )


def _on_parts(b: Builder, op: Op, operands: Sequence[Operand], **attrs: Any) -> list[Operand]:
    """An op that gives its operands, on this rank's parts."""
    results = b.emit(op, *map(part, operands), **attrs)
    return [like(x, result) for x, result in zip(operands, results, strict=True)]


def _barrier(b: Builder, site: Site, *operands: Operand) -> Sequence[Operand]:
    return _on_parts(b, ops.barrier, operands) if operands else ()


def _boundary(b: Builder, site: Site, *operands: Operand) -> Sequence[Operand]:
    marks, uid, path = site.lowering.marks, site.params["uid"], site.params["path"]
    if not marks.cuts(path):
        return operands
    if site.recomputing:
        # What this marker gave in the forward is what crossed the cut: recomputation starts from it.
        return marks.outputs(uid) or operands
    index = marks.open(uid, path)
    results = _on_parts(b, ops.boundary, operands, index=index, backward=False)
    marks.keep(uid, results)
    return results


def _cotangent(b: Builder, site: Site, *operands: Operand) -> Sequence[Operand]:
    marks = site.lowering.marks
    if not marks.cuts(site.params["path"]):
        return operands
    # In a gradient that the loss itself takes, backward markers are no cuts of the step's backward.
    index = marks.close(site.params["uid"]) if marks.in_backward else None
    if index is None:
        return operands
    return _on_parts(b, ops.boundary, operands, index=index, backward=True)


def _device_put(b: Builder, site: Site, *operands: Value) -> Sequence[Operand]:
    if any(device is not None for device in site.params["devices"]):
        return extern(b, site, *operands)
    return operands


def _reshard(b: Builder, site: Site, *operands: Operand) -> Sequence[Operand]:
    """JAX puts one where a cotangent meets what came of a mesh: to nowhere in particular."""
    sharding = site.params["dst_sharding"]
    if any(over is not None for over in sharding.spec):
        return [annotated(b, site, x, sharding) for x in operands]
    return operands


def _identities(b: Builder, site: Site, *operands: Operand) -> Sequence[Operand]:
    return operands


CALLS: Mapping[str, str] = MappingProxyType(
    {
        "jit": "jaxpr",
        "closed_call": "call_jaxpr",
        "custom_jvp_call": "call_jaxpr",
        "custom_vjp_call": "call_jaxpr",
        "custom_vmap_call": "call",
        "linear_call": "callee",
        "composite": "jaxpr",
        "remat_opt": "fwd_jaxpr",
    }
)
"""Primitives that call a jaxpr on all of their operands, and the parameter that holds it."""

IDENTITIES = frozenset({"optimization_barrier", "reshard", BOUNDARY, TANGENT, COTANGENT})
"""Primitives that give their operands."""

TAKES_PARTS = IDENTITIES | {*CALLS, "remat2"}
"""Primitives whose rules take operands that are sharded."""

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{name: _call(param) for name, param in CALLS.items()},
        "remat2": _remat,
        "custom_linear_solve": _linear_solve,
        "platform_index": _platform_index,
        "while": _while,
        "optimization_barrier": _barrier,
        "device_put": _device_put,
        "reshard": _reshard,
        BOUNDARY: _boundary,
        TANGENT: _identities,
        COTANGENT: _cotangent,
    }
)
