"""Where stages go when a rank has several: round and round, or down and up again."""


def loop(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stage s on rank s % num_ranks: `loop(3, 2)` is (0, 1, 2, 0, 1, 2)."""
    return tuple(range(num_ranks)) * stages_per_rank


def vee(num_ranks: int) -> tuple[int, ...]:
    """Two stages a rank, the first and the last on rank 0: `vee(3)` is (0, 1, 2, 2, 1, 0).

    The turn in the middle needs no message, and the rank with the first stage has the loss.
    """
    down = tuple(range(num_ranks))
    return down + down[::-1]
