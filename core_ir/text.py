"""The text form: a graph or a program printed, and parsed back to the same text.

    plait.ir 1
    graph @double(%x: f32[3] {activation "h"}) -> (%y: f32[3] {activation "out"}) {
      %y: f32[3] = add(%x, %x)
    }

Types stand at the binder; attributes are sorted; constants of up to 16 elements stand inline, larger ones by the hash
of their content, to be found in a table beside the text. `//` begins a comment.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from plait.core_ir.graph import Eqn, Graph, Port, Value
from plait.core_ir.op import Array, Literal
from plait.core_ir.types import DType, TensorType

HEADER = "plait.ir 1"
INLINE_ELEMENTS = 16

BARE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*|[0-9]+")


Comment: TypeAlias = Callable[[Eqn], str]
"""What a comment behind an equation says."""


def print_graph(
    graph: Graph, *, source: bool = False, header: bool = True, comment: Comment | None = None
) -> str:
    """The text of a graph, with a comment behind each equation: with `source`, where the user wrote it."""
    lines = [HEADER, ""] if header else []
    _graph_lines(graph, "", "", lines, _source if source else comment)
    return "\n".join(lines) + "\n"


class ProgramLike(Protocol):
    """What printing asks of a program (`program.Program`, which stands above this file and prints by it)."""

    @property
    def name(self) -> str: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def edges(self) -> Sequence[Any]: ...
    @property
    def stages(self) -> Sequence[Any]: ...
    @property
    def pairs(self) -> Mapping[tuple[int, int], Graph]: ...
    @property
    def reshard(self) -> str: ...


def print_program(program: ProgramLike, *, source: bool = False) -> str:
    """The text of a program: its notes as comments, its edges, its tasks."""
    comment = _source if source else None
    lines = [HEADER, "", *(f"// {note}" for note in program.notes)]
    reshard = f", reshard={program.reshard}" if program.reshard != "after_backward" else ""
    lines.append(f"program @{_name(program.name)} {{stages={len(program.stages)}{reshard}}}")
    for e in program.edges:
        lines.append(
            f"edge {e.source} {_port(e.output)} -> {e.target} {_port(e.input)} {{{e.kind}, bytes={e.num_bytes}}}"
        )
    for stage in program.stages:
        for kind, graph in stage.tasks.items():
            lines.append("")
            _graph_lines(graph, "", f"task {stage.index} {kind} ", lines, comment)
    for (forward, backward), graph in program.pairs.items():
        lines.append("")
        _graph_lines(graph, "", f"pair {forward} {backward} ", lines, comment)
    return "\n".join(lines) + "\n"


def constants_of(*graphs: Graph) -> dict[str, Array]:
    """The table of the constants that do not stand inline in the text of these graphs, by content hash."""
    table: dict[str, Array] = {}
    for graph in graphs:
        for eqn in graph.eqns:
            for attr in eqn.attrs.values():
                for item in attr if isinstance(attr, tuple) else (attr,):
                    if isinstance(item, Graph):
                        table.update(constants_of(item))
                    elif isinstance(item, Literal) and item.array.size > INLINE_ELEMENTS:
                        table[item.digest] = item.array
    return table


# Printing.


def _name(name: str) -> str:
    return name if BARE_NAME.fullmatch(name) else json.dumps(name)


def _port(port: Port) -> str:
    return f"{port.role} {json.dumps(port.name)}" if port.name else port.role


def _hint(value: Value, port: Port | None) -> str:
    if value.name:
        return value.name
    tail = port.name.rpartition(".")[2] if port is not None else ""
    return tail if tail.isidentifier() else ""


def _value_names(graph: Graph) -> dict[Value, str]:
    """A name for each value: its hint where that is free, else the hint with a number, else a number."""
    names: dict[Value, str] = {}
    taken: set[str] = set()
    counts: dict[str, int] = {}

    def give(value: Value, port: Port | None) -> None:
        hint = _hint(value, port)
        name = hint
        while not name or name in taken:
            number = counts.get(hint, 0)
            counts[hint] = number + 1
            name = f"{hint}_{number}" if hint else str(number)
        taken.add(name)
        names[value] = name

    for value, port in zip(graph.inputs, graph.input_ports, strict=True):
        give(value, port)
    for eqn in graph.eqns:
        for value in eqn.results:
            give(value, None)
    return names


def _source(eqn: Eqn) -> str:
    return str(eqn.source)


def _graph_lines(
    graph: Graph, indent: str, prefix: str, lines: list[str], comment: Comment | None
) -> None:
    names = {value: f"%{_name(name)}" for value, name in _value_names(graph).items()}
    types: dict[TensorType, str] = {}

    def typed(value: Value) -> str:
        kind = value.type
        text = types.get(kind)
        if text is None:
            text = types[kind] = repr(kind)
        return f"{names[value]}: {text}"

    def listed(values: tuple[Value, ...], ports: tuple[Port, ...]) -> str:
        pairs = zip(values, ports, strict=True)
        return ", ".join(f"{typed(v)} {{{_port(p)}}}" if p.role else typed(v) for v, p in pairs)

    head = f"{indent}{prefix}graph @{_name(graph.name)}({listed(graph.inputs, graph.input_ports)})"
    tail = f" -> ({listed(graph.outputs, graph.output_ports)}) {{"
    if len(head) + len(tail) <= 100:
        lines.append(head + tail)
    else:
        lines.append(head)
        lines.append(f"{indent}   {tail}")
    inner = indent + "  "
    for eqn in graph.eqns:
        operands = ", ".join([names[v] for v in eqn.operands])
        left = ", ".join(map(typed, eqn.results))
        text = f"{inner}{left + ' = ' if left else ''}{eqn.op.name}({operands})"
        if eqn.attrs:
            text += f" {{{_attrs(eqn.attrs, inner)}}}"
        lines.append(text if comment is None else f"{text}  // {comment(eqn)}")
    lines.append(indent + "}")


def _attrs(attrs: Mapping[str, Any], indent: str) -> str:
    return ", ".join([f"{key}={_attr(attrs[key], indent)}" for key in sorted(attrs)])


def _attr(value: Any, indent: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if value is None:
        return "none"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, (DType, TensorType)):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join([_attr(v, indent) for v in value])}]"
    if isinstance(value, Literal):
        return _literal(value)
    if isinstance(value, Graph):
        lines: list[str] = []
        _graph_lines(value, indent + "  ", "", lines, None)
        return "\n".join(["", *lines])
    raise TypeError(f"an attribute cannot be a {type(value).__name__}: {value!r}")


def _literal(literal: Literal) -> str:
    array = literal.array
    if array.size > INLINE_ELEMENTS:
        return f"{literal.type}:#{literal.digest}"
    return (
        f"{literal.type}:[{', '.join(_number(x, literal.type.dtype) for x in array.reshape(-1))}]"
    )


def _number(x: Any, dtype: DType) -> str:
    if dtype.kind == "bool":
        return "true" if x else "false"
    if dtype.is_integer:
        return str(int(x))
    if dtype.kind == "complex":
        return f"[{float(x.real)!r}, {float(x.imag)!r}]"
    if dtype.name == "f32" and np.isfinite(x):
        short = str(x)
        return short if np.float32(float(short)) == x else repr(float(x))
    return repr(float(x))
