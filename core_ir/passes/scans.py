"""Scans by parts: which outputs of a body need which, and a scan of some of its equations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops.control import scan


@dataclass(frozen=True)
class Scan:
    """A scan equation, its operands and results by kind."""

    eqn: Eqn

    @property
    def body(self) -> Graph:
        body: Graph = self.eqn.attrs["body"]
        return body

    @property
    def num_consts(self) -> int:
        return int(self.eqn.attrs["num_consts"])

    @property
    def num_carry(self) -> int:
        return int(self.eqn.attrs["num_carry"])

    def carry_of(self, body_input: int) -> int | None:
        """The number of the carry that an input of the body is, if it is one."""
        number = body_input - self.num_consts
        return number if 0 <= number < self.num_carry else None


def with_carries(whole: Scan, outputs: Iterable[int]) -> set[int]:
    """Outputs of the body, and the carries that they need from step to step."""
    found = set(outputs)
    while True:
        grown = found | carries_read(whole, (whole.body.outputs[i] for i in found))
        if grown == found:
            return found
        found = grown


def carries_read(whole: Scan, values: Iterable[Value]) -> set[int]:
    """The carries that some values of the body need, by number."""
    read = inputs_read(whole.body, values)
    carries = (whole.carry_of(i) for i, v in enumerate(whole.body.inputs) if v in read)
    return {carry for carry in carries if carry is not None}


def closure(graph: Graph, values: Iterable[Value]) -> set[Eqn]:
    """The equations that some values need."""
    needed = set(values)
    found: set[Eqn] = set()
    for eqn in reversed(graph.eqns):
        if any(r in needed for r in eqn.results):
            found.add(eqn)
            needed.update(eqn.operands)
    return found


def inputs_read(graph: Graph, values: Iterable[Value]) -> set[Value]:
    """The inputs that some values need."""
    values = set(values)
    for eqn in closure(graph, values):
        values.update(eqn.operands)
    return values & set(graph.inputs)


def rebuild_scan(
    whole: Scan,
    eqns: Sequence[Eqn],
    outputs: Sequence[int],
    stacked: Sequence[Value] = (),
    stacks: Mapping[Value, Value] = MappingProxyType({}),
) -> Eqn:
    """A scan of some equations of the body: some of its outputs, then stacks of `stacked`.

    stacks: values of the body that come from the stacks of another scan.
    """
    body, eqn, num_consts = whole.body, whole.eqn, whole.num_consts
    carries = [i for i in outputs if i < whole.num_carry]
    ys = [i for i in outputs if i >= whole.num_carry]
    read = {o for e in eqns for o in e.operands} | {body.outputs[i] for i in outputs} | {*stacked}
    read -= {r for e in eqns for r in e.results} | stacks.keys()
    operand = dict(zip(body.inputs, eqn.operands, strict=True))
    consts = [v for v in body.inputs[:num_consts] if v in read]
    carried = [body.inputs[num_consts + i] for i in carries]
    xs = [v for v in body.inputs[num_consts + whole.num_carry :] if v in read]
    fresh = {v: Value(v.type, v.name) for v in (*consts, *carried, *xs, *stacks)}
    inner = [e.with_operands([fresh.get(o, o) for o in e.operands]) for e in eqns]
    given = [body.outputs[i] for i in (*carries, *ys)] + [*stacked]
    part = Graph(
        body.name,
        tuple(fresh[v] for v in (*consts, *carried, *xs, *stacks)),
        tuple(inner),
        tuple(fresh.get(v, v) for v in given),
    )
    length = eqn.attrs["length"]
    attrs = {
        "body": part,
        "num_consts": len(consts),
        "num_carry": len(carried),
        "length": length,
        "reverse": eqn.attrs["reverse"],
    }
    results = [eqn.results[i] for i in (*carries, *ys)]
    results += [Value(v.type.with_shape((length, *v.type.shape)), v.name) for v in stacked]
    operands = [operand[v] for v in (*consts, *carried, *xs)] + [*stacks.values()]
    return Eqn(scan, tuple(operands), attrs, tuple(results), eqn.source)
