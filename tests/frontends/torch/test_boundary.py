"""Markers: where they stand, what crosses them, and what is refused."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait.core_ir.errors import CaptureError, UsageError
from plait.frontends.torch.boundary import stage_boundary
from plait.frontends.torch.capture import capture


def markers(captured):
    """`(index, backward, types)` of each marker, in order."""
    return [
        (e.attrs["index"], e.attrs["backward"], [str(v.type) for v in e.operands])
        for e in captured.graph.eqns
        if e.op.name == "boundary"
    ]


def caught(loss_fn, model, batch, split=None, **kwargs):
    return capture(loss_fn, model, batch, num_microbatches=1, split=split, **kwargs)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model, batch):
    return model(batch).sum()


BATCH = torch.ones(2, 4)


def test_outside_capture_a_boundary_is_the_identity():
    tree = {"a": torch.ones(2), "b": [1, None]}
    assert stage_boundary(tree) is tree


def test_order_of_execution_decides_the_index():
    captured = caught(loss_fn, Chain(), BATCH, ["blocks.2", "blocks.1"])
    assert captured.num_cuts == 2
    crossing = ["f32[2, 4]"]
    assert markers(captured) == [
        (0, False, crossing), (1, False, crossing), (1, True, crossing), (0, True, crossing),
    ]  # fmt: skip
    sources = [e.source.module for e in captured.graph.eqns if e.op.name == "boundary"]
    assert sources[:2] == ["blocks.1", "blocks.2"]


def test_a_path_may_name_a_module_inside_containers():
    assert caught(loss_fn, Chain(), BATCH, ["blocks.1.1"]).num_cuts == 1


def test_paths_and_marks_count_together():
    class Marked(Chain):
        def forward(self, x):
            return stage_boundary(super().forward(stage_boundary(x)))

    captured = caught(loss_fn, Marked(), BATCH, ["blocks.1"])
    assert [m[:2] for m in markers(captured)] == [
        (0, False), (1, False), (2, False), (2, True), (1, True),
    ]  # fmt: skip


class Passing(nn.Module):
    """Takes hidden state, a table without gradient, an integer tensor and static values, by position and by name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, table, state, *, ids, scale=2.0, note=None):
        assert note == ["kept", None]
        return state["h"] * self.weight * table * scale + ids.float()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Passing()

    def forward(self, x):
        h = self.first(x)
        table = torch.arange(4.0).cos()
        return self.inner(table, {"h": h}, ids=torch.arange(4), note=["kept", None])


def test_every_tensor_leaf_crosses_and_only_those_with_a_gradient_come_back():
    captured = caught(loss_fn, Outer(), BATCH, ["inner"])
    assert markers(captured) == [
        (0, False, ["f32[4]", "f32[2, 4]", "i64[4]"]),
        (0, True, ["f32[2, 4]"]),
    ]


def test_a_tensor_that_nothing_reads_behind_the_cut_has_no_cotangent(run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            kept, _ = stage_boundary((self.a(x), self.b(x)))
            return kept

    captured = caught(loss_fn, Model(), BATCH)
    assert markers(captured) == [(0, False, ["f32[2, 4]"] * 2), (0, True, ["f32[2, 4]"])]
    assert ("param_grad", "b.weight") not in run(captured, BATCH)


def test_below_frozen_parameters_a_marker_stays():
    model = Chain()
    model.blocks[0].requires_grad_(False)
    assert markers(caught(loss_fn, model, BATCH, ["blocks.1"])) == [(0, False, ["f32[2, 4]"])]


def test_a_marker_whose_results_are_dead_stays():
    class Model(Chain):
        def forward(self, x):
            stage_boundary(x)
            return super().forward(x)

    assert [m[0] for m in markers(caught(loss_fn, Model(), BATCH))] == [0]


@pytest.mark.parametrize("reentrant", [False])
def test_a_marker_met_in_recomputation_is_dropped(run, reentrant):
    class Model(Chain):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model = Model()
    captured = caught(loss_fn, model, BATCH, ["blocks.1"])
    assert [m[:2] for m in markers(captured)] == [(0, False), (0, True)]
    results = run(captured, BATCH)
    loss_fn(model, BATCH).backward()
    for name, param in model.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(torch.tensor(results["param_grad", name]), param.grad)


def test_hooks_are_gone_after_a_capture():
    model = Chain()
    caught(loss_fn, model, BATCH, ["blocks.1"])
    with pytest.raises(UsageError):
        caught(loss_fn, model, BATCH, ["nowhere"])
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert model(BATCH).device.type == "cpu"


def test_an_unknown_path_lists_near_matches():
    with pytest.raises(UsageError, match=r"no module 'block\.1'.*blocks\.1"):
        caught(loss_fn, Chain(), BATCH, ["block.1"])


def test_an_unknown_path_lists_near_matches_only():
    with pytest.raises(UsageError, match=r"no module 'nope'; near matches: none"):
        caught(loss_fn, Chain(), BATCH, ["nope"])


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_a_boundary_inside_a_transform(transform):
    class Model(Chain):
        def forward(self, x):
            return transform(stage_boundary)(super().forward(x))

    with pytest.raises(CaptureError, match=r"test_boundary\.py:\d+: .*inside a transform"):
        caught(loss_fn, Model(), BATCH)


@pytest.mark.parametrize("path", ["spare", "blocks"])
def test_a_module_that_is_never_called(path):
    with pytest.raises(CaptureError, match=f"never calls '{path}'.*container"):
        caught(loss_fn, Chain(), BATCH, [path])


def test_a_module_that_is_called_twice_names_both_places():
    class Model(Chain):
        def forward(self, x):
            x = self.spare(x)
            return self.spare(x)

    with pytest.raises(
        CaptureError,
        match=r"'spare' is called more than once, at .*test_boundary\.py:\d+ and at .*\.py",
    ):
        caught(loss_fn, Model(), BATCH, ["spare"])


@pytest.mark.parametrize("split", ["blocks.1", [1], ["blocks.1", "blocks.1"]])
def test_a_split_that_is_no_list_of_paths(split):
    with pytest.raises(UsageError, match="split"):
        caught(loss_fn, Chain(), BATCH, split)


def test_a_boundary_without_tensors():
    class Model(Chain):
        def forward(self, x):
            stage_boundary((1, None))
            return x

    with pytest.raises(
        CaptureError, match=r"test_boundary\.py:\d+: a stage boundary got no tensor"
    ):
        caught(loss_fn, Model(), BATCH)


def test_markers_change_no_value(run):
    torch.manual_seed(0)
    model = Chain()
    plain, cut = (
        run(caught(loss_fn, model, BATCH), BATCH),
        run(caught(loss_fn, model, BATCH, ["blocks.1"]), BATCH),
    )
    assert plain.keys() == cut.keys()
    assert all((plain[k] == cut[k]).all() for k in plain)
