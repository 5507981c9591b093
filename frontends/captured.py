"""What a frontend hands over: the joint program, and how the user's own structures map to its ports.

The joint program is one Graph with `boundary` markers. Its ports:

inputs   `param` and `buffer` (the user's names), `batch` (names of leaves), `rng_key` (the microbatch's key),
         `loss_grad` (the cotangent of the loss, of the loss's type)
outputs  `loss` (a scalar), `param_grad` for each trainable parameter that the loss depends on, `buffer_update` for each
         buffer that the forward changes, `aux` by leaf

`boundary {index=k}` marks the cut between stage k and stage k + 1: the forward marker over every tensor leaf that the
user (or the hook) passed through it, the backward marker over the cotangents of those that have one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from plait.core_ir.graph import Graph
from plait.core_ir.mesh import Layout, axes_of
from plait.core_ir.passes.equations import collective_axes
from plait.core_ir.types import TensorType
from plait.frontends.batch import BatchSpec

Framework: TypeAlias = Literal["torch", "jax"]


@dataclass(frozen=True)
class Leaf:
    """A parameter or a buffer of the user's model: its port name, its type, whether it has a gradient.

    `role` is "param" or "buffer". A frozen parameter, and an integer leaf of a JAX model, is not trainable. `type` is
    that of what a rank holds: the part of the whole that `layout` says.
    """

    name: str
    type: TensorType
    role: Literal["param", "buffer"]
    trainable: bool
    layout: Layout = ()
    placement: Layout = ()
    """How it lies over axes that are left to the compiler, along which `type` is whole."""


@dataclass(frozen=True)
class Captured:
    """A captured model: one joint program, and the maps between the user's structures and port names.

    leaves: every parameter and buffer, in the model's own order (torch: tied ones once, by the first name).
    num_cuts: number of boundary markers met (stages are one more).
    flatten_batch: a batch -> [(leaf name, leaf)] in a fixed order; static leaves too.
    read_leaves: the model's current arrays by leaf name, not copied (torch: detached).
    flatten_params: the `params` argument of `loss_and_grads` -> arrays by leaf name; UsageError where keys differ.
    pack_grads: gradients by leaf name (a trainable leaf is always there) -> the user's structure; frozen -> None,
        integer leaves of a JAX model -> float0.
    pack_aux: aux leaves by port name, stacked by microbatch -> the user's structure.
    pack_state: buffers by leaf name -> the user's `state` structure (JAX with `state=`), else None.
    flatten_state: the inverse; UsageError where the structure differs, or the model keeps its state itself.
    batch_axes: axes that the model names though its ranks run parts of a batch of their own along them (FSDP).
    """

    graph: Graph
    framework: Framework
    num_cuts: int
    leaves: tuple[Leaf, ...]
    batch: BatchSpec
    flatten_batch: Callable[[Any], list[tuple[str, Any]]]
    read_leaves: Callable[[], dict[str, Any]]
    flatten_params: Callable[[Any], dict[str, Any]]
    pack_grads: Callable[[Mapping[str, Any]], Any]
    pack_aux: Callable[[Mapping[str, Any]], Any]
    pack_state: Callable[[Mapping[str, Any]], Any]
    flatten_state: Callable[[Any], dict[str, Any]]
    notes: Sequence[str] = field(default=())
    batch_axes: frozenset[str] = frozenset()
    annotated: Mapping[str, str] = field(default_factory=dict)
    """The axes that the model leaves to the compiler's own partitioning, and what of the model says so."""

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """How parameters and buffers that are cut lie over ranks."""
        return {leaf.name: leaf.layout for leaf in self.leaves if axes_of(leaf.layout)}

    @cached_property
    def placements(self) -> dict[str, Layout]:
        """How parameters lie over axes that are left to the compiler."""
        return {leaf.name: leaf.placement for leaf in self.leaves if axes_of(leaf.placement)}

    @cached_property
    def named_axes(self) -> frozenset[str]:
        """The axes of the mesh that the model names: in collectives, or in the layout of a parameter."""
        cut = {axis for layout in self.layouts.values() for axis in axes_of(layout)}
        return frozenset(collective_axes(self.graph)) | cut
