"""Orders for one stage a rank, told by two lags per rank.

Between backwards a rank runs at most one forward and one weight gradient. How far forwards run
ahead of the backwards, and weight gradients behind, is all in which GPipe, 1F1B, ZB-H1 and ZB-H2
differ.
"""

from collections.abc import Callable

import numpy as np

from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import B, F, I, W
from plait.core_ir.schedule.recipe import Request, Row, table_from_rows

Lag = Callable[[int], int]


def build_lagged(
    name: str, request: Request, warmup: Lag, weight_lag: Lag | None = None
) -> ActionTable:
    """Each rank's order: `warmup(rank)` forwards, then a backward and a forward in turn.

    `weight_lag(rank)` is by how many I tasks W runs behind; None runs I and W as one B. Lags
    longer than the number of microbatches are clamped: all forwards come first, the weight
    gradients last.
    """
    rows = [
        _row(rank, request.num_microbatches, warmup(rank), weight_lag and weight_lag(rank))
        for rank in range(request.num_ranks)
    ]
    return table_from_rows(name, range(request.num_ranks), request.num_microbatches, rows)


def _row(stage: int, num_microbatches: int, warmup: int, weight_lag: int | None) -> Row:
    # After backward k come weight gradient k - weight_lag, then forward k + warmup.
    microbatch = np.arange(num_microbatches)
    backward = B if weight_lag is None else I
    tasks = [(backward, 3 * microbatch), (F, 3 * (microbatch - warmup) + 2)]
    if weight_lag is not None:
        tasks.append((W, 3 * (microbatch + weight_lag) + 1))
    slot = np.concatenate([slots for _, slots in tasks])
    kind = np.repeat([kind.code for kind, _ in tasks], num_microbatches)
    order = np.argsort(slot)
    return Row(
        kind[order],
        np.full(len(order), stage),
        np.tile(microbatch, len(tasks))[order],
    )
