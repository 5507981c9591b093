"""How bundles of arrays of unlike types share fixed fields: what an spmd program needs, where all ranks have one type.

Types that stand in every bundle are fields of their own, leaf by leaf; what is left over is packed, one vector for
each dtype, as long as the longest bundle asks. Nothing is cast. Arrays without elements take no room. With auto axes
every type has fields of its own: a vector of arrays one behind the other cannot lie over devices as each of them does,
and would be whole on each.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
from jax import lax

from plait.core_ir.types import DType, TensorType

Bundle = Sequence[TensorType]


@dataclass(frozen=True)
class Place:
    """Where an array stands: a whole field, or from `offset` on in a packed one; `field` is None for an empty array."""

    field: int | None
    offset: int | None = None


@dataclass(frozen=True)
class Layout:
    """The fields of a pool; the first `num_leaves` hold one array each, the others are packed vectors."""

    fields: tuple[TensorType, ...]
    num_leaves: int

    @classmethod
    def of(cls, bundles: Iterable[Bundle], *, packs: bool = True) -> "Layout":
        """The fields that hold any one of these bundles. packs: what is not in all of them shares a field."""
        counts = [Counter(t for t in bundle if t.size) for bundle in bundles]
        counts = [count for count in counts if count]
        if not counts:
            return cls((), 0)
        common = counts[0].copy()
        for count in counts[1:]:
            common = common & count if packs else common | count
        leaves = tuple(common.elements())
        lengths: dict[DType, int] = {}
        for count in counts:
            for dtype, length in _lengths((count - common).elements()).items():
                lengths[dtype] = max(lengths.get(dtype, 0), length)
        packed = (TensorType(dtype, (length,)) for dtype, length in lengths.items())
        return cls((*leaves, *packed), len(leaves))

    def place(self, bundle: Bundle) -> tuple[Place, ...]:
        """A place for each array of a bundle; equal bundles get equal places."""
        free: dict[TensorType, list[int]] = {}
        for number in reversed(range(self.num_leaves)):
            free.setdefault(self.fields[number], []).append(number)
        packed = {self.fields[n].dtype: n for n in range(self.num_leaves, len(self.fields))}
        ends: dict[DType, int] = {}
        places = []
        for t in bundle:
            if not t.size:
                places.append(Place(None))
            elif free.get(t):
                places.append(Place(free[t].pop()))
            else:
                offset = ends.get(t.dtype, 0)
                ends[t.dtype] = offset + t.size
                places.append(Place(packed[t.dtype], offset))
        return tuple(places)

    @property
    def num_bytes(self) -> int:
        """Bytes of one row of fields."""
        return sum(t.num_bytes for t in self.fields)


def _lengths(types: Iterable[TensorType]) -> dict[DType, int]:
    lengths: dict[DType, int] = {}
    for t in types:
        lengths[t.dtype] = lengths.get(t.dtype, 0) + t.size
    return lengths


def unpack(place: Place, type_: TensorType, fields: Sequence[jax.Array]) -> jax.Array:
    """The array of that type that stands at a place."""
    if place.field is None:
        return lax.full(type_.shape, 0, type_.dtype.numpy)
    field = fields[place.field]
    if place.offset is None:
        return field
    return lax.reshape(
        lax.slice_in_dim(field, place.offset, place.offset + type_.size), type_.shape
    )


def pack(layout: Layout, places: Sequence[Place], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The fields with each array at its place, and zeros where none stands."""
    pieces: dict[int, list[tuple[int, jax.Array]]] = {}
    whole: dict[int, jax.Array] = {}
    for place, array in zip(places, arrays, strict=True):
        if place.field is None:
            continue
        if place.offset is None:
            whole[place.field] = array
        else:
            pieces.setdefault(place.field, []).append((place.offset, array))
    return [
        whole[n] if n in whole else _vector(field, pieces.get(n, []))
        for n, field in enumerate(layout.fields)
    ]


def _vector(field: TensorType, pieces: list[tuple[int, jax.Array]]) -> jax.Array:
    """The field with flattened arrays one behind the other from its start, and zeros behind them."""
    if not pieces:
        return lax.full(field.shape, 0, field.dtype.numpy)
    flat = [lax.reshape(a, (a.size,)) for _, a in sorted(pieces, key=lambda piece: piece[0])]
    rest = field.size - sum(a.size for a in flat)
    if rest:
        flat.append(lax.full((rest,), 0, field.dtype.numpy))
    return lax.concatenate(flat, 0) if len(flat) > 1 else flat[0]
