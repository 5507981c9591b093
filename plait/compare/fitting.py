"""Which schedules a comparison can have, told before anything is captured."""

from functools import cache

from plait.compare.job import stages_of
from plait.core_ir.errors import PlaitError, ScheduleError, UsageError
from plait.core_ir.schedule import registry
from plait.core_ir.schedule.schedule import Schedule


@cache
def misfit(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    num_cuts: int | None = None,
    num_layers: int | None = None,
) -> PlaitError | None:
    """What keeps a schedule, a name or a CSV file, from running so many microbatches on so many ranks.

    num_cuts: of the model, where that is known. num_layers: where the model is cut before layers, into as many stages
    as the schedule has. Raises `ScheduleError` for a schedule that there is not.
    """
    num_stages = stages_of(schedule, num_ranks)
    try:
        _check_numbers(schedule, num_ranks, num_microbatches)
    except ScheduleError as error:
        return error
    if num_cuts is not None and num_cuts + 1 != num_stages:
        return UsageError(
            f"schedule {schedule!r} on {num_ranks} ranks runs {num_stages} stages, and --split names {num_cuts} module "
            f"paths to cut before, where it takes {num_stages - 1}"
        )
    if num_layers is not None and num_stages > num_layers:
        return UsageError(
            f"the model has {num_layers} layers, which do not fill {num_stages} stages, those of {schedule} on "
            f"{num_ranks} ranks; use fewer ranks or a larger config"
        )
    return None


def check_stages(schedule: str, num_stages: int | None, num_microbatches: int) -> None:
    """ScheduleError for a schedule that cannot run so many stages, where their number is known, and microbatches."""
    if schedule.endswith(".csv"):
        given = Schedule.from_csv(schedule)
        _check_equal(
            schedule,
            {"stages": given.num_stages, "microbatches": given.num_microbatches},
            {"stages": num_stages or given.num_stages, "microbatches": num_microbatches},
        )
    elif num_stages is None:
        registry.find(schedule)
    else:
        registry.build(schedule, registry.ranks_for(schedule, num_stages), num_microbatches)


def _check_numbers(schedule: str, num_ranks: int, num_microbatches: int) -> None:
    if not schedule.endswith(".csv"):
        registry.build(schedule, num_ranks, num_microbatches)
        return
    given = Schedule.from_csv(schedule)
    _check_equal(
        schedule,
        {"ranks": given.num_ranks, "microbatches": given.num_microbatches},
        {"ranks": num_ranks, "microbatches": num_microbatches},
    )


def _check_equal(schedule: str, found: dict[str, int], asked: dict[str, int]) -> None:
    if found != asked:
        numbers = [" and ".join(f"{n} {what}" for what, n in x.items()) for x in (found, asked)]
        raise ScheduleError(
            f"schedule {schedule!r} is for {numbers[0]}; asked for are {numbers[1]}"
        )
