"""Rewriting equations one by one, in order: a rule gives another value for an equation's result, or None."""

from collections.abc import Callable, Mapping
from typing import Any

from plait.core_ir.graph import UNKNOWN, Eqn, Source, Value
from plait.core_ir.op import Op


class Folder:
    """Equations as rewritten so far.

    eqns: in order. same: what stands for the result of an equation that is gone. Rules ask `made_by` and `is_shared`,
    and make new equations, which are rewritten in turn.
    """

    def __init__(
        self,
        rules: Mapping[Op, Callable[["Folder", Eqn], Value | None]],
        uses: Mapping[Value, int],
    ) -> None:
        self.eqns: list[Eqn] = []
        self.same: dict[Value, Value] = {}
        self._rules = rules
        self._uses = dict(uses)
        self._producers: dict[Value, Eqn] = {}
        self._source: Source = UNKNOWN

    def put(self, eqn: Eqn) -> None:
        """Take in the next equation of the graph."""
        self._source = eqn.source
        eqn = eqn.with_operands([self.same.get(o, o) for o in eqn.operands])
        value = self._rewritten(eqn)
        if value is None:
            return
        self.same[eqn.result] = value
        self._uses[value] = self._uses.get(value, 0) + self._uses.get(eqn.result, 0)

    def make(self, op: Op, *operands: Value, **attrs: Any) -> Value:
        """A new equation's result, which may be an older value that equals it."""
        (type_,) = op.types([o.type for o in operands], attrs)
        eqn = Eqn(op, operands, attrs, (Value(type_),), self._source)
        value = self._rewritten(eqn)
        return eqn.result if value is None else value

    def made_by(self, value: Value, op: Op) -> Eqn | None:
        """The equation that makes a value, if it is of that op."""
        eqn = self._producers.get(value)
        return eqn if eqn is not None and eqn.op is op else None

    def is_shared(self, value: Value) -> bool:
        """Whether more than one equation or output reads a value."""
        return self._uses.get(value, 0) > 1

    def _rewritten(self, eqn: Eqn) -> Value | None:
        """Another value for the equation's result; None when the equation stays, which is then appended."""
        rule = self._rules.get(eqn.op)
        value = rule(self, eqn) if rule else None
        if value is None:
            self.eqns.append(eqn)
            self._producers.update((r, eqn) for r in eqn.results)
        return value
