"""What a comparison may ask of a machine."""

import os

import pytest

from plait.compare.machine import check_device, check_gpus, check_ranks
from plait.compare.plan import Request, plan_jobs
from plait.core_ir.errors import UsageError


@pytest.mark.parametrize(("cores", "most"), [(2, 64), (8, 128)])
def test_ranks_are_sixteen_a_core_and_64_anywhere(
    cores: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    check_ranks(plan_jobs(Request("mlp", axes={"data": most // 2})))
    jobs = plan_jobs(Request("mlp", axes={"data": most // 2 + 1}))
    with pytest.raises(UsageError, match=f"would run {most + 2} ranks .*given at most {most};"):
        check_ranks(jobs)


def test_each_process_has_a_gpu_of_its_own() -> None:
    distributed, mpmd = plan_jobs(Request("mlp", axes={"data": 2}, engines=("distributed", "mpmd")))
    check_gpus(distributed, 4)
    check_gpus(mpmd, 1)
    with pytest.raises(UsageError, match="4 ranks need a GPU each, and this machine has 1; make"):
        check_gpus(distributed, 1)


def test_devices_that_backends_have() -> None:
    check_device(None, ("torch", "jax"))
    for device in ("cpu", "cuda"):
        check_device(device, ("torch", "jax"))
    check_device("cuda:1", ("torch",))
    check_device("gpu", ("jax",))
    with pytest.raises(UsageError, match="--device cuda:1: the backend jax runs on cpu, gpu, cuda"):
        check_device("cuda:1", ("torch", "jax"))
