"""The clocks of the ranks, read as one."""

import math
import time

import torch

from plait.backends.torch.process_group import Members

ROUNDS = 20


def clock_offset(group: Members, device: torch.device) -> float:
    """What to add to this rank's `time.perf_counter` for that of rank 0. All ranks call it at once.

    Told by the exchange with the shortest round trip; 0 where it is less than half of that, which is as much as can be
    told: on one host all ranks read one clock.
    """
    word = torch.zeros((), dtype=torch.float64, device=device)
    shortest, offset = math.inf, 0.0
    for rank in range(1, group.size):
        for _ in range(ROUNDS):
            if group.rank == 0:
                group.irecv(word, rank).wait()
                group.isend(word.fill_(time.perf_counter()), rank).wait()
            elif group.rank == rank:
                asked = time.perf_counter()
                group.isend(word, 0).wait()
                group.irecv(word, 0).wait()
                there = word.item()
                answered = time.perf_counter()
                if answered - asked < shortest:
                    shortest, offset = answered - asked, there - (asked + answered) / 2
    return offset if abs(offset) > shortest / 2 else 0.0
