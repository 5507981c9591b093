"""Elementwise rules against torch: dtypes, promotion, numbers, broadcasting, NaN, infinities, integer division."""

import math

import pytest
import torch

nan, inf = math.nan, math.inf
SPECIAL = [nan, inf, -inf, 0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.7, 1e-3]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def special(dtype=torch.float32):
    return torch.tensor(SPECIAL, dtype=dtype)


def pairs(dtype=torch.float32):
    x = special(dtype)
    a, b = torch.meshgrid(x, x, indexing="ij")
    return a.flatten().clone(), b.flatten().clone()


UNARY = """neg exp exp2 expm1 log log1p log2 log10 sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh
acosh atanh sigmoid erf erfc erfinv lgamma digamma floor ceil trunc round frac reciprocal abs sign isnan isinf
isfinite isposinf isneginf relu logical_not sgn square nan_to_num signbit""".split()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(compare, name, dtype):
    compare(getattr(torch, name), special(dtype))


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 1, 3)])
def test_unary_of_any_shape(compare, name, shape):
    compare(getattr(torch, name), torch.rand(shape) * 0.8 + 0.1)


@pytest.mark.parametrize(
    "name",
    [
        "neg",
        "abs",
        "sign",
        "floor",
        "ceil",
        "round",
        "trunc",
        "sqrt",
        "exp",
        "bitwise_not",
        "sigmoid",
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_unary_of_integers(compare, name, dtype):
    compare(getattr(torch, name), torch.tensor([0, 1, 2, 5, 100], dtype=dtype))


BINARY = """add sub mul div maximum minimum fmax fmin atan2 remainder fmod pow eq ne lt le gt ge logical_and
logical_or logical_xor floor_divide""".split()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary(compare, name, dtype):
    compare(getattr(torch, name), *pairs(dtype))


@pytest.mark.parametrize("name", [*BINARY, "bitwise_and", "bitwise_or", "bitwise_xor"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_binary_of_integers(compare, name, dtype):
    a = torch.tensor([7, 7, 0, 1, 2, 100], dtype=dtype)
    b = torch.tensor([2, 3, 5, 1, 7, 3], dtype=dtype)
    if dtype.is_signed and name != "pow":
        a, b = torch.cat([a, -a, a, -a]), torch.cat([b, b, -b, -b])
    if name == "pow":
        a, b = a[:5], b[:5].clamp(max=3)
    compare(getattr(torch, name), a, b)


@pytest.mark.parametrize("exponent", [-3, -2, -1, 0, 1, 2, 3])
def test_integer_power_of_signed_exponents(compare, exponent):
    base = torch.tensor([-3, -1, 1, 2])
    compare(torch.pow, base, torch.full((4,), exponent))


@pytest.mark.parametrize("exponent", [-3, -2, -1, -0.5, 0, 0.5, 1, 1.0, 2, 2.0, 3, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_power_by_a_number(compare, exponent, dtype):
    compare(lambda x: x**exponent, torch.tensor([0.5, 1.5, 2.0, 3.0], dtype=dtype))


def test_power_of_a_number_and_of_integers(compare):
    compare(lambda x: 2.5**x, torch.tensor([0.5, -1.5, 2.0]))
    compare(lambda x: x**2, torch.tensor([3, -4]))
    compare(lambda x: x**0.5, torch.tensor([4, 9]))


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "div", "eq", "lt", "maximum", "pow", "where"]
)
@pytest.mark.parametrize(
    "shapes", [((3,), ()), ((2, 1), (3,)), ((0, 3), (1,)), ((2, 1, 3), (4, 1))]
)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.int64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bool, torch.int8),
        (torch.int32, torch.int64),
    ],
    ids=str,
)
def test_promotion_and_broadcast(compare, name, shapes, dtypes):
    a, b = ((torch.rand(s) * 4 + 1).to(d) for s, d in zip(shapes, dtypes, strict=True))
    if name == "where":
        compare(lambda x, y: torch.where(x > 2, x, y), a, b)
    elif name == "pow" and not b.is_floating_point():
        compare(torch.pow, a.float(), b)
    elif name == "sub" and a.dtype == torch.bool:
        compare(torch.sub, b, b)
    else:
        compare(getattr(torch, name), a, b)


NUMBERS = [2, -3, 0.1, True]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8, torch.bool],
    ids=str,
)
def test_numbers_do_not_promote_tensors_of_their_kind(compare, number, dtype):
    if dtype == torch.uint8:
        number = abs(number)
    x = torch.tensor([0, 1, 3], dtype=dtype)
    compare(
        lambda x: [x + number, x * number, x / number, number / (x + 1), x == number, x > number], x
    )
    compare(lambda x: torch.where(x > 0, x, number), x)


def test_alpha_and_rsub(compare):
    x, y = torch.randn(3), torch.randn(3)
    compare(lambda x, y: [torch.add(x, y, alpha=2), torch.sub(x, y, alpha=0.5), 2 - x], x, y)
    compare(lambda x: torch.rsub(x, 3, alpha=2), torch.tensor([1, 2]))


def test_bool_arithmetic(compare):
    a, b = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    compare(
        lambda a, b: [
            a + b,
            a * b,
            torch.maximum(a, b),
            torch.minimum(a, b),
            a & b,
            a | b,
            a ^ b,
            ~a,
        ],
        a,
        b,
    )


