"""Random ops follow the key: bits as jax.random draws them, one number per op, masks kept for the backward."""

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from plait.core_ir.arrays import to_numpy
from plait.core_ir.errors import CaptureError
from plait.frontends.torch.capture import capture

KEY = (3, 7)


def key_of(number, key=KEY):
    return jax.random.fold_in(jax.random.wrap_key_data(np.array(key, np.uint32)), number)


def caught(loss_fn, model, batch, **kwargs):
    return capture(loss_fn, model, batch, num_microbatches=1, split=None, **kwargs)


def drawn(run, function, key=KEY):
    """What a function of nothing draws, as aux of a program."""

    def loss_fn(model, _):
        return model.weight.sum(), function()

    captured = caught(loss_fn, nn.Linear(1, 1), None, has_aux=True)
    results = run(captured, None, key)
    return [x for (role, _), x in sorted(results.items()) if role == "aux"]


def test_numbers_count_the_ops_of_the_program(run):
    first, second = drawn(run, lambda: [torch.rand(4), torch.rand(4)])
    np.testing.assert_array_equal(first, jax.random.uniform(key_of(0), (4,)))
    np.testing.assert_array_equal(second, jax.random.uniform(key_of(1), (4,)))


def test_another_key_gives_other_numbers(run):
    (a,), (b,) = drawn(run, lambda: [torch.rand(8)]), drawn(run, lambda: [torch.rand(8)], (3, 8))
    assert (a != b).any()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("shape", [(5,), (), (2, 0, 3), (300,)])
