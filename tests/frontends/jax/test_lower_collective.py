"""Collectives of a jaxpr over a mesh, interpreted on all ranks, against JAX on as many devices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.lax.parallel import all_gather_invariant
from jax.sharding import AxisType, PartitionSpec
from jax_checks import assert_close, primitives, random

from plait.core_ir.build import Builder
from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Graph
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.verify import verify
from plait.frontends.jax.jaxpr import ClosedJaxpr, closed, type_of_aval
from plait.frontends.jax.lower import lower_jaxpr
from plait.frontends.jax.marks import Marks

MESH = {"data": 2, "model": 2}


def lowered(jaxpr: ClosedJaxpr, axes: dict[str, int]) -> Graph:
    b = Builder("f")
    inputs = [b.input(type_of_aval(v.aval, "input")) for v in jaxpr.jaxpr.invars]
    for value in lower_jaxpr(b, jaxpr, inputs, Marks(cuts=lambda path: not path), axes):
        b.output(value)
    return verify(b.build())


def check(
    function: Callable[..., Any], *args: Any, primitive: str, vma: bool = True
) -> list[dict[str, Any]]:
    """The function on each rank, arguments cut along dimension 0; attributes of its collectives."""
    mesh = jax.make_mesh(
        tuple(MESH.values()),
        tuple(MESH),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[:4],
    )

    def on_a_rank(*arrays: Any) -> Any:
        results = function(*(x[0] for x in arrays))
        return jax.tree.map(lambda y: lax.pcast(y[None], _missing(y), to="varying"), results)

    def _missing(y: Any) -> tuple[str, ...]:
        return tuple(a for a in MESH if vma and a not in jax.typeof(y).mat.varying)

    spec = PartitionSpec(tuple(MESH))
    mapped = jax.shard_map(on_a_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=vma)
    jaxpr = jax.make_jaxpr(mapped)(*args)
    (eqn,) = jaxpr.jaxpr.eqns
    assert primitive in set(primitives(eqn.params["jaxpr"]))
    graph = lowered(closed(eqn.params["jaxpr"]), MESH)
    assert "extern" not in {e.op.name for e in graph.eqns}
    ranks = [[x[rank : rank + 1] for x in args] for rank in range(math.prod(MESH.values()))]
    found = interpret_ranks(graph, ranks, MESH)
    for index, want in enumerate(jax.tree.leaves(jax.jit(mapped)(*args))):
        assert_close(np.concatenate([of[index] for of in found]), np.asarray(want))
    return [dict(e.attrs) for e in graph.eqns if "axis" in e.attrs]


X = random((4, 4, 6))
CASES: Sequence[tuple[str, str, Callable[..., Any]]] = [
    ("psum_invariant", "sum", lambda x: lax.psum(x, "data")),
    ("psum_invariant", "two-axes", lambda x: lax.psum(x, ("data", "model"))),
    ("psum_invariant", "tree", lambda x: lax.psum((x, 2 * x[0]), "model")),
    ("psum_invariant", "mean", lambda x: lax.pmean(x, "data")),
    ("psum_invariant", "bool", lambda x: lax.psum(x > 0, "data")),
    ("pmax", "max", lambda x: lax.pmax(x, "model")),
    ("pmin", "integers", lambda x: lax.pmin(x.astype("i4"), ("data", "model"))),
    ("all_gather", "tiled", lambda x: lax.all_gather(x, "data", axis=1, tiled=True)),
    ("all_gather", "stacked", lambda x: lax.all_gather(x, "data", axis=2)),
    ("all_gather", "two-axes", lambda x: lax.all_gather(x, ("data", "model"), tiled=True)),
    ("all_gather", "turned", lambda x: lax.all_gather(x, ("model", "data"), axis=1)),
    ("all_gather_invariant", "tiled", lambda x: all_gather_invariant(x, "data", tiled=True)),
    (
        "reduce_scatter",
        "tiled",
        lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
    ),
    ("reduce_scatter", "stacked", lambda x: lax.psum_scatter(x[:2], "model")),
    ("reduce_scatter", "two-axes", lambda x: lax.psum_scatter(x, ("data", "model"), tiled=True)),
    ("all_to_all", "tiled", lambda x: lax.all_to_all(x, "model", 0, 1, tiled=True)),
    ("all_to_all", "stacked", lambda x: lax.all_to_all(x[:2], "model", 0, 1)),
    ("ppermute", "ring", lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)])),
    ("ppermute", "one-way", lambda x: lax.ppermute(x, "model", [(0, 1)])),
    ("ppermute", "shuffle", lambda x: lax.pshuffle(x, "model", [1, 0])),
    ("axis_index", "place", lambda x: x + lax.axis_index("data")),
    ("axis_index", "both", lambda x: x * lax.axis_index(("data", "model"))),
    ("pvary", "constant", lambda x: x + lax.pcast(jnp.arange(6.0), "data", to="varying")),
    ("pvary", "gradient", jax.grad(lambda x: lax.psum(jnp.sum(jnp.sin(x)) * 2, "data"))),
    ("scan", "loop", lambda x: lax.scan(lambda c, r: (c + lax.psum(r, "data"), c), x[0] * 0, x)),
]


TRACKED = ("pvary", "all_gather_invariant")
"""What exists only where it is tracked along which axes a value varies."""


@pytest.mark.parametrize(
    ("primitive", "name", "function"), CASES, ids=[f"{p}-{n}" for p, n, _ in CASES]
)
def test_collective(primitive: str, name: str, function: Callable[..., Any]) -> None:
    check(function, X, primitive=primitive, vma=True)
    if primitive not in TRACKED:
        check(function, X, primitive=primitive.removesuffix("_invariant"), vma=False)


def test_several_axes_are_gathered_from_the_last_and_scattered_from_the_first() -> None:
    gathered = check(CASES[9][2], X, primitive="all_gather")
    assert [attrs["axis"] for attrs in gathered] == ["model", "data"]
    scattered = check(CASES[14][2], X, primitive="reduce_scatter")
    assert [attrs["axis"] for attrs in scattered] == ["data", "model"]


def test_an_axis_of_vmap_is_a_dim() -> None:
    def both(x: Any) -> Any:
        return jax.vmap(lambda r: lax.psum(r, ("rows", "data")), axis_name="rows")(x)

    (attrs,) = check(both, X, primitive="psum", vma=False)
    assert attrs["axis"] == "data"


def test_the_gradient_of_a_gathered_layer() -> None:
    def loss(w: Any, x: Any) -> Any:
        whole = lax.all_gather(w, "data", tiled=True)
        return lax.psum(jnp.sum(jnp.tanh(x @ whole)), ("data", "model"))

    check(jax.grad(loss, argnums=(0, 1)), random((4, 3, 5)), X, primitive="reduce_scatter")


def over_axes(function: Callable[..., Any], axes: dict[str, int]) -> Graph:
    env = [("data", 2), ("model", 2)]
    return lowered(jax.make_jaxpr(function, axis_env=env)(jnp.ones((4, 6))), axes)


def test_what_is_refused() -> None:
    groups = [[0], [1]]
    for function, message in (
        (lambda x: lax.psum(x, "data", axis_index_groups=groups), "psum with axis_index_groups"),
        (
            lambda x: lax.all_to_all(x, ("data", "model"), 0, 0, tiled=True),
            "all_to_all over several",
        ),
        (lambda x: lax.ppermute(x, ("data", "model"), [(0, 3)]), "ppermute over several axes"),
    ):
        with pytest.raises(CaptureError, match=rf"test_lower_collective.py:\d+: {message}"):
            over_axes(function, MESH)


def test_an_axis_that_the_mesh_lacks_is_refused_with_those_it_has() -> None:
    for axes, has in (({}, "no axes"), ({"model": 2}, "'model'")):
        with pytest.raises(
            CaptureError, match=rf"psum, a collective, is over axis 'data'.*has {has}"
        ):
            over_axes(lambda x: lax.psum(x, "data"), axes)
