"""One program for all ranks from those captured at some places of a mesh.

They must be the same but for numbers that are linear in a rank's place along an axis: these are computed from
`axis_index`. At place 0 and 1 of `model`:

    %s: f32[2, 4] = slice(%x) {limit=[2, 4], start=[0, 0]}    and    {limit=[4, 4], start=[2, 0]}    ->

    %i: i32[] = axis_index() {axis="model", size=2}
    %k: i32[] = mul(%i, %two)
    %s: f32[2, 4] = dynamic_slice(%x, %k, %zero) {sizes=[2, 4]}
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from plait.core_ir.build import Builder
from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.mesh import Mesh, Place
from plait.core_ir.op import Literal
from plait.core_ir.ops import collective
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.ops import shape as sh
from plait.core_ir.passes.equations import has_effect
from plait.core_ir.text import print_graph
from plait.core_ir.types import DType, i32

Values: TypeAlias = tuple[Value, ...]
"""A value of the result, as it is in each of the given programs."""
Eqns: TypeAlias = tuple[Eqn, ...]


@dataclass(frozen=True)
class Sample:
    """A program as it was captured at a place."""

    place: Place
    graph: Graph


@dataclass(frozen=True)
class Line:
    """Numbers that are linear in a rank's place: `base`, and by axis what each step along it adds."""

    base: np.ndarray[Any, Any]
    steps: Mapping[str, np.ndarray[Any, Any]]


def merged(samples: Sequence[Sample], mesh: Mesh) -> Graph:
    """The program that is each of the samples at its place. The first one gives the order, and sources.

    samples: with one that is at place 0 along all axes that matter, and for each of these axes one at the last place
        along it and at 0 along the others.

    CaptureError, with the user's line and what differs, where they differ otherwise.
    """
    texts = {print_graph(sample.graph) for sample in samples}
    return samples[0].graph if len(texts) == 1 else _Merging(samples, mesh).graph()


@dataclass(frozen=True)
class _Raised:
    """How equations that stand for one another become one: what it reads, and how it is made of that."""

    operands: Sequence[Values]
    make: Callable[[Sequence[Value]], Sequence[Value]]


