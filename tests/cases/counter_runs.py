"""What each gloo rank of test_counters.py does."""

import torch
import torch.distributed as dist
from counting import NUM_MICROBATCHES, SPLIT, CountingStack, X, check_counts, torch_loss

import plait
from plait.frontends.torch.reference import reference


def main() -> None:
    """Two steps under ZB-V on two stages' ranks by two of data: buffers of the stages here, as on one device."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, batch = CountingStack(), torch.tensor(X)
    pipeline = plait.compile(
        torch_loss,
        model,
        batch,
        split=SPLIT,
        schedule="zbv",
        num_microbatches=NUM_MICROBATCHES,
        mesh={"data": 2, "stage": 2},
        codegen="eager",
    )
    stages = pipeline.engine.stages
    for count in (1, 2):
        wanted = reference(torch_loss, model, batch, num_microbatches=1).buffers
        pipeline.step(batch)
        found = {name: buffer.numpy() for name, buffer in model.named_buffers()}
        own = {n: x for n, x in wanted.items() if int(n.split(".")[1]) in stages}
        assert len(own) == 6
        check_counts({name: found[name] for name in own}, own)
        assert found[next(iter(own))] == 100 + count * len(X)
    dist.barrier()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
