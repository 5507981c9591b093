"""What each gloo rank of test_plain_models.py does with the models that it names."""

import sys

import torch
import torch.distributed as dist
from plain_models import MODELS


def main(*names: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        pipeline = MODELS[name]().check("distributed")
        assert len(pipeline.engine.stages) == 2
        print(name)
    dist.barrier()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