def test_uniform(run, dtype, shape):
    (found,) = drawn(run, lambda: [torch.rand(shape, dtype=dtype)])
    with jax.enable_x64(True):
        expected = np.asarray(jax.random.uniform(key_of(0), shape, dtype=str(dtype).split(".")[1]))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    assert ((found >= 0) & (found < 1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_normal(run, dtype):
    found, moved, like = drawn(
        run,
        lambda: [
            torch.randn(1000, dtype=dtype),
            torch.empty(1000, dtype=dtype).normal_(3, 0.5),
            torch.randn_like(torch.ones(7, dtype=dtype)),
        ],
    )
    with jax.enable_x64(True):
        expected = [
            np.asarray(jax.random.normal(key_of(i), (1000,), dtype=found.dtype)) for i in (0, 1)
        ]
    np.testing.assert_allclose(found, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(moved, expected[1] * 0.5 + 3, rtol=1e-5, atol=1e-6)
    assert like.shape == (7,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_normal_in_16_bits_is_finite_and_centred(run, dtype):
    (found,) = drawn(run, lambda: [torch.randn(4000, dtype=dtype)])
    wide = found.astype(np.float64)
    assert np.isfinite(wide).all()
    assert abs(wide.mean()) < 0.1
    assert abs(wide.std() - 1) < 0.1


def test_bernoulli(run):
    found, by_tensor = drawn(
        run,
        lambda: [
            torch.bernoulli(torch.zeros(100), 0.3),
            torch.bernoulli(torch.linspace(0, 1, 100)),
        ],
    )
    np.testing.assert_array_equal(found, jax.random.bernoulli(key_of(0), 0.3, (100,)))
    np.testing.assert_array_equal(
        by_tensor, jax.random.bernoulli(key_of(1), np.linspace(0, 1, 100, dtype=np.float32))
    )


def test_integers_and_permutations(run):
    small, low, wide, perm = drawn(
        run,
        lambda: [
            torch.randint(5, (1000,)), torch.randint(-3, 4, (1000,), dtype=torch.int32),
            torch.randint(0, 1 << 40, (50,)), torch.randperm(50),
        ],
    )  # fmt: skip
    assert set(small.tolist()) == set(range(5))
    assert set(low.tolist()) == set(range(-3, 4))
    assert low.dtype == np.int32
    assert wide.max() > 1 << 33
    assert wide.min() >= 0
    assert sorted(perm.tolist()) == list(range(50))
    assert perm.tolist() != list(range(50))


def test_distributions_of_the_rest(run):
    uniform, exponential = drawn(
        run, lambda: [torch.empty(2000).uniform_(-2, 4), torch.empty(2000).exponential_(2.0)]
    )
    assert uniform.min() >= -2
    assert uniform.max() < 4
    assert abs(uniform.mean() - 1) < 0.2
    assert (exponential >= 0).all()
    assert abs(exponential.mean() - 0.5) < 0.05


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("training", [True, False])
def test_dropout(run, p, training):
    (found,) = drawn(run, lambda: [F.dropout(torch.ones(200), p, training)])
    kept = (
        np.asarray(jax.random.bernoulli(key_of(0), 1 - p, (200,)))
        if training and p
        else np.ones(200, bool)
    )
    expected = np.where(kept, 1 / (1 - p) if training and p < 1 else 1.0, 0.0)
    np.testing.assert_allclose(
        found, expected if not (training and p == 1) else np.zeros(200), rtol=1e-6
    )


class Keyed(TorchDispatchMode):
    """Eager torch with its random masks drawn by key, numbered as they come."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def mask(self, p, shape):
        mask = jax.random.bernoulli(key_of(self.count), p, tuple(shape))
        self.count += 1
        return torch.tensor(np.asarray(mask))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func is aten.bernoulli_.float:
            return args[0].copy_(self.mask(args[1], args[0].shape))
        if func is aten.native_dropout.default:
            x, p, _ = args
            mask = self.mask(1 - p, x.shape)
            return x * mask / (1 - p), mask
        return func(*args, **(kwargs or {}))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.4)

    def forward(self, x):
        return self.drop(self.b(self.drop(self.a(x).relu())))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x).reshape(2, 2, 3, 4)
        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.3, is_causal=True)


@pytest.mark.parametrize(("model", "shape"), [(Noisy, (4, 6)), (Attending, (2, 3, 8))])
def test_the_backward_uses_the_masks_of_the_forward(run, model, shape):
    torch.manual_seed(0)
    model, batch = model(), torch.randn(shape)
    loss_fn = lambda m, x: m(x).square().sum()  # noqa: E731
    results = run(caught(loss_fn, model, batch), batch, KEY)
    with Keyed() as keyed:
        loss = loss_fn(model, batch)
        loss.backward()
    assert keyed.count
    np.testing.assert_allclose(results["loss", ""], loss.item(), rtol=1e-5)
    for name, param in model.named_parameters():
        np.testing.assert_allclose(
            results["param_grad", name], to_numpy(param.grad), rtol=1e-4, atol=1e-5
        )


def test_a_recomputed_random_op_has_the_number_it_had(run):
    class Checkpointed(Noisy):
        def forward(self, x):
            return checkpoint(
                super().forward,
                checkpoint(super().forward, x, use_reentrant=False),
                use_reentrant=False,
            )

    class Plain(Noisy):
        def forward(self, x):
            return super().forward(super().forward(x))

    torch.manual_seed(0)
    model, plain, batch = Checkpointed(), Plain(), torch.randn(4, 6)
    plain.load_state_dict(model.state_dict())
    loss_fn = lambda m, x: (m(x) + torch.rand(6)).square().sum()  # noqa: E731
    found, expected = (run(caught(loss_fn, m, batch), batch, KEY) for m in (model, plain))
    assert found.keys() == expected.keys()
    for port, value in expected.items():
        np.testing.assert_array_equal(found[port], value)


def test_a_random_op_without_a_rule_is_refused():
    with pytest.raises(CaptureError, match=r"test_random\.py:\d+: aten.multinomial.*step's key"):
        caught(
            lambda m, x: (m(x) + torch.multinomial(x, 1)).sum(), nn.Linear(3, 3), torch.ones(2, 3)
        )


def test_captures_do_not_touch_the_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    caught(lambda m, x: m(x).sum(), Noisy(), torch.ones(2, 6))
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), before)
