"""DeepSeek-V3 and Llama over meshes of four and eight, two stages on each rank in a V, through both backends."""

import os
from pathlib import Path

import pytest
from mesh_cases import APART, CASES, check, compiled, run, same_bits
from process_group import run_ranks

TESTS = Path(__file__).parents[1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "frontend"),
    [
        ("data", "torch"),
        ("expert", "torch"),
        ("expert", "flax"),
        ("data-expert", "torch"),
        ("data-tensor", "torch"),
    ],
)
def test_gloo_processes(name: str, frontend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    script = Path(__file__).with_name("mesh_runs.py")
    ranks = run_ranks(script, [name, frontend], CASES[name].num_ranks, watchdog=400)
    for rank, ended in enumerate(ranks):
        assert ended.status == 0, f"rank {rank}:\n{ended.stderr[-3000:]}"
        assert ended.stdout.endswith("done\n")


@pytest.mark.parametrize(
    ("name", "frontend", "engine"),
    [
        ("data", "flax", "mpmd"),
        ("expert", "flax", "mpmd"),
        ("expert", "torch", "mpmd"),
        ("expert", "flax", "spmd"),
        ("data-expert", "flax", "mpmd"),
        ("data-tensor", "flax", "mpmd"),
        ("data-tensor", "flax", "spmd"),
    ],
)
def test_host_devices(name: str, frontend: str, engine: str) -> None:
    case = CASES[name]
    workload = case.workload(frontend)
    pipeline = compiled(case, workload, backend="jax", engine=engine)
    loss, grads = run(pipeline, workload)
    check(workload, pipeline, loss, grads, "framework" if frontend == "flax" else "backends")
    if (name, frontend, engine) == ("expert", "flax", "mpmd"):
        apart = compiled(case, workload, backend="jax", engine=engine, passes=APART)
        same_loss, same = run(apart, workload)
        assert loss == same_loss
        same_bits(grads, same)
