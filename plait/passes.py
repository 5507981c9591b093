"""The passes, and the pipeline that they make: to be read, changed, and added to.

A model is captured as one *joint graph*: forward, loss and backward of one microbatch. It goes through

    Passes.joint       (Graph) -> Graph              cleaning; by default CLEANING
    partition_stages   (Graph, num_stages) -> Program
    Passes.program     (Program) -> Program          splitting backwards and more; by default PROGRAM_PASSES
    Passes.sharding    how shard_parameters gives UNSHARD and REDUCE_GRAD to stages; by default not at all
    (a schedule is chosen)
    Passes.scheduled   (Program, pairs) -> Program   what the schedule overlaps; by default SCHEDULED_PASSES

A graph is immutable: a pass returns a new one, and reuses the equations that it does not change. `each_task` makes a
program pass of a graph pass. A program or scheduled pass with an argument named `seconds` is given what an equation
takes on the ranks' hardware. `plait.compile(..., passes=Passes(...))` runs your own, in any of the three places.
"""

from plait.core_ir.lanes import Lanes, lanes
from plait.core_ir.passes.clean_bodies import clean_bodies
from plait.core_ir.passes.deduplicate_stages import deduplicate_stages
from plait.core_ir.passes.eliminate_dead_code import eliminate_dead_code
from plait.core_ir.passes.fold_constants import fold_constants
from plait.core_ir.passes.fold_exchanges import fold_exchanges
from plait.core_ir.passes.fold_transposes import fold_transposes
from plait.core_ir.passes.live import peak_bytes
from plait.core_ir.passes.merge_common_subexpressions import merge_common_subexpressions
from plait.core_ir.passes.multiplex import multiplex, multiplex_pairs
from plait.core_ir.passes.overlap import fillers, overlap, overlap_pairs, overlap_tasks
from plait.core_ir.passes.partition_stages import partition_stages
from plait.core_ir.passes.pipeline import (
    CLEANING,
    DEFAULT_PASSES,
    PROGRAM_PASSES,
    SCHEDULED_PASSES,
    GraphPass,
    Passes,
    ProgramPass,
    ScheduledPass,
    build_program,
    clean,
    each_task,
    schedule_program,
    sort_tasks,
)
from plait.core_ir.passes.shard_parameters import Sharding, shard_parameters
from plait.core_ir.passes.sort_equations import sort_equations
from plait.core_ir.passes.split_backward import split_backward

__all__ = [
    "CLEANING",
    "DEFAULT_PASSES",
    "PROGRAM_PASSES",
    "SCHEDULED_PASSES",
    "GraphPass",
    "Lanes",
    "Passes",
    "ProgramPass",
    "ScheduledPass",
    "Sharding",
    "build_program",
    "clean",
    "clean_bodies",
    "deduplicate_stages",
    "each_task",
    "eliminate_dead_code",
    "fillers",
    "fold_constants",
    "fold_exchanges",
    "fold_transposes",
    "lanes",
    "merge_common_subexpressions",
    "multiplex",
    "multiplex_pairs",
    "overlap",
    "overlap_pairs",
    "overlap_tasks",
    "partition_stages",
    "peak_bytes",
    "schedule_program",
    "shard_parameters",
    "sort_equations",
    "sort_tasks",
    "split_backward",
]
