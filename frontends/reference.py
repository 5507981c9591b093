"""What a framework gives by itself, unpipelined: the oracle that a compiled pipeline is compared with."""

from collections.abc import Mapping
from dataclasses import dataclass

from plait.core_ir.op import Array


@dataclass(frozen=True)
class Reference:
    """One step over all microbatches, in order.

    loss: their mean or sum. grads: by leaf name, of every trainable parameter. buffers: by leaf name, as the last
    microbatch leaves them.
    """

    loss: Array
    grads: Mapping[str, Array]
    buffers: Mapping[str, Array]
