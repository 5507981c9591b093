"""Pairs of MoE layers of DeepSeek-V3 over two ranks of an expert axis, captured from torch or Flax; and what code runs
beside each of their exchanges.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch
from jax.sharding import AbstractMesh
from ranks_in_name import ranks_in_name_only

import plait
from plait.backends.parts import cut_pair
from plait.capturing import capture_program
from plait.core_ir.cost import seconds_on
from plait.core_ir.graph import Graph, Value
from plait.core_ir.hardware import Link
from plait.core_ir.mesh import Mesh
from plait.core_ir.named_hardware import CPU_CORE, H100
from plait.core_ir.passes.cut_at_messages import Part
from plait.core_ir.passes.multiplex import multiplex_pairs
from plait.core_ir.passes.overlap import overlap_pairs
from plait.core_ir.program import Program
from plait.models.deepseek_v3 import flax, parallel_flax, parallel_torch
from plait.models.deepseek_v3 import torch as plain_torch
from plait.models.deepseek_v3.config import CONFIGS, batches

AXIS, NUM_RANKS = "expert", 2
CONFIG = replace(CONFIGS["tiny"], num_layers=3, num_dense_layers=0, seq_len=8, dim=32)
MESH = Mesh({"stage": 3, AXIS: NUM_RANKS})
HARDWARE = {
    "cpu-core": CPU_CORE,
    "h100": replace(H100, inside=Link(H100.inside.bytes_per_second)),
}
"""An H100 without the latency of its links, behind which nothing of layers this small could hide."""
PAIR = (1, 1)
"""The layer in the middle, of one microbatch forward and of another one backward."""


@cache
def captured(source: str) -> Program:
    """Three layers, a stage each."""
    batch = next(batches(CONFIG, "train", 4 * NUM_RANKS, seed=0))
    options = {"num_microbatches": 2, "mesh": MESH}
    if source == "flax":
        model = flax.build(CONFIG)
        over_ranks = partial(parallel_flax.loss_fn, mesh=AbstractMesh((NUM_RANKS,), (AXIS,)))
        loss = partial(over_ranks, cuts=(1, 2), boundary=plait.stage_boundary)
        model.set_attributes(training=False)
        return capture_program(loss, model, batch, **options)[1]
    with ranks_in_name_only(MESH.axes) as mesh:
        devices = mesh[AXIS]
        layers = parallel_torch.expert_parallel(plain_torch.build(CONFIG).eval(), devices)
        tensors = {name: torch.tensor(np.asarray(x)) for name, x in batch.items()}
        spread = partial(parallel_torch.loss_fn, mesh=devices)
        options["split"] = ["layers.1", "layers.2"]
        return capture_program(spread, layers, tensors, **options)[1]


@dataclass(frozen=True)
class HalvedPart:
    """A part of a pair, and to which half each of its inputs belongs."""

    graph: Graph
    inputs: tuple[str, ...]


def parts(source: str, hardware: str) -> tuple[Graph, tuple[HalvedPart, ...]]:
    """The pair as it is compiled, ordered by the times of some hardware; whole, and cut at messages."""
    program = multiplex_pairs(captured(source), [PAIR])
    program = overlap_pairs(program, [PAIR], seconds_on(HARDWARE[hardware]))
    pair = program.pairs[PAIR]
    cut, _ = cut_pair(program, PAIR)
    return pair, tuple(_halved(pair, cut))


def _halved(pair: Graph, cut: Iterable[Part]) -> Iterator[HalvedPart]:
    numbered = [port.name.partition(".")[0] for port in pair.input_ports]
    for part in cut:
        own = tuple(numbered[number] for number in part.operands)
        yield HalvedPart(part.graph, own)
        half = halves(part.graph, own)
        numbered += [half.get(value, "") for value in part.graph.outputs]


def halves(graph: Graph, inputs: Sequence[str]) -> dict[Value, str]:
    """The half to which each value belongs; those that are made of constants alone belong to none."""
    found = dict(zip(graph.inputs, inputs, strict=True))
    for eqn in graph.eqns:
        own = {found[value] for value in eqn.operands if found.get(value)}
        assert len(own) <= 1, eqn
        found.update(dict.fromkeys(eqn.results, next(iter(own), "")))
    return found


@dataclass(frozen=True)
class Event:
    """A start, a wait or a product in the order that runs; `exchange` is its name, for the first two."""

    kind: str
    half: str
    exchange: str = ""


def in_graph(part: HalvedPart) -> list[Event]:
    """The events of a part as the IR has them."""
    half = halves(part.graph, part.inputs)
    names = {value: f"input {n}" for n, value in enumerate(part.graph.inputs)}
    found = []
    for number, eqn in enumerate(part.graph.eqns):
        if eqn.op.name == "all_to_all":
            names[eqn.result] = str(number)
            found.append(Event("start", half[eqn.result], str(number)))
        elif eqn.op.name == "wait":
            found.append(Event("wait", half[eqn.result], names[eqn.operands[0]]))
        elif eqn.op.name == "dot_general":
            found.append(Event("product", half[eqn.result]))
    return found


def unhidden(events: Sequence[Event]) -> list[Event]:
    """The starts between which and their wait, or the end, no product of the other half stands."""
    found = []
    for at, event in enumerate(events):
        if event.kind != "start":
            continue
        end = (n for n, e in enumerate(events) if (e.kind, e.exchange) == ("wait", event.exchange))
        beside = events[at : next(end, len(events))]
        if not any(e.kind == "product" and e.half not in ("", event.half) for e in beside):
            found.append(event)
    return found


_CALLS = {
    "start": re.compile(r"^ *buf(\d+) = torch\.ops\._c10d_functional\.all_to_all_single\."),
    "wait": re.compile(r"^ *torch\.ops\._c10d_functional\.wait_tensor\.default\((\w+)\)"),
    "product": re.compile(r"^ *extern_kernels\.(?:mm|bmm|addmm|baddbmm)\(.*out=buf(\d+)\)"),
}


def in_wrapper(code: str, part: HalvedPart) -> list[Event]:
    """The events of a part in the order in which the wrapper runs them that Inductor wrote for it.

    Inductor numbers buffers in the order of the graph that it is given, whatever order it runs them in: so the n-th
    product by these numbers is the n-th of the graph, and the same of starts.
    """
    calls = [
        (kind, found[1])
        for line in code.splitlines()
        for kind, pattern in _CALLS.items()
        if (found := pattern.match(line))
    ]
    events: dict[str, Event] = {}
    for kind in ("start", "product"):
        numbers = sorted((number for k, number in calls if k == kind), key=int)
        planned = [event for event in in_graph(part) if event.kind == kind]
        events |= dict(zip(numbers, planned, strict=True))
    return [
        Event("wait", *_of(events[of.removeprefix("buf")])) if kind == "wait" else events[of]
        for kind, of in calls
    ]


def _of(start: Event) -> tuple[str, str]:
    return start.half, start.exchange


@dataclass(frozen=True)
class Op:
    """An op of StableHLO: its name, what it reads, and in the order of the text its number."""

    name: str
    operands: tuple[str, ...]
    number: int


_RESULT = re.compile(r"^\s*(%\w+)(?::\d+)? = \"?([\w.]+)\"?(.*)$")
_OPERAND = re.compile(r"%\w+(?:#\d+)?")
_BODY = re.compile(r"sdy\.manual_computation\(.*?\) .*? \((.*)\) \{$", re.MULTILINE)


class StableHLO:
    """The text that a part is lowered to, and which half its values belong to."""

    def __init__(self, text: str, inputs: Sequence[str]) -> None:
        (body,) = _BODY.finditer(text)
        lines = text[body.end() : text.index("\n    }", body.end())].splitlines()
        self.ops: dict[str, Op] = {}
        self.read = Counter(_OPERAND.findall("\n".join(lines)))
        names = re.findall(r"(%\w+): tensor", body[1])
        self._half = dict(zip(names, inputs, strict=True))
        for number, line in enumerate(lines):
            found = _RESULT.match(line)
            if found:
                read = tuple(dict.fromkeys(_OPERAND.findall(found[3])))
                self.ops[found[1]] = Op(found[2].removeprefix("stablehlo."), read, number)

    def half(self, value: str) -> str:
        """Of constants alone: none. What comes through a barrier stays of its half."""
        name, _, leg = value.partition("#")
        if name not in self._half:
            op = self.ops.get(name)
            if op is not None and op.name == "optimization_barrier" and leg:
                return self.half(op.operands[int(leg)])
            own = {self.half(read) for read in op.operands} - {""} if op is not None else set()
            assert len(own) <= 1, (value, op)
            self._half[name] = next(iter(own), "")
        return self._half[name]

    def made_of(self, value: str) -> set[str]:
        """All that has to be computed before a value."""
        found: set[str] = set()
        todo = [value.partition("#")[0]]
        while todo:
            name = todo.pop()
            if name not in found and name in self.ops:
                found.add(name)
                todo += [read.partition("#")[0] for read in self.ops[name].operands]
        return found

    def unhidden(self) -> tuple[int, list[str]]:
        """How many exchanges there are; those of them that may end before any product of the other half which stands
        behind their start: their result comes through no barrier with what is made of one and is read behind it."""
        starts = [name for name, op in self.ops.items() if op.name == "all_to_all"]
        return len(starts), [name for name in starts if not self._is_hidden(name)]

    def _is_hidden(self, start: str) -> bool:
        other = {"forward": "backward", "backward": "forward"}[self.half(start)]
        readers = [(name, op) for name, op in self.ops.items() if start in op.operands]
        assert [op.name for _, op in readers] == ["optimization_barrier"]
        ((name, barrier),) = readers
        return any(
            self.ops[made].name == "dot_general"
            and self.ops[made].number > self.ops[start].number
            and self.half(made) == other
            for leg, read in enumerate(barrier.operands)
            if self.read[f"{name}#{leg}"] and read != start
            for made in self.made_of(read)
        )
