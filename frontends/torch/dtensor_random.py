"""Random ops on DTensors: where the tensor is cut, each rank draws numbers of its own.

NOTE: torch keeps the state of the generator in step over ranks here. A captured program has keys instead, and no
generator is touched. This is private. Tested with torch 2.13.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.distributed.tensor import Shard, _dispatch, _random

from plait.core_ir.mesh import Mesh
from plait.frontends.torch.groups import axes_of


class _Tracker(_random.OffsetBasedRNGTracker):
    """In place of torch's: tells over which axes a tensor is cut, while numbers for it are drawn."""

    def __init__(self, mesh: Mesh | None, tell: Callable[[tuple[str, ...]], None]) -> None:
        self._mesh, self._tell = mesh, tell
        self._use_distribute_region = True

    @contextmanager
    def _distribute_region(self, spec: Any, generator: Any = None) -> Iterator[None]:
        self._tell(self._cut(spec))
        yield
        self._tell(())

    def _compute_rng_offsets(self, spec: Any) -> tuple[int, int]:
        self._tell(self._cut(spec))
        return 0, 0

    def drawn(self, before: int, after: int, op: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """In place of an op that draws between two offsets."""
        result = op(*args, **kw)
        self._tell(())
        return result

    def _cut(self, spec: Any) -> tuple[str, ...]:
        what = "random numbers for a DTensor"
        return tuple(
            axis
            for dim, placement in enumerate(spec.placements)
            if isinstance(placement, Shard)
            for axis in axes_of(spec.mesh.get_group(dim), self._mesh, what)
        )


@contextmanager
def drawing(mesh: Mesh | None, tell: Callable[[tuple[str, ...]], None]) -> Iterator[None]:
    """Inside, `tell` is told before a random op on a DTensor over which axes it is cut, and () after."""
    tracker = _Tracker(mesh, tell)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(_random, "_rng_tracker", tracker))
        stack.enter_context(mock.patch.object(_dispatch, "run_dtensor_rng_op", tracker.drawn))
        yield
