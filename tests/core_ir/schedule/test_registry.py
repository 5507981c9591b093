"""Schedules by name: what exists, what is refused, and a user's own."""

import pytest

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule import (
    Memory,
    Recipe,
    Request,
    Schedule,
    Times,
    build,
    find,
    ranks_for,
    recipes,
    register,
    shape_for,
)
from plait.core_ir.schedule import registry as registry_module
from plait.core_ir.schedule.text import parse_action


def test_every_recipe_is_described_once():
    names = [recipe.name for recipe in recipes()]
    assert names[:5] == ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2"]
    for recipe in recipes():
        assert find(recipe.name) is recipe
        assert recipe.summary
        assert recipe.needs


def test_unknown_name_lists_what_exists():
    with pytest.raises(
        ScheduleError, match=r"unknown schedule '1f2b'; there are: naive, gpipe, 1f1b, zb-h1, zb-h2"
    ):
        build("1f2b", 2, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 2), {}, "num_ranks must be 1 or more, got 0"),
        ((2, -1), {}, "num_microbatches must be 1 or more, got -1"),
        ((2, 2.5), {}, r"num_microbatches must be 1 or more, got 2\.5"),
        ((2, 2), {"stages_per_rank": 2}, "cannot have 2 stages a rank: stages = ranks"),
        ((4, 8), {"memory_limit": 3}, "hold 4, over the memory limit of 3; it takes 4"),
        ((4, 8), {"memory": Memory(2), "memory_limit": 7}, "hold 8, over"),
    ],
)
def test_numbers_that_a_schedule_cannot_have_are_errors(arguments, options, message):
    with pytest.raises(ScheduleError, match=message):
        build("1f1b", *arguments, **options)


def test_options_that_fit():
    limited = build("1f1b", 4, 8, stages_per_rank=1, memory=Memory(2), memory_limit=8)
    assert limited == build("1f1b", 4, 8)
    assert (limited.name, limited.num_ranks, limited.num_microbatches) == ("1f1b", 4, 8)


def test_ranks_follow_from_stages():
    assert ranks_for("zb-h1", 4) == 4
    with pytest.raises(ScheduleError, match="which 0 stages do not fill"):
        ranks_for("zb-h1", 0)


def test_shape_follows_from_stages_and_ranks():
    assert shape_for("1f1b", 4) == (4, 1)
    assert shape_for("zbv", 4) == (2, 2)
    assert shape_for("interleaved-1f1b", 12) == (6, 2)
    assert shape_for("interleaved-1f1b", 12, 4) == (4, 3)
    assert shape_for("auto", 4) == (4, 1)
    assert shape_for("auto", 4, 2) == (2, 2)
    with pytest.raises(ScheduleError, match="7 stages cannot be put on 2 ranks"):
        shape_for("auto", 7, 2)
    with pytest.raises(ScheduleError, match="'zbv' cannot have 1 stages a rank"):
        shape_for("zbv", 4, 4)


def test_times_by_stage_say_how_many_stages_a_rank_has():
    assert build("interleaved-1f1b", 2, 4, times=Times([1] * 6, 1, 1)).num_stages == 6
    assert build("interleaved-1f1b", 2, 4, times=Times(1, 1, 1)).num_stages == 4
    assert build("auto", 2, 4, times=Times(1, [1] * 4, 1)).num_stages == 4
    with pytest.raises(ScheduleError, match=r"Times\.f .* 3 stages, got 4 values"):
        build("auto", 3, 4, times=Times([1] * 4, 1, 1))


@pytest.fixture
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry_module, "_RECIPES", dict(registry_module._RECIPES))


def one_by_one(request: Request) -> Schedule:
    """Two stages on a rank, one microbatch after the other."""
    row = []
    for m in range(request.num_microbatches):
        row += [f"0F{m}", f"1F{m}", f"1B{m}", f"0B{m}"]
    return Schedule.from_actions(
        "one by one", [0, 0], request.num_microbatches, [map(parse_action, row)]
    )


def recipe(build, name="one-by-one", **options) -> Recipe:
    return Recipe(name, "one by one", "0", "v", "one rank", build, **options)


@pytest.mark.usefixtures("_own_registry")
def test_a_users_schedule():
    register(recipe(one_by_one, stages_per_rank=2, stages_are_free=True))
    schedule = build("one-by-one", 1, 3)
    assert schedule.num_stages == 2
    assert recipes()[-1].name == "one-by-one"
    assert ranks_for("one-by-one", 6) == 3
    assert ranks_for("one-by-one", 6, stages_per_rank=3) == 2
    with pytest.raises(
        ScheduleError, match="puts 2 stages on each rank, which 3 stages do not fill"
    ):
        ranks_for("one-by-one", 3)
    with pytest.raises(ScheduleError, match="there is a schedule 'one-by-one' already"):
        register(recipe(one_by_one))
    with pytest.raises(ScheduleError, match="there is a schedule 'zbv' already"):
        register(recipe(one_by_one, name="zbv"))


@pytest.mark.usefixtures("_own_registry")
def test_a_users_schedule_is_validated():
    def wrong(request: Request) -> Schedule:
        return Schedule.from_actions("wrong", [0], 1, [[parse_action("0F0")]])

    register(recipe(wrong, name="wrong"))
    with pytest.raises(ScheduleError, match=r"0I0 \(or 0B0\) is missing in schedule 'wrong'"):
        build("wrong", 1, 1)


@pytest.mark.usefixtures("_own_registry")
@pytest.mark.parametrize(
    ("built", "message"),
    [
        (None, "must return a Schedule, got NoneType"),
        (
            Schedule.from_actions("wrong", [0], 1, [[parse_action("0F0"), parse_action("0B0")]]),
            "asked for 1 ranks, 1 stages and 2 microbatches, but its builder returned .* 1 microbatches",
        ),
    ],
)
def test_a_users_builder_returns_what_was_asked_for(built, message):
    register(recipe(lambda request: built, name="wrong"))
    with pytest.raises(ScheduleError, match=message):
        build("wrong", 1, 2)


def test_recipe_without_a_name_is_an_error():
    with pytest.raises(ScheduleError, match="needs a name"):
        recipe(one_by_one, name="")
