"""What each rank of test_meshes.py does: `mesh_runs.py CASE FRONTEND`."""

import sys

import torch
import torch.distributed as dist
from mesh_cases import APART, CASES, check, compiled, run, same_bits


def main(name: str, frontend: str) -> None:
    """DualPipeV on this rank: the plain model's loss and gradients; the same bits where pairs run apart."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = CASES[name]
    workload = case.workload(frontend)
    options = {"backend": "torch", "engine": "distributed", "codegen": "eager"}
    pipeline = compiled(case, workload, **options)
    loss, grads = run(pipeline, workload)
    check(workload, pipeline, loss, grads, "framework" if frontend == "torch" else "backends")
    assert pipeline.program.pairs
    if case.num_ranks == 4:  # eight processes capture twice for long
        apart = compiled(case, workload, passes=APART, **options)
        assert not apart.program.pairs
        same_loss, same = run(apart, workload)
        assert loss == same_loss
        same_bits(grads, same)
    dist.barrier()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
