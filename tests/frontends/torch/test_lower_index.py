"""Rules of indexing, gather, scatter, embeddings and class losses against torch."""

import pytest
import torch
from torch.nn import functional as F

I = torch.tensor  # noqa: E741


def x34():
    return torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize("function", [
    lambda x, i: x[i],
    lambda x, i: x[:, i],
    lambda x, i: x[i, i],
    lambda x, i: x[i, :2],
    lambda x, i: x[i[:, None], i],
    lambda x, i: x[i.reshape(1, -1)],
    lambda x, i: x[None, i],
    lambda x, i: x[..., i],
    lambda x, i: x[i, 0],
    lambda x, i: x[i[:0]],
], ids=range(10))  # fmt: skip
def test_index_wraps_negative_indices(compare, function):
    compare(function, x34(), I([0, -1, 2, -3]))


def test_index_of_split_dims_comes_first(compare):
    x = torch.arange(24.0).reshape(2, 3, 4)
    compare(lambda x, i: [x[i, :, i], x[:, i, i], x[i, i, i], x[i, :, 1]], x, I([0, 1, -1]))


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(compare, accumulate):
    put = torch.ops.aten.index_put.default
    x, i = x34(), I([0, -1])
    compare(lambda x, i, v: put(x, [i], v, accumulate), x, i, torch.randn(2, 4))
    compare(lambda x, i, v: put(x, [None, i], v, accumulate), x, i, torch.randn(3, 2))
    compare(lambda x, i, v: put(x, [i, i], v, accumulate), x, i, torch.tensor(5.0))
    compare(lambda x, m, v: put(x, [m], v, accumulate), x, x > 4, torch.tensor(5.0))
    compare(
        lambda x, m, v: put(x, [m], v, accumulate), x, I([True, False, True]), torch.tensor([5.0])
    )


def test_index_put_adds_duplicates(compare):
    compare(
        lambda x, i, v: torch.ops.aten.index_put.default(x, [i], v, True),
        x34(),
        I([1, 1, 1]),
        torch.randn(3, 4),
    )


