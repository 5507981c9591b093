"""Rules of matrix products, convolutions and attention, with gradients, against torch."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plait.core_ir.interpret import interpret


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64], ids=str
)
def test_products(compare, dtype):
    torch.manual_seed(0)
    a, b, v = (torch.randint(-4, 4, s).to(dtype) for s in [(3, 4), (4, 5), (4,)])
    compare(lambda a, b, v: [a @ b, a @ v, torch.dot(v, v), a.t() @ a], a, b, v)
    compare(
        lambda a, b: [torch.bmm(a, b), a @ b], a.expand(2, 3, 4).clone(), b.expand(2, 4, 5).clone()
    )
    if dtype.is_floating_point:
        compare(
            lambda a, b: [
                torch.einsum("ij,jk->ik", a, b),
                torch.tensordot(a, b, 1),
                torch.outer(a[0], b[0]),
            ],
            a,
            b,
        )


def test_empty_products(compare):
    compare(lambda a, b: a @ b, torch.zeros(2, 0), torch.zeros(0, 3))
    compare(lambda a, b: a @ b, torch.zeros(0, 2), torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 1), (2, 0.5)])
def test_products_with_bias(compare, dtype, beta, alpha):
    torch.manual_seed(0)
    a, b, c = (torch.randn(s).to(dtype) for s in [(3, 4), (4, 5), (5,)])
    compare(lambda a, b, c: torch.addmm(c, a, b, beta=beta, alpha=alpha), a, b, c)
    compare(
        lambda a, b, c: torch.addmv(c, a, b, beta=beta, alpha=alpha),
        a,
        b[:, 0].clone(),
        c[:3].clone(),
    )
    compare(
        lambda a, b, c: torch.baddbmm(c, a, b, beta=beta, alpha=alpha),
        a[None].clone(),
        b[None].clone(),
        c,
    )


@pytest.mark.parametrize("function", [
    lambda x, w, b: F.linear(x, w, b),
    lambda x, w, b: F.linear(x[0], w, b),
    lambda x, w, b: F.linear(x[None], w),
    lambda x, w, b: F.bilinear(x, x, w[:, :, None].expand(-1, -1, 4), b),
    lambda x, w, b: torch.einsum("bi,oi->ob", x, w),
    lambda x, w, b: x.matmul(w.t()).add(b),
    lambda x, w, b: x[0] @ w.t() @ w,
], ids=range(7))  # fmt: skip
def test_linear_with_gradient(compare_gradients, function):
    compare_gradients(function, torch.randn(3, 4), torch.randn(5, 4), torch.randn(5))


def test_mm_is_a_dot_of_its_operands(lowered):
    graph = lowered(lambda x, y: x.t() @ y, (torch.randn(3, 4), torch.randn(3, 5)))
    assert [e.op.name for e in graph.eqns] == ["transpose", "dot_general"]
    assert graph.eqns[1].attrs["contract"] == ((1,), (0,))


CONVOLUTIONS = {
    "plain": (nn.Conv2d(3, 4, 3), (2, 3, 7, 6)),
    "strided": (nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 7, 6)),
    "dilated": (nn.Conv2d(2, 4, 3, dilation=2, padding=(2, 1)), (1, 2, 8, 9)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 5, 5)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4, bias=False), (2, 4, 5, 5)),
    "1d": (nn.Conv1d(3, 4, 3, stride=2), (2, 3, 9)),
    "3d": (nn.Conv3d(2, 3, 2, padding=1), (1, 2, 3, 4, 3)),
    "same": (nn.Conv2d(2, 2, 3, padding="same"), (1, 2, 5, 5)),
    "even same": (nn.Conv2d(2, 2, 2, padding="same"), (1, 2, 5, 5)),
    "unbatched": (nn.Conv2d(2, 3, 3), (2, 5, 5)),
    "patches": (nn.Conv2d(3, 4, 4, stride=4), (2, 3, 10, 8)),
    "transposed": (nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 4)),
    "transposed, strided": (
        nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1),
        (2, 4, 4, 3),
    ),
    "transposed, grouped": (nn.ConvTranspose2d(4, 6, 2, groups=2, bias=False), (1, 4, 3, 3)),
    "transposed 1d": (nn.ConvTranspose1d(2, 3, 4, stride=2, dilation=2), (1, 2, 5)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_with_gradient(compare_gradients, name):
    torch.manual_seed(0)
    module, shape = CONVOLUTIONS[name]
    module = module.double()
    names = [n for n, _ in module.named_parameters()]

    def function(x, *params):
        return torch.func.functional_call(module, dict(zip(names, params, strict=True)), (x,))

    captured = compare_gradients(
        function,
        torch.randn(shape, dtype=torch.float64),
        *(p.detach() for p in module.parameters()),
    )
    ops = [e.op.name for e in captured.graph.eqns]
    assert "extern" not in ops
    if "transposed" not in name:
        assert ops.count("convolution_input_grad") == 1
        assert ops.count("convolution_weight_grad") == 1


def causal(t, s):
    return torch.ones(t, s, dtype=torch.bool).tril()


MASKS = {
    "none": lambda t, s: {},
    "causal": lambda t, s: {"is_causal": True},
    "bool": lambda t, s: {"attn_mask": causal(t, s)},
    "float": lambda t, s: {"attn_mask": torch.randn(2, 1, t, s)},
    "row": lambda t, s: {"attn_mask": torch.randn(1, 4, 1, s)},
    "scale": lambda t, s: {"scale": 0.3},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("t", "s"), [(5, 5), (3, 6), (6, 3)])
def test_attention_is_one_op(compare_gradients, mask, t, s):
    torch.manual_seed(0)
    kwargs = MASKS[mask](t, s)
    captured = compare_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **kwargs),
        torch.randn(2, 4, t, 8), torch.randn(2, 4, s, 8), torch.randn(2, 4, s, 8),
    )  # fmt: skip
    ops = [e.op.name for e in captured.graph.eqns]
    assert ops.count("attention") == 1
    assert ops.count("attention_backward") == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_attention_dtypes(compare_gradients, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 4, 8).to(dtype) for _ in range(3))
    compare_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v
    )


def test_attention_by_the_math_path_stays_composed(compare_gradients):
    torch.manual_seed(0)
    q, k, v, mask = (torch.randn(2, 2, 4, n) for n in (8, 8, 8, 4))
    captured = compare_gradients(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), q, k, v, mask
    )
    assert "attention" not in {e.op.name for e in captured.graph.eqns}


def test_grouped_heads(compare_gradients):
    torch.manual_seed(0)
    compare_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8),
    )  # fmt: skip


def composed(q, k, v, bias, causal):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf
        )
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_of_other_devices(lowered, kernel, causal):
    """Traced on fake tensors; the oracle is plain softmax attention."""
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 2, 4, 8) for _ in range(4))
    bias = torch.randn(1, 2, 4, 4) if kernel == "efficient" else None
    aten = torch.ops.aten

    def function(q, k, v, g, *rest):
        (bias,) = rest or (None,)
        if kernel == "flash":
            out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, causal
            )
            grads = aten._scaled_dot_product_flash_attention_backward(
                g, q, k, v, out, lse, cq, ck, mq, mk, 0.0, causal, seed, offset
            )
        elif kernel == "efficient":
            out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
                q, k, v, bias, True, 0.0, causal
            )
            grads = aten._scaled_dot_product_efficient_attention_backward(
                g, q, k, v, bias, out, lse, seed, offset, 0.0, [True] * 4, causal
            )
        else:
            out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal
            )
            grads = aten._scaled_dot_product_cudnn_attention_backward(
                g, q, k, v, out, lse, seed, offset, None, cq, ck, mq, mk, 0.0, causal
            )
        return [out, *grads[: 4 if bias is not None else 3]]

    given = (q, k, v, g) if bias is None else (q, k, v, g, bias)
    found = interpret(
        lowered(function, given), [*(x.numpy() for x in given), np.zeros(2, np.uint32)]
    )
    wanted = [x.requires_grad_() for x in ([q, k, v] if bias is None else [q, k, v, bias])]
    out, _ = composed(q, k, v, bias, causal)
    expected = [out.detach(), *torch.autograd.grad(out, wanted, g)]
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=2e-6)
