"""Prints the order of collectives, waits and products in the code that Inductor writes, on each rank.

The argument is a file: it holds the text of a graph over the axis "expert" of all ranks.
"""

import re
import sys
from pathlib import Path

import torch.distributed as dist
from torch._inductor.graph import GraphLowering
from torch.distributed.device_mesh import init_device_mesh

from plait.backends.torch.compile import compile_task
from plait.backends.torch.mesh_groups import axis_group
from plait.core_ir.parse import parse_graph

CALLS = {
    r"= torch\.ops\._c10d_functional\.all_to_all_single\.": "all_to_all",
    r"^ *torch\.ops\._c10d_functional\.wait_tensor\.": "wait",
    r"^ *extern_kernels\.mm\(": "dot_general",
}


def main(file: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("expert",))
    axis_group(mesh, "expert")
    written: list[str] = []
    GraphLowering.save_output_code = staticmethod(written.append)  # type: ignore[assignment,method-assign]
    compile_task(parse_graph(Path(file).read_text()), codegen="inductor", device="cpu")
    (code,) = written
    for line in code.splitlines():
        for pattern, name in CALLS.items():
            if re.search(pattern, line):
                print(name)
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
