"""Lowering rules: calls (inlined), control flow (kept), recomputation, boundary markers."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from plait.core_ir.build import Builder
from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Value
from plait.core_ir.ops import control as ops
from plait.core_ir.ops.elementwise import select
from plait.core_ir.ops.reduce import reduce_or
from plait.core_ir.types import i32
from plait.frontends.jax.jaxpr import closed
from plait.frontends.jax.lower_extern import extern
from plait.frontends.jax.lower_unroll import unroll_scan
from plait.frontends.jax.marks import BOUNDARY, COTANGENT, TANGENT
from plait.frontends.jax.site import Rule, Site


def _call(param: str) -> Rule:
    """A primitive that calls the jaxpr in `param` on its operands: inlined."""

    def rule(b: Builder, site: Site, *operands: Value) -> list[Value]:
        return site.lowering.inline(b, closed(site.params[param]), *operands)

    return rule


def _remat(b: Builder, site: Site, *operands: Value) -> list[Value]:
    body = closed(site.params["jaxpr"])
    if not site.params["differentiated"]:
        return site.lowering.inline(b, body, *operands)
    # One barrier for each value of the forward: a stage, or a part of a backward, takes those it needs.
    backward = site.lowering.marks.backward
    fresh = [x if x in backward else b(ops.barrier, x) for x in operands]
    return site.lowering.recompute(b, body, *fresh)


def _linear_solve(b: Builder, site: Site, *operands: Value) -> list[Value]:
    lengths, solve = site.params["const_lengths"], site.params["jaxprs"].solve
    first = lengths.matvec + lengths.vecmat
    consts = operands[first : first + lengths.solve]
    rhs = operands[first + lengths.solve + lengths.transpose_solve :]
    return site.lowering.inline(b, closed(solve), *consts, *rhs)


def _refuse_cut(site: Site, *bodies: object) -> None:
    if any(site.lowering.marks.inside(body) for body in bodies):  # type: ignore[arg-type]
        raise CaptureError(
            f"{site.source}: a stage boundary stands inside a {site.eqn.primitive.name}, which runs in one stage; "
            "move it out, or use jax.lax.scan, which is unrolled where a boundary cuts it"
        )


def _cond(b: Builder, site: Site, index: Value, *operands: Value) -> tuple[Value, ...]:
    branches = site.params["branches"]
    if site.params.get("branches_platforms"):
        return _default_branch(b, site, *operands)
    _refuse_cut(site, *branches)
    graphs = tuple(site.lowering.body(f"branch{i}", branch) for i, branch in enumerate(branches))
    return b.emit(ops.cond, index, *operands, branches=graphs)


def _default_branch(b: Builder, site: Site, *operands: Value) -> tuple[Value, ...]:
    """A branch for each platform: a program runs on any, so the one that serves them all."""
    platforms = site.params["branches_platforms"]
    if None not in platforms:
        raise CaptureError(
            f"{site.source}: lax.platform_dependent without a default has branches for {platforms} only, and Plait "
            "compiles for any platform; add default=..."
        )
    branch = site.params["branches"][platforms.index(None)]
    return tuple(site.lowering.inline(b, branch, *operands))


def _platform_index(b: Builder, site: Site) -> list[Value]:
    """Which platform runs: read by `cond` alone, which takes its default branch."""
    platforms = site.params["platforms"]
    return [b.literal(platforms.index(None) if None in platforms else 0, i32)]


def _while(b: Builder, site: Site, *operands: Value) -> tuple[Value, ...]:
    p = site.params
    cond, body = p["cond_jaxpr"], p["body_jaxpr"]
    _refuse_cut(site, cond, body)
    if cond.out_avals[0].shape:
        return _batched_while(b, site, *operands)
    return b.emit(
        ops.while_,
        *operands,
        cond=site.lowering.body("cond", cond),
        body=site.lowering.body("body", body),
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
    (running,) = site.lowering.inline(cond, p["cond_jaxpr"], *inputs)
    cond.output(cond(reduce_or, running, dims=tuple(range(running.type.rank))))

    body = Builder("body")
    inputs = [body.input(x.type) for x in (*cond_consts, *body_consts, *carry)]
    old = inputs[num_cond + num_body :]
    (running,) = site.lowering.inline(body, p["cond_jaxpr"], *inputs[:num_cond], *old)
    for before, after in zip(
        old, site.lowering.inline(body, p["body_jaxpr"], *inputs[num_cond:]), strict=True
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


def _scan(b: Builder, site: Site, *operands: Value) -> Sequence[Value]:
    p = site.params
    num_consts, num_carry, body = int(p["num_consts"]), int(p["num_carry"]), closed(p["jaxpr"])
    if site.lowering.marks.inside(body):
        first_x = num_consts + num_carry
        carry = operands[num_consts:first_x]
        return unroll_scan(b, site, body, operands[:num_consts], carry, operands[first_x:])
    return b.emit(
        ops.scan,
        *operands,
        body=site.lowering.body("body", body),
        num_consts=num_consts,
        num_carry=num_carry,
        length=int(p["length"]),
        reverse=bool(p["reverse"]),
    )


def _barrier(b: Builder, site: Site, *operands: Value) -> Sequence[Value]:
    return b.emit(ops.barrier, *operands) if operands else ()


def _boundary(b: Builder, site: Site, *operands: Value) -> Sequence[Value]:
    marks, uid, path = site.lowering.marks, site.params["uid"], site.params["path"]
    if not marks.cuts(path):
        return operands
    if site.recomputing:
        # What this marker gave in the forward is what crossed the cut: recomputation starts from it.
        return marks.outputs(uid) or operands
    index = marks.open(uid, path)
    results = b.emit(ops.boundary, *operands, index=index, backward=False)
    marks.keep(uid, results)
    return results


def _cotangent(b: Builder, site: Site, *operands: Value) -> Sequence[Value]:
    marks = site.lowering.marks
    if not marks.cuts(site.params["path"]):
        return operands
    # In a gradient that the loss itself takes, backward markers are no cuts of the step's backward.
    index = marks.close(site.params["uid"]) if marks.in_backward else None
    if index is None:
        return operands
    return b.emit(ops.boundary, *operands, index=index, backward=True)


def _device_put(b: Builder, site: Site, *operands: Value) -> Sequence[Value]:
    if any(device is not None for device in site.params["devices"]):
        return extern(b, site, *operands)
    return operands


def _identities(b: Builder, site: Site, *operands: Value) -> Sequence[Value]:
    return operands


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "jit": _call("jaxpr"),
        "closed_call": _call("call_jaxpr"),
        "custom_jvp_call": _call("call_jaxpr"),
        "custom_vjp_call": _call("call_jaxpr"),
        "custom_vmap_call": _call("call"),
        "linear_call": _call("callee"),
        "composite": _call("jaxpr"),
        "remat_opt": _call("fwd_jaxpr"),
        "remat2": _remat,
        "custom_linear_solve": _linear_solve,
        "cond": _cond,
        "platform_index": _platform_index,
        "while": _while,
        "scan": _scan,
        "optimization_barrier": _barrier,
        "device_put": _device_put,
        BOUNDARY: _boundary,
        TANGENT: _identities,
        COTANGENT: _cotangent,
    }
)
