"""A `shard_map` whose specs do not divide its arrays: what is wrong, read off JAX's message, that of jax 0.10.2."""

import re

_FUNCTION = re.compile(
    r"shard_map applied to the function '(.*)' was given argument arrays with axis sizes that are not evenly divisible"
)
_ARRAY = re.compile(
    r"the passed args(?P<place>\[\d+\])(?P<path>.*?) of shape \w+\[(?P<shape>[\d,]*)\](?P<bound>.*) corresponds to "
    r"in_specs.*, which maps array axis (?P<dim>\d+) \(of size (?P<length>\d+)\) to mesh ax[ie]s (?P<axes>.+) "
    r"\(of (?:total )?size (?P<ranks>\d+)\)"
)
_PARAMETER = re.compile(r"is bound to .*'s parameter '(\w+)")
_KEY = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


def does_not_divide(message: str) -> str | None:
    """What to say of specs that do not divide, after the place; None where the message is about something else."""
    function = _FUNCTION.search(message)
    found = [*_ARRAY.finditer(message)]
    if function is None or not found:
        return None
    first = found[0]
    length, ranks = first["length"], first["ranks"]
    axes = re.findall(r"'(\w+)'", first["axes"]) or [first["axes"]]
    over = f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(repr, axes))}"
    more = f" (and {len(found) - 1} more like it)" if found[1:] else ""
    rows = "; of the batch it has the rows of one microbatch" if first["dim"] == "0" else ""
    name = "" if " at 0x" in function[1] else f" of {function[1]}"
    return (
        f"shard_map{name} cuts dim {first['dim']} of its argument {_name(first)}, of shape "
        f"[{first['shape'].replace(',', ', ')}], over {over} of {ranks} ranks, and {ranks} does not divide {length}"
        f"{more}; give the {over.split()[0]} a size that divides {length}, or pad the array{rows}"
    )


def _name(array: re.Match[str]) -> str:
    """An argument, or what is in it, as leaves are named: `params.layers.1.w`."""
    parameter = _PARAMETER.search(array["bound"])
    keys = ["".join(groups) for groups in _KEY.findall(array["path"])]
    name = ".".join([parameter[1] if parameter else f"args{array['place']}", *keys])
    return name.removesuffix(".value")
