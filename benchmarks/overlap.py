"""What hiding an expert exchange behind compute is worth: DualPipeV with and without overlap, paired in one run.

    python benchmarks/overlap.py [--codegen eager] [--rounds N] [--milliseconds 5]

Two ranks share the experts of a model of four expert layers (`models.deepseek_v3.moe`), in two stages on each rank: a V
of one. Each layer exchanges tokens twice forward and twice backward. The rows of a table:

    overlapped       F&B as one graph, ordered so that one half computes while the other's tokens travel
    multiplexed      F&B as one graph, in the order of its halves: every wait behind its start
    apart            B and F as tasks of their own
    torch            torch.distributed.pipelining, eager, Interleaved1F1B, the same model

hidden = 1 - (step - step of compute alone) / (time of the collectives alone). Compute alone is the same code whose
exchanges bring each rank its own tokens at once.

Two transports: a link that takes --milliseconds for an exchange and no core (`delayed_transport`), and gloo as it is,
which moves bytes with the cores that compute.
"""

import argparse
import dataclasses
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from delayed_transport import NAME, DelayedGroup, register
from torch import Tensor, multiprocessing, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import plait
from plait.core_ir.hardware import Link
from plait.models.deepseek_v3.config import CONFIGS
from plait.models.deepseek_v3.moe.torch import Exchange, MoE
from plait.passes import PROGRAM_PASSES, Passes, multiplex_pairs, overlap_tasks

NUM_RANKS, NUM_MICROBATCHES, NUM_TOKENS, NUM_LAYERS = 2, 8, 512, 4
CONFIG = dataclasses.replace(
    CONFIGS["tiny"],
    dim=256,
    moe_hidden_dim=512,
    num_experts=4,
    num_groups=1,
    top_groups=1,
    top_k=2,
    capacity_factor=1.0,
)
SLOTS = CONFIG.num_experts * CONFIG.capacity(NUM_TOKENS), CONFIG.dim
EXCHANGED_BYTES = 4 * SLOTS[0] * SLOTS[1] // NUM_RANKS
"""What a rank sends in one exchange."""

UNORDERED = tuple(one for one in PROGRAM_PASSES if one is not overlap_tasks)
VARIANTS = {
    "overlapped": Passes(),
    "multiplexed": Passes(program=UNORDERED, scheduled=(multiplex_pairs,)),
    "apart": Passes(program=UNORDERED, scheduled=()),
}
Step = Callable[[], object]


