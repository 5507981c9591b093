"""Lowering rules: primitives whose meaning is a function of arrays, which is traced and inlined."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax

from plait.core_ir.build import Builder
from plait.core_ir.graph import Value
from plait.frontends.jax import special
from plait.frontends.jax.jaxpr import like
from plait.frontends.jax.sharded import Operand
from plait.frontends.jax.site import Rule, Site


def _traced(function: Callable[..., Any], *names: str) -> Rule:
    """The rule of a primitive that is `function` on its operands and its parameters of these names."""

    def rule(b: Builder, site: Site, *operands: Value) -> list[Operand]:
        params = {name: site.params[name] for name in names}
        avals = (like(x) for x in site.eqn.invars)
        jaxpr = jax.make_jaxpr(lambda *xs: function(*xs, **params))(*avals)
        return site.lowering.inline(b, jaxpr, *operands)

    return rule


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "bessel_i0e": _traced(special.bessel_i0e),
        "bessel_i1e": _traced(special.in_one_precision(special.bessel_i1e)),
        "igamma": _traced(special.igamma),
        "igammac": _traced(special.igammac),
        "igamma_grad_a": _traced(special.igamma_grad_a),
        "regularized_incomplete_beta": _traced(special.regularized_incomplete_beta),
        "zeta": _traced(special.in_one_precision(special.zeta)),
        "polygamma": _traced(special.in_one_precision(special.polygamma)),
        "random_gamma": _traced(special.random_gamma, "log_space"),
        "reduce": _traced(special.reduce, "jaxpr", "dimensions"),
    }
)
