"""Llama in Flax over a mesh of devices: the model of `flax.py`, its parameters and its loss, mapped by `shard_map`.

Shapes are those of one rank: B batch, T time, D model dim, N heads, K key-value heads, H head dim, V vocabulary.

- Over the *model axis* heads, hidden dims and the vocabulary are cut (arXiv 1909.08053, section 3): what each rank
  makes of its part is added up behind attention and MLP. With `sequence_parallel` the residual stream is cut along time
  there (arXiv 2205.05198, section 4.2.2): sums are scattered, and gathered where the next part is entered.
- Over the *context axis* the sequence is cut. Keys and values go round the ranks in a ring, and what a rank's queries
  find in each part is merged by its log-sum-exp (arXiv 2310.01889).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from plait.models.llama.config import WHOLE_AXES, Config
from plait.models.llama.flax import (
    Boundary,
    Layer,
    Llama,
    attend_causally,
    no_boundary,
    rotary_tables,
)

COLUMNS = frozenset({"wq", "wk", "wv", "w1", "w3", "head"})
"""Linear layers whose outputs are cut over the model axis."""
ROWS = frozenset({"wo", "w2"})
"""Linear layers whose inputs are."""

_UNSEEN = -1e30


@dataclass(frozen=True)
class Form:
    """Over which axes of a mesh what is cut; None: nothing."""

    mesh: Any
    model_axis: str | None = None
    context_axis: str | None = None
    sequence_parallel: bool = False

    def check(self, config: Config) -> None:
        """ValueError where heads, hidden dims or the vocabulary do not divide over the ranks of the model axis."""
        config.check_mesh({"tensor": self.mesh.shape[self.model_axis] if self.model_axis else 1})

    def enter(self, x: Array) -> Array:
        """What every rank of the model axis reads whole; [B, T, D], or a part of T -> [B, T, D]."""
        if self.model_axis is None or not self.sequence_parallel:
            return x
        return lax.all_gather(x, self.model_axis, axis=1, tiled=True)

    def leave(self, x: Array) -> Array:
        """The sum of what the ranks of the model axis made; [B, T, D] -> [B, T, D], or this rank's part of T."""
        if self.model_axis is None:
            return x
        if not self.sequence_parallel:
            return lax.psum(x, self.model_axis)
        return lax.psum_scatter(x, self.model_axis, scatter_dimension=1, tiled=True)

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        """Causal attention of this rank's queries to all keys."""
        if self.context_axis is None:
            return attend_causally(q, k, v)
        return ring_attention(q, k, v, self.context_axis)


AXES = WHOLE_AXES
"""What the axes are called over which `loss_fn_over` cuts."""


def loss_fn_over(mesh: Any) -> Any:
    """The loss over those of AXES that a mesh has; a residual stream of whole positions."""
    tensor, context = (axis if axis in mesh.shape else None for axis in AXES)
    return partial(loss_fn, form=Form(mesh, tensor, context))


def loss_fn(
    model: Llama,
    batch: Mapping[str, Array],
    *,
    form: Form,
    cuts: Sequence[int] = (),
    boundary: Boundary = no_boundary,
) -> Array:
    """The loss of `flax.loss_fn`, computed as `form` says; `boundary` is called on every rank."""
    form.check(model.config)
    graphdef, params = nnx.split(model)

    def on_rank(params: Any, batch: Mapping[str, Array]) -> Array:
        return _loss(nnx.merge(graphdef, params), batch, form, cuts, boundary)

    mapped = jax.shard_map(
        on_rank,
        mesh=form.mesh,
        in_specs=(param_specs(params, form.model_axis), P(None, form.context_axis)),
        out_specs=P(),
    )
    return mapped(params, batch)


def param_specs(params: Any, model_axis: str | None) -> Any:
    """How each parameter is cut over the model axis."""

    def spec(path: Any, _: Any) -> P:
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        if COLUMNS & {*names}:
            return P(None, model_axis)
        return P(model_axis) if (ROWS | {"tok_embed"}) & {*names} else P()

    return jax.tree.map_with_path(spec, params)


def _loss(
    model: Llama, batch: Mapping[str, Array], form: Form, cuts: Sequence[int], boundary: Boundary
) -> Array:
    tokens = batch["tokens"]
    x = embed(model.tok_embed, tokens, form)
    cos, sin = _rotary_tables(model.config, tokens.shape[1], x, form)
    for index, layer in enumerate(model.layers):
        x = _layer(layer, boundary(x) if index in cuts else x, cos, sin, form)
    x = form.enter(model.norm(x))
    logits = model.tok_embed.attend(x) if model.config.tied_head else model.head(x)
    losses = cross_entropies(logits.astype(jnp.float32), batch["targets"], form.model_axis)
    loss = losses.mean()
    return loss if form.context_axis is None else lax.pmean(loss, form.context_axis)


