"""The table of large constants beside a text, as a safetensors file: content hash -> array.

Arrays are stored as bytes with their type in the file's metadata, so that every dtype comes back bit for bit.
"""

from collections.abc import Mapping
from os import PathLike

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from plait.core_ir.errors import TextError
from plait.core_ir.op import Array, Literal
from plait.core_ir.types import DTYPES, type_of


def save_constants(path: str | PathLike[str], constants: Mapping[str, Array]) -> None:
    """Write a table as `text.constants_of` gives it."""
    raw = {key: np.frombuffer(array.tobytes(), np.uint8) for key, array in constants.items()}
    types = {key: f"{type_of(a).dtype} {list(a.shape)}" for key, a in constants.items()}
    save_file(raw, path, metadata=types)


def load_constants(path: str | PathLike[str]) -> dict[str, Array]:
    """Read a table, for `parse.parse_graph`. TextError where an array is not what its hash says."""
    table: dict[str, Array] = {}
    with safe_open(path, framework="numpy") as file:
        for key, words in (file.metadata() or {}).items():
            dtype, _, shape = words.partition(" ")
            sizes = [int(n) for n in shape.strip("[]").split(",") if n.strip()]
            array = file.get_tensor(key).view(DTYPES[dtype].numpy).reshape(sizes)
            if Literal(array).digest != key:
                raise TextError(f"{path}: constant #{key} has other content than its hash says")
            table[key] = array
    return table
