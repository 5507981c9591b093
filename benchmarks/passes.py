"""Seconds that each pass takes on the Llama of `models/llama`, by number of layers.

    python benchmarks/passes.py [LAYERS ...]

Captures the model on torch's meta device, 8 stages, then runs the passes as `plait.compile` does, each verified. Exits
with an error when 64 layers take more than 10 seconds.
"""

import dataclasses
import logging
import sys
import time

import torch

from plait.core_ir.parse import parse_program
from plait.core_ir.passes.pipeline import build_program
from plait.core_ir.text import print_program
from plait.frontends.captured import Captured
from plait.frontends.torch.capture import capture
from plait.models.llama.config import CONFIGS
from plait.models.llama.torch import build, loss_fn

NUM_STAGES = 8
MOST_SECONDS = {64: 10.0}


class Timings(logging.Handler):
    """Collects the pass names and seconds of the pipeline's log."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        name, seconds, _ = record.args  # type: ignore[misc]
        self.seconds[str(name)] = self.seconds.get(str(name), 0.0) + float(seconds)  # type: ignore[arg-type]


def captured(num_layers: int) -> Captured:
    """The joint program of a Llama with so many layers, without storage for its parameters."""
    config = dataclasses.replace(CONFIGS["tiny"], num_layers=num_layers)
    with torch.device("meta"):
        model = build(config)
    tokens = torch.zeros((2, config.seq_len), dtype=torch.int64)
    split = [f"layers.{layer}" for layer in config.cuts(NUM_STAGES)]
    batch = {"tokens": tokens, "targets": tokens}
    return capture(loss_fn, model, batch, num_microbatches=1, split=split)


def main(layers: list[int]) -> int:
    """Print the table."""
    logger = logging.getLogger("plait.core_ir.passes.pipeline")
    logger.setLevel(logging.INFO)
    rows = []
    for num_layers in layers:
        graph = captured(num_layers).graph
        timings = Timings()
        logger.addHandler(timings)
        started = time.process_time()
        program = build_program(graph, NUM_STAGES)
        all_passes = time.process_time() - started
        logger.removeHandler(timings)
        started = time.process_time()
        parse_program(print_program(program))
        text = time.process_time() - started
        rows.append((num_layers, len(graph.eqns), timings.seconds, all_passes, text))
    names = list(rows[0][2])
    width = max(map(len, names))
    print(f"{'layers':{width}} " + " ".join(f"{row[0]:>8}" for row in rows))
    print(f"{'equations':{width}} " + " ".join(f"{row[1]:>8}" for row in rows))
    for name in names:
        print(f"{name:{width}} " + " ".join(f"{row[2][name]:8.3f}" for row in rows))
    print(f"{'all passes, CPU s':{width}} " + " ".join(f"{row[3]:8.3f}" for row in rows))
    print(f"{'print and parse, CPU s':{width}} " + " ".join(f"{row[4]:8.3f}" for row in rows))
    return int(any(row[3] > MOST_SECONDS.get(row[0], float("inf")) for row in rows))


if __name__ == "__main__":
    sys.exit(main([int(n) for n in sys.argv[1:]] or [8, 16, 32, 64]))
