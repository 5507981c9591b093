"""Rules that move, cut, join and make tensors, against torch: negative dims, empty parts, steps, offsets."""

import pytest
import torch
from torch.nn import functional as F


def counted(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


CASES = {
    "view": (lambda x: [x.view(6, 4), x.reshape(-1), x.flatten(1), x.view(2, 3, 2, -1)], (2, 3, 4)),
    "view of a transpose": (lambda x: x.transpose(0, 2).reshape(4, 6), (2, 3, 4)),
    "t": (lambda x: x.t(), (2, 3)),
    "t of a vector": (lambda x: x.t(), (3,)),
    "transpose": (lambda x: [x.transpose(-1, 0), x.transpose(1, 1)], (2, 3, 4)),
    "transpose of a scalar": (lambda x: x.transpose(0, -1), ()),
    "permute": (lambda x: [x.permute(2, 0, -2), x.movedim(0, -1), x.swapaxes(0, 1)], (2, 3, 4)),
    "expand": (lambda x: [x.expand(2, 3, 4), x.expand(-1, 4), x.expand(5, -1, -1)], (3, 1)),
    "squeeze": (lambda x: [x.squeeze(), x.squeeze(0), x.squeeze(1), x.squeeze((0, -1))], (1, 3, 1)),
    "unsqueeze": (lambda x: [x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(1)], (2, 3)),
    "slice": (
        lambda x: [x[1:], x[:, -2:], x[:, 1:100:2], x[3:1], x[..., :-1], x[::2, ::3]],
        (4, 5),
    ),
    "select": (lambda x: [x[1], x[-1, 2], x.select(-1, -2), x[:, 0]], (3, 4)),
    "cat": (lambda x: [torch.cat([x, x[:1]]), torch.cat([x, x, x], -1), torch.cat([x])], (2, 3)),
    "cat of empties": (lambda x: torch.cat([x, torch.zeros(0), x[:0]]), (2, 3)),
    "stack": (lambda x: [torch.stack([x, x + 1]), torch.stack([x, x], -1)], (2, 3)),
    "hstack and vstack": (lambda x: [torch.hstack([x, x]), torch.vstack([x, x])], (2, 3)),
    "split": (
        lambda x: [*x.split(2), *x.split([1, 0, 4]), *x.chunk(2, -1), *x.tensor_split(3)],
        (5, 3),
    ),
    "unbind": (lambda x: [*x.unbind(), *x.unbind(-1)], (2, 3)),
    "pad": (
        lambda x: [F.pad(x, (1, 2)), F.pad(x, (0, 0, -1, 1), value=7.0), F.pad(x, (-1, -1))],
        (3, 4),
    ),
    "flip": (lambda x: [x.flip(0), x.flip(-1, 0)], (2, 3)),
    "roll": (lambda x: [x.roll(1), x.roll(-2, 1), x.roll((1, 2), (0, 1)), x.roll(0, 0)], (3, 4)),
    "repeat": (lambda x: [x.repeat(2, 1), x.repeat(3, 1, 2), x.tile((2,)), x.repeat(0, 1)], (2, 3)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, dim=1), (2, 3)),
    "diagonal": (
        lambda x: [x.diagonal(), x.diagonal(1), x.diagonal(-2, -1, 0), x.diagonal(3)],
        (4, 3),
    ),
    "diagonal of a batch": (lambda x: x.diagonal(1, 1, 2), (2, 3, 4)),
    "diag_embed": (lambda x: torch.diag_embed(x, 1), (2, 3)),
    "tril and triu": (lambda x: [x.tril(), x.triu(1), x.tril(-1), x.triu(-1)], (2, 3, 4)),
    "meshgrid": (lambda x: list(torch.meshgrid(x[0], x[1], indexing="xy")), (2, 3)),
    "unfold": (lambda x: [x.unfold(1, 3, 2), x.unfold(-1, 1, 1), x.unfold(0, 2, 1)], (2, 7)),
    "contiguous": (lambda x: x.t().contiguous(), (2, 3)),
    "narrow": (lambda x: x.narrow(1, 1, 2), (2, 4)),
    "atleast": (lambda x: [torch.atleast_2d(x), torch.atleast_3d(x)], ()),
    "slice_scatter": (
        lambda x: [
            torch.slice_scatter(x, x[:2] * 10, 0, 1, 3),
            torch.slice_scatter(x, x[:, :2] * 10, 1, 0, 4, 2),
            torch.select_scatter(x, x[0] * 10, 0, -1),
            torch.slice_scatter(x, x[:0], 0, 2, 2),
        ],
        (4, 5),
    ),
    "as_strided": (lambda x: x.as_strided((2, 2), (1, 2), 1), (2, 4)),
    "empty": (lambda x: [x.reshape(3, 0), x.t(), x.sum(0), torch.cat([x, x], 1)], (0, 3)),
    "like": (
        lambda x: [
            torch.zeros_like(x),
            torch.ones_like(x),
            torch.full_like(x, 2.5),
            x.new_zeros(3),
        ],
        (2, 3),
    ),
    "new": (
        lambda x: [
            x.new_ones(2, 2),
            x.new_full((2,), 3),
            torch.zeros(2),
            torch.ones(2, dtype=torch.int32),
        ],
        (),
    ),
    "copy": (lambda x: torch.ops.aten.copy.default(x, x[0]), (2, 3)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (1, 4, 2, 3)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), (1, 4, 2, 2)),
    "rot90": (lambda x: torch.rot90(x), (2, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_against_torch(compare, name):
    function, shape = CASES[name]
    compare(function, counted(*shape))


@pytest.mark.parametrize(
    "args",
    [(5,), (2, 7), (1, 10, 3), (5, 0, -2), (0,), (0.0, 1.0, 0.3), (3, 3)],
)
def test_arange(compare, args):
    compare(lambda x: torch.arange(*args) + 0 * x, torch.zeros(()))


def test_constants(compare):
    compare(
        lambda x: [
            torch.full((2,), 3) + x,
            torch.eye(3) + x,
            torch.eye(2, 3, dtype=torch.float64) + x,
            torch.tensor([1.5, 2.5]) + x,
            torch.linspace(0, 1, 5) + x,
            torch.scalar_tensor(2.0) + x,
        ],
        torch.zeros(()),
    )


GRADIENTS = {
    "slice": lambda x: x[1:, ::2],
    "slice of a slice": lambda x: x[1:][:1],
    "select": lambda x: x[-1],
    "diagonal": lambda x: x.diagonal(1),
    "diagonal of other dims": lambda x: x.diagonal(-1, 1, 0),
    "flip": lambda x: x.flip(0) * 2,
    "cat": lambda x: torch.cat([x, x[:1]], 0),
    "expand": lambda x: x[:, :1].expand(3, 5) * 2,
    "unfold": lambda x: x.unfold(1, 2, 1),
    "roll": lambda x: x.roll(1, 0) * x,
    "repeat": lambda x: x.repeat(2, 2),
    "stack": lambda x: torch.stack([x, x * x], 1),
    "unbind": lambda x: x.unbind(0)[1],
    "split": lambda x: x.split(2, 1)[0],
    "pad": lambda x: F.pad(x, (1, -1)),
    "tril": lambda x: x.tril(),
    "permute": lambda x: x.permute(1, 0) * 3,
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "view": lambda x: x.view(4, 3) * 2,
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2), 1),
    "masked": lambda x: x.masked_fill(x > 2, 0.0),
    "to": lambda x: x.to(torch.float64) * 2,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient(compare_gradients, name):
    compare_gradients(GRADIENTS[name], torch.randn(3, 4))
