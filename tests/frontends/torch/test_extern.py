"""Ops without a lowering: the call as one equation, and what cannot be one."""

import json

import pytest
import torch
from torch import nn

from plait.core_ir.errors import CaptureError
from plait.frontends.torch.capture import capture


@torch.library.custom_op("plait_tests::scale", mutates_args=())
def scale(x: torch.Tensor, w: torch.Tensor, power: int, name: str | None = None) -> torch.Tensor:
    return x * w**power


@scale.register_fake
def _(x, w, power, name=None):
    return torch.empty_like(x)


@torch.library.custom_op("plait_tests::scale_backward", mutates_args=())
def scale_backward(
    grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return grad * w, grad * x


@scale_backward.register_fake
def _(grad, x, w):
    return torch.empty_like(x), torch.empty_like(w)


scale.register_autograd(
    lambda ctx, grad: (*scale_backward(grad, *ctx.saved_tensors), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
)


@torch.library.custom_op("plait_tests::bump", mutates_args={"x"})
def bump(x: torch.Tensor) -> None:
    x.add_(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return scale(x, self.w, 1, "kept")


def caught(loss_fn, model, batch):
    return capture(loss_fn, model, batch, num_microbatches=1, split=None)


def test_a_custom_op_and_its_backward_are_one_equation_each():
    captured = caught(lambda m, x: m(x).sum(), Model(), torch.ones(3))
    forward, backward = (e for e in captured.graph.eqns if e.op.name == "extern")
    assert forward.attrs["target"] == "torch:plait_tests.scale.default"
    assert json.loads(forward.attrs["spec"]) == {
        "args": [{"operand": 0}, {"operand": 1}, 1, "kept"],
        "kwargs": {},
    }
    assert forward.source.file.endswith("test_extern.py")
    assert backward.attrs["target"] == "torch:plait_tests.scale_backward.default"
    assert [str(t) for t in backward.attrs["results"]] == ["f32[3]", "f32[3]"]
    assert "effect" not in forward.attrs


def test_arguments_of_every_kind_are_in_the_spec():
    def loss_fn(model, x):
        y = torch.ops.aten.searchsorted.Tensor(
            torch.arange(3.0), model.w.detach() * x, out_int32=True, side="right"
        )
        z = torch.ops.aten.histc.default(y.float(), 3, 0.5, float("inf"))
        return (model(x) * z).sum()

    search, histogram = (
        json.loads(e.attrs["spec"]) for e in caught(loss_fn, Model(), torch.ones(3)).graph.eqns
        if e.op.name == "extern" and "aten" in e.attrs["target"]
    )  # fmt: skip
    assert search == {
        "args": [{"operand": 0}, {"operand": 1}],
        "kwargs": {"out_int32": True, "side": "right"},
    }
    assert histogram["args"] == [{"operand": 0}, 3, 0.5, float("inf")]


def test_an_op_that_changes_its_argument_is_refused():
    def loss_fn(model, x):
        y = model(x).detach().clone()
        bump(y)
        return (model(x) * y).sum()

    with pytest.raises(
        CaptureError, match=r"test_extern\.py:\d+: plait_tests.bump.*changes its arguments"
    ):
        caught(loss_fn, Model(), torch.ones(3))


def test_an_op_with_functions_as_arguments_is_refused():
    def loss_fn(model, x):
        y = model(x)
        return torch.cond(y.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,)).sum()

    with pytest.raises(CaptureError, match=r"test_extern\.py:\d+: cond takes functions"):
        caught(loss_fn, Model(), torch.ones(3))
