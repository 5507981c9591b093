"""The schedules that exist, by name, in one table; users add their own."""

from collections.abc import Sized

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.auto import AUTO
from plait.core_ir.schedule.families import FAMILIES
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.recipe import Recipe, Request
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.times import Memory, Times
from plait.core_ir.schedule.validate import check_memory

_RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (*FAMILIES, AUTO)}


def recipes() -> tuple[Recipe, ...]:
    """Every schedule that can be built, the user's own last."""
    return tuple(_RECIPES.values())


def find(name: str) -> Recipe:
    """The recipe called `name`.

    Raises `ScheduleError`, listing what exists, for an unknown name.
    """
    if name not in _RECIPES:
        raise ScheduleError(f"unknown schedule {name!r}; there are: {', '.join(_RECIPES)}")
    return _RECIPES[name]


def register(recipe: Recipe) -> None:
    """Add a user's schedule, so that its name works wherever a schedule's name does.

    Raises `ScheduleError` for a name that is taken.
    """
    if recipe.name in _RECIPES:
        raise ScheduleError(f"there is a schedule {recipe.name!r} already; take another name")
    _RECIPES[recipe.name] = recipe


def ranks_for(name: str, num_stages: int, stages_per_rank: int | None = None) -> int:
    """The number of ranks on which schedule `name` runs `num_stages` stages."""
    per_rank = _stages_per_rank(find(name), stages_per_rank)
    if num_stages < 1 or num_stages % per_rank:
        raise ScheduleError(
            f"schedule {name!r} puts {per_rank} stages on each rank, which {num_stages} stages do"
            " not fill"
        )
    return num_stages // per_rank


def shape_for(name: str, num_stages: int, num_ranks: int | None = None) -> tuple[int, int]:
    """`(num_ranks, stages_per_rank)` for which schedule `name` runs `num_stages` stages.

    Without `num_ranks` the schedule's default number of stages a rank decides. Raises
    `ScheduleError` where the stages do not fit.
    """
    recipe = find(name)
    if num_ranks is None:
        return ranks_for(name, num_stages), recipe.stages_per_rank
    if num_ranks < 1 or num_stages % num_ranks:
        raise ScheduleError(
            f"{num_stages} stages cannot be put on {num_ranks} ranks, the same number on each"
        )
    return num_ranks, _stages_per_rank(recipe, num_stages // num_ranks)


def build(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int | None = None,
    times: Times | None = None,
    memory: Memory | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """The schedule called `name`, valid, for `num_ranks` ranks and `num_microbatches` microbatches.

    `stages_per_rank`: where the schedule leaves it open; it follows from `times` given per stage.
    `times` (default: F = I = W = 1) guide those schedules that are searched for. `memory_limit`, in
    the unit of `memory` (default: one per stage activation), is the most that a rank may hold.

    Raises `ScheduleError` for an unknown name, for numbers that the schedule cannot have, and for a
    memory limit it cannot keep.
    """
    recipe = find(name)
    for value, what in ((num_ranks, "num_ranks"), (num_microbatches, "num_microbatches")):
        if not isinstance(value, int) or value < 1:
            raise ScheduleError(f"schedule {name!r}: {what} must be 1 or more, got {value!r}")
    if stages_per_rank is None and times is not None:
        stages_per_rank = _implied_by(times, recipe, num_ranks)
    request = Request(
        num_ranks,
        num_microbatches,
        _stages_per_rank(recipe, stages_per_rank),
        times,
        memory,
        memory_limit,
    )
    schedule = _built(recipe, request)
    schedule.validate()
    if memory_limit is not None:
        check_memory(schedule, memory or Memory(), memory_limit)
    return schedule


def _built(recipe: Recipe, request: Request) -> Schedule:
    """What the builder returns, if it is what was asked for."""
    table = recipe.build(request)
    if not isinstance(table, ActionTable):
        raise ScheduleError(
            f"the builder of schedule {recipe.name!r} must return a Schedule, got {type(table).__name__}"
        )
    asked = (request.num_ranks, request.num_stages, request.num_microbatches)
    found = (table.num_ranks, table.num_stages, table.num_microbatches)
    if found != asked:
        raise ScheduleError(
            f"schedule {recipe.name!r} was asked for {_sizes(*asked)}, but its builder returned {_sizes(*found)}"
        )
    return Schedule.from_table(table)


def _sizes(num_ranks: int, num_stages: int, num_microbatches: int) -> str:
    return f"{num_ranks} ranks, {num_stages} stages and {num_microbatches} microbatches"


def _implied_by(times: Times, recipe: Recipe, num_ranks: int) -> int | None:
    """How many stages a rank must have for times that are given per stage."""
    given = [value for value in (times.f, times.i, times.w) if isinstance(value, Sized)]
    if not given or not recipe.stages_are_free or len(given[0]) % num_ranks:
        return None
    return len(given[0]) // num_ranks


def _stages_per_rank(recipe: Recipe, asked: int | None) -> int:
    if asked is None or asked == recipe.stages_per_rank:
        return recipe.stages_per_rank
    if not recipe.stages_are_free or asked < 1:
        raise ScheduleError(
            f"schedule {recipe.name!r} cannot have {asked} stages a rank: {recipe.needs}"
        )
    return asked
