"""From lists of names to jobs."""

from pathlib import Path

import pytest

import plait
from plait.compare.job import Job, stages_of
from plait.compare.plan import Request, plan_jobs
from plait.core_ir.errors import PlaitError, UsageError

DEMO = Request(
    "llama",
    frontends=("torch", "flax"),
    backends=("torch", "jax"),
    engines=("distributed", "mpmd", "spmd"),
    schedules=("1f1b", "zb-h1"),
    train_steps=100,
)


def test_each_engine_goes_with_its_own_backend() -> None:
    jobs = plan_jobs(DEMO)
    assert [(job.backend, job.engine) for job in jobs] == [
        ("torch", "distributed"),
        ("jax", "mpmd"),
        ("jax", "spmd"),
    ]
    assert {job.frontends for job in jobs} == {("torch", "flax")}
    assert {job.schedules for job in jobs} == {("1f1b", "zb-h1")}
    assert [job.num_rows for job in jobs] == [4, 4, 4]
    assert [job.num_processes for job in jobs] == [2, 1, 1]


def test_first_engine_of_each_backend_trains_its_own_frontend() -> None:
    jobs = plan_jobs(DEMO)
    assert [(job.train_steps, job.train_frontend) for job in jobs[:2]] == [
        (100, "torch"),
        (100, "flax"),
    ]
    assert jobs[2].train_steps == 0


def test_training_takes_the_frontend_there_is() -> None:
    jobs = plan_jobs(Request("llama", frontends=("flax",), train_steps=1))
    assert [job.train_frontend for job in jobs] == ["flax", "flax"]


def test_defaults_are_what_is_installed_and_each_backends_engine() -> None:
    jobs = plan_jobs(Request("mlp"))
    assert [(j.backend, j.engine) for j in jobs] == [("torch", "distributed"), ("jax", "mpmd")]
    assert jobs[0].frontends == ("torch", "flax")
    assert jobs[0].batch_size == 16
    assert [j.engine for j in plan_jobs(Request("mlp", num_ranks=1))] == ["local", "mpmd"]


def test_engines_alone_say_which_backends() -> None:
    jobs = plan_jobs(Request("mlp", engines=("spmd", "mpmd")))
    assert [(job.backend, job.engine) for job in jobs] == [("jax", "spmd"), ("jax", "mpmd")]


def test_several_numbers_of_microbatches_cut_one_batch() -> None:
    jobs = plan_jobs(Request("mlp", backends=("torch",), microbatches=(2, 8), train_steps=5))
    assert [(job.num_microbatches, job.batch_size) for job in jobs] == [(2, 16), (8, 16)]
    assert [job.train_steps for job in jobs] == [5, 0]


def test_codegen_is_for_the_torch_backend() -> None:
    assert [job.codegen for job in plan_jobs(Request("mlp", codegen="eager"))] == ["eager", None]


def test_a_model_of_the_users_own_says_itself_what_it_is() -> None:
    job = plan_jobs(Request("package.module:build", train_steps=1))[0]
    assert job.frontends == (None,)
    assert job.train_frontend is None


def test_job_survives_its_way_to_a_worker() -> None:
    for job in plan_jobs(DEMO):
        assert Job.from_json(job.to_json()) == job


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frontends": ("keras",)}, "unknown frontend 'keras'; there are: torch, flax"),
        ({"backends": ("tvm",)}, "unknown backend 'tvm'; there are: torch, jax"),
        ({"engines": ("gloo",)}, "unknown engine 'gloo'; there are: local, distributed, mpmd"),
        ({"backends": ("torch",), "engines": ("spmd",)}, "'spmd' belongs to none of the backends"),
        ({"schedules": ("2f2b",)}, "unknown schedule '2f2b'; there are: .*1f1b"),
        ({"schedules": ()}, "at least one schedule"),
        ({"dtype": "f8"}, "unknown dtype 'f8'; there are: f32, bf16"),
        ({"codegen": "triton"}, "unknown codegen 'triton'; there are: inductor, eager"),
        ({"config": "huge"}, "llama has no config 'huge'; there are: tiny, small, 7b"),
        ({"model": "gpt"}, "unknown model 'gpt'; there are: deepseek_v3, llama, mlp"),
        ({"batch_size": 12}, "12 rows cannot be cut into 8 equal microbatches"),
        ({"engines": ("mpmd", "spmd"), "timeline": True}, "spmd runs a step as one program"),
        ({"microbatches": (4, 3)}, "8 rows cannot be cut into 3 equal microbatches; --batch-size"),
        ({"microbatches": (4, 0)}, "microbatches must be at least 1, got 0"),
        ({"microbatches": ()}, "at least one number of microbatches"),
        ({"num_ranks": 0}, "ranks must be at least 1, got 0"),
        (
            {"model": "deepseek_v3", "axes": {"expert": 3}},
            "deepseek_v3 over a mesh with expert=3: 8 experts do not divide over 3 ranks; choose",
        ),
        ({"axes": {"tensor": 4}}, "2 key-value heads do not divide over 4 ranks"),
        ({"axes": {"data": 5, "context": 3}}, "64 positions do not divide over 3 ranks"),
    ],
)
def test_mistakes_are_found_before_a_process_starts(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(PlaitError, match=message):
        plan_jobs(Request(**{"model": "llama", **changes}))  # type: ignore[arg-type]


def test_stages_follow_from_the_schedule(tmp_path: Path) -> None:
    assert stages_of("gpipe", 3) == 3
    file = tmp_path / "mine.csv"
    plait.schedule("1f1b", 4, 4).to_csv(file)
    assert stages_of(str(file), 4) == 4


def test_usage_errors_are_usage_errors() -> None:
    with pytest.raises(UsageError):
        plan_jobs(Request("gpt"))
