"""The colours of pictures: one for each kind of task, a darker shade for each later stage of a rank."""

from plait.core_ir.schedule.ir import Action
from plait.core_ir.schedule.kinds import OPT, OVERLAP_F_B, ActionKind, B, F, I, W

# Told apart by people with any colour vision, and in grey.
COLORS: dict[ActionKind, str] = {
    F: "#8ab8e8",
    B: "#6fbf8b",
    I: "#6fbf8b",
    W: "#f2c14e",
    OVERLAP_F_B: "#b79bd9",
    OPT: "#c9c9c9",
}
_OTHER = "#dddddd"
_SHADE = 0.8

MESSAGE_COLOR = "#d1495b"
IDLE_COLOR = "#e6e2dc"


def color_of(action: Action, placement: tuple[int, ...]) -> str:
    """The colour of an action, `#rrggbb`."""
    color = COLORS.get(action.kind, _OTHER)
    if action.stage is None:
        return color
    earlier = placement[: action.stage].count(placement[action.stage])
    return _darken(color, _SHADE**earlier)


def _darken(color: str, share: float) -> str:
    parts = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part * share):02x}" for part in parts)
