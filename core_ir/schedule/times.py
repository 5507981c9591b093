"""What tasks and transfers cost: times and memory, as one number, one per stage or one per edge."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.checks import check_is, checked_count

FloatArray = NDArray[np.float64]
PerStage = float | Sequence[float]
PerEdge = float | Mapping[tuple[int, int], float]

# Numbers beyond these would overflow in sums and ratios of schedules.
_LEAST, _MOST = 1e-100, 1e100


@dataclass(frozen=True)
class Times:
    """Times of the tasks F, I, W, B and F&B and of the optimizer step, in any one unit.

    Each is a number, the same for every stage, or one per stage. `b` defaults to `i + w`. `fb` is
    the time of a pair, read by the stage of its forward; it defaults to the sum of its two tasks. A
    rank's optimizer step takes the sum of `optimizer` over its stages.

    A transfer between ranks occupies the sending rank's communication lane for `transfer` (bytes by
    bandwidth), one after the other, and arrives `comm` (the latency) after that; neither occupies a
    rank's computing. Both are a number or a mapping from (source stage, target stage).

    While a rank's lane is occupied, its computing takes `slowdown` times as long: 132 / (132 - 20)
    where 20 of 132 units move data, as in DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2).

    `unshard` and `reduce_grad` are of a stage's parameters and gradients where these are sharded: an UNSHARD
    and a REDUCE_GRAD occupy the lane so long, in turn with the messages of their rank. What runs the stage
    waits for the one, the optimizer step for the other.

    A message leaves when its action ends, as published figures assume; or, if `early`, when what it carries
    is there: the gradient of a B after its I, that of a pair after the I of its backward, its activation
    before the W.

    Raises `ScheduleError` for what is no time (negative, not finite, beyond 1e100), and for a slowdown
    below 1.
    """

    f: PerStage
    i: PerStage
    w: PerStage
    b: PerStage | None = None
    fb: PerStage | None = None
    comm: PerEdge = field(default=0.0, hash=False)
    optimizer: PerStage = 0.0
    transfer: PerEdge = field(default=0.0, hash=False)
    slowdown: float = 1.0
    early: bool = False
    unshard: PerStage = 0.0
    reduce_grad: PerStage = 0.0

    def __post_init__(self) -> None:
        _normalise(self)
        if not isinstance(self.slowdown, float) or self.slowdown < 1:
            raise ScheduleError(
                f"Times.slowdown must be one number, 1 or more, got {self.slowdown!r}"
            )


@dataclass(frozen=True)
class Memory:
    """What one microbatch of a stage holds, in any one unit: a number or one per stage.

    `activation` is held from the start of F to the end of I, `handover` from the end of I to the
    end of W; B holds `activation` to its end. `handover` defaults to `activation`. `parameters` is
    what a stage holds all the time: weights, gradients, optimizer state.

    Where parameters are sharded, `unsharded` is what a stage's gathered parameters hold, from UNSHARD to
    RESHARD, and `gradients` what its gradients do from the first weight gradient to REDUCE_GRAD; in a schedule
    without these actions, all the time.

    Raises `ScheduleError` for what is no amount: negative, not finite, beyond 1e100.
    """

    activation: PerStage = 1.0
    handover: PerStage | None = None
    parameters: PerStage = 0.0
    unsharded: PerStage = 0.0
    gradients: PerStage = 0.0

    def __post_init__(self) -> None:
        _normalise(self)

    def per_microbatch(self, num_stages: int) -> tuple[FloatArray, FloatArray]:
        """Activation and hand-over of each stage: two arrays [num_stages]."""
        activation = per_stage(self.activation, num_stages, "Memory.activation")
        if self.handover is None:
            return activation, activation
        return activation, per_stage(self.handover, num_stages, "Memory.handover")

    def while_sharded(self, num_stages: int) -> tuple[FloatArray, FloatArray]:
        """Gathered parameters and gradients of each stage: two arrays [num_stages]."""
        unsharded = per_stage(self.unsharded, num_stages, "Memory.unsharded").copy()
        return unsharded, per_stage(self.gradients, num_stages, "Memory.gradients").copy()

    def resident(
        self,
        placement: Sequence[int],
        num_ranks: int,
        gathered: Collection[int] = (),
        reduced: Collection[int] = (),
    ) -> FloatArray:
        """What each rank holds all the time: [num_ranks]. `gathered` and `reduced` are the stages whose parameters
        and gradients come and go."""
        parameters = per_stage(self.parameters, len(placement), "Memory.parameters").copy()
        for amounts, apart in zip(
            self.while_sharded(len(placement)), (gathered, reduced), strict=True
        ):
            amounts[list(apart)] = 0.0
            parameters += amounts
        resident = np.zeros(num_ranks)
        np.add.at(resident, np.asarray(placement), parameters)
        return resident


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


def per_edge(value: PerEdge, edges: Iterable[tuple[int, int]], what: str) -> FloatArray:
    """`value` as an array [edges], each (source stage, target stage); `what` names it in the error."""
    pairs = list(edges)
    if not isinstance(value, Mapping):
        return np.full(len(pairs), float(value))
    missing = [pair for pair in pairs if pair not in value]
    if missing:
        source, target = missing[0]
        raise ScheduleError(
            f"{what} has no entry ({source}, {target}), but stage {source} sends to stage {target}"
            " on another rank; give one for each such pair, or one number for all"
        )
    return np.array([value[pair] for pair in pairs], dtype=np.float64)


def _normalise(costs: Times | Memory) -> None:
    """Turn numbers into floats, sequences into tuples and mappings into dicts of them, in place."""
    for column in fields(costs):
        value = getattr(costs, column.name)
        if column.name == "early":
            check_is(value, bool, "Times.early", "True or False")
            continue
        if value is None and column.default is None:
            continue
        convert = _edge_numbers if column.name in ("comm", "transfer") else _stage_numbers
        what = f"{type(costs).__name__}.{column.name}"
        object.__setattr__(costs, column.name, convert(value, what))


def _stage_numbers(value: Any, what: str) -> float | tuple[float, ...]:
    array = _checked(value, what, "a number or one per stage", max_ndim=1)
    return tuple(array.tolist()) if array.ndim else float(array)


def _edge_numbers(value: Any, what: str) -> float | dict[tuple[int, int], float]:
    expected = "a number or one per edge, {(source stage, target stage): number}"
    if isinstance(value, Mapping):
        return {
            _pair(pair, what, expected): float(_checked(x, what, expected, max_ndim=0))
            for pair, x in value.items()
        }
    return float(_checked(value, what, expected, max_ndim=0))


def _pair(key: Any, what: str, expected: str) -> tuple[int, int]:
    if not isinstance(key, tuple) or len(key) != 2:
        raise ScheduleError(f"{what} must be {expected}, got the key {key!r}")
    # Entries for stages that do not exist are never read.
    source, target = (checked_count(s, f"{what}: a stage of {key}", least=-(2**31)) for s in key)
    return source, target


def _checked(value: Any, what: str, expected: str, max_ndim: int) -> FloatArray:
    try:
        given = np.asarray(value, dtype=object).ravel().tolist()
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ScheduleError(f"{what} must be {expected}, got {value!r}") from error
    # NumPy would make numbers of these.
    is_other = any(each is None or isinstance(each, str | bytes | bool) for each in given)
    if is_other or array.ndim > max_ndim or not array.size:
        raise ScheduleError(f"{what} must be {expected}, got {value!r}")
    if not np.isfinite(array).all() or (array < 0).any():
        raise ScheduleError(f"{what} must be {expected}, finite and not negative, got {value!r}")
    if ((array > _MOST) | (array < _LEAST) & (array > 0)).any():
        raise ScheduleError(
            f"{what} must be {expected}, 0 or from {_LEAST:g} to {_MOST:g}, got {value!r}: take another unit"
        )
    return array
