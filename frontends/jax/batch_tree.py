"""The batch as a tree: which leaves are traced, and the batch the loss gets for one microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from plait.frontends.batch import BatchSpec, batch_spec
from plait.frontends.jax.jaxpr import abstract
from plait.frontends.jax.trees import named_leaves


def flatten_batch(batch: Any) -> list[tuple[str, Any]]:
    """`[(leaf name, leaf)]` of a batch; None is a leaf."""
    return named_leaves(batch, "batch", is_leaf=lambda x: x is None)[0]


@dataclass(frozen=True)
class BatchTree:
    """The structure of a batch. names, avals: of the traced leaves, for one microbatch."""

    spec: BatchSpec
    treedef: Any
    names: tuple[str, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]

    def build(self, arrays: Sequence[Any]) -> Any:
        """The batch with these arrays for its traced leaves, and its static ones."""
        known = dict(zip(self.names, arrays, strict=True))
        leaves = [known.get(leaf.name, leaf.value) for leaf in self.spec.leaves]
        return jax.tree.unflatten(self.treedef, leaves)


def batch_tree(batch: Any, num_microbatches: int, *, x64: bool) -> BatchTree:
    """The structure of an example batch; BatchError where it cannot be cut."""
    leaves, treedef = named_leaves(batch, "batch", is_leaf=lambda x: x is None)
    spec = batch_spec(leaves, num_microbatches, narrow=not x64)
    names, avals = [], []
    for described, (name, leaf) in zip(spec.leaves, leaves, strict=True):
        if described.type is None:
            continue
        # A Python number does not decide the dtype of what it meets.
        weak = isinstance(leaf, (int, float, complex))
        shape, dtype = described.type.shape, described.type.dtype.numpy
        names.append(name)
        avals.append(abstract(shape, dtype, weak=weak))
    return BatchTree(spec, treedef, tuple(names), tuple(avals))
