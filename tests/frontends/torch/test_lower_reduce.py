"""Rules of reductions, cumulative ops, sorting and softmax against torch: dims, empties, ties, NaN, 16-bit floats."""

import math

import pytest
import torch

nan, inf = math.nan, math.inf
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = {
    "sum": lambda x: [x.sum(), x.sum(0), x.sum((0, -1)), x.sum(1, keepdim=True), x.sum(())],
    "mean": lambda x: [x.mean(), x.mean(-1), x.mean((0, 1), keepdim=True)],
    "amax": lambda x: [x.amax(), x.amax(1), x.amax((0, -1), keepdim=True)],
    "amin": lambda x: [x.amin(), x.amin(1), x.amin((0, -1), keepdim=True)],
    "max": lambda x: [x.max(), *x.max(1), *x.max(-1, keepdim=True)],
    "min": lambda x: [x.min(), *x.min(0), *x.min(-1, keepdim=True)],
    "argmax": lambda x: [x.argmax(), x.argmax(1), x.argmax(-1, keepdim=True)],
    "argmin": lambda x: [x.argmin(), x.argmin(0), x.argmin(-1, keepdim=True)],
    "prod": lambda x: [x.prod(), x.prod(1), x.prod(-1, keepdim=True)],
    "any": lambda x: [x.any(), x.any(0), x.any(-1, keepdim=True)],
    "all": lambda x: [x.all(), x.all(0), x.all(-1, keepdim=True)],
    "var": lambda x: [x.var(), x.var(0), x.var((0, 2), correction=0), x.var(1, keepdim=True)],
    "std": lambda x: [x.std(), x.std(-1, correction=0)],
    "var_mean": lambda x: [
        *torch.var_mean(x, 1),
        *torch.var_mean(x, (0, 1), correction=0, keepdim=True),
    ],
    "norm": lambda x: [
        x.norm(),
        x.norm(1, -1),
        x.norm(3, 0),
        x.norm(inf, 1),
        x.norm(-inf, 1),
        x.norm(0, 2),
    ],
    "cumsum": lambda x: [x.cumsum(0), x.cumsum(-1)],
    "cumprod": lambda x: [x.cumprod(0), x.cumprod(-1)],
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "logsumexp": lambda x: [x.logsumexp(0), x.logsumexp((0, 1), keepdim=True)],
    "softmax": lambda x: [x.softmax(0), x.softmax(-1), x.log_softmax(1)],
    "count_nonzero": lambda x: [x.count_nonzero(), x.count_nonzero(1)],
    "nansum": lambda x: x.nansum(1),
    "aminmax": lambda x: list(torch.aminmax(x, dim=1)),
    "sort": lambda x: [
        *x.sort(stable=True, dim=-1),
        *x.sort(dim=0, descending=True, stable=True),
        x.argsort(dim=1, stable=True),
    ],
    "topk": lambda x: [*x.topk(2), *x.topk(1, 0), *x.topk(2, -1, largest=False)],
    "cummax": lambda x: [*x.cummax(1), *x.cummin(-1)],
    "median": lambda x: [x.median(), *x.median(1), *x.kthvalue(2, 1)],
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_of_floats(compare, name, dtype):
    torch.manual_seed(0)
    x = torch.randperm(24).reshape(2, 3, 4).to(dtype) / 8 - 1
    if name == "logcumsumexp" and dtype != torch.float64:
        x = x.double()
    compare(REDUCTIONS[name], x)


@pytest.mark.parametrize(
    "name", ["sum", "amax", "max", "argmax", "prod", "any", "all", "cumsum", "sort", "topk", "min"]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_of_integers(compare, name, dtype):
    torch.manual_seed(0)
    compare(
        REDUCTIONS[name],
        torch.randperm(24).reshape(2, 3, 4).to(dtype) % 7
        + torch.arange(24).reshape(2, 3, 4).to(dtype) * 7
        if name in ("sort", "topk")
        else torch.randperm(24).reshape(2, 3, 4).to(dtype),
    )


@pytest.mark.parametrize("name", ["sum", "any", "all", "argmax", "amax", "cumsum", "max"])
def test_of_bools(compare, name):
    x = torch.tensor([[[True, False], [False, False]], [[True, True], [False, True]]])
    function = REDUCTIONS[name]
    if name == "argmax":
        function = lambda x: x.int().argmax(1)  # noqa: E731
    if name == "max":
        function = lambda x: x.max()  # noqa: E731
    compare(function, x)


@pytest.mark.parametrize(
    "name",
    ["amax", "max", "argmax", "amin", "min", "argmin", "sort", "sum", "mean", "softmax", "cumsum"],
)
def test_nan_and_infinity(compare, name):
    x = torch.tensor([[[1.0, nan, inf, -inf], [nan, nan, 2.0, 1.0], [inf, 5.0, -inf, 0.0]]])
    compare(REDUCTIONS[name], x)


def test_ties(compare):
    x = torch.tensor([[2.0, 1.0, 2.0, 1.0], [0.0, -0.0, 0.0, -0.0]])
    compare(
        lambda x: [
            x.argmax(1),
            x.argmin(1),
            *x.sort(dim=1, stable=True),
            *x.sort(dim=1, descending=True, stable=True),
        ],
        x,
    )
    compare(lambda x: [*x.max(1), *x.min(1)], x)


def test_empty(compare):
    compare(
        lambda x: [x.sum(), x.sum(0), x.sum(1), x.mean(0), x.prod(1), x.any(0), x.all(1), x.amax(1), x.cumsum(0),
                   x.softmax(0), x.softmax(1), x.log_softmax(1), *x.sort(1), x.norm(dim=1)],
        torch.zeros(0, 3),
    )  # fmt: skip
    compare(lambda x: [x.logsumexp(1), x.norm(dim=1), x.sum(1), x.mean(1)], torch.zeros(2, 0))


def test_scalars(compare):
    compare(
        lambda x: [x.sum(), x.sum(0), x.mean(-1), x.amax(0), *x.max(0), x.argmax(), x.cumsum(0), x.softmax(0),
                   x.log_softmax(-1), *x.sort(0), *x.topk(1), x.var(correction=0), x.prod()],
        torch.tensor(2.5),
    )  # fmt: skip


def test_dtype_arguments(compare):
    x = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    compare(
        lambda x: [
            x.sum(dtype=torch.float32),
            x.mean(dtype=torch.float64),
            x.cumsum(0, dtype=torch.int64),
            x.prod(dtype=torch.float32),
        ],
        x,
    )
    compare(lambda x: x.softmax(0, dtype=torch.float32), torch.randn(4, dtype=torch.bfloat16))


def test_softmax_of_masked_rows(compare):
    x = torch.tensor([[-inf, -inf], [0.0, -inf], [1e4, 1.0]])
    compare(
        lambda x: [torch.ops.aten._safe_softmax(x, -1), x[1:].softmax(1), x[1:].log_softmax(1)], x
    )


GRADIENTS = {
    "sum": lambda x: x.sum(1) * 2,
    "mean": lambda x: x.mean((0, 1)),
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(1)[0],
    "max of all": lambda x: x.max(),
    "prod": lambda x: x.prod(1),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std(),
    "norm": lambda x: x.norm(dim=1),
    "norm 1": lambda x: x.norm(1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(0),
    "sort": lambda x: x.sort(1)[0],
    "topk": lambda x: x.topk(2)[0],
    "cummax": lambda x: x.cummax(1)[0],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient(compare_gradients, name, dtype):
    torch.manual_seed(0)
    compare_gradients(GRADIENTS[name], (torch.randperm(12).reshape(3, 4) / 4 - 1.1).to(dtype))
