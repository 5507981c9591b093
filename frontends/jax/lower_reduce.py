"""Lowering rules: reductions, cumulative primitives, windows, sorting."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from plait.core_ir.build import Builder
from plait.core_ir.graph import Value
from plait.core_ir.op import Op
from plait.core_ir.ops import elementwise, window
from plait.core_ir.ops import reduce as ops
from plait.core_ir.types import bool_, dtype_of
from plait.frontends.jax.lower_extern import extern
from plait.frontends.jax.site import Rule, Site, ints, pairs


def _reduction(op: Op, logical: Op | None = None) -> Rule:
    """`op` over dims, or on bool `logical`."""

    def rule(b: Builder, site: Site, x: Value) -> Value:
        chosen = logical if logical is not None and x.type.dtype == bool_ else op
        return b(chosen, x, dims=ints(site.params["axes"]))

    return rule


def _arg(op: Op) -> Rule:
    def rule(b: Builder, site: Site, x: Value) -> Value:
        (dim,) = ints(site.params["axes"])
        return b(op, x, dim=dim, dtype=dtype_of(site.params["index_dtype"]))

    return rule


def _cumulative(op: Op) -> Rule:
    def rule(b: Builder, site: Site, x: Value) -> Value:
        return b(op, x, dim=int(site.params["axis"]), reverse=bool(site.params["reverse"]))

    return rule


def _window(kind: str) -> Rule:
    def rule(b: Builder, site: Site, x: Value) -> Value:
        p = site.params
        return b(
            window.reduce_window,
            x,
            kind=kind,
            window=ints(p["window_dimensions"]),
            strides=ints(p["window_strides"]),
            padding=pairs(p["padding"]),
            base_dilation=ints(p["base_dilation"]),
            window_dilation=ints(p["window_dilation"]),
        )

    return rule


def _select_and_scatter_add(b: Builder, site: Site, source: Value, operand: Value) -> Value:
    p = site.params
    if p["select_prim"].name == "le":  # the first least element is the first largest of the negated
        operand = b(elementwise.neg, operand)
    return b(
        window.select_and_scatter_add,
        source,
        operand,
        window=ints(p["window_dimensions"]),
        strides=ints(p["window_strides"]),
        padding=pairs(p["padding"]),
    )


def _sort(b: Builder, site: Site, *xs: Value) -> tuple[Value, ...]:
    p = site.params
    return b.emit(ops.sort, *xs, dim=int(p["dimension"]), num_keys=int(p["num_keys"]))


def _top_k(b: Builder, site: Site, x: Value) -> list[Value]:
    return _top_along(b, site, x, int(site.params["axis"]))


def _top_along(b: Builder, site: Site, x: Value, dim: int) -> list[Value]:
    last = x.type.rank - 1
    swap = [last if d == dim else dim if d == last else d for d in range(x.type.rank)]
    values, indices = b.emit(ops.top_k, b.transpose(x, swap), k=int(site.params["k"]))
    return [b.transpose(values, swap), b.convert(b.transpose(indices, swap), site.results[1].dtype)]


def _approx_top_k(b: Builder, site: Site, x: Value) -> Value | Sequence[Value]:
    """The exact top k, which is what JAX itself gives where the hardware has nothing faster."""
    p = site.params
    if not p["aggregate_to_topk"]:
        return extern(b, site, x)
    signed = x if p["is_max_k"] else b(elementwise.neg, x)
    values, indices = _top_along(b, site, signed, int(p["reduction_dimension"]) % x.type.rank)
    return [values if p["is_max_k"] else b(elementwise.neg, values), indices]


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "reduce_sum": _reduction(ops.reduce_sum),
        "reduce_prod": _reduction(ops.reduce_prod),
        "reduce_max": _reduction(ops.reduce_max, ops.reduce_or),
        "reduce_min": _reduction(ops.reduce_min, ops.reduce_and),
        "reduce_and": _reduction(ops.reduce_and),
        "reduce_or": _reduction(ops.reduce_or),
        "argmax": _arg(ops.argmax),
        "argmin": _arg(ops.argmin),
        "cumsum": _cumulative(ops.cumsum),
        "cumprod": _cumulative(ops.cumprod),
        "cummax": _cumulative(ops.cummax),
        "cummin": _cumulative(ops.cummin),
        "cumlogsumexp": _cumulative(ops.cumlogsumexp),
        "reduce_window_sum": _window("sum"),
        "reduce_window_max": _window("max"),
        "reduce_window_min": _window("min"),
        "select_and_scatter_add": _select_and_scatter_add,
        "sort": _sort,
        "top_k": _top_k,
        "approx_top_k": _approx_top_k,
    }
)
