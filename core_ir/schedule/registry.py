"""The schedules that exist, by name, in one table; users add their own."""

from collections.abc import Sized
from dataclasses import replace

from plait.core_ir.errors import PlaitError, ScheduleError
from plait.core_ir.schedule.auto import AUTO
from plait.core_ir.schedule.checks import check_is, checked_count, counted
from plait.core_ir.schedule.families import FAMILIES
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.recipe import Recipe, Request
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.times import Memory, Times

_RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (*FAMILIES, AUTO)}


def recipes() -> tuple[Recipe, ...]:
    """Every schedule that can be built, the user's own last."""
    return tuple(_RECIPES.values())


def find(name: str) -> Recipe:
    """The recipe called `name`.

    Raises `ScheduleError`, listing what exists, for an unknown name.
    """
    check_is(name, str, "the name of a schedule", "a str")
    if name not in _RECIPES:
        raise ScheduleError(f"unknown schedule {name!r}; there are: {', '.join(_RECIPES)}")
    return _RECIPES[name]


def register(recipe: Recipe) -> None:
    """Add a user's schedule, so that its name works wherever a schedule's name does.

    Raises `ScheduleError` for a name that is taken, or that commands read as something else.
    """
    check_is(recipe, Recipe, "what is registered", "a Recipe")
    if recipe.name == "all" or recipe.name.endswith(".csv"):
        raise ScheduleError(
            f"no schedule can be called {recipe.name!r}: 'all' means every schedule, and a name that ends in"
            " '.csv' a file; take another name"
        )
    if recipe.name in _RECIPES:
        raise ScheduleError(f"there is a schedule {recipe.name!r} already; take another name")
    _RECIPES[recipe.name] = recipe


def ranks_for(name: str, num_stages: int, stages_per_rank: int | None = None) -> int:
    """The number of ranks on which schedule `name` runs `num_stages` stages."""
    per_rank = _stages_per_rank(find(name), stages_per_rank)
    num_stages = checked_count(num_stages, "num_stages")
    if num_stages % per_rank:
        raise ScheduleError(
            f"schedule {name!r} puts {counted(per_rank, 'stage')} on each rank, which"
            f" {counted(num_stages, 'stage')} cannot fill"
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
    num_ranks = checked_count(num_ranks, "num_ranks")
    num_stages = checked_count(num_stages, "num_stages")
    if num_stages % num_ranks:
        raise ScheduleError(
            f"{counted(num_stages, 'stage')} cannot be put on {counted(num_ranks, 'rank')}, the same"
            " number on each"
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
    default = recipe.stages_per_rank
    request = Request(num_ranks, num_microbatches, default, times, memory, memory_limit)
    if stages_per_rank is None and times is not None:
        stages_per_rank = _implied_by(times, recipe, request.num_ranks)
    request = replace(request, stages_per_rank=_stages_per_rank(recipe, stages_per_rank))
    schedule = _built(recipe, request)
    schedule.validate(memory=memory, memory_limit=request.memory_limit)
    return schedule


def _built(recipe: Recipe, request: Request) -> Schedule:
    """What the builder returns, if it is what was asked for."""
    try:
        table = recipe.build(request)
    except PlaitError:
        raise
    except Exception as error:
        raise ScheduleError(
            f"the builder of schedule {recipe.name!r} failed: {type(error).__name__}: {error}"
        ) from error
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
    return (
        f"{counted(num_ranks, 'rank')}, {counted(num_stages, 'stage')} and"
        f" {counted(num_microbatches, 'microbatch')}"
    )


def _implied_by(times: Times, recipe: Recipe, num_ranks: int) -> int | None:
    """How many stages a rank must have for times that are given per stage."""
    given = [value for value in (times.f, times.i, times.w) if isinstance(value, Sized)]
    if not given or not recipe.stages_are_free or len(given[0]) % num_ranks:
        return None
    return len(given[0]) // num_ranks


def _stages_per_rank(recipe: Recipe, asked: int | None) -> int:
    if asked is None:
        return recipe.stages_per_rank
    number = checked_count(asked, "stages_per_rank")
    if number != recipe.stages_per_rank and not recipe.stages_are_free:
        raise ScheduleError(
            f"schedule {recipe.name!r} cannot have {counted(number, 'stage')} a rank: {recipe.needs}"
        )
    return number
