"""Capture: what stands at the ports, ties, buffers, frozen and unused parameters, aux, batches, and refusals."""

import inspect
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plait.core_ir.errors import BatchError, CaptureError, UsageError
from plait.core_ir.text import print_graph
from plait.frontends.torch.capture import capture


def caught(loss_fn, model, batch, **kwargs):
    return capture(loss_fn, model, batch, **{"num_microbatches": 1, "split": None, **kwargs})


def ports(captured):
    graph = captured.graph
    return [str(p) for p in graph.input_ports], [str(p) for p in graph.output_ports]


def same_as_autograd(run, captured, model, loss_fn, batch):
    model.zero_grad()
    results = run(captured, batch)
    loss = loss_fn(model, batch)
    loss.backward()
    np.testing.assert_allclose(results["loss", ""], loss.detach().numpy(), rtol=1e-6)
    for name, param in model.named_parameters():
        if param.grad is None:
            assert ("param_grad", name) not in results
        else:
            found = torch.tensor(results["param_grad", name])
            torch.testing.assert_close(found, param.grad, rtol=1e-5, atol=1e-6)
    return results


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.up(x))


def small_loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def small_batch(rows=4):
    torch.manual_seed(0)
    return {"x": torch.randn(rows, 3), "y": torch.randn(rows, 4)}


def test_ports_and_leaves():
    captured = caught(small_loss, Small(), small_batch(), num_microbatches=2)
    inputs, outputs = ports(captured)
    assert inputs == [
        "param 'up.weight'", "param 'up.bias'", "param 'norm.weight'", "param 'norm.bias'",
        "buffer 'norm.running_mean'", "buffer 'norm.running_var'", "buffer 'norm.num_batches_tracked'",
        "batch 'x'", "batch 'y'", "rng_key", "loss_grad",
    ]  # fmt: skip
    assert outputs == [
        "buffer_update 'norm.running_mean'", "buffer_update 'norm.running_var'",
        "buffer_update 'norm.num_batches_tracked'", "loss",
        "param_grad 'up.weight'", "param_grad 'up.bias'", "param_grad 'norm.weight'", "param_grad 'norm.bias'",
    ] or outputs[0] == "loss"  # fmt: skip
    assert str(dict(captured.graph.inputs_of("batch"))["x"].type) == "f32[2, 3]"
    assert [(leaf.name, leaf.role, leaf.trainable) for leaf in captured.leaves][3:5] == [
        ("norm.bias", "param", True), ("norm.running_mean", "buffer", False),
    ]  # fmt: skip
    assert captured.framework == "torch"
    assert captured.num_cuts == 0


def test_buffers_that_change_are_results(run):
    model, batch = Small(), small_batch()
    captured = caught(small_loss, model, batch)
    before = {n: b.clone() for n, b in model.named_buffers()}
    results = run(captured, batch)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    small_loss(model, batch)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(torch.tensor(results["buffer_update", name]), buffer)


def test_in_eval_mode_buffers_do_not_change(run):
    model, batch = Small().eval(), small_batch()
    captured = caught(small_loss, model, batch)
    assert not list(captured.graph.outputs_of("buffer_update"))
    same_as_autograd(run, captured, model, small_loss, batch)


def test_tied_weights_are_one_leaf_with_one_summed_gradient(run):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    def loss_fn(model, ids):
        return F.cross_entropy(model(ids), ids)

    torch.manual_seed(0)
    model, ids = Tied(), torch.tensor([0, 1, 4, 1])
    captured = caught(loss_fn, model, ids)
    assert [leaf.name for leaf in captured.leaves] == ["embed.weight"]
    assert [n for n, _ in captured.graph.outputs_of("param_grad")] == ["embed.weight"]
    assert list(captured.flatten_params({"embed.weight": 1})) == ["embed.weight"]
    same_as_autograd(run, captured, model, loss_fn, ids)


