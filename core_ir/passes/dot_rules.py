"""Rules that take movement of data into the dims of `dot_general`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.core_ir.graph import Eqn, Value
from plait.core_ir.ops.linalg import dot_general
from plait.core_ir.ops.shape import reshape, transpose
from plait.core_ir.passes.folder import Folder

_Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Side:
    """One operand of a product: a value and its dims in three parts."""

    value: Value
    batch: _Shape
    contract: _Shape

    @property
    def free(self) -> _Shape:
        """The dims that go to the result, in order."""
        taken = {*self.batch, *self.contract}
        return tuple(d for d in range(self.value.type.rank) if d not in taken)

    def sizes(self, dims: Sequence[int]) -> _Shape:
        """Sizes of some dims, but for those of size 1."""
        return tuple(self.value.type.shape[d] for d in dims if self.value.type.shape[d] != 1)


def _sides(eqn: Eqn) -> tuple[_Side, _Side]:
    (a, b), batch, contract = eqn.operands, eqn.attrs["batch"], eqn.attrs["contract"]
    return _Side(a, batch[0], contract[0]), _Side(b, batch[1], contract[1])


def _make(folder: Folder, eqn: Eqn, a: _Side, b: _Side) -> Value:
    """The product of two sides; the pairs of contracted dims in the order of the first side."""
    pairs = sorted(zip(a.contract, b.contract, strict=True))
    attrs: dict[str, Any] = {
        **eqn.attrs,
        "batch": (a.batch, b.batch),
        "contract": (tuple(p for p, _ in pairs), tuple(q for _, q in pairs)),
    }
    return folder.make(dot_general, a.value, b.value, **attrs)


def fold_dot(folder: Folder, eqn: Eqn) -> Value | None:
    """Of a transpose: of its operand, unless that exchanges free dims. Of reshapes that join dims: of these dims."""
    a, b = _sides(eqn)
    plain_a, plain_b = _without_transpose(folder, a), _without_transpose(folder, b)
    if plain_a is not a or plain_b is not b:
        return _make(folder, eqn, plain_a, plain_b)
    apart = _without_reshapes(folder, a, b)
    if apart is None and (freed := (_with_free_apart(folder, a), _with_free_apart(folder, b))) != (
        a,
        b,
    ):
        apart = freed
    if apart is not None:
        return folder.make(reshape, _make(folder, eqn, *apart), shape=eqn.result.type.shape)
    if list(a.contract) != sorted(a.contract):
        return _make(folder, eqn, a, b)
    return None


def fold_transposed_dot(folder: Folder, eqn: Eqn) -> Value | None:
    """A transpose of a product that nothing else reads: the product with operands or batch dims exchanged."""
    (x,), permutation = eqn.operands, eqn.attrs["permutation"]
    inner = folder.made_by(x, dot_general)
    if inner is None or folder.is_shared(x):
        return None
    a, b = _sides(inner)
    num_batch, num_free = len(a.batch), len(a.free)
    first, rest = permutation[:num_batch], list(permutation[num_batch:])
    if any(d >= num_batch for d in first):
        return None
    a_free = list(range(num_batch, num_batch + num_free))
    b_free = list(range(num_batch + num_free, len(permutation)))
    a = _Side(a.value, tuple(a.batch[d] for d in first), a.contract)
    b = _Side(b.value, tuple(b.batch[d] for d in first), b.contract)
    if rest == a_free + b_free:
        return _make(folder, inner, a, b)
    if rest == b_free + a_free:
        return _make(folder, inner, b, a)
    return None


def _without_transpose(folder: Folder, side: _Side) -> _Side:
    inner = folder.made_by(side.value, transpose)
    if inner is None:
        return side
    source = inner.attrs["permutation"]
    free = [source[d] for d in side.free]
    if free != sorted(free):
        return side
    return _Side(
        inner.operands[0],
        tuple(source[d] for d in side.batch),
        tuple(source[d] for d in side.contract),
    )


def _without_reshapes(folder: Folder, a: _Side, b: _Side) -> tuple[_Side, _Side] | None:
    """Both sides with their reshapes undone; None where there is none, or the dims do not pair."""
    for try_a, try_b in ((True, True), (True, False), (False, True)):
        plain_a = _without_reshape(folder, a) if try_a else a
        plain_b = _without_reshape(folder, b) if try_b else b
        if plain_a is None or plain_b is None:
            continue
        same_batch = plain_a.sizes(plain_a.batch) == plain_b.sizes(plain_b.batch)
        if same_batch and plain_a.sizes(plain_a.contract) == plain_b.sizes(plain_b.contract):
            return _without_units(plain_a), _without_units(plain_b)
    return None


def _without_units(side: _Side) -> _Side:
    """Dims of size 1 are free: alone in a result they can be reshaped away."""
    shape = side.value.type.shape
    return _Side(
        side.value,
        tuple(d for d in side.batch if shape[d] != 1),
        tuple(d for d in side.contract if shape[d] != 1),
    )


def _without_reshape(folder: Folder, side: _Side) -> _Side | None:
    inner = folder.made_by(side.value, reshape)
    if inner is None:
        return None
    (x,) = inner.operands
    groups = _joined(x.type.shape, side.value.type.shape)
    if groups is None:
        return None
    return _Side(
        x,
        tuple(d for joined in side.batch for d in groups[joined]),
        tuple(d for joined in side.contract for d in groups[joined]),
    )


def _with_free_apart(folder: Folder, side: _Side) -> _Side:
    """The side with joined free dims apart, where its other dims have to stay joined."""
    inner = folder.made_by(side.value, reshape)
    groups = _joined(inner.operands[0].type.shape, side.value.type.shape) if inner else None
    if inner is None or groups is None:
        return side
    (x,), shape = inner.operands, side.value.type.shape
    sizes = [
        [x.type.shape[i] for i in groups[d]] if d in side.free else [shape[d]]
        for d in range(len(shape))
    ]
    target = tuple(size for part in sizes for size in part)
    if target == shape:
        return side
    starts = [sum(map(len, sizes[:d])) for d in range(len(shape))]
    return _Side(
        folder.make(reshape, x, shape=target),
        tuple(starts[d] for d in side.batch),
        tuple(starts[d] for d in side.contract),
    )


def _joined(shape: _Shape, result: _Shape) -> list[list[int]] | None:
    """For each result dim, the dims that multiply to it, without those of size 1; None where one is taken apart."""
    if 0 in shape:
        return None
    dims = [d for d, size in enumerate(shape) if size != 1]
    groups: list[list[int]] = []
    for size in result:
        group: list[int] = []
        product = 1
        while product < size:
            if not dims:
                return None
            product *= shape[dims[0]]
            group.append(dims.pop(0))
        if product != size:
            return None
        groups.append(group)
    return groups
