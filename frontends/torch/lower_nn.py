"""Lowering of layers that torch has as one op: activations and mean squared error, with their gradients."""

import math

import numpy as np
import torch

from plait.core_ir.graph import Value
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.ops import reduce as rd
from plait.frontends.torch.dtypes import compute_dtype
from plait.frontends.torch.rules import Number, Rules, Site, in_compute_dtype

aten = torch.ops.aten


# Activations.


def relu(s: Site, x: Value) -> Value:
    return s(ew.max_, x, s.b.full(x.type, 0))


@in_compute_dtype
def silu(s: Site, x: Value) -> Value:
    return s(ew.mul, x, s(ew.logistic, x))


@in_compute_dtype
def silu_backward(s: Site, grad: Value, x: Value) -> Value:
    """grad sig + x grad sig (1 - sig), in the form that jax.nn.silu has."""
    sig = s(ew.logistic, x)
    slope = s(ew.mul, sig, s(ew.sub, s.b.full(x.type, 1), sig))
    product = s(ew.mul, x, grad)
    return s(ew.add, s(ew.mul, grad, sig), s(ew.mul, product, slope))


@in_compute_dtype
def sigmoid_backward(s: Site, grad: Value, out: Value) -> Value:
    return s(ew.mul, grad, s(ew.mul, out, s(ew.sub, s.b.full(out.type, 1), out)))


@in_compute_dtype
def tanh_backward(s: Site, grad: Value, out: Value) -> Value:
    return s(ew.mul, grad, s(ew.sub, s.b.full(out.type, 1), s(ew.mul, out, out)))


_ALPHA, _BETA = math.sqrt(2 / math.pi), 0.044715


def _inner(s: Site, x: Value) -> Value:
    """tanh(sqrt(2/pi) (x + 0.044715 x^3))."""
    cube = s(ew.mul, s(ew.mul, x, x), x)
    return s(ew.tanh, s.mul(s(ew.add, x, s.mul(cube, _BETA)), _ALPHA))


