"""Parsing the text form back into graphs and programs; errors name line and column."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from plait.core_ir.errors import PlaitError, TextError
from plait.core_ir.graph import ROLES, Eqn, Graph, Port, Value
from plait.core_ir.op import Array, Literal
from plait.core_ir.ops import OPS
from plait.core_ir.program import (
    STEP_KINDS,
    TASK_KINDS,
    Edge,
    EdgeKind,
    Program,
    Stage,
    TaskKind,
)
from plait.core_ir.shards import Reshard
from plait.core_ir.text import HEADER
from plait.core_ir.types import DTYPES, AsyncType, DType, TensorType

T = TypeVar("T")

_TOKEN = re.compile(
    r"""
      (?P<space>(?:\s+|//[^\n]*)+)
    | (?P<value>%(?:[A-Za-z_][A-Za-z0-9_.\-]*|[0-9]+|"(?:[^"\\]|\\.)*"))
    | (?P<number>-?(?:[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|inf\b|nan\b))
    | (?P<word>[A-Za-z_][A-Za-z0-9_]*(?:[.\-](?!>)[A-Za-z0-9_]+)*)
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<hash>\#[0-9a-f]+)
    | (?P<at>@(?:[A-Za-z_][A-Za-z0-9_.\-]*|[0-9]+|"(?:[^"\\]|\\.)*"))
    | (?P<punctuation>->|[()\[\]{},:=&<>])
    """,
    re.VERBOSE,
)


def parse_graph(text: str, constants: Mapping[str, Array] | None = None) -> Graph:
    """The graph of a text; TextError with line and column where it is not one.

    constants: arrays by content hash for the constants that do not stand inline.
    """
    parser = _Parser(text, constants or {})
    parser.header()
    graph = parser.graph()
    parser.end()
    return graph


def parse_program(text: str, constants: Mapping[str, Array] | None = None) -> Program:
    """The program of a text; its notes, which print as comments, are not read."""
    parser = _Parser(text, constants or {})
    parser.header()
    program = parser.program()
    parser.end()
    return program


class _Parser:
    """A recursive-descent parser over the tokens of one text."""

    def __init__(self, text: str, constants: Mapping[str, Array]) -> None:
        self._text = text
        self._constants = constants
        self._tokens: list[tuple[str, str, int]] = []
        position = 0
        for match in _TOKEN.finditer(text):
            if match.start() != position:
                break
            position = match.end()
            if match.lastgroup != "space":
                self._tokens.append((cast(str, match.lastgroup), match.group(), match.start()))
        if position != len(text):
            self._fail_at(position, f"unexpected character {text[position]!r}")
        self._tokens.append(("end", "end of text", len(text)))
        self._next = 0
        self._types: dict[str, TensorType] = {}

    # Tokens.

    def _fail_at(self, offset: int, message: str) -> NoReturn:
        line = self._text.count("\n", 0, offset) + 1
        column = offset - (self._text.rfind("\n", 0, offset) + 1) + 1
        raise TextError(f"line {line}, column {column}: {message}")

    def _fail(self, message: str) -> NoReturn:
        self._fail_at(self._tokens[self._next][2], message)

    def _peek(self) -> str:
        return self._tokens[self._next][1]

    def _take(self, kind: str, what: str) -> str:
        found, text, _ = self._tokens[self._next]
        if found != kind:
            self._fail(f"expected {what}, found {text!r}")
        self._next += 1
        return text

    def _expect(self, text: str) -> None:
        if self._tokens[self._next][1] != text or self._tokens[self._next][0] == "string":
            self._fail(f"expected {text!r}, found {self._peek()!r}")
        self._next += 1

    def _accept(self, text: str) -> bool:
        if self._tokens[self._next][1] == text and self._tokens[self._next][0] != "string":
            self._next += 1
            return True
        return False

    def _list(self, open_: str, close: str, item: Callable[[], T]) -> list[T]:
        self._expect(open_)
        items: list[T] = []
        while not self._accept(close):
            if items:
                self._expect(",")
            items.append(item())
        return items

    def _integer(self, what: str) -> int:
        text = self._take("number", what)
        if not text.lstrip("-").isdigit():
            self._next -= 1
            self._fail(f"expected {what}, found {text!r}")
        return int(text)

    # The grammar.

    def header(self) -> None:
        """`plait.ir 1`."""
        if not self._text.lstrip().startswith(HEADER):
            self._fail(f"expected the first line {HEADER!r}")
        self._next = 2

    def end(self) -> None:
        """Nothing more."""
        if self._tokens[self._next][0] != "end":
            self._fail(f"expected the end, found {self._peek()!r}")

    def program(self) -> Program:
        """`program @name {stages=N, reshard=...}`, its edges, its tasks, its pairs."""
        self._expect("program")
        name = _unquoted(self._take("at", "the program's @name"))
        for text in ("{", "stages", "="):
            self._expect(text)
        count = self._integer("the number of stages")
        reshard: Reshard = "after_backward"
        if self._accept(","):
            for text in ("reshard", "=", "after_forward"):
                self._expect(text)
            reshard = "after_forward"
        self._expect("}")
        edges: list[Edge] = []
        while self._accept("edge"):
            edges.append(self._edge())
        tasks: list[dict[TaskKind, Graph]] = [{} for _ in range(count)]
        while self._accept("task"):
            index = self._integer("a stage's number")
            if not 0 <= index < count:
                self._fail(f"stage {index} of a program with {count} stages")
            kind = self._take("word", "a task kind")
            if kind not in _TASK_KINDS:
                self._fail(f"expected a task kind ({', '.join(_TASK_KINDS)}), found {kind!r}")
            tasks[index][kind] = self.graph()
        pairs: dict[tuple[int, int], Graph] = {}
        while self._accept("pair"):
            halves = tuple(self._integer("a stage's number") for _ in ("forward", "backward"))
            if not all(0 <= index < count for index in halves):
                self._fail(f"a pair of stages {halves} of a program with {count} stages")
            pairs[halves[0], halves[1]] = self.graph()
        stages = tuple(Stage(i, t) for i, t in enumerate(tasks))
        return Program(name, stages, tuple(edges), pairs=pairs, reshard=reshard)

    def _edge(self) -> Edge:
        source = self._integer("a stage's number")
        output = self._port()
        self._expect("->")
        target = self._integer("a stage's number")
        input_ = self._port()
        self._expect("{")
        word = self._take("word", "activation or gradient")
        kind = _EDGE_KINDS.get(word)
        if kind is None:
            self._fail(f"expected activation or gradient, found {word!r}")
        for text in (",", "bytes", "="):
            self._expect(text)
        num_bytes = self._integer("a number of bytes")
        self._expect("}")
        return Edge(source, output, target, input_, kind, num_bytes)

    def graph(self) -> Graph:
        """`graph @name(inputs) -> (outputs) { equations }`."""
        self._expect("graph")
        name = _unquoted(self._take("at", "the graph's @name"))
        known: dict[str, Value] = {}
        bound = self._list("(", ")", self._bound)
        inputs = [self._define(known, text, kind) for text, kind, _ in bound]
        self._expect("->")
        returned = self._list("(", ")", self._bound)
        self._expect("{")
        eqns: list[Eqn] = []
        while not self._accept("}"):
            eqns.append(self._eqn(known))
        outputs = [self._known(known, text, kind) for text, kind, _ in returned]
        return Graph(
            name,
            tuple(inputs),
            tuple(eqns),
            tuple(outputs),
            tuple(port for _, _, port in bound),
            tuple(port for _, _, port in returned),
        )

    def _bound(self) -> tuple[str, TensorType, Port]:
        name = self._take("value", "a value")
        self._expect(":")
        kind = self._type()
        port = Port()
        if self._accept("{"):
            port = self._port()
            self._expect("}")
        return name, kind, port

    def _port(self) -> Port:
        role = self._take("word", "a port role")
        if role not in ROLES:
            self._next -= 1
            self._fail(f"unknown port role {role!r}; roles are {', '.join(sorted(ROLES - {''}))}")
        name = ""
        if self._tokens[self._next][0] == "string":
            name = json.loads(self._take("string", "a name"))
        return Port(cast(Any, role), name)

    def _define(self, known: dict[str, Value], text: str, kind: TensorType) -> Value:
        if text in known:
            self._fail(f"{text} is defined twice")
        name = _unquoted(text)
        value = known[text] = Value(kind, "" if name.isdigit() else name)
        return value

    def _known(self, known: dict[str, Value], text: str, kind: TensorType | None = None) -> Value:
        value = known.get(text)
        if value is None:
            self._fail(f"{text} is not defined")
        if kind is not None and kind != value.type:
            self._fail(f"{text} has type {value.type}, not {kind}")
        return value

    def _eqn(self, known: dict[str, Value]) -> Eqn:
        bound: list[tuple[str, TensorType]] = []
        if self._tokens[self._next][0] == "value":
            bound.append(self._binder())
            while self._accept(","):
                bound.append(self._binder())
            self._expect("=")
        start = self._tokens[self._next][2]
        name = self._take("word", "an op")
        op = OPS.get(name)
        if op is None:
            self._next -= 1
            self._fail(f"unknown op {name!r}")
        operands = [
            self._known(known, text)
            for text in self._list("(", ")", lambda: self._take("value", "a value"))
        ]
        attrs = dict(self._list("{", "}", self._attr)) if self._peek() == "{" else {}
        try:
            types = op.types([v.type for v in operands], attrs)
        except PlaitError as error:
            self._fail_at(start, str(error))
        if tuple(kind for _, kind in bound) != types:
            self._fail_at(
                start, f"{name} gives {list(types)}, the text says {[k for _, k in bound]}"
            )
        results = tuple(self._define(known, text, kind) for text, kind in bound)
        return Eqn(op, tuple(operands), attrs, results)

    def _binder(self) -> tuple[str, TensorType]:
        name = self._take("value", "a value")
        self._expect(":")
        return name, self._type()

    def _type(self) -> TensorType:
        if self._accept("async"):
            self._expect("<")
            kind = AsyncType(self._tensor_type())
            self._expect(">")
            return kind
        return self._tensor_type()

    def _tensor_type(self) -> TensorType:
        name = self._take("word", "a dtype")
        dtype = DTYPES.get(name)
        if dtype is None:
            self._next -= 1
            self._fail(f"unknown dtype {name!r}; dtypes are {', '.join(DTYPES)}")
        return self._shaped(dtype)

    def _shaped(self, dtype: DType) -> TensorType:
        return TensorType(dtype, tuple(self._list("[", "]", lambda: self._integer("a size"))))

    def _attr(self) -> tuple[str, Any]:
        name = self._take("word", "an attribute's name")
        self._expect("=")
        return name, self._attr_value()

    def _attr_value(self) -> Any:
        kind, text, _ = self._tokens[self._next]
        if kind == "punctuation" and text == "[":
            return tuple(self._list("[", "]", self._attr_value))
        if kind == "word" and text == "graph":
            return self.graph()
        self._next += 1
        if kind == "number":
            return int(text) if text.lstrip("-").isdigit() else float(text)
        if kind == "string":
            return json.loads(text)
        if kind == "word" and text in _WORDS:
            return _WORDS[text]
        if kind == "word" and text in DTYPES:
            return self._typed_attr(DTYPES[text])
        self._next -= 1
        self._fail(f"expected an attribute's value, found {text!r}")

    def _typed_attr(self, dtype: DType) -> DType | TensorType | Literal:
        if self._peek() != "[":
            return dtype
        type_ = self._shaped(dtype)
        if not self._accept(":"):
            return type_
        if self._tokens[self._next][0] == "hash":
            digest = self._take("hash", "a content hash")[1:]
            if digest not in self._constants:
                self._fail(
                    f"constant #{digest} is not in the table of constants given with the text"
                )
            literal = Literal(self._constants[digest])
            if literal.type != type_:
                self._fail(f"constant #{digest} is {literal.type}, the text says {type_}")
            return literal
        numbers = self._list("[", "]", self._attr_value)
        return Literal(_array(numbers, type_))


_TASK_KINDS = (*TASK_KINDS, *STEP_KINDS)
_EDGE_KINDS: dict[str, EdgeKind] = {"activation": "activation", "gradient": "gradient"}
_WORDS = {"true": True, "false": False, "none": None}


def _array(numbers: Iterable[Any], type_: TensorType) -> Array:
    if type_.dtype.kind == "complex":
        numbers = [complex(real, imag) for real, imag in numbers]
    flat = np.array(list(numbers), dtype=object if type_.dtype.is_integer else None)
    return np.asarray(flat.astype(type_.dtype.numpy)).reshape(type_.shape)


def _unquoted(text: str) -> str:
    name = text[1:]
    return cast(str, json.loads(name)) if name.startswith('"') else name