def test_tied_table_of_the_public_case(run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(2, 2), nn.Linear(2, 2, bias=False)
            self.embed.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
            self.head.weight = self.embed.weight

    results = run(
        caught(lambda m, t: m.head(m.embed(t)).sum(), Model(), torch.tensor([0, 1])),
        torch.tensor([0, 1]),
    )
    assert results["loss", ""] == 52
    assert results["param_grad", "embed.weight"].tolist() == [[8, 12], [8, 12]]


def test_frozen_and_unused_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.frozen, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.used(x))

    captured = caught(lambda m, x: m(x).sum(), Model(), torch.ones(2, 3))
    assert [n for n, _ in captured.graph.outputs_of("param_grad")] == ["used.weight", "used.bias"]
    trainable = {leaf.name: leaf.trainable for leaf in captured.leaves}
    assert trainable == {
        "used.weight": True, "used.bias": True, "frozen.weight": False, "frozen.bias": False,
        "unused.weight": True, "unused.bias": True,
    }  # fmt: skip
    grads = captured.pack_grads({n: n for n, t in trainable.items() if t})
    assert grads["frozen.weight"] is None
    assert grads["unused.bias"] == "unused.bias"
    assert list(grads) == list(trainable)


def test_a_weight_used_twice(run):
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor([[1.0, 3.0], [2.0, 4.0]])  # x W is x @ weight.T
    batch = torch.tensor([[1.0, -1.0]])
    results = run(caught(lambda m, x: m(m(x)).sum(), model, batch), batch)
    assert results["loss", ""] == -20
    assert results["param_grad", "weight"].T.tolist() == [[1, 5], [-5, -9]]


def test_aux(run):
    def loss_fn(model, batch):
        out = model(batch["x"])
        return out.square().mean(), {
            "out": out,
            "rows": 4,
            "note": "kept",
            "deep": [out.sum()],
            "none": None,
        }

    model, batch = Small().eval(), small_batch()
    captured = caught(loss_fn, model, batch, has_aux=True)
    names = [n for n, _ in captured.graph.outputs_of("aux")]
    assert names == ["out", "deep.0"]
    results = run(captured, batch)
    packed = captured.pack_aux({n: results["aux", n] for n in names})
    _, expected = loss_fn(model, batch)
    assert (packed["rows"], packed["note"], packed["none"]) == (4, "kept", None)
    torch.testing.assert_close(torch.tensor(packed["out"]), expected["out"].detach())
    torch.testing.assert_close(torch.tensor(packed["deep"][0]), expected["deep"][0].detach())


def test_without_aux_there_is_none():
    assert caught(small_loss, Small(), small_batch()).pack_aux({}) is None


