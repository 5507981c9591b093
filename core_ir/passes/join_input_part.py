"""Cheap equations of W that join I, because fewer bytes are then held between the two.

The gradient of a norm's scale is a sum over the batch of %g times %n: in I it leaves as one small parameter gradient,
in W it has %g and %n held for it. Equations are taken by clusters, connected by the values they make: elementwise ones,
views and reductions that need no matrix product of W. A cluster joins when the values that W would hold for it alone
are larger than the values that the rest of W needs of it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from plait.core_ir.cost import eqn_flops
from plait.core_ir.graph import Eqn, Value
from plait.core_ir.ops import elementwise, reduce
from plait.core_ir.passes.equations import VIEWS
from plait.core_ir.passes.recompute import is_view, price

_CHEAP = frozenset({*elementwise.FAMILY, *reduce.FAMILY, *VIEWS})


def join_input_part(
    rest: Sequence[Eqn],
    outputs: Iterable[Value],
    producers: Mapping[Value, Eqn],
    is_free: Callable[[Value], bool],
) -> set[Eqn]:
    """The equations of `rest` that join I.

    rest: the equations that the input gradients do not need, in order. outputs: the parameter gradients. producers: of
    the values that I makes. is_free: whether holding a value costs nothing.
    """
    constants = _constants(rest)
    free_values = {r for eqn in constants for r in eqn.results}
    uses = Counter(o for eqn in rest for o in set(eqn.operands))
    given = set(outputs)

    def spares_bytes(cluster: _Cluster) -> bool:
        held = sum(
            price(o, producers, is_free)
            for o, n in cluster.uses.items()
            if uses[o] == n and o not in cluster.made | given | free_values
        )
        return held > sum(r.type.num_bytes for r in cluster.made if uses[r] > cluster.uses[r])

    clusters = [_Cluster(eqns) for eqns in _clusters([eqn for eqn in rest if eqn not in constants])]
    readers: dict[Value, list[_Cluster]] = {}
    for cluster in clusters:
        for operand in cluster.uses:
            readers.setdefault(operand, []).append(cluster)
    joined: set[Eqn] = set()
    needed: set[Value] = set()
    pending = dict.fromkeys(clusters)
    while pending:
        cluster = next(iter(pending))
        del pending[cluster]
        if joined.isdisjoint(cluster.eqns) and spares_bytes(cluster):
            joined.update(cluster.eqns)
            needed.update(cluster.uses)
            uses.subtract(cluster.uses)
            pending.update((other, None) for o in cluster.uses for other in readers[o])
    for eqn in reversed(rest):
        if eqn in constants and any(r in needed for r in eqn.results):
            joined.add(eqn)
            needed.update(eqn.operands)
    return joined


class _Cluster:
    """Connected equations, what they make, and how many of them read each value."""

    def __init__(self, eqns: list[Eqn]) -> None:
        self.eqns = eqns
        self.made = {r for eqn in eqns for r in eqn.results}
        self.uses = Counter(o for eqn in eqns for o in set(eqn.operands))


def _constants(rest: Sequence[Eqn]) -> set[Eqn]:
    """The views of constants alone: they connect nothing, since either task may compute them."""
    values: set[Value] = set()
    found: set[Eqn] = set()
    for eqn in rest:
        if is_view(eqn) and all(o in values for o in eqn.operands):
            found.add(eqn)
            values.update(eqn.results)
    return found


def _clusters(eqns: Sequence[Eqn]) -> list[list[Eqn]]:
    """The cheap equations that need no other equation of these, by connection; each cluster in order."""
    leader: dict[Eqn, Eqn] = {}
    producers: dict[Value, Eqn] = {}
    costly: set[Value] = set()

    def leader_of(eqn: Eqn) -> Eqn:
        while leader[eqn] is not eqn:
            leader[eqn] = leader[leader[eqn]]
            eqn = leader[eqn]
        return eqn

    for eqn in eqns:
        if not _is_cheap(eqn) or any(o in costly for o in eqn.operands):
            costly.update(eqn.results)
            continue
        leader[eqn] = eqn
        producers.update(dict.fromkeys(eqn.results, eqn))
        for operand in eqn.operands:
            if operand in producers:
                leader[leader_of(producers[operand])] = eqn
    clusters: dict[Eqn, list[Eqn]] = {}
    for eqn in leader:
        clusters.setdefault(leader_of(eqn), []).append(eqn)
    return list(clusters.values())


def _is_cheap(eqn: Eqn) -> bool:
    size = sum(v.type.size for v in (*eqn.operands, *eqn.results))
    return eqn.op in _CHEAP and eqn_flops(eqn) <= size
