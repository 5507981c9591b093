"""Fold views around an exchange into the dims that it cuts and joins.

    %h: async<f32[4, 3]> = all_to_all(%x) {concat_dim=0, split_dim=0, ...}
    %w: f32[4, 3] = wait(%h)
    %a: f32[2, 2, 3] = reshape(%w) {shape=[2, 2, 3]}
    %b: f32[2, 2, 3] = transpose(%a) {permutation=[1, 0, 2]}
    %y: f32[2, 6] = reshape(%b) {shape=[2, 6]}
                            ->  %h: async<f32[2, 6]> = all_to_all(%x) {concat_dim=1, split_dim=0, ...}
                                %y: f32[2, 6] = wait(%h)

torch exchanges rows alone and moves them before and after; JAX names any dims. So equal programs come out equal, and
what follows reads matrices as they are. Exchanges and their order stay.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops.collective import all_to_all, wait
from plait.core_ir.ops.shape import reshape, transpose
from plait.core_ir.passes.element_order import Elements, elements

_VIEWS = (reshape, transpose)


@dataclass(frozen=True)
class _Exchange:
    """An exchange with the views before it, in order, and those behind it, each read by the next one alone."""

    start: Eqn
    end: Eqn
    before: tuple[Eqn, ...]
    behind: tuple[Eqn, ...]


def fold_exchanges(graph: Graph) -> Graph:
    """The graph with such views folded; those before an exchange may be left dead."""
    now: dict[Eqn, Eqn | None] = {}
    for found in _exchanges(graph):
        folded = _folded(found)
        if folded is not None:
            now |= folded
    eqns = (now.get(eqn, eqn) for eqn in graph.eqns)
    return replace(graph, eqns=tuple(eqn for eqn in eqns if eqn is not None)) if now else graph


def _exchanges(graph: Graph) -> Iterator[_Exchange]:
    uses = Counter(graph.outputs)
    makers: dict[Value, Eqn] = {}
    reader: dict[Value, Eqn] = {}
    for eqn in graph.eqns:
        uses.update(eqn.operands)
        reader.update(dict.fromkeys(eqn.operands, eqn))
        makers.update(dict.fromkeys(eqn.results, eqn))
    for start in graph.eqns:
        if start.op is all_to_all and start.result in reader:
            end = reader[start.result]
            before = tuple(_back(start.operands[0], makers))
            yield _Exchange(start, end, before[::-1], tuple(_on(end.result, reader, uses)))


def _back(value: Value, makers: Mapping[Value, Eqn]) -> Iterator[Eqn]:
    while (eqn := makers.get(value)) is not None and eqn.op in _VIEWS:
        yield eqn
        (value,) = eqn.operands


def _on(value: Value, reader: Mapping[Value, Eqn], uses: Mapping[Value, int]) -> Iterator[Eqn]:
    while uses[value] == 1 and (eqn := reader.get(value)) is not None and eqn.op in _VIEWS:
        yield eqn
        value = eqn.result


def _folded(found: _Exchange) -> dict[Eqn, Eqn | None] | None:
    """What stands for its equations, with as many views folded as can be; None for one that goes."""
    start, end = found.start, found.end
    over = {name: start.attrs[name] for name in ("axis", "size")}
    for first in range(len(found.before) + 1):
        before = found.before[first:]
        x = before[0].operands[0] if before else start.operands[0]
        for last in range(len(found.behind), -1, -1):
            behind = found.behind[:last]
            y = behind[-1].result if behind else end.result
            dims = _dims(start, x, before, y, behind)
            if dims is None:
                continue
            attrs = {**over, "split_dim": dims[0], "concat_dim": dims[1]}
            if (x, y, attrs) == (start.operands[0], end.result, dict(start.attrs)):
                return None
            (type_,) = all_to_all.types([x.type], attrs)
            started = Value(type_)
            return {
                start: Eqn(all_to_all, (x,), attrs, (started,), start.source),
                **dict.fromkeys(behind),
                end: Eqn(wait, (started,), {}, (y,), end.source),
            }
    return None


def _dims(
    start: Eqn, x: Value, before: tuple[Eqn, ...], y: Value, behind: tuple[Eqn, ...]
) -> tuple[int, int] | None:
    """Along which dims x is to be cut and y to be joined, with no views; the first of several."""
    size = start.attrs["size"]
    sent = elements(x.type.shape)
    for eqn in before:
        sent = sent.viewed(eqn)
    sent = sent.cut(start.attrs["split_dim"], size)
    came = elements(sent.shape).joined(start.attrs["concat_dim"])
    for eqn in behind:
        came = came.viewed(eqn)
    splits = _cuts(elements(x.type.shape), size)
    joins = _cuts(came, size)
    for split_dim, parts in splits:
        for concat_dim, back in joins:
            if (
                parts.loops == sent.loops is not None
                and back.loops == elements(back.shape).loops
                and parts.shape == back.shape
            ):
                return split_dim, concat_dim
    return None


def _cuts(array: Elements, count: int) -> list[tuple[int, Elements]]:
    return [(d, array.cut(d, count)) for d, n in enumerate(array.shape) if n % count == 0]
