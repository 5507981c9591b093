"""What tasks cost: their times and the memory they hold, given as one number or one per stage."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from plait.core_ir.errors import ScheduleError

FloatArray = NDArray[np.float64]
PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Times:
    """Times of the tasks F, I, W, B and F&B and of the optimizer step, in any one unit.

    Each is a number, the same for every stage, or one per stage. `b` defaults to `i + w`. `fb` is
    the time of a pair, read by the stage of its forward; it defaults to the sum of its two tasks.
    `comm` is the latency of a transfer between ranks: it delays the receiver and occupies nobody.
    A rank's optimizer step takes the sum of `optimizer` over its stages.

    Raises `ScheduleError` for a negative or non-finite time.
    """

    f: PerStage
    i: PerStage
    w: PerStage
    b: PerStage | None = None
    fb: PerStage | None = None
    comm: float = 0.0
    optimizer: PerStage = 0.0

    def __post_init__(self) -> None:
        _normalise(self)
        if isinstance(self.comm, tuple):
            raise ScheduleError(f"Times.comm must be one number, got {self.comm}")


@dataclass(frozen=True)
class Memory:
    """What one microbatch of a stage holds, in any one unit: a number or one per stage.

    `activation` is held from the start of F to the end of I, `handover` from the end of I to the
    end of W; B holds `activation` to its end. `handover` defaults to `activation`.

    Raises `ScheduleError` for a negative or non-finite amount.
    """

    activation: PerStage = 1.0
    handover: PerStage | None = None

    def __post_init__(self) -> None:
        _normalise(self)


def per_stage(value: PerStage, num_stages: int, what: str) -> FloatArray:
    """`value` as an array [num_stages]; `what` names it in the error for a wrong length."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 0:
        return np.full(num_stages, float(array))
    if array.shape != (num_stages,):
        raise ScheduleError(
            f"{what} must be a number or one per stage: the schedule has {num_stages} stages,"
            f" got {array.size} values"
        )
    return array


def _normalise(costs: Times | Memory) -> None:
    """Turn numbers into floats and sequences into tuples of floats, in place."""
    for column in fields(costs):
        value = getattr(costs, column.name)
        if value is None:
            continue
        what = f"{type(costs).__name__}.{column.name}"
        try:
            array = np.asarray(value, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ScheduleError(
                f"{what} must be a number or one per stage, got {value!r}"
            ) from error
        if array.ndim > 1 or not np.isfinite(array).all() or (array < 0).any():
            raise ScheduleError(
                f"{what} must be a number or one per stage, finite and not negative, got {value!r}"
            )
        object.__setattr__(
            costs, column.name, tuple(array.tolist()) if array.ndim else float(array)
        )
