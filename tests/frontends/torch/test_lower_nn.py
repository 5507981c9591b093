"""Rules of normalisations and pooling, with gradients, against torch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plait.frontends.torch.capture import capture

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "dims"), [((2, 3, 4), 1), ((2, 3, 4), 2), ((4,), 1), ((0, 4), 1)]
)
def test_layer_norm(compare_gradients, dtype, shape, dims):
    torch.manual_seed(0)
    x, w, b = (torch.randn(s).to(dtype) for s in (shape, shape[-dims:], shape[-dims:]))
    compare_gradients(lambda x, w, b: F.layer_norm(x, w.shape, w, b), x, w, b)
    compare_gradients(lambda x: F.layer_norm(x, x.shape[-dims:]), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(compare_gradients, dtype):
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 4).to(dtype), torch.randn(4).to(dtype)
    compare_gradients(lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), x, w)
    compare_gradients(lambda x: F.rms_norm(x, (4,)), x)


def test_fused_rms_norm(call):
    """The op of CUDA, called by hand; the oracle is the composed form."""
    torch.manual_seed(0)
    x, w, g = torch.randn(2, 3, 4), torch.randn(4), torch.randn(2, 3, 4)
    x.requires_grad_()
    w.requires_grad_()
    rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    out = x * rstd * w
    aten = torch.ops.aten
    call(aten._fused_rms_norm.default, (x, [4], w, 1e-5), [out, rstd])
    grads = torch.autograd.grad(out, (x, w), g)
    call(aten._fused_rms_norm_backward.default, (g, x, [4], rstd, w, [True, True]), grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 4, 3, 2), (2, 4, 1, 3)])
def test_group_norm(compare_gradients, dtype, shape):
    torch.manual_seed(0)
    x, w, b = torch.randn(shape).to(dtype), torch.randn(4).to(dtype), torch.randn(4).to(dtype)
    compare_gradients(lambda x, w, b: F.group_norm(x, 2, w, b), x, w, b)
    compare_gradients(lambda x: F.group_norm(x, 4), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4, 2)])
def test_batch_norm(compare_gradients, dtype, training, shape):
    torch.manual_seed(0)
    mean, var = (None, None) if training else (torch.randn(3).to(dtype), torch.rand(3).to(dtype))
    x, w, b = torch.randn(shape).to(dtype), torch.randn(3).to(dtype), torch.randn(3).to(dtype)
    compare_gradients(lambda x, w, b: F.batch_norm(x, mean, var, w, b, training), x, w, b)


def test_instance_norm_and_local_response(compare_gradients):
    torch.manual_seed(0)
    compare_gradients(lambda x: F.instance_norm(x), torch.randn(2, 3, 4, 4))
    compare_gradients(lambda x: F.local_response_norm(x, 2), torch.randn(2, 3, 4, 4))
    compare_gradients(lambda x: F.normalize(x, dim=1), torch.randn(2, 3))


POOLS = {
    "max": lambda x: F.max_pool2d(x, 2),
    "max, padded": lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
    "max, ceil": lambda x: F.max_pool2d(x, 2, stride=2, ceil_mode=True),
    "max 1d": lambda x: F.max_pool1d(x[0], 2),
    "avg": lambda x: F.avg_pool2d(x, 2),
    "avg, padded": lambda x: F.avg_pool2d(x, 3, stride=2, padding=1),
    "avg, uncounted": lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False),
    "avg, ceil": lambda x: F.avg_pool2d(x, (2, 3), stride=2, ceil_mode=True),
    "avg, overlapping": lambda x: F.avg_pool2d(x, 3, stride=1),
    "avg, divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "avg 1d": lambda x: F.avg_pool1d(x[0], 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x[..., :6, :6], (3, 2)),
    "adaptive to 1": lambda x: F.adaptive_avg_pool2d(x, 1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "interpolate bilinear": lambda x: F.interpolate(x, size=(5, 9), mode="bilinear"),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_pool(compare_gradients, name, dtype):
    torch.manual_seed(0)
    x = torch.randperm(2 * 2 * 7 * 6).reshape(2, 2, 7, 6).to(dtype) / 8
    captured = compare_gradients(POOLS[name], x)
    assert "extern" not in {e.op.name for e in captured.graph.eqns}


def test_max_pool_gradient_of_ties_goes_to_the_first(compare_gradients):
    compare_gradients(lambda x: F.max_pool2d(x, 2), torch.ones(1, 1, 4, 4))


def test_dilated_max_pool_forward(compare):
    torch.manual_seed(0)
    compare(
        lambda x: torch.ops.aten.max_pool2d_with_indices.default(x, [2, 2], [1, 1], [0, 0], [2, 2])[
            0
        ],
        torch.randn(1, 2, 6, 6),
    )


def test_lstm_and_gru(compare_gradients):
    torch.manual_seed(0)
    for cell in (nn.LSTM(3, 4), nn.GRU(3, 4), nn.RNN(3, 4)):
        names = [n for n, _ in cell.named_parameters()]

        def function(x, *params, cell=cell, names=names):
            return torch.func.functional_call(cell, dict(zip(names, params, strict=True)), (x,))[0]

        captured = compare_gradients(
            function, torch.randn(5, 2, 3), *(p.detach() for p in cell.parameters())
        )
        assert "extern" not in {e.op.name for e in captured.graph.eqns}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_over_data_are_plain_ops(run, kind):
    torch.manual_seed(0)
    model, batch = (
        kind(4, 3, num_layers=2, bidirectional=True, batch_first=True),
        torch.randn(2, 5, 4),
    )

    def loss_fn(model, x):  # nothing before it needs a gradient: torch would take oneDNN's layer
        return model(x)[0].square().sum()

    captured = capture(loss_fn, model, batch, num_microbatches=1, split=None)
    assert "extern" not in {e.op.name for e in captured.graph.eqns}
    results = run(captured, batch)
    loss = loss_fn(model, batch)
    loss.backward()
    torch.testing.assert_close(torch.tensor(results["loss", ""]), loss.detach())
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            torch.tensor(results["param_grad", name]), param.grad, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(("pad", "shape"), [((1, 2), (2, 3, 5)), ((2, 1, 1, 0), (2, 3, 4, 5))])
def test_reflected_padding(compare_gradients, pad, shape):
    torch.manual_seed(0)
    captured = compare_gradients(
        lambda x: nn.functional.pad(x, pad, mode="reflect").square(), torch.randn(shape)
    )
    assert "extern" not in {e.op.name for e in captured.graph.eqns}


def test_transformer_layer(compare_gradients):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    names = [n for n, _ in layer.named_parameters()]
    compare_gradients(
        lambda x, *ps: torch.func.functional_call(layer, dict(zip(names, ps, strict=True)), (x,)),
        torch.randn(2, 5, 8), *(p.detach() for p in layer.parameters()),
    )  # fmt: skip
