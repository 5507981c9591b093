"""The unpipelined torch step against gradients worked out by hand, and against one call over the whole batch."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plait.core_ir.numerics import gradient_error, relative_error
from plait.frontends.torch.reference import named_gradients, reference


class Scale(nn.Module):
    """x * weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.frozen


def total(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum()


BATCH = torch.tensor([[1.0], [2.0], [3.0], [6.0]])


@pytest.mark.parametrize(("reduction", "loss", "grad"), [("mean", 12.0, 6.0), ("sum", 24.0, 12.0)])
def test_sum_and_mean_over_microbatches(reduction: str, loss: float, grad: float) -> None:
    # Two microbatches of x = 1 + 2 and 3 + 6; the loss is 2 x, the gradient x.
    model = Scale()
    found = reference(total, model, BATCH, num_microbatches=2, reduction=reduction)  # type: ignore[arg-type]
    assert found.loss == loss
    assert found.grads["weight"] == grad
    assert np.array_equal(found.grads["unused"], np.zeros(3))
    assert set(found.grads) == {"weight", "unused"}
    assert model.weight.grad is None


def test_numpy_batches_and_static_leaves() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, object]) -> Tensor:
        assert batch["mode"] == "train"
        x = batch["x"]
        assert isinstance(x, Tensor)
        return model(x).sum() * batch["factor"]

    batch = {"x": BATCH.numpy(), "mode": "train", "factor": 0.5}
    # The mean of 2 x / 2 over x = 1, 2, 3, 6.
    assert reference(loss_fn, Scale(), batch, num_microbatches=4).loss == 3.0
    halves = {**batch, "x": BATCH.numpy().astype(ml_dtypes.bfloat16)}
    found = reference(loss_fn, Scale().bfloat16(), halves, num_microbatches=4)
    assert found.grads["weight"].dtype == ml_dtypes.bfloat16


def test_buffers_are_chained_and_the_model_keeps_its_own() -> None:
    model = nn.BatchNorm1d(1, momentum=0.5)
    found = reference(lambda m, x: m(x).square().mean(), model, BATCH, num_microbatches=2)
    # Means 1.5 and 4.5: 0 -> 0.75 -> 2.625.
    assert found.buffers["running_mean"] == 2.625
    assert found.buffers["num_batches_tracked"] == 2
    assert model.running_mean == 0.0


def test_microbatches_of_equal_size_give_what_the_whole_batch_gives() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    batch = torch.randn(8, 4)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    found = reference(loss_fn, model, batch, num_microbatches=4)
    whole = loss_fn(model, batch)
    whole.backward()
    expected = named_gradients({name: p.grad for name, p in model.named_parameters()})
    assert relative_error(found.loss, whole.item()) < 1e-6
    assert gradient_error(found.grads, expected) < 1e-6


def test_named_gradients_leave_out_what_is_none() -> None:
    assert list(named_gradients({"a": torch.ones(1), "b": None})) == ["a"]
