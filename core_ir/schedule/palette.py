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
# However many stages a rank has, its colours keep this share of their light.
_DARKEST, _SHADE = 0.35, 0.7

MESSAGE_COLOR = "#d1495b"
IDLE_COLOR = "#e6e2dc"

# What the colours mean, in words; `SHADES` what their shades do.
TASK_LEGEND: tuple[tuple[str, str], ...] = (
    (COLORS[F], "F"),
    (COLORS[B], "B or I"),
    (COLORS[W], "W"),
    (COLORS[OVERLAP_F_B], "F&B"),
    (COLORS[OPT], "OPT"),
)
LEGEND = (*TASK_LEGEND, (MESSAGE_COLOR, "message"), (IDLE_COLOR, "bubble"))
SHADES = "darker: a later stage of the rank"


def color_of(action: Action, placement: tuple[int, ...]) -> str:
    """The colour of an action, `#rrggbb`."""
    color = COLORS.get(action.kind, _OTHER)
    if action.stage is None:
        return color
    earlier = placement[: action.stage].count(placement[action.stage])
    share = _DARKEST + (1 - _DARKEST) * _SHADE**earlier
    return "#" + "".join(f"{round(part * share):02x}" for part in rgb(color))


def ink_on(color: str) -> str:
    """Black or white, whichever is easier to read on `color`: the one of more contrast by WCAG 2."""
    linear = [
        (p / 255 / 12.92 if p <= 10 else ((p / 255 + 0.055) / 1.055) ** 2.4) for p in rgb(color)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 >= 1.05 * 0.05 else "#ffffff"


def rgb(color: str) -> tuple[int, int, int]:
    """The parts of `#rrggbb`, 0 to 255."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
