"""The public `Schedule`: a table of actions with what can be done with it as methods."""

from collections.abc import Collection, Iterable, Sequence
from os import PathLike
from typing import Self

from plait.core_ir.schedule.checks import checked_list
from plait.core_ir.schedule.csv import read_csv, write_csv
from plait.core_ir.schedule.draw import draw
from plait.core_ir.schedule.ir import Action, ActionTable
from plait.core_ir.schedule.lower import lower
from plait.core_ir.schedule.rewrite import keep_forward
from plait.core_ir.schedule.simulate import simulate
from plait.core_ir.schedule.text import parse_action, parse_schedule, print_schedule
from plait.core_ir.schedule.timeline import Sync, Timeline
from plait.core_ir.schedule.times import Memory, Times
from plait.core_ir.schedule.validate import validate
from plait.core_ir.shards import ShardedStages

Edges = Iterable[tuple[int, int, str]]


class Schedule(ActionTable):
    """Which rank runs which task in which order. Immutable; `rank(r)` gives the actions of a rank.

    Made by `plait.schedule`, `Schedule.from_actions`, `Schedule.from_csv` or `Schedule.from_text`;
    none of the latter validates. `edges` are (source stage, target stage, "activation" |
    "gradient"), by default a chain of stages.
    """

    @classmethod
    def from_table(cls, table: ActionTable) -> Self:
        """The same actions as a `Schedule`."""
        return cls(
            table.name,
            table.placement,
            table.num_ranks,
            table.num_microbatches,
            table.offsets,
            table.kind,
            table.stage,
            table.microbatch,
            table.other_stage,
            table.other_microbatch,
            table.cells,
        )

    @classmethod
    def from_actions(
        cls,
        name: str,
        placement: Sequence[int],
        num_microbatches: int,
        rows: Sequence[Iterable[Action | str]],
    ) -> Self:
        """A schedule from each rank's actions in order, as `Action` or as text (`"0F1"`)."""
        parsed = [
            [parse_action(a) if isinstance(a, str) else a for a in checked_list(row, "a row")]
            for row in checked_list(rows, "rows")
        ]
        return super().from_actions(name, placement, num_microbatches, parsed)

    @classmethod
    def from_csv(cls, path: str | PathLike[str]) -> Self:
        """Read a CSV file of torch.distributed.pipelining's form; see `csv.read_csv`."""
        return read_csv(cls, path)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse what `str(schedule)` prints. Raises `TextError` with line and column."""
        return parse_schedule(cls, text)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write a CSV file of torch.distributed.pipelining's form; `UsageError` where that cannot be."""
        write_csv(self, path)

    def validate(
        self,
        *,
        edges: Edges | None = None,
        memory: Memory | None = None,
        memory_limit: float | None = None,
        ordered_forward: Collection[int] = (),
        forward_only: bool = False,
    ) -> None:
        """Raise `ScheduleError` unless the schedule is legal; see `validate.validate`."""
        validate(
            self,
            edges=edges,
            memory=memory,
            memory_limit=memory_limit,
            ordered_forward=ordered_forward,
            forward_only=forward_only,
        )

    def lower(self, edges: Edges | None = None, sharded: ShardedStages | None = None) -> Self:
        """The schedule with sends and receives, and those of sharded stages; see `lower.lower`."""
        return lower(self, edges, sharded)

    def forward_only(self) -> Self:
        """The forward tasks alone, in their order."""
        return keep_forward(self)

    def simulate(
        self,
        times: Times,
        memory: Memory | None = None,
        *,
        edges: Edges | None = None,
        sync: Sync = "none",
    ) -> Timeline:
        """The timeline under the given task times; see `simulate.simulate`."""
        return simulate(self, times, memory, edges=edges, sync=sync)

    def draw(self, times: Times) -> str:
        """A text picture of the simulated timeline."""
        return draw(self.simulate(times))

    def __str__(self) -> str:
        return print_schedule(self)
