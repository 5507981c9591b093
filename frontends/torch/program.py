"""The user's loss over the model as one module over the flat tensors of a microbatch: what is traced."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.core_ir.errors import CaptureError
from plait.core_ir.mesh import Mesh
from plait.frontends.batch import BatchSpec
from plait.frontends.torch.boundary import Marks
from plait.frontends.torch.dtensors import entered, local_part, whole
from plait.frontends.torch.effects import Effects
from plait.frontends.torch.trees import kind_of, named_leaves

LossFn: TypeAlias = Callable[[Any, Any], Any]
"""`loss_fn(model, batch) -> loss` or `(loss, aux)`."""


@dataclass(frozen=True)
class Aux:
    """The structure of aux: for each leaf its name if it is a tensor, else the leaf itself."""

    names: tuple[str | None, ...] = ()
    statics: tuple[Any, ...] = ()
    treespec: pytree.TreeSpec | None = None

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the tensors, in order."""
        return tuple(name for name in self.names if name is not None)

    def pack(self, arrays: Mapping[str, Any]) -> Any:
        """Arrays by name into the user's structure; what was no tensor is as it was."""
        if self.treespec is None:
            return None
        pairs = zip(self.names, self.statics, strict=True)
        leaves = [static if name is None else arrays[name] for name, static in pairs]
        return pytree.tree_unflatten(leaves, self.treespec)


class Program(nn.Module):
    """The model under its loss, as a module over the flat tensors of a microbatch; `model` is its one child."""

    def __init__(
        self,
        loss_fn: LossFn,
        model: nn.Module,
        spec: BatchSpec,
        treespec: pytree.TreeSpec,
        has_aux: bool,
        restart: Callable[[], None] = lambda: None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.effects = Effects(model)
        self.marks = Marks(self.effects)
        self.aux = Aux()
        self.replaced: tuple[str, ...] = ()
        self._loss_fn, self._spec, self._treespec = loss_fn, spec, treespec
        self._has_aux, self._restart, self._mesh = has_aux, restart, mesh

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Loss, then the tensors of aux and the buffers that were replaced, without gradient."""
        self.marks.restart()
        self._restart()
        given = iter(tensors)
        leaves = [leaf.value if leaf.type is None else next(given) for leaf in self._spec.leaves]
        before = _held(self.model)
        with self.effects.watching(before), entered(self.model, self._mesh):
            result = self._loss_fn(self.model, pytree.tree_unflatten(leaves, self._treespec))
        loss, aux = self._parted(pytree.tree_map(whole, result))
        _check_loss(loss, self.model)
        replaced = _replaced(before, _held(self.model))
        self.replaced = tuple(replaced)
        # a copy: what is returned is then never a view of something inside
        rest = (*aux, *map(local_part, replaced.values()))
        return (loss.clone(), *(x.detach().clone() for x in rest))

    def _parted(self, result: Any) -> tuple[Any, list[Tensor]]:
        if not self._has_aux:
            return result, []
        if not isinstance(result, tuple) or len(result) != 2:
            raise CaptureError(
                f"has_aux=True: the loss function must return (loss, aux), it returned {kind_of(result)}"
            )
        loss, aux = result
        named = named_leaves(aux)
        self.aux = Aux(
            tuple(name if isinstance(x, Tensor) else None for name, x in named),
            tuple(None if isinstance(x, Tensor) else x for _, x in named),
            pytree.tree_structure(aux),
        )
        return loss, [x for _, x in named if isinstance(x, Tensor)]


def _held(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _replaced(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Buffers that the forward replaced by another tensor, as in `self.mean = 0.9 * self.mean + x`."""
    replaced = {n: x for n, x in after.items() if n in before and x is not before[n]}
    for name, tensor in replaced.items():
        old = before[name]
        if isinstance(old, nn.Parameter):
            raise CaptureError(
                f"the forward replaces parameter {name!r}; a captured step may change buffers only"
            )
        if (tensor.shape, tensor.dtype) != (old.shape, old.dtype):
            raise CaptureError(
                f"the forward replaces buffer {name!r}, {old.dtype} of shape {list(old.shape)}, by {tensor.dtype} of "
                f"shape {list(tensor.shape)}; keep its type"
            )
    return replaced


def _check_loss(loss: Any, model: nn.Module) -> None:
    if not isinstance(loss, Tensor):
        pair = isinstance(loss, tuple) and len(loss) == 2
        raise CaptureError(
            f"the loss must be a scalar tensor, the loss function returned {kind_of(loss)}"
            + ("; for (loss, aux), pass has_aux=True" if pair else "")
        )
    if loss.ndim != 0:
        raise CaptureError(
            f"the loss must be a scalar, the loss function returned a tensor of shape {list(loss.shape)}; reduce it, "
            "for instance by .mean()"
        )
    if not loss.dtype.is_floating_point:
        raise CaptureError(f"the loss must be a floating-point number, it is {loss.dtype}")
    if not loss.requires_grad:
        params = list(model.parameters())
        if not params:
            reason = "the model has no parameters"
        elif not any(p.requires_grad for p in params):
            reason = "every parameter of the model is frozen (requires_grad=False)"
        else:
            reason = "it depends on frozen parameters alone or on none, or it was detached or computed under no_grad"
        raise CaptureError(f"the loss needs no gradient: {reason}")