@in_compute_dtype
def gelu(s: Site, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        inside = _inner(s, x)
    else:
        inside = s(ew.erf, s.mul(x, math.sqrt(0.5)))
    return s(ew.mul, s.mul(x, 0.5), s.add(inside, 1))


@in_compute_dtype
def gelu_backward(s: Site, grad: Value, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        inside = _inner(s, x)
        square = s(ew.mul, x, x)
        bend = s(ew.sub, s.b.full(x.type, 1), s(ew.mul, inside, inside))
        slope = s.mul(s.add(s.mul(square, 3 * _BETA), 1), _ALPHA)
        density = s(ew.mul, s.mul(x, 0.5), s(ew.mul, bend, slope))
    else:
        inside = s(ew.erf, s.mul(x, math.sqrt(0.5)))
        bell = s(ew.exp, s.mul(s(ew.mul, x, x), -0.5))
        density = s(ew.mul, x, s.mul(bell, 1 / math.sqrt(2 * math.pi)))
    cumulative = s.mul(s.add(inside, 1), 0.5)
    return s(ew.mul, grad, s(ew.add, cumulative, density))


def threshold_backward(s: Site, grad: Value, x: Value, threshold: Number) -> Value:
    return s.select(s.compare("le", x, threshold), 0, grad, s.type)


def hardtanh(s: Site, x: Value, low: Number = -1, high: Number = 1) -> Value:
    return s(ew.min_, s(ew.max_, x, s.b.full(x.type, low)), s.b.full(x.type, high))


def hardtanh_backward(s: Site, grad: Value, x: Value, low: Number, high: Number) -> Value:
    outside = s(ew.or_, s.compare("le", x, low), s.compare("ge", x, high))
    return s.select(outside, 0, grad, s.type)


@in_compute_dtype
def leaky_relu(s: Site, x: Value, slope: Number = 0.01) -> Value:
    return s.select(s.compare("gt", x, 0), x, s.mul(x, slope), s.type)


@in_compute_dtype
def leaky_relu_backward(
    s: Site, grad: Value, x: Value, slope: Number, self_is_result: bool
) -> Value:
    return s.select(s.compare("gt", x, 0), grad, s.mul(grad, slope), s.type)


def shrink_backward(s: Site, grad: Value, x: Value, lambd: Number) -> Value:
    inside = s(ew.and_, s.compare("ge", x, -lambd), s.compare("le", x, lambd))
    return s.select(inside, 0, grad, s.type)


@in_compute_dtype
def hardsigmoid_backward(s: Site, grad: Value, x: Value) -> Value:
    """A sixth within (-3, 3); torch's kernel holds the sixth in f32 for every dtype."""
    inside = s(ew.and_, s.compare("gt", x, -3), s.compare("lt", x, 3))
    return s.select(inside, s.mul(grad, float(np.float32(1 / 6))), 0, s.type)


@in_compute_dtype
def softplus(s: Site, x: Value, beta: Number = 1, threshold: Number = 20) -> Value:
    scaled = s.mul(x, beta)
    curve = s.div(s(ew.log1p, s(ew.exp, scaled)), beta)
    return s.select(s.compare("gt", scaled, threshold), x, curve, s.type)


@in_compute_dtype
def softplus_backward(s: Site, grad: Value, x: Value, beta: Number, threshold: Number) -> Value:
    scaled = s.mul(x, beta)
    curve = s(ew.mul, grad, s(ew.logistic, scaled))
    return s.select(s.compare("gt", scaled, threshold), grad, curve, s.type)


# Losses.

_NONE, _MEAN, _SUM = 0, 1, 2


def mse_loss(s: Site, x: Value, y: Value, reduction: int = _MEAN) -> Value:
    wide = compute_dtype(s.type.dtype)
    rest = s(ew.sub, s.b.convert(x, wide), s.b.convert(y, wide))
    square = s(ew.mul, rest, rest)
    if reduction == _NONE:
        return s.b.convert(square, s.type.dtype)
    result = (
        s(rd.reduce_sum, square, dims=tuple(range(square.type.rank)))
        if square.type.rank
        else square
    )
    if reduction == _MEAN:
        result = s.div(result, square.type.size)
    return s.b.convert(result, s.type.dtype)


def mse_loss_backward(s: Site, grad: Value, x: Value, y: Value, reduction: int) -> Value:
    """2 (x - y) times the cotangent, divided first by the number of elements for a mean."""
    wide = compute_dtype(s.type.dtype)
    grad = s.b.convert(grad, wide)
    slope = s.mul(s(ew.sub, s.b.convert(x, wide), s.b.convert(y, wide)), 2)
    if reduction == _MEAN:
        grad = s.div(grad, x.type.size)
    return s.b.convert(s(ew.mul, s.b.expand(grad, slope.type.shape), slope), s.type.dtype)


RULES: Rules = {
    aten.relu.default: relu,
    aten.silu.default: silu,
    aten.silu_backward.default: silu_backward,
    aten.sigmoid_backward.default: sigmoid_backward,
    aten.tanh_backward.default: tanh_backward,
    aten.gelu.default: gelu,
    aten.gelu_backward.default: gelu_backward,
    aten.threshold_backward.default: threshold_backward,
    aten.hardtanh.default: hardtanh,
    aten.hardtanh_backward.default: hardtanh_backward,
    aten.leaky_relu.default: leaky_relu,
    aten.leaky_relu_backward.default: leaky_relu_backward,
    aten.softshrink_backward.default: shrink_backward,
    aten.hardshrink_backward.default: shrink_backward,
    aten.hardsigmoid_backward.default: hardsigmoid_backward,
    aten.softplus.default: softplus,
    aten.softplus_backward.default: softplus_backward,
    aten.mse_loss.default: mse_loss,
    aten.mse_loss_backward.default: mse_loss_backward,
}
