"""Checkpointed regions: computed again behind barriers, from what crossed the cuts inside them."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from plait.core_ir.passes.partition_stages import partition_stages
from plait.core_ir.passes.pipeline import clean
from plait.frontends.torch.boundary import stage_boundary
from plait.frontends.torch.capture import capture

checkpoint = functools.partial(checkpoints.checkpoint, use_reentrant=False)

BATCH = torch.linspace(-1, 1, 12).reshape(3, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + torch.tanh(self.down(torch.tanh(self.up(x))))


class Chain(nn.Module):
    """Three blocks; `around` says how a region of blocks is called."""

    def __init__(self, around, split=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.around, self.split = around, split

    def forward(self, x):
        return self.around(self.region, x).square()

    def region(self, x):
        for index, block in enumerate(self.blocks):
            x = block(stage_boundary(x) if index and self.split else x)
        return x


def call(function, *args):
    return function(*args)


def nested(function, x):
    return checkpoint(lambda x: checkpoint(function, x), x)


def save_products(context, op, *args, **kwargs):
    saved = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


selective = functools.partial(
    checkpoint,
    context_fn=functools.partial(create_selective_checkpoint_contexts, save_products),
)


def caught(model, split=None):
    return capture(lambda m, x: m(x).sum(), model, BATCH, num_microbatches=1, split=split)


def num_products(graph):
    return sum(eqn.op.name == "dot_general" for eqn in graph.eqns)


# Forward 6 products, backward 11 (none gives the gradient of the batch); the last product of the region is computed
# again too, for the tanh behind it.
@pytest.mark.parametrize(
    ("around", "again"), [(call, 0), (checkpoint, 6), (nested, 6), (selective, 0)]
)
def test_what_is_computed_again(run, around, again):
    captured, plain = caught(Chain(around)), caught(Chain(call))
    assert num_products(clean(captured.graph)) == 6 + 11 + again
    assert any(e.op.name == "barrier" for e in captured.graph.eqns) == (around is not call)
    found, expected = run(captured, BATCH), run(plain, BATCH)
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array)


@pytest.mark.parametrize("around", [checkpoint, nested])
@pytest.mark.parametrize("split", [None, ["blocks.1", "blocks.2"]])
def test_recomputation_goes_on_from_what_crossed_a_cut_inside(run, around, split):
    captured = caught(Chain(around, split=split is None), split)
    plain = caught(Chain(call, split=split is None), split)
    for stage in partition_stages(clean(captured.graph), 3).stages:
        own = {f"blocks.{stage.index}.{name}" for name, _ in Block().named_parameters()}
        assert set(stage.params) <= own
        num_backward = 3 if stage.index == 0 else 4
        assert num_products(stage.tasks["F"]) == 2
        assert num_products(stage.tasks["B"]) == num_backward + 2
    expected = run(plain, BATCH)
    for key, array in run(captured, BATCH).items():
        np.testing.assert_array_equal(array, expected[key])


def test_a_dropout_mask_is_drawn_again():
    class Model(nn.Module):
        def __init__(self, around):
            super().__init__()
            self.linear, self.around = nn.Linear(4, 4), around

        def forward(self, x):
            return self.around(lambda x: torch.dropout(self.linear(x), 0.5, True).exp(), x)

    def num_draws(around):
        graph = clean(caught(Model(around)).graph)
        return sum(eqn.op.name == "random_bits" for eqn in graph.eqns)

    assert num_draws(call) == 1
    assert num_draws(checkpoint) == 2


def test_regions_behind_each_other_are_computed_again_apart():
    class Model(Chain):
        def region(self, x):
            for block in self.blocks:
                x = checkpoint(block, x)
            return x

    graph = clean(caught(Model(call)).graph)
    barriers = [e for e in graph.eqns if e.op.name == "barrier"]
    assert num_products(graph) == 6 + 11 + 6
    # the input of each region, two weights and two biases
    assert sum(len(e.operands) for e in barriers) == 3 * 5


def test_nothing_is_left_behind():
    before = checkpoints._checkpoint_hook, checkpoints._recomputation_hook
    caught(Chain(checkpoint))
    assert (checkpoints._checkpoint_hook, checkpoints._recomputation_hook) == before
    model = Chain(checkpoint)
    model(BATCH).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
