"""What the ranks of a mesh axis have equal parts of."""


def share(total: int, ranks: int, what: str) -> int:
    """How many of them each rank has; ValueError where they do not divide."""
    if total % ranks:
        raise ValueError(
            f"{total} {what} do not divide over {ranks} ranks; choose a number of ranks that divides {total}, or "
            f"another number of {what}"
        )
    return total // ranks
