"""Schedules by name: what exists, what is refused, and a user's own."""

import numpy as np
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
        ((2, 2.5), {}, r"num_microbatches must be an integer, got 2\.5"),
        ((True, 2), {}, "num_ranks must be an integer, got True"),
        ((10**20, 2), {}, "num_ranks must be 2147483647 or less"),
        ((2 * 10**9, 8), {}, "48000000000 tasks; a schedule has at most 67108864: take fewer"),
        ((2, 2), {"stages_per_rank": 2}, "cannot have 2 stages a rank: stages = ranks"),
        ((2, 2), {"stages_per_rank": 1.5}, r"stages_per_rank must be an integer, got 1\.5"),
        ((2, 2), {"stages_per_rank": "2"}, "stages_per_rank must be an integer, got '2'"),
        ((2, 2), {"times": (1, 1, 1)}, r"times must be plait\.Times, got \(1, 1, 1\)"),
        ((2, 2), {"memory": [1, 2]}, r"memory must be Memory, got \[1, 2\]"),
        ((2, 2), {"memory_limit": float("nan")}, "memory_limit must be a number or None, got nan"),
        ((2, 2), {"memory_limit": "3"}, "memory_limit must be a number or None, got '3'"),
        ((4, 8), {"memory_limit": 3}, "hold 4, over the memory limit of 3; it takes 4"),
        ((4, 8), {"memory": Memory(2), "memory_limit": 7}, "hold 8, over"),
    ],
)
def test_numbers_that_a_schedule_cannot_have_are_errors(arguments, options, message):
    with pytest.raises(ScheduleError, match=message):
        build("1f1b", *arguments, **options)


def test_a_name_is_text():
    with pytest.raises(ScheduleError, match=r"name of a schedule must be a str, got \['1f1b'\]"):
        build(["1f1b"], 2, 2)


@pytest.mark.parametrize("name", ["zbv", "v-half", "v-min", "interleaved-1f1b", "interleaved-zb"])
def test_patterns_for_more_microbatches_than_asked_for_are_bounded(name):
    with pytest.raises(ScheduleError, match="a schedule has at most"):
        build(name, 10**5, 1)


def test_integers_of_numpy_are_integers():
    schedule = build("interleaved-1f1b", np.int64(2), np.int8(4), stages_per_rank=np.uint16(3))
    assert schedule == build("interleaved-1f1b", 2, 4, stages_per_rank=3)
    assert type(schedule.num_microbatches) is int
    assert schedule.rank(np.int32(1)) == schedule.rank(1)


def test_options_that_fit():
    limited = build("1f1b", 4, 8, stages_per_rank=1, memory=Memory(2), memory_limit=8)
    assert limited == build("1f1b", 4, 8)
    assert (limited.name, limited.num_ranks, limited.num_microbatches) == ("1f1b", 4, 8)


def test_ranks_follow_from_stages():
    assert ranks_for("zb-h1", 4) == 4
    with pytest.raises(ScheduleError, match="num_stages must be 1 or more, got 0"):
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
    with pytest.raises(ScheduleError, match="'zbv' cannot have 1 stage a rank"):
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
        ScheduleError, match="puts 2 stages on each rank, which 3 stages cannot fill"
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
            "asked for 1 rank, 1 stage and 2 microbatches, but its builder returned .* 1 microbatch",
        ),
    ],
)
def test_a_users_builder_returns_what_was_asked_for(built, message):
    register(recipe(lambda request: built, name="wrong"))
    with pytest.raises(ScheduleError, match=message):
        build("wrong", 1, 2)


@pytest.mark.usefixtures("_own_registry")
def test_a_builder_that_fails_is_an_error_with_its_cause():
    def failing(request: Request) -> Schedule:
        raise KeyError("stages")

    register(recipe(failing, name="failing"))
    with pytest.raises(
        ScheduleError, match="builder of schedule 'failing' failed: KeyError: 'stages'"
    ) as caught:
        build("failing", 1, 1)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("name", ["all", "mine.csv"])
def test_names_that_mean_something_else_are_refused(name):
    with pytest.raises(ScheduleError, match=f"no schedule can be called '{name}'"):
        register(recipe(one_by_one, name=name))


def test_what_cannot_build_is_refused():
    with pytest.raises(ScheduleError, match="'one-by-one' must be a function of a Request, got 3"):
        recipe(3)
    with pytest.raises(ScheduleError, match="what is registered must be a Recipe, got 'zbv'"):
        register("zbv")


def test_recipe_without_a_name_is_an_error():
    with pytest.raises(ScheduleError, match="needs a name"):
        recipe(one_by_one, name="")
