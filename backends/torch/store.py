"""The parameters and buffers of a torch model as one rank holds them: read for a step, written after it."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from plait.backends.torch.dtensors import copy_into, like, local_part, local_part_of
from plait.backends.torch.engine_distributed import DistributedEngine
from plait.backends.torch.engine_local import LocalEngine
from plait.backends.torch.engine_local_mesh import LocalMeshEngine
from plait.core_ir.arrays import to_numpy
from plait.core_ir.errors import UsageError
from plait.core_ir.program import Program
from plait.core_ir.types import TensorType


class Store:
    """What `Pipeline` needs of a torch model whose stages run on the torch backend.

    A model on a real device keeps its own parameters. One built on `meta` gets memory for the parameters and buffers of
    this rank's stages only; `load_state_dict` has to fill them before the first step.

    Of a sharded parameter the store holds this rank's rows, as a parameter of their own, and only these are trained:
    the model's own parameter, if it has content, stays as it was.
    """

    def __init__(
        self,
        model: nn.Module,
        trainable: Mapping[str, bool],
        program: Program,
        engine: LocalEngine | LocalMeshEngine | DistributedEngine,
    ) -> None:
        self._program, self._engine = program, engine
        self._model, self._trainable = model, trainable
        self._training = {name: module.training for name, module in model.named_modules()}
        self._compiled = _named_tensors(model)
        device = engine.arrays.device
        stages = [program.stages[s] for s in engine.stages]
        owned = {name for stage in stages for name in (*stage.params, *stage.buffers)}
        if 0 in engine.stages:  # what no stage uses counts as the first one's
            owned |= set(trainable) - {
                name for stage in program.stages for name in (*stage.params, *stage.buffers)
            }
        self._parameters: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._shards = engine.shards if isinstance(engine, DistributedEngine) else None
        self._versions: dict[str, int] = {}
        self._unfilled: set[str] = set()
        for name, parameter in model.named_parameters():
            if name in owned:
                self._parameters[name] = self._held(name, parameter, device)
        for name, buffer in model.named_buffers():
            if name in owned:
                if buffer.is_meta:
                    self._unfilled.add(name)
                    buffer = torch.empty_like(buffer, device=device)
                self._buffers[name] = buffer
        self._agree_on_shared()

    def _held(self, name: str, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        held, is_shard = parameter.detach(), self._is_shard(name)
        if is_shard and self._shards is not None:
            held = local_part(parameter).detach()[self._shards.rows(name)]
            self._versions[name] = local_part(parameter)._version
        if parameter.is_meta:
            self._unfilled.add(name)
            held = torch.empty_like(held, device=device)
        elif is_shard:
            held = held.clone()
        else:
            return parameter
        return nn.Parameter(held, requires_grad=parameter.requires_grad)

    def _is_shard(self, name: str) -> bool:
        return self._shards is not None and name in self._shards

    def shard_type(self, name: str) -> TensorType | None:
        """What this rank holds of a parameter that is sharded; None of any other."""
        return (
            self._shards.type(name) if self._shards is not None and name in self._shards else None
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stages, in the model's order."""
        return iter(self._parameters.items())

    def read(self) -> dict[str, torch.Tensor]:
        """Current values by name, detached, of DTensors this rank's part.

        UsageError where the model is no longer the one that was compiled.
        """
        if self._unfilled:
            raise UsageError(
                f"{len(self._unfilled)} parameters or buffers of a model built on meta have no values yet "
                f"({', '.join(sorted(self._unfilled)[:3])}, ...); call Pipeline.load_state_dict first"
            )
        self._check_model()
        held = {**self._parameters, **self._buffers}
        return {name: local_part(tensor).detach() for name, tensor in held.items()}

    def _check_model(self) -> None:
        """Refuse what would silently be ignored: other tensors, hooks, flags or modes than at compile time."""
        now = _named_tensors(self._model)
        for name, tensor in self._compiled.items():
            if now.get(name) is not tensor:
                what = "is gone" if name not in now else "is another tensor"
                raise UsageError(
                    f"{name!r} {what} since the pipeline was compiled (assigned, re-parametrised, or loaded with "
                    "assign=True); change values in place, or compile again"
                )
        for name, version in self._versions.items():
            if local_part(self._compiled[name])._version != version:
                raise UsageError(
                    f"parameter {name!r} of the model was changed, but the pipeline trains shards of its own: make the "
                    "optimizer of Pipeline.parameters(), and load values with Pipeline.load_state_dict"
                )
        for name, parameter in self._parameters.items():
            if parameter.requires_grad != self._trainable[name]:
                flag = "trainable" if parameter.requires_grad else "frozen"
                raise UsageError(
                    f"parameter {name!r} is {flag} now, but was not when the pipeline was compiled; compile again"
                )
            if parameter._backward_hooks:
                raise UsageError(
                    f"parameter {name!r} has a tensor hook (register_hook), which expects each contribution to the "
                    "gradient; use register_post_accumulate_grad_hook, which fires once a step"
                )
        for name, module in self._model.named_modules():
            if module.training != self._training.get(name, module.training):
                raise UsageError(
                    f"module {name or 'model'!r} was compiled in {'train' if self._training[name] else 'eval'} mode "
                    "and is in the other one now; compile again, or change it back"
                )

    def write(self, grads: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Add gradients to `.grad`, each once, so that post-accumulate hooks fire once; copy buffers in."""
        for name, grad in grads.items():
            parameter = self._parameters[name]
            # Through autograd's own accumulation: it adds to .grad and fires the hooks.
            with torch.inference_mode(False), torch.enable_grad():
                alias = parameter.view_as(parameter)
                torch.autograd.backward(alias, like(grad.to(parameter.device), parameter))
        with torch.no_grad():
            for name, buffer in buffers.items():
                local_part(self._buffers[name]).copy_(buffer)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by name, detached."""
        return {n: x for n, x in self._held_tensors().items() if n in self._persistent()}

    def _held_tensors(self) -> dict[str, torch.Tensor]:
        return {**{n: p.detach() for n, p in self._parameters.items()}, **self._buffers}

    def _persistent(self) -> frozenset[str]:
        """The names in the model's own `state_dict`: a buffer may be left out of it."""
        return frozenset(self._model.state_dict())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy values in; UsageError, before anything is changed, for a missing name or another shape.

        Buffers that are not persistent may be missing, if they have values.
        """
        held, needed = self._held_tensors(), self._persistent() | self._unfilled
        own = {name: tensor for name, tensor in held.items() if name in needed or name in state}
        missing = sorted(set(own) - set(state))
        unknown = sorted(set(state) - set(_named_tensors(self._model, aliases=True)))
        if missing or unknown:
            raise UsageError(f"load_state_dict: missing {missing}, not in the model {unknown}")
        values = {name: self._own(name, state[name]) for name in own}
        for name, target in own.items():
            if tuple(values[name].shape) != tuple(target.shape):
                whole = f" (or whole {self._program.param_types[name]})" * self._is_shard(name)
                raise UsageError(
                    f"load_state_dict: {name} has shape {list(target.shape)}{whole}, got {list(state[name].shape)}"
                )
        for name, target in own.items():
            copy_into(target, values[name])
        self._unfilled.clear()
        self._agree_on_shared()

    def _own(self, name: str, value: Any) -> Any:
        """Of a sharded parameter that comes whole this rank's rows; any other value as it is."""
        if self._shards is None or name not in self._shards:
            return value
        return self._shards.own(name, local_part_of(value, self._compiled[name]))

    def _agree_on_shared(self) -> None:
        """UsageError on every rank unless all hold equal values of the parameters that several stages share."""
        if not isinstance(self._engine, DistributedEngine) or not self._program.shared_params:
            return
        own = {
            name: hashlib.sha256(to_numpy(local_part(self._parameters[name])).tobytes()).hexdigest()
            for name in self._program.shared_params
            if name in self._parameters and name not in self._unfilled
        }
        everywhere = self._engine.pipe.gather(own)
        for name in self._program.shared_params:
            values = {rank: held[name] for rank, held in enumerate(everywhere) if name in held}
            if len(set(values.values())) > 1:
                raise UsageError(
                    f"parameter {name!r} is shared by stages on ranks {sorted(values)}, which hold different values of "
                    "it; build the model from one seed, or load one state_dict, on every rank"
                )

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients to a total 2-norm of at most `max_norm` over all ranks, shared parameters once; the norm."""
        if not max_norm >= 0:
            raise UsageError(f"max_norm must be a number of at least 0, got {max_norm}")
        held = self._parameters.items()
        grads = {n: local_part(p.grad) for n, p in held if p.grad is not None}
        device = self._engine.arrays.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for name, grad in grads.items():
            if self._counts_here(name):
                norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
                total += norm.to(device=device, dtype=torch.float64) ** 2
        if isinstance(self._engine, DistributedEngine):
            self._engine.group.sum(total)
        norm = total.sqrt().to(torch.float32)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in grads.values():
            grad.mul_(scale.to(grad.device))
        return norm

    def _counts_here(self, name: str) -> bool:
        """Each part of each parameter counts on one rank of the run."""
        holders = self._program.shared_params.get(name)
        is_first = holders is None or holders[0] in self._engine.stages
        if isinstance(self._engine, DistributedEngine):
            return is_first and self._engine.standing.counts(name, is_shard=self._is_shard(name))
        return is_first


def _named_tensors(model: nn.Module, *, aliases: bool = False) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; a tied one by its first name, or by all."""
    once = not aliases
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=once))
    named.update(model.named_buffers(remove_duplicate=once))
    return named