def _layer(layer: Layer, x: Array, cos: Array, sin: Array, form: Form) -> Array:
    x = x + form.leave(layer.attn(form.enter(layer.attn_norm(x)), cos, sin, form.attend))
    return x + form.leave(layer.mlp(form.enter(layer.mlp_norm(x))))


def embed(table: nnx.Embed, tokens: Array, form: Form) -> Array:
    """Rows of a table of which each rank of the model axis has some; i32[B, T] -> [B, T, D], as `leave` gives it."""
    if form.model_axis is None:
        return table(tokens)
    mine, rows = _own(tokens, len(table.embedding[...]), form.model_axis)
    return form.leave(jnp.where(mine[..., None], table(rows), 0))


def cross_entropies(logits: Array, targets: Array, model_axis: str | None) -> Array:
    """-log softmax(logits)[target] at each position; [B, T, V], i32[B, T] -> [B, T].

    The ranks of the model axis have the logits of a part of the vocabulary each.
    """
    highest = lax.stop_gradient(logits.max(-1))
    if model_axis is None:
        mine, rows = jnp.ones_like(targets, bool), targets
    else:
        highest = lax.pmax(highest, model_axis)
        mine, rows = _own(targets, logits.shape[-1], model_axis)
    shifted = logits - highest[..., None]
    picked = jnp.take_along_axis(shifted, rows[..., None], axis=-1)[..., 0]
    total, target = jnp.exp(shifted).sum(-1), jnp.where(mine, picked, 0)
    if model_axis is not None:
        total, target = lax.psum((total, target), model_axis)
    return jnp.log(total) - target


def _own(ids: Array, num_rows: int, axis: str) -> tuple[Array, Array]:
    """Which ids are of this rank's rows, and of which; 0 for those of others."""
    rows = ids - lax.axis_index(axis) * num_rows
    mine = (rows >= 0) & (rows < num_rows)
    return mine, jnp.where(mine, rows, 0)


def _rotary_tables(
    config: Config, num_positions: int, like: Array, form: Form
) -> tuple[Array, Array]:
    """The tables of this rank's part of the sequence."""
    if form.context_axis is None:
        return rotary_tables(config, num_positions, like)
    ranks, start = lax.axis_size(form.context_axis), lax.axis_index(form.context_axis)
    cos, sin = rotary_tables(config, num_positions * ranks, like)
    start *= num_positions
    return (
        lax.dynamic_slice_in_dim(cos, start, num_positions),
        lax.dynamic_slice_in_dim(sin, start, num_positions),
    )


def ring_attention(q: Array, k: Array, v: Array, axis: str) -> Array:
    """Causal attention where each rank of the axis has a part of the sequence, in order of ranks.

    [B, T, N, H], [B, T, K, H] twice -> [B, T, N, H].
    """
    ranks, place, length = lax.axis_size(axis), lax.axis_index(axis), q.shape[1]
    positions = jnp.arange(length)
    onwards = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    out, lse = _partial_attention(q, k, v, positions[:, None] >= positions)
    for step in range(1, ranks):
        k, v = lax.ppermute((k, v), axis, onwards)
        # These are of the rank that stands `step` places before: all of them earlier, or all of them later.
        seen = jnp.broadcast_to(place >= step, (length, length))
        out, lse = _merged(out, lse, *_partial_attention(q, k, v, seen))
    return out.astype(q.dtype)


def _partial_attention(q: Array, k: Array, v: Array, seen: Array) -> tuple[Array, Array]:
    """What queries find in some keys, and the log-sum-exp of their scores; bool[T, S] -> f32[B, T, N, H], f32[B, T, N].

    Where a query sees none of the keys the latter is very low, and the former has no weight in a sum.
    """
    batch, length, heads, dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, dim)
    scores = jnp.einsum("btkgh,bskh->btkgs", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores * dim**-0.5, _UNSEEN)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None]).astype(v.dtype)
    out = jnp.einsum("btkgs,bskh->btkgh", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape), lse.reshape(batch, length, heads)


def _merged(out: Array, lse: Array, other: Array, other_lse: Array) -> tuple[Array, Array]:
    """What queries find in two sets of keys together."""
    total = jnp.logaddexp(lse, other_lse)
    first, second = jnp.exp(lse - total), jnp.exp(other_lse - total)
    return out * first[..., None] + other * second[..., None], total