def test_batches_are_pytrees(run):
    def loss_fn(model, batch):
        (x, extra), options = batch
        assert options["mode"] == "sum"
        assert options["flag"] is True
        assert options["none"] is None
        return (model(x) * extra["scale"] * options["factor"]).sum()

    model = nn.Linear(3, 3)
    batch = (
        (np.ones((4, 3), np.float32), {"scale": torch.tensor(2.0)}),
        {"mode": "sum", "flag": True, "none": None, "factor": 0.5},
    )
    captured = caught(loss_fn, model, batch, num_microbatches=2)
    kinds = {leaf.name: (leaf.kind, str(leaf.type)) for leaf in captured.batch.leaves}
    assert kinds == {
        "0.0": ("cut", "f32[2, 3]"), "0.1.scale": ("whole", "f32[]"), "1.mode": ("static", "None"),
        "1.flag": ("static", "None"), "1.none": ("static", "None"), "1.factor": ("whole", "f32[]"),
    }  # fmt: skip
    assert [n for n, _ in captured.graph.inputs_of("batch")] == ["0.0", "0.1.scale", "1.factor"]
    assert [n for n, _ in captured.flatten_batch(batch)] == list(kinds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_python_number_does_not_promote(dtype):
    captured = caught(
        lambda m, b: (m(b["x"]) * b["k"]).sum(),
        nn.Linear(2, 2, dtype=dtype),
        {"x": torch.ones(2, 2, dtype=dtype), "k": 3.0},
    )
    (loss,) = (v for _, v in captured.graph.outputs_of("loss"))
    assert loss.type.dtype.name == {torch.bfloat16: "bf16", torch.float64: "f64"}[dtype]


def test_two_leaves_of_one_name():
    x = torch.ones(2, 3)
    with pytest.raises(UsageError, match=r"two leaves have the name 'a\.b'"):
        caught(lambda m, b: m(b["a.b"]).sum(), nn.Linear(3, 3), {"a.b": x, "a": {"b": x}})


def test_checks_at_run_time_leave_nothing():
    def loss_fn(model, x):
        torch._assert_async(x.sum() > 0, "positive")
        return model(x).sum()

    captured = caught(loss_fn, nn.Linear(3, 3), torch.ones(2, 3))
    assert "extern" not in {e.op.name for e in captured.graph.eqns}


def test_a_batch_that_does_not_divide():
    with pytest.raises(BatchError, match=r"4 rows.*num_microbatches=3"):
        caught(small_loss, Small(), small_batch(), num_microbatches=3)


def test_a_model_on_meta_gives_the_same_program():
    with torch.device("meta"):
        model = Small()
    on_meta = caught(small_loss, model, small_batch())
    assert print_graph(on_meta.graph) == print_graph(
        caught(small_loss, Small(), small_batch()).graph
    )
    assert model.up.weight.device.type == "meta"
    assert on_meta.read_leaves()["up.weight"].device.type == "meta"


class Located(nn.Module):
    """Makes tensors where its input lives, and where the user says."""

    def __init__(self, device):
        super().__init__()
        self.linear, self.device = nn.Linear(4, 4), device

    def forward(self, x):
        positions = torch.arange(4, device=x.device) + torch.ones((), device=self.device)
        table = torch.tensor([1.0, 2.0, 3.0, 4.0], device=self.device)
        mask = torch.full((4,), 2.0, device=self.device).to(x.device)
        return (
            F.scaled_dot_product_attention(*[(self.linear(x) * positions * table)[None, None]] * 3)
            + mask
        )


def test_capture_for_cuda_needs_no_cuda():
    batch = torch.randn(4, 4)

    def loss_fn(model, x):
        assert not isinstance(x, torch.nn.Parameter)
        return model(x).sum()

    for_cuda = caught(loss_fn, Located("cuda"), batch, device="cuda")
    assert print_graph(for_cuda.graph) == print_graph(caught(loss_fn, Located("cpu"), batch).graph)


def test_autocast_for_cuda_needs_cuda():
    def loss_fn(model, x):
        with torch.autocast("cuda", torch.bfloat16):
            return model(x).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as users' programs may
        with pytest.raises(CaptureError, match=r"autocast.*without CUDA"):
            caught(loss_fn, nn.Linear(3, 3), torch.ones(2, 3), device="cuda")


def test_autocast_on_the_cpu(run):
    def loss_fn(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    captured = caught(loss_fn, nn.Linear(3, 3), torch.ones(2, 3))
    assert {
        v.type.dtype.name
        for e in captured.graph.eqns
        if e.op.name == "dot_general"
        for v in e.results
    } <= {"bf16", "f32"}
    assert "bf16" in {v.type.dtype.name for e in captured.graph.eqns for v in e.results}


def test_a_replaced_buffer_keeps_its_type():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("last", torch.zeros(3))

        def forward(self, x):
            self.last = x
            return self.linear(x)

    with pytest.raises(CaptureError, match=r"replaces buffer 'last'.*\[3\], by .*\[2, 3\]"):
        caught(lambda m, x: m(x).sum(), Model(), torch.ones(2, 3))


def test_a_buffer_changed_with_a_value_that_has_a_gradient(run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            y = self.linear(x)
            self.mean = 0.5 * self.mean + y.mean(0)
            return y + self.mean

    torch.manual_seed(0)
    batch = torch.randn(2, 3)
    loss_fn = lambda m, x: m(x).square().sum()  # noqa: E731
    captured = caught(loss_fn, Model(), batch)
    results = run(captured, batch)
    model = Model()
    model.load_state_dict({k: v for k, v in captured.read_leaves().items()})
    loss_fn(model, batch).backward()
    torch.testing.assert_close(
        torch.tensor(results["param_grad", "linear.weight"]), model.linear.weight.grad
    )
    torch.testing.assert_close(torch.tensor(results["buffer_update", "mean"]), model.mean.detach())


def test_equations_say_where_the_user_wrote_them():
    model = nn.Sequential(nn.Linear(3, 3), Small())
    model[1].up = nn.Linear(3, 4)
    captured = caught(lambda m, b: m(b).square().sum(), model, torch.ones(2, 3))
    line = inspect.getsourcelines(Small.forward)[1] + 1
    places = {
        (e.op.name, e.source.module, e.source.file.rsplit("/", 1)[-1], e.source.line)
        for e in captured.graph.eqns
    }
    assert ("dot_general", "1.up", "test_capture.py", line) in places
    backward = captured.graph.eqns[-1].source
    assert (backward.module, backward.line) != ("", 0)
    assert not any(e.source.file == "" for e in captured.graph.eqns)


def test_a_traceable_autograd_function_is_traced(run):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 3))

        def forward(self, x):
            return Product.apply(x, self.w)

    model, batch = Model(), torch.randn(2, 3)
    loss_fn = lambda m, x: m(m(x)).square().sum()  # noqa: E731
    captured = caught(loss_fn, model, batch)
    assert "extern" not in {e.op.name for e in captured.graph.eqns}
    same_as_autograd(run, captured, model, loss_fn, batch)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_the_users_torch_compile_is_looked_through(run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.double = nn.Linear(3, 3), torch.compile(lambda x: 2 * x)

        def forward(self, x):
            return self.double(self.linear(x))

    captured = caught(lambda m, x: m(x).sum(), torch.compile(Model()), torch.ones(2, 3))
    assert [leaf.name for leaf in captured.leaves] == [
        "_orig_mod.linear.weight",
        "_orig_mod.linear.bias",
    ]
    assert "dot_general" in {e.op.name for e in captured.graph.eqns}


def test_constants_that_the_model_holds_as_plain_attributes(run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.table = nn.Linear(3, 3), torch.tensor([1.0, 2.0, 3.0])

        def forward(self, x):
            return self.linear(x) * self.table

    model, batch = Model(), torch.randn(2, 3)
    loss_fn = lambda m, x: m(x).sum()  # noqa: E731
    same_as_autograd(run, caught(loss_fn, model, batch), model, loss_fn, batch)


def test_the_batch_is_not_changed_by_a_forward_that_writes_to_it(run):
    def loss_fn(model, x):
        x.mul_(2)
        return model(x).sum()

    model, batch = nn.Linear(3, 3), torch.ones(2, 3)
    results = run(caught(loss_fn, model, batch), batch)
    assert torch.equal(batch, torch.ones(2, 3))
    np.testing.assert_allclose(
        results["loss", ""], loss_fn(model, batch.clone()).detach().numpy(), rtol=1e-6
    )


# Refusals.


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda m, x: m(x), r"must be a scalar.*shape \[2, 3\]"),
        (lambda m, x: 3.0, "scalar tensor.* returned a float$"),
        (lambda m, x: [m(x).sum()], "scalar tensor.* returned a list$"),
        (lambda m, x: (m(x).sum(), 1), "scalar tensor.* returned a tuple; .*pass has_aux=True"),
        (lambda m, x: m(x).sum().detach(), "needs no gradient: .*detached"),
        (lambda m, x: m(x).argmax(), "floating-point.*int64"),
    ],
)
def test_a_loss_that_is_no_scalar_with_a_gradient(loss_fn, message):
    with pytest.raises(CaptureError, match=message):
        caught(loss_fn, nn.Linear(3, 3), torch.ones(2, 3))


