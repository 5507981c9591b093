"""Which node of autograd runs while a backward is captured. The adapter to what torch notes of it; tested with 2.13.0.

Where torch itself refuses a node (a gradient of another shape, a value that was changed in place, an op without a
backward), no line of the user's runs: then the forward line that made the node is the place to look at.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.fx import traceback


class Running:
    """The node of autograd that runs, or ran when an exception left the backward.

    name: as torch calls it, `ExpBackward0`; "" outside a backward. sequence: the number of the forward op it is of.
    """

    def __init__(self) -> None:
        self.name, self.sequence = "", -1

    @contextmanager
    def following(self) -> Iterator[None]:
        """Nodes that run inside, in a backward of AOTAutograd, are followed."""
        begin, end = traceback.set_grad_fn_seq_nr, traceback.reset_grad_fn_seq_nr

        def begun(sequence: int) -> Any:
            node: Any = torch._C._current_autograd_node()
            self.name, self.sequence = "" if node is None else node.name(), sequence
            return begin(sequence)

        def ended() -> Any:
            self.name, self.sequence = "", -1
            return end()

        with (
            mock.patch.object(traceback, "set_grad_fn_seq_nr", begun),
            mock.patch.object(traceback, "reset_grad_fn_seq_nr", ended),
        ):
            yield