class Layer(nn.Module):
    """A residual expert layer, [B, T, D] -> [B, T, D]; the experts of this rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        size = dist.get_world_size(group)

        def to_experts(slots: Tensor) -> Tensor:
            arrived = exchanged(slots, group)
            experts, capacity, dim = slots.shape
            parts = arrived.view(size, experts // size, capacity, dim)
            return parts.transpose(0, 1).reshape(experts // size, size * capacity, dim)

        def to_tokens(slots: Tensor) -> Tensor:
            experts, capacity, dim = slots.shape
            parts = slots.view(experts, size, capacity // size, dim).transpose(0, 1)
            return exchanged(parts.reshape(size * experts, capacity // size, dim), group)

        self.norm = nn.LayerNorm(CONFIG.dim)
        self.moe = MoE(CONFIG, Exchange(to_experts, to_tokens))
        for name, whole in list(self.moe.experts.named_parameters()):
            own = whole[: len(whole) // size].detach().clone()
            setattr(self.moe.experts, name, nn.Parameter(nn.init.normal_(own, std=0.02)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


def exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i along dim 0 goes to rank i."""
    parts = [len(x) // dist.get_world_size(group)] * dist.get_world_size(group)
    return all_to_all_single_autograd(x, parts, parts, group)


def loss_fn(out: Tensor, target: Tensor) -> Tensor:
    """Mean square."""
    return (out - target).square().mean()


def main() -> None:
    """Start the ranks; the first prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--codegen", default="inductor")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--milliseconds", type=float, default=5.0)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    multiprocessing.spawn(run_rank, (address, options), NUM_RANKS)


def run_rank(rank: int, address: str, options: argparse.Namespace) -> None:
    """Measure every variant over every transport; rank 0 prints."""
    torch.set_num_threads(1)
    link = Link(EXCHANGED_BYTES / (options.milliseconds / 1e3), 0.0)
    register(link)
    dist.init_process_group(NAME, init_method=address, rank=rank, world_size=NUM_RANKS)
    group = dist.new_group(list(range(NUM_RANKS)))
    alone = [dist.new_group([one]) for one in range(NUM_RANKS)][rank]
    torch.manual_seed(rank)
    layers = [Layer(group).eval() for _ in range(NUM_LAYERS)]
    x = torch.randn(NUM_MICROBATCHES, NUM_TOKENS, CONFIG.dim)
    steps = {
        name: plait_step(layers, x, passes, options.codegen) for name, passes in VARIANTS.items()
    }
    steps["torch"] = torch_step(layers, x, alone)
    alone_seconds = {"link": link.seconds(EXCHANGED_BYTES), "gloo": exchange_seconds(group)}
    for transport, seconds in alone_seconds.items():
        report(rank, transport, seconds, steps, options.rounds)
    dist.destroy_process_group()


def plait_step(layers: list[Layer], x: Tensor, passes: Passes, codegen: str) -> Step:
    """A step of DualPipeV, two stages on each rank."""
    pipeline = plait.compile(
        lambda model, x: loss_fn(model(x), x),
        nn.Sequential(*layers),
        x,
        split=[str(NUM_LAYERS // 2)],
        schedule="dualpipev",
        num_microbatches=NUM_MICROBATCHES,
        mesh={"stage": 1, "expert": NUM_RANKS},
        engine="distributed",
        codegen=codegen,
        passes=passes,
    )
    return partial(pipeline.loss_and_grads, x)


def torch_step(layers: list[Layer], x: Tensor, alone: dist.ProcessGroup) -> Step:
    """A step of torch's own runtime, the same two stages."""
    half = NUM_LAYERS // 2
    stages = [
        PipelineStage(nn.Sequential(*part), number, 2, torch.device("cpu"), group=alone)
        for number, part in enumerate((layers[:half], layers[half:]))
    ]
    schedule = ScheduleInterleaved1F1B(stages, NUM_MICROBATCHES, loss_fn=loss_fn)  # type: ignore[arg-type]

    def step() -> None:
        for layer in layers:
            layer.zero_grad()
        schedule.step(x, target=x)

    return step


def exchange_seconds(group: dist.ProcessGroup) -> float:
    """What gloo takes for an exchange when nothing else runs: the median of some."""
    DelayedGroup.mode = "gloo"
    slots, seconds = torch.ones(SLOTS), []
    with torch.no_grad():
        for _ in range(20):
            dist.barrier()
            started = time.perf_counter()
            float(exchanged(slots, group)[0, 0])
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def report(rank: int, transport: str, exchange: float, steps: dict[str, Step], rounds: int) -> None:
    """Medians over rounds in which all variants take turns, after one that does not count."""
    seconds: dict[tuple[str, str], list[float]] = {}
    calls: dict[tuple[str, str], int] = {}
    for number in range(rounds + 1):
        for name, step in steps.items():
            for mode in (transport, "none"):
                took, calls[name, mode] = timed(step, mode)
                if number:
                    seconds.setdefault((name, mode), []).append(took)
    if rank:
        return
    median = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    print(f"\ntransport: {transport}; milliseconds, medians of {rounds}")
    print(f"{'':14}{'step':>9}{'compute alone':>15}{'collectives alone':>19}{'hidden':>9}")
    for name in steps:
        step, compute = median[name, transport], median[name, "none"]
        alone = 1e3 * exchange * calls[name, transport]
        hidden = 1 - (step - compute) / alone
        print(f"{name:14}{step:9.1f}{compute:15.1f}{alone:19.1f}{hidden:9.0%}", flush=True)


def timed(step: Step, mode: str) -> tuple[float, int]:
    """Seconds of a step from all ranks ready to all ranks done, and how many exchanges it has."""
    DelayedGroup.mode = mode
    DelayedGroup.sent.clear()
    dist.barrier()
    started = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - started, len(DelayedGroup.sent)


if __name__ == "__main__":
    main()