@pytest.mark.parametrize("mode", ["floor", "trunc", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_division_modes(compare, mode, dtype):
    a = torch.tensor([7, -7, 7, -7, 0, 1], dtype=dtype)
    b = torch.tensor([2, 2, -2, -2, 3, 3], dtype=dtype)
    compare(lambda a, b: torch.div(a, b, rounding_mode=mode), a, b)
    compare(lambda a: torch.div(a, 2, rounding_mode=mode), a)


def test_clamp(compare):
    x = special()
    compare(
        lambda x: [
            x.clamp(-1, 2),
            x.clamp(min=0),
            x.clamp(max=1.5),
            x.clamp_min(1),
            x.clamp_max(0),
        ],
        x,
    )
    low, high = torch.tensor([0.0, nan, -1.0] * 4), torch.tensor([1.0, 2.0, nan] * 4)
    compare(
        lambda x, a, b: [torch.clamp(x, a, b), torch.clamp(x, min=a), torch.clamp(x, max=b)],
        x,
        low,
        high,
    )
    compare(lambda x: x.clamp(1, 3), torch.tensor([0, 2, 5]))


def test_masked_fill_and_where(compare):
    x, mask = torch.randn(2, 3), torch.tensor([True, False, True])
    compare(
        lambda x, m: [x.masked_fill(m, -inf), torch.where(m, x, 0.0), torch.where(m, 1, x)], x, mask
    )
    compare(lambda x, m, v: x.masked_fill(m, v), x, mask, torch.tensor(2.0))


def test_shifts(compare):
    a, b = torch.tensor([1, 5, -8, 64]), torch.tensor([0, 2, 1, 3])
    compare(lambda a, b: [a << b, a >> b, a << 2, a >> 1], a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_products(compare, dtype):
    x, a, b = (torch.rand(4, dtype=dtype) + 0.5 for _ in range(3))
    compare(
        lambda x, a, b: [
            torch.addcmul(x, a, b, value=0.5),
            torch.addcdiv(x, a, b, value=2),
            torch.addcmul(x, a, b),
        ],
        x,
        a,
        b,
    )
    compare(
        lambda x, a, b: [torch.lerp(x, a, b), torch.lerp(x, a, 0.25), torch.lerp(x, a, 0.75)],
        x,
        a,
        b,
    )


@pytest.mark.parametrize("decimals", [-1, 0, 2])
def test_round_decimals(compare, decimals):
    compare(lambda x: torch.round(x, decimals=decimals), torch.tensor([12.345, -0.555, 25.0, 35.0]))


@pytest.mark.parametrize(
    "to", [torch.int32, torch.int64, torch.bool, torch.float64, torch.bfloat16, torch.complex64]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bool, torch.bfloat16])
def test_conversions(compare, dtype, to):
    compare(lambda x: x.to(to), torch.tensor([0, 1, 2.5, -3.5]).to(dtype))


@pytest.mark.parametrize("function", [
    lambda x: x * 1j,
    lambda x: (2j - x) / (1 + x * 1j),
    lambda x: (1 + 2j) ** x,
    lambda x: x.to(torch.complex64) ** (1 + 2j),
    lambda x: torch.where(x > 0, x, 1j),
    lambda x: torch.complex(x, x).add(x, alpha=2j),
    lambda x: torch.rsub(torch.complex(x, x), 3j),
    lambda x: x.to(torch.complex64).lerp(torch.complex(x, x), 0.5j),
], ids=range(8))  # fmt: skip
def test_complex_numbers_of_python(compare_gradients, function):
    torch.manual_seed(0)
    compare_gradients(lambda x: function(x).abs(), torch.rand(3, 4) + 0.5)


def test_bitcast_and_complex(compare):
    x, y = torch.randn(3), torch.randn(3)
    compare(lambda x: [x.view(torch.int32), x.to(torch.bfloat16).view(torch.int16)], x)
    compare(lambda x, y: torch.complex(x, y) * torch.complex(y, x), x, y)
    compare(lambda x, y: torch.view_as_real(torch.complex(x, y).conj().resolve_conj()), x, y)
    compare(lambda x: torch.view_as_complex(x).abs(), torch.randn(3, 2))


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, 0.2),
    "softplus": lambda x: torch.nn.functional.softplus(x, 2, 3),
    "hardtanh": lambda x: torch.nn.functional.hardtanh(x, -0.5, 0.7),
    "relu6": torch.nn.functional.relu6,
    "elu": torch.nn.functional.elu,
    "selu": torch.nn.functional.selu,
    "celu": torch.nn.functional.celu,
    "mish": torch.nn.functional.mish,
    "hardswish": torch.nn.functional.hardswish,
    "hardsigmoid": torch.nn.functional.hardsigmoid,
    "logsigmoid": torch.nn.functional.logsigmoid,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "glu": lambda x: torch.nn.functional.glu(x, 0),
    "softsign": torch.nn.functional.softsign,
    "tanhshrink": torch.nn.functional.tanhshrink,
    "softshrink": torch.nn.functional.softshrink,
    "hardshrink": torch.nn.functional.hardshrink,
    "threshold": lambda x: torch.nn.functional.threshold(x, 0.1, 5.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_activations_with_gradient(compare_gradients, name, dtype):
    captured = compare_gradients(ACTIVATIONS[name], torch.linspace(-4, 4, 24, dtype=dtype))
    assert "extern" not in {e.op.name for e in captured.graph.eqns}


def test_silu_has_the_form_of_jax(lowered):
    aten = torch.ops.aten
    graph = lowered(
        lambda x, g: [aten.silu(x), aten.silu_backward(g, x)], (torch.randn(3), torch.randn(3))
    )
    assert [e.op.name for e in graph.eqns] == [
        "logistic", "mul",
        "logistic", "constant", "broadcast", "sub", "mul", "mul", "mul", "mul", "add",
    ]  # fmt: skip