def test_has_aux_wants_a_pair():
    with pytest.raises(
        CaptureError, match=r"must return \(loss, aux\), it returned a tensor of shape \[\]$"
    ):
        caught(lambda m, x: m(x).sum(), nn.Linear(3, 3), torch.ones(2, 3), has_aux=True)


@pytest.mark.parametrize("function", [
    lambda x: x[x > 0],
    lambda x: x.nonzero(),
    lambda x: torch.unique(x),
    lambda x: x.masked_select(x > 0),
    lambda x: x * x.sum().item(),
    lambda x: x if x.sum() > 0 else -x,
], ids=range(6))  # fmt: skip
def test_what_depends_on_data_is_refused_with_the_line(function):
    def loss_fn(model, x):
        return function(model(x)).float().sum()

    line = function.__code__.co_firstlineno
    with pytest.raises(
        CaptureError,
        match=rf"test_capture\.py:{line}: (aten\.\S+ gives a shape|the value .* is read).* depends on the data",
    ):
        caught(loss_fn, nn.Linear(3, 3), torch.ones(2, 3))


def test_options_of_jax_models():
    for option in ("state", "trainable"):
        with pytest.raises(UsageError, match=f"{option}= is for JAX models"):
            caught(small_loss, Small(), small_batch(), **{option: {}})


