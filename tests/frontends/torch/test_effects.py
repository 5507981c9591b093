"""Changes in place across a marker, and state outside parameters and buffers: right numbers or an error."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.core_ir.errors import CaptureError
from plait.frontends.torch.boundary import stage_boundary
from plait.frontends.torch.capture import capture

BATCH = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A model whose forward is a function of it and the input."""

    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.relu, self.c = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(4))
        self.plain, self.history, self.table = torch.ones(4), [], {}
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def loss_fn(model, x):
    return model(x).square().mean()


def caught(forward, split=None):
    model = Net(forward)
    return model, capture(loss_fn, model, BATCH, num_microbatches=1, split=split)


def residual(s, x):
    x = s.a(x)
    identity = x
    return s.c(s.relu(x)) + identity


def input_changed(s, x):
    x = s.a(x)
    y = stage_boundary(x)
    x.mul_(2)
    return s.c(y)


def output_changed(s, x):
    x = s.a(x)
    stage_boundary(x).mul_(2)
    return s.c(x)


def view_changed(s, x):
    x = s.a(x)
    y = stage_boundary(x)
    x[:, :2].add_(1)
    return s.c(y)


def view_of_output_changed(s, x):
    x = s.a(x)
    stage_boundary(x)[0] = 0
    return s.c(x[1])


def data_changed(s, x):
    x = s.a(x)
    y = stage_boundary(x)
    x.data.mul_(2)
    return s.c(y)


def two_cuts_apart(s, x):
    x = s.a(x)
    z = stage_boundary(stage_boundary(x).view(4, 3))
    z.mul_(2)
    return s.c(x)


def twice_in_one_cut(s, x):
    x = s.a(x)
    y, z = stage_boundary((x, x))
    y.mul_(2)
    return s.c(z)


def out_argument(s, x):
    x = s.a(x).detach()
    y = stage_boundary(x)
    torch.mul(y, 2, out=y)
    return s.c(x)


@pytest.mark.parametrize(
    ("forward", "split", "op"),
    [
        (residual, ["relu"], "relu_"),
        (input_changed, None, "mul_"),
        (output_changed, None, "mul_"),
        (view_changed, None, "add_"),
        (view_of_output_changed, None, "fill_|copy_|zero_"),
        (data_changed, None, "mul_"),
        (two_cuts_apart, None, "mul_"),
        (twice_in_one_cut, None, "mul_"),
        (out_argument, None, "mul.out"),
    ],
)
def test_a_change_that_is_read_across_a_cut_is_refused(forward, split, op):
    place = "before 'relu'" if split else r"at .*test_effects\.py:\d+"
    with pytest.raises(
        CaptureError,
        match=rf"test_effects\.py:\d+: aten\.({op}).*{place}.*test_effects\.py:\d+ \(aten.*inplace=False",
    ):
        caught(forward, split)


def test_a_buffer_whose_marked_copy_changes_is_refused():
    def forward(s, x):
        stage_boundary(s.kept).add_(1)
        return s.c(x)

    with pytest.raises(CaptureError, match=r"'kept' of the model"):
        caught(forward)


def after_the_cut(s, x):
    return s.c(s.relu(s.a(x)))


def before_the_cut(s, x):
    x = s.a(x)
    identity = x
    x.mul_(2)
    x, identity = stage_boundary((x, identity))
    return s.c(x) + identity


def on_views_behind(s, x):
    y = stage_boundary(s.a(x))
    y[:, 1:].mul_(3)
    return s.c(y)


@pytest.mark.parametrize(
    ("forward", "split"),
    [(after_the_cut, ["relu"]), (before_the_cut, None), (on_views_behind, None), (residual, ["c"])],
)
def test_changes_on_one_side_of_a_cut_are_captured(run, forward, split):
    model, captured = caught(forward, split)
    results = run(captured, BATCH)
    loss = loss_fn(model, BATCH)
    loss.backward()
    np.testing.assert_allclose(results["loss", ""], loss.item(), rtol=1e-6)
    for name, param in model.named_parameters():
        torch.testing.assert_close(torch.tensor(results["param_grad", name]), param.grad)


