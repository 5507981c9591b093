"""Products, convolutions and factorisations against JAX: dims, dtypes, dilations, groups, gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax_checks import Case, check, random, with_gradients

from plait.frontends.jax.lower_linalg import RULES

BF16 = ml_dtypes.bfloat16
A, B = random((2, 3, 4), "f8"), random((2, 4, 5), "f8")
SYMMETRIC = np.eye(3) * 4 + np.full((2, 3, 3), 0.5)
GROUPS = np.array([2, 0, 3], "i4")
ROWS, TABLES = random((6, 4), "f8"), random((3, 4, 5), "f8")


def convolve(x: Any, w: Any, **more: Any) -> Any:
    defaults = {
        "window_strides": (1, 1),
        "padding": "SAME",
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    }
    return lax.conv_general_dilated(x, w, **(defaults | more))


IMAGE, KERNEL = random((2, 6, 7, 4), "f8"), random((3, 2, 4, 6), "f8")
GROUPED = random((3, 2, 2, 6), "f8")
CONVOLUTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "same": (KERNEL, {}),
    "strides": (KERNEL, {"window_strides": (2, 3), "padding": "VALID"}),
    "negative-padding": (KERNEL, {"padding": ((-1, 2), (0, -1))}),
    "kernel-dilation": (KERNEL, {"rhs_dilation": (2, 1), "padding": ((2, 2), (1, 0))}),
    "input-dilation": (KERNEL, {"lhs_dilation": (2, 3), "padding": ((1, 2), (0, 1))}),
    "groups": (GROUPED, {"feature_group_count": 2}),
    "depthwise": (random((3, 2, 1, 8), "f8"), {"feature_group_count": 4}),
}


def solve(a: Any, b: Any, **more: bool) -> Any:
    defaults = {
        "left_side": True,
        "lower": True,
        "transpose_a": False,
        "conjugate_a": False,
        "unit_diagonal": False,
    }
    return lax.linalg.triangular_solve(a, b, **(defaults | more))


TRIANGLE = np.tril(random((2, 3, 3), "f8", 1, 2))

CASES = [
    *(
        Case("dot_general", np.dtype(d).name, jnp.matmul, (A.astype(d), B.astype(d)))
        for d in ("f4", "f8", "f2", BF16, "i4", "c8")
    ),
    *(
        Case(
            "dot_general",
            f"{np.dtype(d).name}-to-{np.dtype(p).name}",
            lambda x, y, p=p: jnp.matmul(x, y, preferred_element_type=p),
            (A.astype(d), B.astype(d)),
        )
        for d, p in ((BF16, "f4"), ("i1", "i4"), ("f4", "f8"), ("f8", "f4"), ("i1", "f4"))
    ),
    Case(
        "dot_general",
        "two-dtypes",
        lambda x, y: lax.dot(x, y, preferred_element_type="f4"),
        (A[0].astype(BF16), B[0].astype("f4")),
    ),
    Case(
        "dot_general",
        "outer",
        lambda x, y: lax.dot_general(x, y, (((), ()), ((), ()))),
        (A[0, 0], B[0, 0]),
    ),
    Case("dot_general", "inner", jnp.dot, (A[0, 0], B[0, :, 0])),
    Case("dot_general", "empty", jnp.matmul, (A[:, :, :0], B[:, :0])),
    Case(
        "dot_general",
        "einsum",
        lambda x, y: jnp.einsum("bij,kjb->ki", x, y),
        (A, random((5, 4, 2), "f8")),
    ),
    Case("dot_general", "gradient", with_gradients(jnp.matmul), (random((2, 3, 5), "f8"), A, B)),
    *(
        Case(
            "conv_general_dilated", name, lambda x, w, m=more: convolve(x, w, **m), (IMAGE, kernel)
        )
        for name, (kernel, more) in CONVOLUTIONS.items()
    ),
    *(
        Case(
            "conv_general_dilated",
            f"{name}-gradient",
            jax.grad(lambda x, w, m=more: jnp.sum(convolve(x, w, **m) ** 2), (0, 1)),
            (IMAGE, kernel),
        )
        for name, (kernel, more) in CONVOLUTIONS.items()
    ),
    *(
        Case(
            "conv_general_dilated", np.dtype(d).name, convolve, (IMAGE.astype(d), KERNEL.astype(d))
        )
        for d in ("f4", BF16)
    ),
    Case(
        "conv_general_dilated",
        "preferred",
        lambda x, w: convolve(x, w, preferred_element_type="f4"),
        (IMAGE.astype(BF16), KERNEL.astype(BF16)),
    ),
    Case(
        "conv_general_dilated",
        "batch-groups",
        lambda x, w: convolve(x, w, batch_group_count=2),
        (random((4, 6, 7, 3)), random((3, 3, 3, 4))),
    ),
    Case(
        "conv_general_dilated",
        "one-dim",
        lambda x, w: lax.conv(x, w, (2,), "VALID"),
        (random((2, 3, 9)), random((4, 3, 2))),
    ),
    Case(
        "conv_general_dilated",
        "three-dims",
        lambda x, w: lax.conv(x, w, (1, 1, 1), "SAME"),
        (random((1, 2, 3, 4, 3)), random((2, 2, 2, 2, 2))),
    ),
    Case(
        "conv_general_dilated",
        "transposed",
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
        (IMAGE, KERNEL),
    ),
    Case(
        "conv_general_dilated",
        "output-layout",
        lambda x, w: convolve(x, w, dimension_numbers=("HNWC", "OHWI", "CWNH")),
        (random((6, 2, 7, 4)), random((5, 3, 2, 4))),
    ),
    Case("ragged_dot_general", "forward", lax.ragged_dot, (ROWS, TABLES, GROUPS)),
    Case(
        "ragged_dot_general", "f4", lax.ragged_dot, (ROWS.astype("f4"), TABLES.astype("f4"), GROUPS)
    ),
    Case(
        "ragged_dot_general",
        "gradient",
        jax.grad(lambda x, w, g: jnp.sum(lax.ragged_dot(x, w, g) ** 2), (0, 1)),
        (ROWS, TABLES, GROUPS),
    ),
    Case("cholesky", "batch", jnp.linalg.cholesky, (SYMMETRIC,)),
    Case("cholesky", "f4", jnp.linalg.cholesky, (SYMMETRIC[0].astype("f4"),)),
    Case(
        "cholesky", "gradient", with_gradients(jnp.linalg.cholesky), (np.tril(SYMMETRIC), SYMMETRIC)
    ),
    *(
        Case(
            "triangular_solve",
            name,
            lambda a, b, m=more: solve(a, b, **m),
            (a, random((2, 3, 3), "f8")),
        )
        for name, a, more in (
            ("lower", TRIANGLE, {}),
            ("upper", TRIANGLE.swapaxes(1, 2), {"lower": False}),
            ("right", TRIANGLE, {"left_side": False}),
            ("transposed", TRIANGLE, {"transpose_a": True}),
            ("unit", TRIANGLE, {"unit_diagonal": True}),
        )
    ),
    Case(
        "triangular_solve",
        "gradient",
        with_gradients(solve),
        (random((2, 3, 3), "f8"), TRIANGLE, random((2, 3, 3), "f8")),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case) -> None:
    check(case.function, *case.args, primitive=case.primitive)


def test_every_rule_has_a_case() -> None:
    assert {case.primitive for case in CASES} == set(RULES)
