"""Reading compiled HLO text: what XLA made of a program, for the checks that it kept the program's form."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_HEAD = re.compile(r"^(?:ENTRY )?%(?P<name>\S+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>\S+) = (?P<type>.+?) (?P<opcode>[a-z][a-z0-9\-]*)\((?P<rest>.*)$"
)
_CALLED = re.compile(r"(?P<how>calls|to_apply|body|condition)=%(?P<name>[^\s,)}]+)")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{(?P<many>[^}]*)\}|(?:true|false)_computation=%(?P<one>[^\s,)}]+))"
)
_TARGET = re.compile(r'custom_call_target="(?P<target>[^"]*)"')
_PRODUCTS = ("dot", "convolution", "ragged-dot")
_PRODUCT_TARGETS = re.compile(r"matmul|gemm|dot|conv", re.IGNORECASE)


@dataclass(frozen=True)
class Instruction:
    """One instruction: the computations it runs are `called`; a while loop's are its `body` too."""

    name: str
    type: str
    opcode: str
    called: tuple[str, ...]
    target: str

    @property
    def is_product(self) -> bool:
        """Whether this is a matrix product or a convolution."""
        return self.opcode in _PRODUCTS or bool(
            self.opcode == "custom-call" and _PRODUCT_TARGETS.search(self.target)
        )


@dataclass(frozen=True)
class Module:
    """The computations of a module by name, and which one is run first."""

    computations: dict[str, list[Instruction]]
    entry: str

    def walk(self) -> Iterator[tuple[int, Instruction]]:
        """Every instruction that runs, with how many while loops it stands in, once for each such number."""
        seen: set[tuple[str, int]] = set()
        todo = [(self.entry, 0)]
        while todo:
            name, depth = todo.pop()
            if (name, depth) in seen:
                continue
            seen.add((name, depth))
            for instruction in self.computations[name]:
                yield depth, instruction
                inside = depth + (instruction.opcode == "while")
                todo.extend((called, inside) for called in instruction.called)


def parse(text: str) -> Module:
    """Parse what `Compiled.as_text` gives."""
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            current = head["name"]
            computations[current] = []
            if line.startswith("ENTRY"):
                entry = current
            continue
        match = _INSTRUCTION.match(line)
        if match and current:
            computations[current].append(_instruction(match))
    return Module(computations, entry)


def _instruction(match: re.Match[str]) -> Instruction:
    rest = match["rest"]
    called = [m["name"] for m in _CALLED.finditer(rest)]
    for branches in _BRANCHES.finditer(rest):
        names = branches["one"] or branches["many"]
        called.extend(name.strip().lstrip("%") for name in names.split(","))
    target = _TARGET.search(rest)
    return Instruction(
        match["name"],
        match["type"],
        match["opcode"],
        tuple(called),
        target["target"] if target else "",
    )