@pytest.mark.filterwarnings("ignore:Error detected in CheckpointFunctionBackward")
def test_reentrant_checkpoints():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.b, self.a(x), use_reentrant=True)

    with pytest.raises(CaptureError, match="pass use_reentrant=False"):
        caught(lambda m, x: m(x).sum(), Model(), torch.ones(2, 3))


def test_tensor_hooks_on_parameters():
    model = Small()
    model.up.weight.register_post_accumulate_grad_hook(lambda p: None)
    caught(small_loss, model, small_batch())
    model.up.weight.register_hook(lambda g: g * 2)
    with pytest.raises(
        CaptureError, match=r"'up.weight' has a tensor hook.*register_post_accumulate_grad_hook"
    ):
        caught(small_loss, model, small_batch())


def test_hooks_on_what_is_saved():
    """Those that change values would be passed over; torch's own, which do not, are."""
    graph = torch.autograd.graph

    def loss(hooks):
        def run(model, x):
            with hooks():
                return model(x).exp().sum()

        return run

    for pack in (lambda x: x / 2, torch.relu, nn.functional.softmax):
        hooks = partial(graph.saved_tensors_hooks, pack, lambda x: x)
        refused = r"test_capture\.py:\d+: saved_tensors_hooks may change"
        with pytest.raises(CaptureError, match=refused):
            caught(loss(hooks), nn.Linear(3, 3), torch.ones(2, 3))
    caught(loss(graph.save_on_cpu), nn.Linear(3, 3), torch.ones(2, 3))


def test_parameters_changed_in_the_forward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            with torch.no_grad():
                self.w.mul_(2)
            return self.w * x

    line = Model.forward.__code__.co_firstlineno + 2
    place = rf"test_capture\.py:{line}: aten.mul_.Tensor "
    with pytest.raises(CaptureError, match=place + "changes parameter 'w' in place"):
        caught(lambda m, x: m(x).sum(), Model(), torch.ones(2, 3))


def test_a_leaf_that_is_changed_in_place():
    def loss_fn(model, x):
        return model.weight.add_(1.0).sum() * x.sum()

    line = loss_fn.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"test_capture\.py:{line}: .*parameter 'weight' in"):
        caught(loss_fn, nn.Linear(3, 3), torch.ones(2, 3))


def test_a_lazy_parameter():
    with pytest.raises(CaptureError, match=r"UninitializedParameter.*materialise"):
        caught(lambda m, x: m(x).sum(), nn.LazyLinear(3), torch.ones(2, 3))


def test_a_tensor_with_gradient_outside_the_model():
    outside = torch.ones(3, requires_grad=True)
    with pytest.raises(CaptureError, match="not a parameter of the model"):
        caught(lambda m, x: (m(x) * outside).sum(), nn.Linear(3, 3), torch.ones(2, 3))


def test_params_by_exactly_the_models_names():
    captured = caught(small_loss, Small(), small_batch())
    with pytest.raises(UsageError, match=r"missing \['up.bias'.*unexpected \['other'\]"):
        captured.flatten_params({"up.weight": 1, "other": 2})
    with pytest.raises(UsageError, match="expected a dict"):
        captured.flatten_params([1])


def test_whatever_the_loss_raises_is_a_capture_error_with_the_line():
    def loss_fn(model, x):
        return 1 / 0

    line = loss_fn.__code__.co_firstlineno + 1
    with pytest.raises(
        CaptureError, match=rf"test_capture\.py:{line}: .*ZeroDivisionError: division by zero"
    ) as caught_error:
        caught(loss_fn, Small(), small_batch())
    assert type(caught_error.value.__cause__) is ZeroDivisionError