def replaced(s, x):
    s.plain = s.plain + x.mean(0)
    return s.c(x) + s.plain


def added_to(s, x):
    s.plain.add_(x.mean(0))
    return s.c(x) + s.plain


def appended(s, x):
    s.history.append(s.a(x).detach().mean())
    return s.c(x) * torch.stack(s.history).mean()


def made_once(s, x):
    if "mean" not in s.table:
        s.table["mean"] = x.mean(0)
    return s.c(x) + s.table["mean"]


@pytest.mark.parametrize(
    ("forward", "name"),
    [(replaced, "plain"), (added_to, "plain"), (appended, "history"), (made_once, "table")],
)
def test_state_in_a_plain_attribute_is_refused(forward, name):
    model = Net(forward)
    with pytest.raises(CaptureError, match=rf"test_effects\.py:\d+.*'{name}'.*register_buffer"):
        capture(loss_fn, model, BATCH, num_microbatches=1, split=None)
    assert type(model.plain) is Tensor
    assert torch.equal(model.plain, torch.ones(4))
    assert (model.history, model.table) == ([], {})


def test_a_tensor_of_a_closure_changed_in_place_is_refused():
    count = torch.zeros(())

    def forward(s, x):
        count.add_(1)
        return s.c(x)

    with pytest.raises(CaptureError, match=r"a tensor outside the model of shape \[\] in place"):
        caught(forward)
    assert count.item() == 0


def test_an_attribute_that_carries_a_result_to_the_loss_is_no_state(run):
    def forward(s, x):
        s.plain = s.a(x).square().mean()
        s.new = s.kept
        return s.c(x) + s.plain + s.new

    model, captured = caught(forward)
    assert torch.equal(model.plain, torch.ones(4))
    assert not hasattr(model, "new")
    np.testing.assert_allclose(
        run(captured, BATCH)["loss", ""], loss_fn(model, BATCH).item(), rtol=1e-6
    )


def test_a_number_that_each_forward_changes_is_refused():
    def forward(s, x):
        s.calls = getattr(s, "calls", 0) + 1
        return s.c(x) * s.calls

    model = Net(forward)
    model.calls = 3
    with pytest.raises(CaptureError, match=r"attribute 'calls', from 4 to 5.*register_buffer"):
        capture(loss_fn, model, BATCH, num_microbatches=1, split=None)
    assert model.calls == 3


def test_a_number_that_a_forward_sets_is_no_state():
    def forward(s, x):
        s.rows = x.shape[0]
        return s.c(x) * s.rows

    caught(forward)


def test_a_tensor_left_in_a_closure_is_refused():
    left = {}

    def forward(s, x):
        left["mean"] = 0.5 * left.get("mean", torch.zeros(4)) + s.a(x).detach().mean(0)
        return s.c(x) + left["mean"]

    with pytest.raises(CaptureError, match=r"left outside the model.*register_buffer"):
        caught(forward)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_change_behind_a_cut_inside_a_checkpointed_region(run, frozen):
    def forward(s, x):
        def block(x):
            return s.c(stage_boundary(s.a(x)).mul_(3)).tanh()

        return checkpoint(block, x, use_reentrant=False)

    model = Net(forward)
    model.a.requires_grad_(not frozen)
    captured = capture(loss_fn, model, BATCH, num_microbatches=1, split=None)
    results = run(captured, BATCH)
    loss = loss_fn(model, BATCH)
    loss.backward()
    np.testing.assert_allclose(results["loss", ""], loss.item(), rtol=1e-6)
    for name, param in model.named_parameters():
        if param.requires_grad:
            torch.testing.assert_close(torch.tensor(results["param_grad", name]), param.grad)
