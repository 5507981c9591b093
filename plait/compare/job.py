"""A job: what the processes of one engine are to measure. It travels to them as JSON."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Self

from plait.core_ir.schedule import registry
from plait.core_ir.schedule.schedule import Schedule


@dataclass(frozen=True)
class Job:
    """Rows, frontends x schedules, for one engine; then, if `train_steps`, a training.

    frontends: names of a model's sources, or one None where the model itself says what it is. num_ranks: of the
    pipeline; axes: of the mesh beside that of the stages; changes: of the model's config. steps: timed steps of a row.
    train_frontend: whose model is trained. timeline: whether rows hold a measured timeline.
    """

    model: str
    config: str
    dtype: str
    batch_size: int
    split: tuple[str, ...] | None
    backend: str
    engine: str
    codegen: str | None
    device: str | None
    num_ranks: int
    axes: dict[str, int]
    changes: dict[str, Any]
    num_microbatches: int
    frontends: tuple[str | None, ...]
    schedules: tuple[str, ...]
    steps: int
    train_steps: int = 0
    train_frontend: str | None = None
    timeline: bool = False

    @property
    def name(self) -> str:
        """The engine, as it is called in messages."""
        return f"{self.backend} {self.engine}"

    @property
    def num_processes(self) -> int:
        """Processes that run the job: the ranks of a `distributed` engine, else one."""
        return self.num_devices if self.engine == "distributed" else 1

    @property
    def num_devices(self) -> int:
        """Ranks of the mesh."""
        return self.num_ranks * math.prod(self.axes.values())

    @property
    def mesh(self) -> dict[str, int] | None:
        """What `plait.compile` takes: stages first, so that other axes stay inside a node."""
        return {"stage": self.num_ranks, **self.axes} if self.axes else None

    @property
    def num_rows(self) -> int:
        """Rows, without the training."""
        return len(self.frontends) * len(self.schedules) if self.steps else 0

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The job of such a line."""
        fields = json.loads(text)
        for name in ("split", "frontends", "schedules"):
            fields[name] = None if fields[name] is None else tuple(fields[name])
        return cls(**fields)


def stages_of(schedule: str, num_ranks: int) -> int:
    """The stages that a schedule, a name or a CSV file, has on so many ranks; ScheduleError for an unknown one."""
    if schedule.endswith(".csv"):
        return Schedule.from_csv(schedule).num_stages
    return num_ranks * registry.find(schedule).stages_per_rank
