"""The rows of sharded parameters that one rank of a torch backend holds."""

from collections.abc import Mapping
from typing import Any

import torch

from plait.core_ir.program import Program
from plait.core_ir.shards import shard_rows
from plait.core_ir.types import TensorType


class Shards:
    """Which rows this rank has of each sharded parameter of a program; `place` is its place in the mesh.

    Outside programs shards are not padded: those of the last ranks may be shorter, or empty.
    """

    def __init__(self, program: Program, place: Mapping[str, int]) -> None:
        axis, self._size = program.shard_axis or ("", 1)
        self._number = place.get(axis, 0)
        self._whole = {name: program.param_types[name] for name in program.shard_types}
        self._padded = program.shard_types

    def __contains__(self, name: str) -> bool:
        return name in self._whole

    def rows(self, name: str) -> slice:
        """The rows of the whole parameter."""
        return shard_rows(self._whole[name].shape[0], self._size, self._number)

    def type(self, name: str) -> TensorType:
        """What this rank holds."""
        whole, rows = self._whole[name], self.rows(name)
        return whole.with_shape((rows.stop - rows.start, *whole.shape[1:]))

    def own(self, name: str, array: Any) -> Any:
        """This rank's rows of an array that may be whole, or its rows already; any other as it is."""
        if name not in self or tuple(array.shape) != self._whole[name].shape:
            return array
        return array[self.rows(name)]

    def padded(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """A shard as programs take it."""
        missing = self._padded[name].shape[0] - len(shard)
        return torch.cat([shard, shard.new_zeros(missing, *shard.shape[1:])]) if missing else shard

    def unpadded(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """A shard without the rows that only fill it up."""
        num_rows = self.type(name).shape[0]
        return shard if len(shard) == num_rows else shard[:num_rows].clone()

    def whole(self, name: str, joined: torch.Tensor) -> torch.Tensor:
        """The parameter, of all shards one behind the other."""
        return joined[: self._whole[name].shape[0]]
