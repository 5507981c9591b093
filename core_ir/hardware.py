"""Hardware as the cost model sees it: how fast one rank computes, reads memory, and reaches the others."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

from plait.core_ir.errors import UsageError
from plait.core_ir.types import DTYPES, DType, dtype

Made = TypeVar("Made")

EIGHT_BITS = "f8"
"""In `Hardware.flops_per_second`: both 8-bit floats."""

_STAND_INS: Mapping[str, tuple[str, ...]] = {
    "f8e4m3fn": (EIGHT_BITS, "f16", "bf16"),
    "f8e5m2": (EIGHT_BITS, "f16", "bf16"),
    "f16": ("bf16",),
    "bf16": ("f16",),
}
_PARTS = {"c64": "f32", "c128": "f64"}


@dataclass(frozen=True)
class Link:
    """What joins two ranks: bytes a second that one rank can send, and the time a message needs on top."""

    bytes_per_second: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        _require(self, "bytes_per_second", _is_positive(self.bytes_per_second), "above 0")
        _require(self, "latency_us", _is_number(self.latency_us), "a number, 0 or more")

    def seconds(self, num_bytes: float) -> float:
        """The time of one message."""
        return self.latency_us * 1e-6 + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Hardware:
    """One rank's device, and the links between ranks.

    flops_per_second: the peak of matrix products, by the dtype of their operands; f32 has to be there, see `peak`.
    product_efficiency: the share of the peak that products reach; the model has one for all, whatever their shape.
    bytes_per_second: of the rank's memory, reading and writing. memory_bytes: what it holds.
    inside, between: the links inside a node and from node to node; a node has `ranks_per_node` ranks, in their order.
    sms, comm_sms: of `sms` equal units of compute, `comm_sms` move data while the rank sends; compute then takes
        `slowdown` times as long.
    assumptions: what a reader of its figures should know, in words.

    Raises `UsageError` for what cannot be.
    """

    name: str
    flops_per_second: Mapping[str, float] = field(hash=False)
    bytes_per_second: float
    memory_bytes: float
    inside: Link
    between: Link
    ranks_per_node: int
    product_efficiency: float = 1.0
    sms: int = 1
    comm_sms: int = 0
    assumptions: str = ""

    def __post_init__(self) -> None:
        _require(self, "name", isinstance(self.name, str) and self.name != "", "a name")
        _require(self, "assumptions", isinstance(self.assumptions, str), "text")
        self._check_flops()
        for name in ("bytes_per_second", "memory_bytes"):
            _require(self, name, _is_positive(getattr(self, name)), "above 0")
        for name in ("inside", "between"):
            _require(self, name, isinstance(getattr(self, name), Link), "a Link")
        for name in ("ranks_per_node", "sms"):
            number = getattr(self, name)
            _require(self, name, _is_count(number) and number > 0, "a whole number, 1 or more")
        efficiency = self.product_efficiency
        _require(
            self, "product_efficiency", _is_positive(efficiency) and efficiency <= 1, "in (0, 1]"
        )
        fits = _is_count(self.comm_sms) and 0 <= self.comm_sms < self.sms
        _require(self, "comm_sms", fits, f"a whole number, 0 or more and below sms ({self.sms})")
        object.__setattr__(self, "flops_per_second", MappingProxyType(dict(self.flops_per_second)))

    def _check_flops(self) -> None:
        rates = self.flops_per_second
        _require(
            self, "flops_per_second", isinstance(rates, Mapping), "a number for each of some dtypes"
        )
        for name, rate in rates.items():
            if name not in DTYPES and name != EIGHT_BITS:
                known = ", ".join((EIGHT_BITS, *DTYPES))
                raise UsageError(
                    f"Hardware.flops_per_second: there is no dtype {name!r}; there are: {known}"
                )
            if not _is_positive(rate):
                raise UsageError(
                    f"Hardware.flops_per_second[{name!r}] must be {_expected('above 0', rate)}, got {rate!r}"
                )
        if "f32" not in rates:
            raise UsageError(
                "Hardware.flops_per_second must have f32, by which dtypes without a figure go; it has "
                + (", ".join(rates) or "nothing")
            )

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Self:
        """Read a JSON or TOML file whose keys are the fields; `inside` and `between` are tables of their fields.

        Raises `UsageError`, with file and key, for what is unreadable, missing, unknown or cannot be.
        """
        path = Path(path)
        given = _table(_read(path), cls, f"{path}: ")
        for key in ("inside", "between"):
            given[key] = _made(Link, given[key], f"{path}: {key}: ")
        return _made(cls, given, f"{path}: ")

    def peak(self, kind: DType) -> float:
        """Flops a second of products over operands of a dtype.

        One without a figure: 8-bit floats go by 16-bit ones, f16 and bf16 by each other, f64 at half of f32, complex
        numbers at a quarter of their parts (a complex multiplication is four), all else by f32.
        """
        for name in (kind.name, *_STAND_INS.get(kind.name, ())):
            if name in self.flops_per_second:
                return self.flops_per_second[name]
        if kind.kind == "complex":
            return self.peak(dtype(_PARTS[kind.name])) / 4
        f32 = self.flops_per_second["f32"]
        return f32 / 2 if kind.name == "f64" else f32

    @property
    def slowdown(self) -> float:
        """How many times as long compute takes while the rank sends."""
        return self.sms / (self.sms - self.comm_sms)

    def link(self, rank: int, other: int) -> Link:
        """What joins two ranks: the link inside a node where both are of one node, which ranks fill in their order."""
        together = rank // self.ranks_per_node == other // self.ranks_per_node
        return self.inside if together else self.between


def describe(hardware: Hardware) -> str:
    """Its figures and assumptions in words, for below a table."""
    rates = ", ".join(f"{n} {_short(r)}flop/s" for n, r in hardware.flops_per_second.items())
    inside, between = hardware.inside, hardware.between
    parts = [
        f"{hardware.name}: products {rates}, of which {hardware.product_efficiency:.0%} is reached; memory "
        f"{_short(hardware.memory_bytes)}B at {_short(hardware.bytes_per_second)}B/s",
        f"links {_short(inside.bytes_per_second)}B/s and {inside.latency_us:g} us inside a node of "
        f"{hardware.ranks_per_node}, {_short(between.bytes_per_second)}B/s and {between.latency_us:g} us between nodes",
    ]
    if hardware.comm_sms:
        parts.append(
            f"{hardware.comm_sms} of {hardware.sms} units move data while a rank sends, so compute takes "
            f"{hardware.slowdown:.2f} times as long"
        )
    return "; ".join(parts) + "." + (f" {hardware.assumptions}" if hardware.assumptions else "")


def to_json(hardware: Hardware) -> dict[str, Any]:
    """What `from_file` reads."""
    plain = {f.name: getattr(hardware, f.name) for f in fields(hardware)}
    links = {key: asdict(plain[key]) for key in ("inside", "between")}
    return {**plain, "flops_per_second": dict(hardware.flops_per_second), **links}


def _read(path: Path) -> Any:
    readers = {".json": json.loads, ".toml": tomllib.loads}
    suffix = path.suffix.lower()
    if suffix not in readers:
        raise UsageError(f"{path}: hardware is read from a .json or .toml file")
    try:
        return readers[suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # what both readers raise
        raise UsageError(f"{path} is not {suffix[1:].upper()}: {error}") from None


def _table(content: Any, kind: type[Any], where: str) -> dict[str, Any]:
    """The content, if it is a table of a dataclass's fields."""
    if not isinstance(content, dict):
        raise UsageError(f"{where}expected a table of keys, got {content!r}")
    known = {column.name: column.default is MISSING for column in fields(kind)}
    unknown = [key for key in content if key not in known]
    if unknown:
        raise UsageError(f"{where}unknown key {unknown[0]!r}; there are: {', '.join(known)}")
    missing = [key for key, needed in known.items() if needed and key not in content]
    if missing:
        raise UsageError(f"{where}key {missing[0]!r} is missing")
    return dict(content)


def _made(kind: type[Made], content: Any, where: str) -> Made:
    """What a table of its fields describes."""
    content = _table(content, kind, where)
    try:
        return kind(**content)
    except UsageError as error:
        raise UsageError(f"{where}{error}") from None


def _require(owner: object, name: str, holds: bool, expected: str) -> None:
    if not holds:
        value = getattr(owner, name)
        raise UsageError(
            f"{type(owner).__name__}.{name} must be {_expected(expected, value)}, got {value!r}"
        )


def _expected(otherwise: str, value: object) -> str:
    return "finite" if isinstance(value, float) and not math.isfinite(value) else otherwise


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value >= 0


def _is_positive(value: object) -> bool:
    return _is_number(value) and value != 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(number: float) -> str:
    """3.35e12 as '3.35 T'."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M")):
        if number >= 10**power:
            return f"{number / 10**power:.4g} {prefix}"
    return f"{number:.4g} "
