"""The kinds of action a schedule is made of, declared in one table.

A kind says what it computes, or which message it moves and between which neighbours by default.
Schedules store `code`, an index into `KINDS`; text and CSV files write `name`, as
torch.distributed.pipelining does.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Payload = Literal["activation", "gradient"]
Direction = Literal["send", "receive"]


@dataclass(frozen=True, slots=True)
class ActionKind:
    """One kind of action: `name` in text, `code` in arrays, and what the kind means.

    `forward`, `input_gradient` and `weight_gradient` say which tasks of (stage, microbatch) are
    done once the action ends. An overlapped pair does its `forward` for its own stage and the rest
    for its partner.
    """

    code: int
    name: str
    summary: str
    forward: bool = False
    input_gradient: bool = False
    weight_gradient: bool = False
    is_pair: bool = False
    direction: Direction | None = None
    payload: Payload | None = None
    peer_offset: int = 0
    has_stage: bool = True
    has_microbatch: bool = True

    @property
    def is_compute(self) -> bool:
        """True for the tasks of one microbatch: F, B, I, W and the overlapped pair."""
        return self.forward or self.input_gradient or self.weight_gradient

    @property
    def is_message(self) -> bool:
        """True for the sends and receives of activations and gradients."""
        return self.direction is not None

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, tuple[str]]:
        # Kinds are compared by identity, so a copy or a pickle gives the table's own object.
        return kind_named, (self.name,)


F = ActionKind(0, "F", "forward", forward=True)
B = ActionKind(1, "B", "backward: I and W as one", input_gradient=True, weight_gradient=True)
I = ActionKind(2, "I", "input-gradient part of the backward", input_gradient=True)  # noqa: E741
W = ActionKind(3, "W", "weight-gradient part of the backward", weight_gradient=True)
OVERLAP_F_B = ActionKind(
    4,
    "OVERLAP_F_B",
    "F of one stage multiplexed with B of another",
    forward=True,
    input_gradient=True,
    weight_gradient=True,
    is_pair=True,
)
OPT = ActionKind(5, "OPT", "a rank's optimizer step", has_stage=False, has_microbatch=False)
SEND_F = ActionKind(
    6, "SEND_F", "send activations", direction="send", payload="activation", peer_offset=1
)
RECV_F = ActionKind(
    7, "RECV_F", "receive activations", direction="receive", payload="activation", peer_offset=-1
)
SEND_B = ActionKind(
    8, "SEND_B", "send gradients", direction="send", payload="gradient", peer_offset=-1
)
RECV_B = ActionKind(
    9, "RECV_B", "receive gradients", direction="receive", payload="gradient", peer_offset=1
)
UNSHARD = ActionKind(10, "UNSHARD", "gather a stage's sharded parameters", has_microbatch=False)
RESHARD = ActionKind(11, "RESHARD", "free a stage's gathered parameters", has_microbatch=False)
REDUCE_GRAD = ActionKind(
    12, "REDUCE_GRAD", "reduce a stage's gradients over data ranks", has_microbatch=False
)
REDUCE_SHARED = ActionKind(
    13, "REDUCE_SHARED", "add the partial gradients of a shared parameter", has_microbatch=False
)

KINDS: tuple[ActionKind, ...] = (
    *(F, B, I, W, OVERLAP_F_B, OPT),
    *(SEND_F, RECV_F, SEND_B, RECV_B),
    *(UNSHARD, RESHARD, REDUCE_GRAD, REDUCE_SHARED),
)
_BY_NAME = {kind.name: kind for kind in KINDS}

# The table's columns as arrays, indexed by code.
IS_COMPUTE: NDArray[np.bool_] = np.array([kind.is_compute for kind in KINDS])
IS_MESSAGE: NDArray[np.bool_] = np.array([kind.is_message for kind in KINDS])
HAS_STAGE: NDArray[np.bool_] = np.array([kind.has_stage for kind in KINDS])
HAS_MICROBATCH: NDArray[np.bool_] = np.array([kind.has_microbatch for kind in KINDS])


def kind_named(name: str) -> ActionKind:
    """The kind whose text name is `name`; raises `KeyError` when the table has none."""
    return _BY_NAME[name]


def message_kinds(payload: Payload) -> tuple[ActionKind, ActionKind]:
    """The (send, receive) kinds that move `payload`."""
    return (SEND_F, RECV_F) if payload == "activation" else (SEND_B, RECV_B)
