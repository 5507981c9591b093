"""Whole models: the captured graph before lowering against eager bit for bit, the lowered one against autograd."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch_models
from torch.utils import _pytree as pytree

from plait.core_ir.errors import CaptureError
from plait.frontends.batch import batch_spec
from plait.frontends.torch.boundary import marking
from plait.frontends.torch.capture import capture, trace
from plait.frontends.torch.lower import TABLE
from plait.frontends.torch.trees import named_leaves

OPS = Path(__file__).parent / "ops.txt"

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:transformers"),
]


def built(name, *, train=False, dtype=torch.float32):
    torch.manual_seed(0)
    loss_fn, model, batch, split = torch_models.ALL[name]()
    as_dtype = lambda x: x.to(dtype) if x.is_floating_point() else x  # noqa: E731
    batch = pytree.tree_map_only(torch.Tensor, as_dtype, batch)
    return loss_fn, model.train(train).to(dtype), batch, split


def traced(loss_fn, model, batch, split):
    spec = batch_spec(named_leaves(batch), 1, narrow=False)
    return trace(loss_fn, model, spec, pytree.tree_structure(batch), split, False, None)


# torch captures an LSTM step by step, where eager has one fused kernel: close, not equal in bits
@pytest.mark.parametrize("name", [n for n in torch_models.ALL if n != "recurrent"])
def test_before_lowering_the_graph_is_eager_with_markers_bit_for_bit(name):
    loss_fn, model, batch, split = built(name)
    program, joint = traced(loss_fn, model, batch, split)
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)]
    with marking(model, split, program.marks):
        (loss,) = program(*tensors)
    loss.backward()
    held = dict(program.named_parameters(remove_duplicate=False))
    held |= dict(program.named_buffers(remove_duplicate=False))
    arguments = {
        "param": lambda slot: held[slot.name].detach(),
        "buffer": lambda slot: held[slot.name],
        "argument": lambda slot: tensors[slot.index],
        "loss_grad": lambda slot: torch.ones(()),
    }
    given = [arguments[slot.kind](slot) for slot in joint.inputs]
    with torch.no_grad():
        results = torch.fx.Interpreter(joint.module).run(*given, enable_io_processing=False)
    grads = {}
    for slot, value in zip(joint.outputs, results, strict=True):
        if slot is not None and slot.kind == "output":
            assert torch.equal(value, loss.detach())
        elif slot is not None and slot.kind == "grad":
            param = held[slot.name]
            grads[param] = grads[param] + value if param in grads else value
    trained = [p for p in model.parameters() if p.grad is not None]
    assert set(grads) == set(trained)
    assert all(torch.equal(grads[p], p.grad) for p in trained)


def against_autograd(run, name, dtype, loss_tolerance, grad_tolerance):
    loss_fn, model, batch, split = built(name, dtype=dtype)
    captured = capture(loss_fn, model, batch, num_microbatches=1, split=split)
    assert captured.num_cuts == len(split)
    assert "extern" not in {e.op.name for e in captured.graph.eqns}
    results = run(captured, batch)
    loss = loss_fn(model, batch)
    loss.backward()
    grads = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    largest = max(np.abs(g).max() for g in grads.values())
    assert abs(results["loss", ""] - loss.item()) <= loss_tolerance * abs(loss.item())
    assert {n for role, n in results if role == "param_grad"} == set(grads)
    for param, grad in grads.items():
        error = np.abs(results["param_grad", param] - grad).max()
        assert error <= grad_tolerance * max(np.abs(grad).max(), 1e-3 * largest), param


@pytest.mark.parametrize("name", torch_models.ALL)
def test_lowered_model_against_autograd(run, name):
    against_autograd(run, name, torch.float32, 1e-6, 1e-5)


@pytest.mark.parametrize("name", ["plait_mlp", "recurrent", "transformer", "skip"])
def test_lowered_model_against_autograd_in_f64(run, name):
    against_autograd(run, name, torch.float64, 1e-12, 1e-10)


@pytest.mark.parametrize("name", ["skip", "hf_resnet"])
def test_training_statistics(run, name):
    loss_fn, model, batch, split = built(name, train=True)
    captured = capture(loss_fn, model, batch, num_microbatches=1, split=split)
    results = run(captured, batch)
    loss_fn(model, batch).backward()
    updates = {n: x for (role, n), x in results.items() if role == "buffer_update"}
    buffers = dict(model.named_buffers())
    assert updates.keys() == buffers.keys()
    for buffer, update in updates.items():
        np.testing.assert_allclose(update, buffers[buffer].numpy(), rtol=1e-5, atol=1e-6)


def ops_met():
    """Names of the aten ops in the joint programs of the HF models in train mode."""
    met = set()
    for name in torch_models.HF:
        _, joint = traced(*built(name, train=True))
        targets = {n.target for n in joint.nodes() if n.op == "call_function"}
        met |= {
            t for t in targets if isinstance(t, torch._ops.OpOverload) and t.namespace == "aten"
        }
    return met


def test_every_op_met_has_a_rule(update_golden):
    met = ops_met()
    if update_golden:
        OPS.write_text("".join(f"{op}\n" for op in sorted(map(str, met))))
    assert sorted(map(str, met)) == OPS.read_text().split()
    assert met <= set(TABLE), sorted(map(str, met - set(TABLE)))


@pytest.mark.parametrize("name", ["hf_llama", "hf_vit"])
def test_attention_is_kept_as_one_op(name):
    loss_fn, model, batch, split = built(name)
    captured = capture(loss_fn, model, batch, num_microbatches=1, split=split)
    ops = [e.op.name for e in captured.graph.eqns]
    assert ops.count("attention") == 2
    assert ops.count("attention_backward") == 2


def test_a_model_that_reads_data_in_python_is_refused():
    loss_fn, model, batch, split = built("hf_gpt2")

    def reading(model, batch):
        return loss_fn(model, batch) * float(batch["ids"].sum())

    with pytest.raises(CaptureError, match="depends on the data"):
        capture(reading, model, batch, num_microbatches=1, split=split)
