"""Options of the command line that are lists by comma, read."""

from json import loads
from typing import Any

from plait.core_ir.errors import UsageError


def names(text: str) -> tuple[str, ...]:
    """The names in a list by comma, each once."""
    return tuple(dict.fromkeys(entries(text)))


def entries(text: str) -> tuple[str, ...]:
    """What stands in a list by comma, in order."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def axes(text: str) -> dict[str, int]:
    """The axes of a list such as data=2,expert=4."""
    found: dict[str, int] = {}
    for entry in entries(text):
        name, size = _pair(entry)
        if not size.isdecimal() or not name or name == "stage" or name in found or int(size) < 1:
            raise UsageError(
                f"--mesh takes the axes beside that of the stages, which --ranks sizes, each once with its size, as in "
                f"data=2,expert=4; got {text!r}"
            )
        found[name] = int(size)
    return found


def changes(text: str) -> dict[str, Any]:
    """The fields of a list such as num_layers=8,capacity_factor=1.25."""
    found: dict[str, Any] = {}
    for entry in entries(text):
        name, value = _pair(entry)
        if not value or not name or name in found:
            raise UsageError(
                f"--set takes fields, each once with its value, as num_layers=8; got {text!r}"
            )
        try:
            found[name] = loads(value)
        except ValueError:
            raise UsageError(
                f"--set {entry}: {value!r} is no number, true, false or null"
            ) from None
    return found


def _pair(entry: str) -> tuple[str, str]:
    """What stands before and behind the equals sign, if there is one."""
    name, _, value = entry.partition("=")
    return name.strip(), value.strip()


def counts(text: str) -> tuple[int, ...]:
    """The whole numbers in a list by comma, each once."""
    try:
        return tuple(dict.fromkeys(int(number) for number in names(text)))
    except ValueError:
        raise UsageError(f"--microbatches takes whole numbers by comma, got {text!r}") from None
