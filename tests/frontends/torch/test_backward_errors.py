"""A backward that fails: the line of the user's that raised, else the forward line that it is of."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait.core_ir.errors import CaptureError
from plait.frontends.torch.capture import capture

STARTS = ("return", "raise", "y = ")
"""How the lines begin that are to be named."""


class GradientOfAnotherShape(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.flatten()[:1]


class BackwardThatBranches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad if grad.sum() > 0 else -grad


class BackwardThatRaises(BackwardThatBranches):
    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("no gradient yet")


@torch.library.custom_op("plait_test_backward::without_backward", mutates_args=())
def without_backward(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@without_backward.register_fake
def _(x):
    return torch.empty_like(x)


def changed_later(x):
    y = x.exp()
    z = y.sum()
    y.mul_(2)
    return y + z


def eigenvalues(x):
    return torch.linalg.eig(x.T @ x)[0].abs()


def zeta(x):
    return torch.special.zeta(x.abs() + 2, x.abs() + 1)


IN = ", in its backward "
CASES = [
    (
        GradientOfAnotherShape.apply,
        GradientOfAnotherShape.forward,
        IN + r"\(GradientOfAnotherShapeBackward\): .* returned an invalid gradient",
    ),
    (BackwardThatBranches.apply, BackwardThatBranches.backward, ": the value of a tensor is read"),
    (BackwardThatRaises.apply, BackwardThatRaises.backward, ": .*NotImplementedError: no gradient"),
    (without_backward, None, IN + r"\(\w+\): .*no autograd formula was registered"),
    (eigenvalues, eigenvalues, IN + r"\(LinalgEigBackward0\): aten._linalg_check_errors"),
    (zeta, zeta, IN + r"\(SpecialZetaBackward0\): .*'zeta' is not implemented"),
    (
        changed_later,
        changed_later,
        IN + r"\(ExpBackward0\): a later line changes in place .*0 instead\); use the op that is",
    ),
]


@pytest.mark.parametrize(
    ("function", "written", "message", "again"),
    [*((*case, False) for case in CASES), *((*case, True) for case in CASES[:-1])],
)
def test_a_backward_that_fails(function, written, message, again):
    """again: in a region that is checkpointed."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(3, 3)

        def forward(self, x):
            return function(self.up(x)).sum()

    def loss_fn(model, x):
        return checkpoint(model, x, use_reentrant=False) if again else model(x)

    lines, first = inspect.getsourcelines(written or Model.forward)
    line = first + next(i for i, line in enumerate(lines) if line.lstrip().startswith(STARTS))
    with pytest.raises(CaptureError, match=rf"test_backward_errors\.py:{line}{message}"):
        capture(loss_fn, Model(), torch.ones(2, 3), num_microbatches=1, split=None)
