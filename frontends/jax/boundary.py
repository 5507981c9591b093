"""Stage boundaries: identity primitives that survive tracing and differentiation and mark where stages are cut.

`boundary_p` marks the forward, over every array of a tree; its derivative is `tangent_p`, whose transpose `cotangent_p`
marks the cotangents at the same place. All are identities wherever they are run. `path` is the module path that asked
for the mark, or empty for a user's own call. `uid` pairs the marks of one call: a call that is traced once but runs
several times (a cached `jit`, a scan body) gives several marks of one uid, and the backward meets them in reverse.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from plait.core_ir.arrays import is_array

Tree = TypeVar("Tree")

boundary_p = Primitive("stage_boundary")
tangent_p = Primitive("stage_boundary_tangent")
cotangent_p = Primitive("stage_boundary_cotangent")

_uids = count()


def stage_boundary(tree: Tree, *, path: str = "") -> Tree:
    """The same tree; where a step is captured, the program is cut into stages here.

    Outside capture it is the identity, under grad, jit, vmap and remat too. What is in the tree crosses the cut, and so
    does whatever else the code behind it uses of the code before it.
    """
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    marked = _bind(boundary_p, [leaves[i] for i in places], {"uid": next(_uids), "path": path})
    for i, leaf in zip(places, marked, strict=True):
        if isinstance(leaf, jax.core.Tracer):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)  # type: ignore[no-any-return]


def _bind(marker: Primitive, xs: Sequence[Any], params: Mapping[str, Any]) -> Any:
    return marker.bind(*xs, **params)  # type: ignore[no-untyped-call]


def _identity(*xs: Any, **_: Any) -> list[Any]:
    return list(xs)


def _mark_live(marker: Primitive, xs: Sequence[Any], **params: Any) -> list[Any]:
    """The marker over those that are not symbolic zeros; the zeros as they are."""
    live = [x for x in xs if type(x) is not ad.Zero]
    marked = iter(_bind(marker, live, params) if live else ())
    return [x if type(x) is ad.Zero else next(marked) for x in xs]


def _boundary_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    return _bind(boundary_p, primals, params), _mark_live(tangent_p, tangents, **params)


def _tangent_transpose(cotangents: Sequence[Any], *_: Any, **params: Any) -> list[Any]:
    return _mark_live(cotangent_p, cotangents, **params)


def _linear_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **_: Any
) -> tuple[list[Any], list[Any]]:
    # A derivative of a derivative: the marks of the outer one are those of the values alone.
    return list(primals), list(tangents)


def _batch(marker: Primitive) -> Any:
    def rule(
        args: Sequence[Any], dims: Sequence[Any], **params: Any
    ) -> tuple[list[Any], Sequence[Any]]:
        return _bind(marker, args, params), dims

    return rule


def _define(marker: Primitive, jvp: Any) -> None:
    marker.multiple_results = True
    marker.def_impl(_identity)  # type: ignore[no-untyped-call]
    marker.def_abstract_eval(_identity)  # type: ignore[no-untyped-call]
    ad.primitive_jvps[marker] = jvp
    batching.primitive_batchers[marker] = _batch(marker)
    mlir.register_lowering(marker, lambda _, *xs, **__: xs)


_define(boundary_p, _boundary_jvp)
_define(tangent_p, _linear_jvp)
_define(cotangent_p, _linear_jvp)
ad.primitive_transposes[tangent_p] = _tangent_transpose
