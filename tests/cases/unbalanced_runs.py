"""What each gloo rank of test_unbalanced.py does."""

import torch
import torch.distributed as dist
from unbalanced import check_unbalanced


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    check_unbalanced("torch", "torch", "distributed", codegen="eager")
    dist.barrier()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
