"""What sizes of a model must be."""

from collections.abc import Collection
from dataclasses import fields
from typing import Any


def check_sizes(config: Any, may_be_none: Collection[str] = ()) -> None:
    """ValueError for a whole number in a config that is below one, or below zero where there may be none of it."""
    for field in fields(config):
        value, least = getattr(config, field.name), 0 if field.name in may_be_none else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ValueError(f"{field.name} must be at least {least}, got {value}")


def share(total: int, ranks: int, what: str) -> int:
    """How many of them each rank of a mesh axis has; ValueError where they do not divide."""
    if total % ranks:
        raise ValueError(
            f"{total} {what} do not divide over {ranks} ranks; choose a number of ranks that divides {total}, or "
            f"another number of {what}"
        )
    return total // ranks
