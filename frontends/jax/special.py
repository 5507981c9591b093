"""Meanings, as functions of arrays, of primitives that JAX computes by a formula or by a loop.

JAX's own functions where it has them; tested with jax 0.10.2, whose private modules they live in.
"""

from collections.abc import Callable, Sequence
from math import factorial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lax import special
from jax._src.random import core as random
from numpy.polynomial.chebyshev import chebinterpolate
from numpy.typing import NDArray
from scipy.special import bernoulli, i1e

from plait.frontends.jax.jaxpr import Jaxpr, as_function, closed

_NUM_TERMS, _NUM_CORRECTIONS = 10, 12


def random_gamma(key: Any, a: Any, *, log_space: bool) -> Any:
    """Samples of the gamma distribution, or their logarithms."""
    return random._gamma_impl(key, a, log_space=log_space, use_vmap=True)  # type: ignore[no-untyped-call]


def zeta(x: Any, q: Any) -> Any:
    """The Hurwitz zeta function: the sum over k >= 0 of (q + k)^-x, by the formula of Euler and Maclaurin."""
    total = sum((q + k) ** -x for k in range(_NUM_TERMS))
    end = q + _NUM_TERMS
    power = end**-x
    tail = power * end / (x - 1) + power / 2
    numbers, rising = bernoulli(2 * _NUM_CORRECTIONS), x
    for j in range(1, _NUM_CORRECTIONS + 1):
        tail += numbers[2 * j] / factorial(2 * j) * rising * power * end ** (1 - 2 * j)
        rising = rising * (x + 2 * j - 1) * (x + 2 * j)
    small = jnp.abs(power) < jnp.abs(total) * float(np.finfo(x.dtype).eps)
    result = jnp.where(small, total, total + tail)
    whole_x, pole = x == jnp.floor(x), (q <= 0) & (q == jnp.floor(q))
    result = jnp.where(pole, jnp.where(whole_x & (x % 2 == 0), jnp.inf, jnp.nan), result)
    result = jnp.where((q <= 0) & ~pole & ~whole_x, jnp.nan, result)
    return jnp.where(x == 1, jnp.inf, jnp.where(x < 1, jnp.nan, result))


def polygamma(n: Any, x: Any) -> Any:
    """The n-th derivative of digamma."""
    sign = jnp.where(n % 2 == 0, -1, 1).astype(x.dtype)
    derivative = sign * jnp.exp(jax.lax.lgamma(n + 1)) * zeta(n + 1, x)
    result = jnp.where(n == 0, jax.lax.digamma(x), derivative)
    return jnp.where((n < 0) | (n != jnp.floor(n)), jnp.nan, result)


def bessel_i1e(x: Any) -> Any:
    """exp(-|x|) times the modified Bessel function of order 1, by a polynomial up to 8 and one of 1/x beyond."""
    size = jnp.abs(x)
    near, far = jnp.minimum(size, 8), jnp.maximum(size, 8)
    small = near * _chebyshev(_I1E_NEAR, near / 4 - 1)
    large = _chebyshev(_I1E_FAR, 16 / far - 1) / jnp.sqrt(far)
    return jnp.sign(x) * jnp.where(size <= 8, small, large)


_I1E_NEAR = chebinterpolate(lambda t: i1e(4 * (t + 1)) / (4 * (t + 1)), 29)
_I1E_FAR = chebinterpolate(lambda t: i1e(16 / (t + 1)) * np.sqrt(16 / (t + 1)), 24)


def _chebyshev(coefficients: NDArray[np.float64], t: Any) -> Any:
    """The sum of Chebyshev polynomials by Clenshaw's recurrence."""
    first, second = jnp.zeros_like(t), jnp.zeros_like(t)
    for c in map(float, coefficients[:0:-1]):
        first, second = 2 * t * first - second + c, first
    return t * first - second + float(coefficients[0])


def in_one_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on arrays of one shape, 8- and 16-bit floats computed in f32 and rounded once."""

    def computed(*operands: Any) -> Any:
        dtype = operands[0].dtype
        wide = dtype if dtype.itemsize > 2 else np.dtype(np.float32)
        return function(*(x.astype(wide) for x in jnp.broadcast_arrays(*operands))).astype(dtype)

    return computed


def reduce(*operands: Any, jaxpr: Jaxpr, dimensions: Sequence[int], **_: Any) -> list[Any]:
    """A reduction by any function: arrays, then what each starts from; one element after the other."""
    arrays, starts = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    dims = tuple(dimensions)
    moved = [jnp.moveaxis(x, dims, range(len(dims))) for x in arrays]
    kept = moved[0].shape[len(dims) :]
    rows = [x.reshape(-1, int(np.prod(kept))) for x in moved]
    combine = jax.vmap(as_function(closed(jaxpr)))
    first = [jnp.broadcast_to(s, rows[0].shape[1:]) for s in starts]
    last, _unused = jax.lax.scan(lambda acc, xs: (combine(*acc, *xs), None), first, rows)
    return [x.reshape(kept) for x in last]


_widened: Callable[..., Any] = special._up_and_broadcast
igamma = _widened(special.igamma_impl)
igammac = _widened(special.igammac_impl)
igamma_grad_a = _widened(special.igamma_grad_a_impl)
regularized_incomplete_beta = _widened(special.regularized_incomplete_beta_impl)
bessel_i0e = special.bessel_i0e_impl
