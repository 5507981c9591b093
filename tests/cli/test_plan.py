"""From lists of names to jobs."""

from dataclasses import replace
from pathlib import Path

import pytest

import plait
from plait.compare.job import Job, stages_of
from plait.compare.plan import Request, left_out, plan_jobs
from plait.core_ir.errors import PlaitError, UsageError
from plait.workloads.family import find_family

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
    job = plan_jobs(Request("json:loads", train_steps=1))[0]
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
        (
            {"batch_size": 16, "axes": {"tensor": 2, "data": 3}},
            "each of 3 parts over data; choose a --batch-size that 24 divides, .* --mesh",
        ),
        (
            {"batch_size": 8, "axes": {"data": 2}, "microbatches": (4, 8)},
            "8 rows cannot be cut into 8 equal microbatches, each of 2 parts over data; .* 16 divides",
        ),
        (
            {
                "model": "deepseek_v3",
                "axes": {"expert": 2},
                "microbatches": (4,),
                "batch_size": 4,
            },
            "4 rows cannot be cut into 4 equal microbatches, each of 2 parts over expert; .* 8 divides",
        ),
        ({"model": "mine:build", "batch_size": 16}, "--batch-size is for named models; mine:build"),
        ({"model": "mine:build", "changes": {"dim": 8}}, "--set is for named models; mine:build"),
        ({"changes": {"num_layers": 2.5}}, "num_layers must be of type int, got 2.5"),
        ({"changes": {"tied_head": 1}}, "tied_head must be of type bool, got 1"),
        ({"changes": {"rope_base": None}}, "rope_base must be of type float, got None"),
        ({"changes": {"seq_len": 0}}, "seq_len must be at least 1, got 0"),
        ({"changes": {"vocab_size": 8}}, "vocab_size must be at least 256, since the text"),
        ({"changes": {"width": 8}}, "llama has no field 'width'; it has: vocab_size, dim"),
        ({"shard": "data"}, "--shard data names no axis of --mesh; write --mesh data=SIZE too"),
        ({"shard": "tensor", "axes": {"tensor": 2}}, "llama itself is cut over that axis"),
        (
            {"split": ("layers.1", "layers.2")},
            "names 2 module paths to cut before, where it takes 1",
        ),
        ({"num_ranks": 5}, "has 4 layers, which do not fill 5 stages, those of 1f1b on 5 ranks"),
        (
            {"schedules": ("dualpipev",), "microbatches": (2,)},
            "needs at least 4 microbatches, got 2",
        ),
        ({"split": ("layers.99",), "frontends": ("torch",)}, "layers.99: .* layers.0 to layers.3"),
        ({"split": ("layers.4.mlp",), "frontends": ("torch",)}, "layers.4.mlp: the model has the"),
        ({"split": ("head",)}, "the Flax models are cut before layers; write layers.1"),
        ({"split": ("layers.2", "layers.2")}, "--split names layers.2 twice"),
        ({"device": "tpu"}, "--device tpu: the backend torch runs on cpu, cuda; choose one"),
        ({"device": "gpu", "engines": ("local", "mpmd")}, "--device gpu: the backend torch runs"),
        ({"model": "no_such_module:build"}, "there is no module 'no_such_module'; name a model as"),
        ({"model": "json.nothing:build"}, "there is no module 'json.nothing'; name a model as"),
        ({"model": "json:nobuild"}, "module 'json' has no function 'nobuild'"),
        ({"model": "json:"}, "'json:' is no path of a function; name a model as package.module"),
        ({"engines": ("mpmd", "spmd"), "timeline": True}, "spmd runs a step as one program"),
        (
            {"microbatches": (4, 3)},
            "8 rows cannot be cut into 3 equal .* a --batch-size that 3 div",
        ),
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


def test_what_a_schedule_cannot_have_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    plait.schedule("1f1b", 2, 4).to_csv(file)
    schedules = ("1f1b", "dualpipev", str(file))
    request = Request("mlp", backends=("torch",), schedules=schedules, microbatches=(2, 4, 8))
    assert [(job.num_microbatches, job.schedules) for job in plan_jobs(request)] == [
        (2, ("1f1b",)),
        (4, schedules),
        (8, ("1f1b", "dualpipev")),
    ]
    of_file = f"schedule {str(file)!r} is for 2 ranks and 4 microbatches; asked for are 2 ranks and"
    assert left_out(request) == [
        "dualpipev with 2 microbatches is left out: schedule 'dualpipev' on 2 ranks needs at least 4 microbatches, "
        "got 2",
        f"{file} with 2 microbatches is left out: {of_file} 2 microbatches",
        f"{file} with 8 microbatches is left out: {of_file} 8 microbatches",
    ]


def test_a_number_of_microbatches_that_no_schedule_can_have_is_left_out() -> None:
    request = Request("mlp", schedules=("dualpipev",), microbatches=(2, 4), train_steps=3)
    jobs = plan_jobs(replace(request, backends=("torch",), engines=("local", "distributed")))
    assert [(job.engine, job.num_microbatches, job.train_steps) for job in jobs] == [
        ("local", 4, 3),
        ("distributed", 4, 0),
    ]


def test_a_whole_number_is_a_number_and_what_may_be_none_may_be_none() -> None:
    family = find_family("deepseek_v3")
    assert family.config("tiny", {"capacity_factor": 2}).capacity_factor == 2
    assert family.config("tiny", {"q_lora_rank": None, "num_dense_layers": 0}).q_lora_rank is None


def test_stages_follow_from_the_schedule(tmp_path: Path) -> None:
    assert stages_of("gpipe", 3) == 3
    file = tmp_path / "mine.csv"
    plait.schedule("1f1b", 4, 4).to_csv(file)
    assert stages_of(str(file), 4) == 4


def test_usage_errors_are_usage_errors() -> None:
    with pytest.raises(UsageError):
        plan_jobs(Request("gpt"))