def test_an_error_inside_torch_has_the_users_line():
    def loss_fn(model, x):
        return F.linear(x["x"], model.up.weight.t()).sum()

    line = loss_fn.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"test_capture\.py:{line}: .*RuntimeError"):
        caught(loss_fn, Small(), small_batch())


def test_an_interrupt_is_no_capture_error():
    def loss_fn(model, x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        caught(loss_fn, Small(), small_batch())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Tanh(), "the model has no parameters"),
        (nn.Linear(3, 3).requires_grad_(False), "every parameter of the model is frozen"),
    ],
)
def test_a_model_with_nothing_to_train(model, reason):
    with pytest.raises(CaptureError, match=f"needs no gradient: {reason}"):
        caught(lambda m, x: m(x).sum(), model, torch.ones(2, 3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_capture_has_gradients_whatever_the_mode_around_it(run, mode):
    model, batch = nn.Linear(3, 3), torch.randn(2, 3)
    loss_fn = lambda m, x: m(x).square().sum()  # noqa: E731
    with mode():
        captured = caught(loss_fn, model, batch)
    same_as_autograd(run, captured, model, loss_fn, batch)


def test_a_model_of_inference_tensors():
    with torch.inference_mode():
        model = nn.Linear(3, 3)
    with pytest.raises(CaptureError, match=r"'weight' was made under torch\.inference_mode"):
        caught(lambda m, x: m(x).sum(), model, torch.ones(2, 3))


class Inside(nn.Module):
    """A module under a name."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Embedding(5, 3, sparse=True), r"'inner' \(Embedding\) has sparse=True"),
        (lambda: nn.BatchNorm1d(3, momentum=None), r"'inner' \(BatchNorm1d\) has momentum=None"),
        (lambda: torch.jit.script(nn.Linear(3, 3)), r"'inner' .* was made by torch\.jit"),
    ],
)
def test_modules_that_cannot_be_captured(make, message):
    with pytest.raises(CaptureError, match=message):
        caught(lambda m, x: m(x).sum(), Inside(make()), torch.ones(2, 3), split=["inner"])


def test_batch_norm_that_averages_all_batches_in_eval_mode(run):
    model, batch = (
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)).eval(),
        torch.ones(2, 3),
    )
    loss_fn = lambda m, x: m(x).sum()  # noqa: E731
    same_as_autograd(run, caught(loss_fn, model, batch), model, loss_fn, batch)


def test_a_function_with_sparse_gradients():
    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+: .*layout torch\.sparse_coo"):
        caught(
            lambda m, x: F.embedding(x, m.weight, sparse=True).sum(),
            nn.Embedding(5, 3),
            torch.ones(2, dtype=torch.long),
        )


def test_an_inverse_that_raises_for_some_data():
    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+: .*_linalg_check.*inv_ex"):
        caught(lambda m, x: torch.linalg.inv(m(x)).sum(), nn.Linear(3, 3), torch.ones(3, 3))


@pytest.mark.parametrize(
    "use",
    [lambda x, n: x[:, :n], lambda x, n: x.view(n, -1), lambda x, n: x if n > 1 else -x],
)
def test_a_number_of_the_batch_is_no_setting(use):
    with pytest.raises(
        CaptureError, match=r"A number in the batch.* closure, or in the batch as a str"
    ):
        caught(
            lambda m, b: use(m(b["x"]), b["n"]).sum(),
            nn.Linear(3, 3),
            {"x": torch.ones(2, 3), "n": 2},
        )


def test_reads_out_of_range_are_nan(run):
    captured = caught(
        lambda m, ids: m(ids).sum(), nn.Embedding(5, 3), torch.zeros(2, dtype=torch.long)
    )
    assert np.isnan(run(captured, torch.tensor([0, 5]))["loss", ""])


def test_dicts_of_a_batch_may_be_in_another_order():
    captured = caught(small_loss, Small(), small_batch())
    batch = small_batch()
    (part,) = captured.batch.microbatches(
        captured.flatten_batch({"y": batch["y"], "x": batch["x"]})
    )
    assert torch.equal(part["x"], batch["x"])
    assert torch.equal(part["y"], batch["y"])
