"""The parameters and buffers of a torch model as one rank holds them: read for a step, written after it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from plait.backends.torch.engine_distributed import DistributedEngine
from plait.backends.torch.engine_local import LocalEngine
from plait.core_ir.errors import UsageError
from plait.core_ir.program import Program


class Store:
    """What `Pipeline` needs of a torch model whose stages run on the torch backend.

    A model on a real device keeps its own parameters. One built on `meta` gets memory for the parameters and buffers of
    this rank's stages only; `load_state_dict` has to fill them before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        trainable: Mapping[str, bool],
        program: Program,
        engine: LocalEngine | DistributedEngine,
    ) -> None:
        self._program, self._engine = program, engine
        self._model, self._trainable = model, trainable
        self._training = {name: module.training for name, module in model.named_modules()}
        device = engine.arrays.device
        stages = [program.stages[s] for s in engine.stages]
        owned = {name for stage in stages for name in (*stage.params, *stage.buffers)}
        if 0 in engine.stages:  # what no stage uses counts as the first one's
            owned |= set(trainable) - {
                name for stage in program.stages for name in (*stage.params, *stage.buffers)
            }
        self._parameters: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, torch.Tensor] = {}
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

    def _held(self, name: str, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        if not parameter.is_meta:
            return parameter
        self._unfilled.add(name)
        return nn.Parameter(
            torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stages, in the model's order."""
        return iter(self._parameters.items())

    def read(self) -> dict[str, torch.Tensor]:
        """Current values by name, detached. UsageError where they were never filled, or the model changed its mode."""
        if self._unfilled:
            raise UsageError(
                f"{len(self._unfilled)} parameters or buffers of a model built on meta have no values yet "
                f"({', '.join(sorted(self._unfilled)[:3])}, ...); call Pipeline.load_state_dict first"
            )
        for name, parameter in self._parameters.items():
            if parameter.requires_grad != self._trainable[name]:
                now = "trainable" if parameter.requires_grad else "frozen"
                raise UsageError(
                    f"parameter {name!r} is {now} now, but was not when the pipeline was compiled; compile again"
                )
        for name, module in self._model.named_modules():
            if module.training != self._training[name]:
                raise UsageError(
                    f"module {name or 'model'!r} was compiled in {'train' if self._training[name] else 'eval'} mode "
                    "and is in the other one now; compile again, or change it back"
                )
        values: dict[str, torch.Tensor] = {n: p.detach() for n, p in self._parameters.items()}
        values.update(self._buffers)
        return values

    def write(self, grads: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Add gradients to `.grad`, each once, so that post-accumulate hooks fire once; copy buffers in."""
        for name, grad in grads.items():
            parameter = self._parameters[name]
            # Through autograd's own accumulation: it adds to .grad and fires the hooks.
            with torch.enable_grad():
                alias = parameter.view_as(parameter)
            torch.autograd.backward(alias, grad.to(parameter.device))
        with torch.no_grad():
            for name, buffer in buffers.items():
                self._buffers[name].copy_(buffer)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, detached."""
        state: dict[str, torch.Tensor] = {n: p.detach() for n, p in self._parameters.items()}
        return {**state, **self._buffers}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy values in; UsageError, before anything is changed, for a missing name or another shape."""
        own = self.state_dict()
        missing = sorted(set(own) - set(state))
        if missing:
            raise UsageError(f"load_state_dict: missing {', '.join(missing)}")
        for name, target in own.items():
            if tuple(state[name].shape) != tuple(target.shape):
                raise UsageError(
                    f"load_state_dict: {name} has shape {list(target.shape)}, got {list(state[name].shape)}"
                )
        for name, target in own.items():
            target.copy_(state[name])
        self._unfilled.clear()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients to a total 2-norm of at most `max_norm` over all ranks, shared parameters once; the norm."""
        grads = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
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
        holders = self._program.shared_params.get(name)
        return holders is None or holders[0] in self._engine.stages
