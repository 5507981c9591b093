"""Random legal schedules, grown by running them: an action is appended when all it needs is done."""

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from plait.core_ir.schedule import Action, Edge, Schedule
from plait.core_ir.schedule.kinds import OVERLAP_F_B, B, F, I, W


class Case(NamedTuple):
    """A schedule and the edges between its stages."""

    schedule: Schedule
    edges: tuple[Edge, ...]


def grow_case(seed: int, chain: bool = False) -> Case:
    """A legal schedule with any placement, split and fused backwards, pairs, and any-to-any edges."""
    rng = random.Random(seed)
    num_stages, num_ranks = rng.randint(1, 6), rng.randint(1, 4)
    num_microbatches = rng.randint(1, 5)
    placement = [rng.randrange(num_ranks) for _ in range(num_stages)]
    edges = _edges(rng, num_stages, chain)
    # The next microbatch in which a weight gradient of the stage may run.
    turn = [0] * num_stages
    done: set[tuple[str, int, int]] = set()
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]

    def needs(kind: str, stage: int, microbatch: int) -> list[tuple[str, int, int]]:
        if kind == "W":
            return [("I", stage, microbatch)]
        payload = "activation" if kind == "F" else "gradient"
        own = [] if kind == "F" else [("F", stage, microbatch)]
        feeding = [e.source for e in edges if e.target == stage and e.kind == payload]
        return own + [(kind, source, microbatch) for source in feeding]

    def ready(kind: str, stage: int, microbatch: int) -> bool:
        return (kind, stage, microbatch) not in done and done.issuperset(
            needs(kind, stage, microbatch)
        )

    while len(done) < 3 * num_stages * num_microbatches:
        candidates: list[Action] = []
        for stage in range(num_stages):
            for microbatch in range(num_microbatches):
                in_turn = microbatch == turn[stage]
                if ready("F", stage, microbatch):
                    candidates.append(Action(F, stage, microbatch))
                if ready("I", stage, microbatch):
                    candidates.append(Action(I, stage, microbatch))
                    candidates += [Action(B, stage, microbatch)] * in_turn
                if ready("W", stage, microbatch) and in_turn:
                    candidates.append(Action(W, stage, microbatch))
        forwards = [a for a in candidates if a.kind is F]
        backwards = [a for a in candidates if a.kind is B]
        candidates += [
            Action(OVERLAP_F_B, f.stage, f.microbatch, partner=b)
            for f in forwards
            for b in backwards
            if placement[f.stage] == placement[b.stage]
        ]
        action = rng.choice(candidates)
        rows[placement[action.stage]].append(action)
        for part in action.parts:
            for task in "IW" if part.kind is B else part.kind.name:
                done.add((task, part.stage, part.microbatch))
                turn[part.stage] += task == "W"
    schedule = Schedule.from_actions(f"random {seed}", placement, num_microbatches, rows)
    return Case(schedule, edges)


def _edges(rng: random.Random, num_stages: int, chain: bool) -> tuple[Edge, ...]:
    density = rng.random()
    return tuple(
        edge
        for late in range(num_stages)
        for early in range(late)
        for edge in (Edge(early, late, "activation"), Edge(late, early, "gradient"))
        if (late - early == 1 if chain else rng.random() < density)
    )


@pytest.fixture(scope="session")
def legal_case() -> Callable[..., Case]:
    """`grow_case`: a legal schedule with its edges from a seed; `chain=True` for a chain of stages."""
    return grow_case