def test_gather(compare):
    i = I([[0, 2, 1], [2, 0, 0]])
    compare(
        lambda x, i: [x.gather(0, i), x.gather(1, i), x.gather(-1, i[:, :1]), x.gather(0, i[:0])],
        x34(),
        i,
    )
    compare(lambda x, i: x.gather(0, i), torch.tensor(3.0), torch.tensor(0))
    compare(lambda x, i: [torch.take_along_dim(x, i, 1)], x34(), I([[3], [0], [1]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_scatter(compare, dtype):
    x, i = x34().to(dtype), I([[0, 2, 1], [2, 0, 0]])
    src = torch.arange(6).reshape(2, 3).to(dtype) + 100
    one = I([[0, 1, 2, 0]])
    compare(
        lambda x, i, v: [x.scatter(0, i, v), x.scatter(0, i, 7), x.scatter(1, i[:, :1], v[:, :1])],
        x,
        one,
        src.reshape(1, 6)[:, :4].clone(),
    )
    compare(
        lambda x, i, v: [
            x.scatter_add(0, i, v),
            x.scatter_add(1, i, v),
            torch.ops.aten.scatter.reduce(x, 1, i, v, reduce="add"),
        ],
        x,
        i,
        src,
    )
    compare(lambda x, i, v: torch.ops.aten.scatter.reduce(x, 1, i, v, reduce="multiply"), x, i, src)
    compare(lambda x, i, v: x.scatter_add(0, i, v), x, i[:, :2].clone(), src)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_scatter_reduce(compare, reduce, include_self, dtype):
    x, i = x34().to(dtype), I([[0, 2, 1], [2, 0, 0]])
    src = torch.tensor([[3, -1, 2], [5, 4, 6]], dtype=dtype)
    compare(lambda x, i, v: x.scatter_reduce(0, i, v, reduce, include_self=include_self), x, i, src)


def test_along_a_dim(compare):
    x, i = x34(), I([2, 0])
    compare(
        lambda x, i: [x.index_select(0, i), x.index_select(-1, i), x.index_select(1, i[:0])], x, i
    )
    compare(
        lambda x, i, v: [
            x.index_add(0, i, v),
            x.index_add(0, i, v, alpha=2),
            x.index_copy(0, i, v),
        ],
        x,
        i,
        torch.randn(2, 4),
    )
    compare(lambda x, i, v: [x.index_add(1, i, v)], x, I([1, 1]), torch.randn(3, 2))
    compare(lambda x, i: [x.index_fill(1, i, 9.0), x.index_fill(0, i, torch.tensor(9.0))], x, i)
    compare(lambda x, i: x.take(i), x, I([0, -1, 5]))


def test_one_hot_and_membership(compare):
    compare(lambda i: F.one_hot(i, 4), I([[0, 3], [2, 1]]))
    compare(lambda x: torch.isin(x, torch.tensor([1, 4])), I([0, 1, 4, 5]))


def test_out_of_range_reads_are_nan_and_writes_are_dropped(lowered):
    from_table = lowered(lambda t, i: F.embedding(i, t), (torch.randn(3, 2), I([0])))
    (gather,) = (e for e in from_table.eqns if e.op.name == "gather")
    assert gather.attrs["mode"] == "fill"
    scatter = lowered(
        lambda x, i, v: x.index_add(0, i, v), (torch.randn(3, 2), I([0]), torch.randn(1, 2))
    )
    assert scatter.eqns[-1].attrs["mode"] == "drop"


@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("by_freq", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embedding(compare_gradients, padding_idx, by_freq, dtype):
    ids = I([[0, 2, 2], [1, 0, 2]])
    compare_gradients(
        lambda table: F.embedding(ids, table, padding_idx=padding_idx, scale_grad_by_freq=by_freq),
        torch.randn(4, 3, dtype=dtype),
    )


def test_embedding_of_odd_shapes(compare):
    table = torch.randn(4, 3)
    compare(lambda t, i: F.embedding(i, t), table, torch.tensor(2))
    compare(lambda t, i: F.embedding(i, t), table, torch.zeros(2, 0, dtype=torch.int64))
    compare(lambda t, i: F.embedding(i, t), table, torch.tensor([1, 3], dtype=torch.int32))


GRADIENTS = {
    "index": lambda x: x[I([0, -1, 0])],
    "index of two": lambda x: x[I([0, 2, 0]), I([1, 1, 1])],
    "gather": lambda x: x.gather(1, I([[0, 0], [3, 1], [2, 2]])),
    "scatter": lambda x: (x * x).scatter(0, I([[0, 1, 2, 0]]), 2.0),
    "scatter_add": lambda x: x.scatter_add(0, I([[0, 0, 2, 1]]), x[:1] * 3),
    "index_select": lambda x: x.index_select(1, I([1, 1, 3])),
    "index_put": lambda x: torch.ops.aten.index_put.default(x, [I([0, 2])], x[:2] * 2),
    "index_add": lambda x: x.index_add(0, I([1, 1]), x[:2] * 2),
    "take_along": lambda x: torch.take_along_dim(x, x.argsort(1), 1),
    "masked assignment": lambda x: torch.where(x > 0, x, x * 0.1),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient(compare_gradients, name):
    torch.manual_seed(0)
    compare_gradients(GRADIENTS[name], torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5, 4), (4,), (2, 4, 3), (2, 4, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy(compare_gradients, reduction, weighted, shape, dtype):
    torch.manual_seed(0)
    rest = (shape[0], *shape[2:]) if len(shape) > 1 else ()
    target = torch.randint(0, 4, rest)
    if target.ndim:
        target.view(-1)[0] = -100
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=dtype) if weighted else None
    compare_gradients(
        lambda x: F.cross_entropy(x, target, weight=weight, reduction=reduction),
        torch.randn(shape, dtype=dtype),
    )


@pytest.mark.parametrize("loss", [
    lambda x, y: F.mse_loss(x, y),
    lambda x, y: F.mse_loss(x, y, reduction="sum"),
    lambda x, y: F.mse_loss(x, y, reduction="none"),
    lambda x, y: F.l1_loss(x, y),
    lambda x, y: F.smooth_l1_loss(x, y),
    lambda x, y: F.huber_loss(x, y, delta=0.5),
    lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    lambda x, y: F.cross_entropy(x, y.softmax(1), label_smoothing=0.1),
    lambda x, y: F.cosine_similarity(x, y),
    lambda x, y: F.hinge_embedding_loss(x, torch.ones(3, 4)),
    lambda x, y: F.soft_margin_loss(x, torch.ones(3, 4)),
    lambda x, y: F.pairwise_distance(x, y),
    lambda x, y: F.poisson_nll_loss(x, y),
], ids=range(15))  # fmt: skip
def test_losses_of_numbers(compare_gradients, loss):
    torch.manual_seed(0)
    compare_gradients(loss, torch.randn(3, 4), torch.randn(3, 4))