class _Merging:
    def __init__(self, samples: Sequence[Sample], mesh: Mesh) -> None:
        self._samples, self._mesh = samples, mesh
        self._graphs = [sample.graph for sample in samples]
        self._b = Builder(self._graphs[0].name)
        self._places: dict[str, Value] = {}

    @cached_property
    def _producers(self) -> list[dict[Value, Eqn]]:
        return [graph.producers() for graph in self._graphs]

    @cached_property
    def _order(self) -> dict[Eqn, int]:
        return {eqn: number for number, eqn in enumerate(self._graphs[0].eqns)}

    def graph(self) -> Graph:
        first, b = self._graphs[0], self._b
        new: dict[Values, Value] = {}
        for values, port in zip(self._together("inputs"), first.input_ports, strict=True):
            new[values] = b.input(values[0].type, port.role, port.name)
        outputs = self._together("outputs")
        raised = self._needed(new, outputs)
        for eqns in sorted(raised, key=lambda eqns: self._order[eqns[0]]):
            with b.at(eqns[0].source):
                made = raised[eqns].make([new[values] for values in raised[eqns].operands])
            for results, value in zip(_columns(e.results for e in eqns), made, strict=True):
                new[results] = value
        for values, port in zip(outputs, first.output_ports, strict=True):
            b.output(new[values], port.role, port.name)
        return b.build()

    def _together(self, what: str) -> list[Values]:
        """Inputs, or outputs, of all programs side by side."""
        for sample in self._samples[1:]:
            ports = [getattr(g, f"{what[:-1]}_ports") for g in (self._graphs[0], sample.graph)]
            types = [getattr(g, f"{what[:-1]}_types") for g in (self._graphs[0], sample.graph)]
            if ports[0] != ports[1] or types[0] != types[1]:
                pairs = zip(zip(*types, strict=False), zip(*ports, strict=False), strict=False)
                odd = next(((a, b, p) for (a, b), (p, q) in pairs if (a, p) != (b, q)), None)
                found = "their number" if odd is None else f"{odd[2]}: {odd[0]} and {odd[1]}"
                raise CaptureError(
                    f"the program has other {what} at {self._where(sample)} than at {self._where(self._samples[0])} "
                    f"({found}); every rank must have tensors of the same shapes"
                )
        return list(_columns(getattr(g, what) for g in self._graphs))

    def _needed(
        self, new: Mapping[Values, Value], outputs: Sequence[Values]
    ) -> dict[Eqns, _Raised]:
        """The equations that outputs and effects need, with what becomes of each."""
        found: dict[Eqns, _Raised] = {}
        pending: list[Eqns] = []
        errors: list[tuple[int, CaptureError]] = []

        def read(values: Sequence[Values]) -> None:
            for one in values:
                if one not in new:
                    try:
                        pending.append(self._eqns_of(one))
                    except CaptureError as error:
                        errors.append((self._number_of(self._producers[0].get(one[0])), error))

        read(outputs)
        pending += self._effects()
        while pending:
            eqns = pending.pop()
            if eqns not in found:
                try:
                    found[eqns] = self._raise(eqns)
                except CaptureError as error:
                    errors.append((self._number_of(eqns[0]), error))
                else:
                    read(found[eqns].operands)
        if errors:  # the first difference: others follow from it
            raise min(errors, key=lambda numbered: numbered[0])[1]
        return found

    def _number_of(self, eqn: Eqn | None) -> int:
        return -1 if eqn is None else self._order[eqn]

    def _effects(self) -> list[Eqns]:
        effects = [[eqn for eqn in graph.eqns if has_effect(eqn)] for graph in self._graphs]
        for eqns in zip(*effects, strict=False):
            if any(eqn.op is not eqns[0].op for eqn in eqns):
                raise self._differ(eqns, [eqn.op.name for eqn in eqns])
        if len(set(map(len, effects))) > 1:
            last = [found[-1] for found in effects if found]
            raise self._differ(
                tuple(last), [f"{len(found)} collectives and marks" for found in effects]
            )
        return list(zip(*effects, strict=True))

    def _eqns_of(self, values: Values) -> Eqns:
        eqns = [p.get(v) for p, v in zip(self._producers, values, strict=True)]
        known = tuple(eqn for eqn in eqns if eqn is not None)
        if len(known) < len(eqns):
            raise self._differ(known, ["an input" if e is None else e.op.name for e in eqns])
        numbers = [eqn.results.index(v) for eqn, v in zip(known, values, strict=True)]
        if any(eqn.op is not known[0].op for eqn in known) or len(set(numbers)) > 1:
            raise self._differ(known, [eqn.op.name for eqn in known])
        return known

    # What becomes of equations of one op.

    def _raise(self, eqns: Eqns) -> _Raised:
        first, op = eqns[0], eqns[0].op
        odd = [name for name in first.attrs if not _same([e.attrs[name] for e in eqns])]
        if op is sh.concatenate and not odd:
            moving = self._moving(eqns)
            if moving is not None:
                return moving
        rule = {sh.constant: self._constant, sh.slice_: self._slice, sh.pad: self._pad}.get(op)
        if odd and rule is not None:
            raised = rule(eqns)
            if raised is not None:
                return raised
        types = [[v.type for v in (*e.operands, *e.results)] for e in eqns]
        if odd or any(t != types[0] for t in types):
            what = [{n: e.attrs[n] for n in odd} or [str(r.type) for r in e.results] for e in eqns]
            raise self._differ(eqns, [f"{op.name} {_shown(w)}" for w in what])

        def make(operands: Sequence[Value]) -> Sequence[Value]:
            return self._b.emit(op, *operands, **first.attrs)

        return _Raised(list(_columns(e.operands for e in eqns)), make)

    def _constant(self, eqns: Eqns) -> _Raised | None:
        """A constant: computed from the places."""
        arrays = [eqn.attrs["value"].array for eqn in eqns]
        line = self._line(arrays)
        if line is None:
            return None
        return _Raised((), lambda _: (self._number(line, eqns[0].result.type.dtype),))

    def _slice(self, eqns: Eqns) -> _Raised | None:
        """A slice: its start is computed."""
        starts = [np.array(eqn.attrs["start"]) for eqn in eqns]
        sizes = [np.array(eqn.attrs["limit"]) - s for eqn, s in zip(eqns, starts, strict=True)]
        line, strides = self._line(starts), eqns[0].attrs["strides"]
        if line is None or not _same([tuple(s) for s in sizes]):
            return None
        if not _same([eqn.attrs["strides"] for eqn in eqns]):
            return None
        window = tuple(map(int, sizes[0]))

        def make(operands: Sequence[Value]) -> Sequence[Value]:
            (x,) = operands
            part = self._b(sh.dynamic_slice, x, *self._scalars(line), sizes=window)
            if any(stride > 1 for stride in strides):
                zeros = (0,) * len(window)
                part = self._b(sh.slice_, part, start=zeros, limit=window, strides=strides)
            return (part,)

        return _Raised(list(_columns(e.operands for e in eqns)), make)

    def _pad(self, eqns: Eqns) -> _Raised | None:
        """Padding whose margins lie differently: the operand is written into it at a computed place."""
        lows = [np.array(eqn.attrs["low"]) for eqn in eqns]
        highs = [np.array(eqn.attrs["high"]) for eqn in eqns]
        totals = [tuple(a + b) for a, b in zip(lows, highs, strict=True)]
        line, interior = self._line(lows), eqns[0].attrs["interior"]
        is_inside = all((a >= 0).all() for a in (*lows, *highs))
        if line is None or not is_inside or not _same(totals):
            return None
        if not _same([eqn.attrs["interior"] for eqn in eqns]):
            return None
        zeros = (0,) * len(interior)

        def make(operands: Sequence[Value]) -> Sequence[Value]:
            x, fill = operands
            if any(interior):
                x = self._b(sh.pad, x, fill, low=zeros, high=zeros, interior=interior)
            whole = self._b.expand(fill, eqns[0].result.type.shape, ())
            return (self._b(sh.dynamic_update_slice, whole, x, *self._scalars(line)),)

        return _Raised(list(_columns(e.operands for e in eqns)), make)

    def _moving(self, eqns: Eqns) -> _Raised | None:
        """A tensor between zeros, which stands at another place among them: what the gradient of a split is."""
        dim, places, moving = eqns[0].attrs["dim"], [], []
        for producers, eqn in zip(self._producers, eqns, strict=True):
            full = [n for n, v in enumerate(eqn.operands) if not _is_zero(v, producers)]
            if len(full) != 1 or not _same([v.type for v in eqn.operands]):
                return None
            places.append(full[0])
            moving.append(eqn.operands[full[0]])
        result = eqns[0].result.type
        starts = [np.zeros(result.rank, np.int64) for _ in eqns]
        for start, place, value in zip(starts, places, moving, strict=True):
            start[dim] = place * value.type.shape[dim]
        line = self._line(starts)
        if _same(places) or line is None or not _same([e.result.type for e in eqns]):
            return None

        def make(operands: Sequence[Value]) -> Sequence[Value]:
            zeros = self._b.full(result, 0)
            return (self._b(sh.dynamic_update_slice, zeros, *operands, *self._scalars(line)),)

        return _Raised([tuple(moving)], make)

    # Numbers that depend on the place.

    def _line(self, arrays: Sequence[np.ndarray[Any, Any]]) -> Line | None:
        """The arrays as numbers linear in the place; None where they are not."""
        if not _same([(a.shape, a.dtype) for a in arrays]) or arrays[0].dtype == bool:
            return None
        places = [sample.place for sample in self._samples]
        axes = [a for a in places[0] if len({place[a] for place in places}) > 1]
        at = {tuple(place[a] for a in axes): x for place, x in zip(places, arrays, strict=True)}
        base = at[(0,) * len(axes)]
        steps = {}
        for number, axis in enumerate(axes):
            last = self._mesh.axes[axis] - 1
            end = at[tuple(last if n == number else 0 for n in range(len(axes)))]
            steps[axis] = ((end - base) / last).astype(base.dtype)
        with np.errstate(all="ignore"):
            for place, array in zip(places, arrays, strict=True):
                moved = base
                for axis, step in steps.items():
                    moved = moved + np.array(place[axis], base.dtype) * step
                if not np.array_equal(moved, array, equal_nan=base.dtype.kind in "fc"):
                    return None
        return Line(base, {axis: step for axis, step in steps.items() if step.any()})

    def _number(self, line: Line, dtype: DType) -> Value:
        """The numbers of a line, at this rank."""
        b, total = self._b, self._b(sh.constant, value=Literal(line.base))
        for axis, step in line.steps.items():
            place = b.expand(b.convert(self._place(axis), dtype), total.type.shape)
            moved = b(ew.mul, place, b(sh.constant, value=Literal(step)))
            total = b(ew.add, total, moved)
        return total

    def _scalars(self, line: Line) -> list[Value]:
        """Each of the numbers as an i32."""
        return [
            self._number(
                Line(
                    start.astype(np.int32),
                    {a: s[n].astype(np.int32) for a, s in line.steps.items() if s[n]},
                ),
                i32,
            )
            for n, start in enumerate(line.base)
        ]

    def _place(self, axis: str) -> Value:
        if axis == self._mesh.stage_axis:
            raise CaptureError(
                f"{self._b.source}: a number depends on the rank's place along {axis!r}, the axis of the stages; what "
                "a stage is given does not depend on where it runs: use the number of the layer"
            )
        if axis not in self._places:
            size = self._mesh.axes[axis]
            self._places[axis] = self._b(collective.axis_index, axis=axis, size=size)
        return self._places[axis]

    # Differences.

    def _where(self, sample: Sample) -> str:
        return ", ".join(f"{axis}={number}" for axis, number in sample.place.items())

    def _differ(self, eqns: Sequence[Eqn], what: Sequence[str]) -> CaptureError:
        other = next(n for n, w in enumerate(what) if w != what[0]) if len(set(what)) > 1 else -1
        source = eqns[0].source if eqns else "the program"
        return CaptureError(
            f"{source}: ranks would run different programs: {what[0]} on the rank at "
            f"{self._where(self._samples[0])}, {what[other]} at {self._where(self._samples[other])}. One program is "
            "for all ranks; it can depend on a rank's place through numbers that grow by the same step from rank to "
            "rank, such as offsets and starts of slices, or through tensors: a buffer that holds the rank's number, "
            "and torch.where"
        )


def _columns(rows: Any) -> Iterator[tuple[Any, ...]]:
    return zip(*rows, strict=True)


def _same(items: Sequence[Any]) -> bool:
    keys = [print_graph(x) if isinstance(x, Graph) else x for x in map(_unfolded, items)]
    return all(key == keys[0] for key in keys)


def _unfolded(attr: Any) -> Any:
    """An attribute with text in place of graphs."""
    if isinstance(attr, tuple):
        return tuple(map(_unfolded, attr))
    return print_graph(attr) if isinstance(attr, Graph) else attr


def _is_zero(value: Value, producers: Mapping[Value, Eqn]) -> bool:
    eqn = producers.get(value)
    while eqn is not None and eqn.op is sh.broadcast:
        eqn = producers.get(eqn.operands[0])
    return eqn is not None and eqn.op is sh.constant and not eqn.attrs["value"].array.any()


def _shown(what: Any) -> str:
    """Attributes, or types, in short."""
    if not isinstance(what, dict):
        return ", ".join(what)
    return ", ".join(
        f"{name}={x.array.tolist() if isinstance(x, Literal) and x.array.size <= 8 else x}"
        for name, x in what.items()
    )
