"""The ranks of a pipeline as one process group: messages between them, agreement, and a common end when one fails.

A rank that fails says so in the group's store, leaves the group, and raises. Its peers, blocked on it, get an error
from their connection, read the store, and raise too, each naming the first failure. A rank that was killed says
nothing, but its connections close all the same.

NOTE: this is the one file that uses private API of torch.distributed (the store of the default group, which torchrun's
agent keeps alive when a rank dies). Tested with torch 2.13.
"""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from plait.core_ir.errors import ExecutionError, PlaitError, UsageError

T = TypeVar("T")

NAME = "plait:stage"
WORD_SECONDS = 5.0
"""How long a rank waits for the word of another that failed first, and for its own to be read."""


class Members:
    """Some ranks of the run, numbered from 0 on among themselves, and what they send each other.

    One rank alone needs no process group.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self._ranks = tuple(ranks)
        self._group = group
        self.rank = self._ranks.index(dist.get_rank())
        self.size = len(self._ranks)

    @property
    def is_open(self) -> bool:
        """Whether no rank has failed."""
        return self._group is not None

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group itself."""
        assert self._group is not None
        return self._group

    def isend(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Begin to send."""
        work = dist.isend(tensor, self._ranks[rank], group=self._group)
        assert work is not None
        return work

    def irecv(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Begin to receive."""
        work = dist.irecv(tensor, self._ranks[rank], group=self._group)
        assert work is not None
        return work

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """The tensor of `source`, on every rank."""
        if self.size > 1:
            dist.broadcast(tensor, self._ranks[source], group=self._group)

    def sum(self, tensor: torch.Tensor) -> None:
        """The sum over ranks, on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)

    def start_sum(self, tensor: torch.Tensor) -> list[dist.Work]:
        """Begin to sum over ranks, in place: what to wait for."""
        if self.size == 1:
            return []
        return [dist.all_reduce(tensor, group=self._group, async_op=True)]

    def gather_tensor(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of each rank, on every rank; all are of one type."""
        if self.size == 1:
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(tensors, tensor, group=self._group)
        return tensors

    def close(self) -> None:
        """Leave: whoever waits for this rank gets an error."""
        if self._group is not None:
            group, self._group = self._group, None
            dist.destroy_process_group(group)

    def gather(self, item: T) -> list[T]:
        """What each rank passed, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self._group)
        return items


class Group(Members):
    """All ranks of the run. Made on every rank at once."""

    def __init__(self) -> None:
        _meet()
        super().__init__(range(dist.get_world_size()), dist.new_group(group_desc=NAME))
        self._store = PrefixStore(f"{NAME}:{next(_numbers)}", _get_default_store())
        self._parts: dict[tuple[tuple[int, ...], ...], Members] = {}

    def part(self, parts: Sequence[Sequence[int]]) -> Members:
        """That of some disjoint parts of the ranks in which this one is. A collective call the first time."""
        key = tuple(map(tuple, parts))
        if len(key) == 1 and len(key[0]) == self.size:
            return self
        if key not in self._parts:
            for ranks in key:  # every rank makes every group, in one order
                made = dist.new_group(list(ranks), group_desc=NAME) if len(ranks) > 1 else None
                if self.rank in ranks:
                    self._parts[key] = Members(ranks, made)
        return self._parts[key]

    def close(self) -> None:
        """Leave all groups."""
        for part in self._parts.values():
            part.close()
        super().close()

    # Agreement.

    def agree(self, error: Exception | None, device: torch.device) -> None:
        """Raise `error` here, and on every other rank an error of the same class that names this rank.

        Costs one reduction of a number when all is well.
        """
        failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
        try:
            self.sum(failed)
        except RuntimeError as lost:
            self.close()
            raise ExecutionError(f"{_ended(self.rank)}, before all had agreed: {lost}") from lost
        if not int(failed.item()):
            return
        own = None
        if error is not None:
            known = isinstance(error, PlaitError)
            kind = type(error) if known else ExecutionError
            own = (kind, str(error) if known else f"{type(error).__name__}: {error}")
        said = self.gather(own)
        if error is not None:
            raise error
        rank, (kind, text) = next((r, word) for r, word in enumerate(said) if word is not None)
        raise kind(f"rank {rank}: {text}")

    def agree_on_text(self, text: str, what: str) -> None:
        """UsageError on every rank unless all pass the same text; it shows the first line that differs."""
        texts = self.gather(text)
        different = [rank for rank, other in enumerate(texts) if other != texts[0]]
        if not different:
            return
        lines = zip(texts[0].splitlines(), texts[different[0]].splitlines(), strict=False)
        first = next(((a, b) for a, b in lines if a != b), ("an end", "more lines"))
        raise UsageError(
            f"ranks {different} built another {what} than rank 0; first difference: rank 0 has {first[0]!r}, rank "
            f"{different[0]} has {first[1]!r}; every rank must compile the same model, batch and options"
        )

    # Failure.

    def fail(self, error: Exception, doing: str) -> NoReturn:
        """End the group because of `error`, met while `doing` (stage, microbatch, action); raise ExecutionError.

        An error of the connection counts as another rank's failure when that rank has said so.
        """
        lost_peer = isinstance(error, RuntimeError) and not isinstance(error, PlaitError)
        who = _ended(self.rank) if lost_peer else f"rank {self.rank} failed first"
        own = json.dumps({"rank": self.rank, "said": f"{who}, {doing}: {error}"})
        first = json.loads(self._first_word(own, patient=lost_peer))
        self.close()
        if first["rank"] == self.rank:
            raise ExecutionError(first["said"]) from error
        raise ExecutionError(f"{first['said']} (rank {self.rank} stopped, {doing})") from error

    def _first_word(self, own: str, *, patient: bool) -> str:
        """The first failure on record; `own` becomes it where there is none (a patient rank waits a while before)."""
        try:
            if patient:
                _wait_until(lambda: self._store.check(["failure"]), WORD_SECONDS)
            first = self._store.compare_set("failure", "", own).decode()
            self._store.add("heard", 1)
            if (
                first == own
            ):  # stay until the others have read it: this rank may be keeping the store
                self.close()
                _wait_until(lambda: self._store.add("heard", 0) >= self.size, WORD_SECONDS)
            return first
        except (RuntimeError, ValueError):  # the store is gone with the rank that kept it
            return own


def _meet() -> None:
    """Wait for all ranks where a connection tells of one that has ended: making a group would wait for it for long."""
    if "gloo" not in dist.get_backend():
        return
    try:
        dist.all_reduce(torch.zeros(1))
    except RuntimeError as lost:
        raise ExecutionError(f"{_ended(dist.get_rank())}, before plait.compile: {lost}") from lost


def _ended(rank: int) -> str:
    return f"another rank has ended, or its connection has; rank {rank} noticed"


def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.02)


_numbers = itertools.count()
_groups: list[Group] = []


def group() -> Group:
    """The group of this run: one for all pipelines, made anew after a failure. A collective call the first time."""
    if not _groups or not _groups[-1].is_open:
        _groups.append(Group())
    return _groups[-1]


def is_initialised() -> bool:
    """Whether the process group that it stands on is there."""
    return dist.is_available() and dist.is_initialized()
