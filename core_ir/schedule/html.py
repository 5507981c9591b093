"""A timeline as an HTML page of its own: zoom, times under the pointer, memory below."""

import json
from html import escape
from typing import Any

from plait.core_ir.schedule.palette import COLORS, IDLE_COLOR, MESSAGE_COLOR
from plait.core_ir.schedule.picture import Box, Panel, Titled, panels_of
from plait.core_ir.schedule.timeline import Timeline
from plait.core_ir.schedule.viewer import SCRIPT, STYLE


def render_html(timelines: Timeline | Titled, *, title: str = "Schedule") -> str:
    """The text of an HTML file that needs nothing else.

    Both lanes of every rank, the memory of all ranks over time below; the wheel zooms, dragging
    moves, the pointer shows names and times. Several timelines, by title, stand below each other
    and move together, on one scale.
    """
    panels = panels_of(timelines)
    colors = sorted({box.color for panel in panels for box in (*panel.tasks, *panel.messages)})
    data = {
        "colors": colors,
        "idle": IDLE_COLOR,
        "panels": [_panel_data(panel, colors) for panel in panels],
    }
    # "</" would end the script.
    encoded = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    bodies = "\n".join(
        f"<h2>{escape(panel.title)}</h2><p>{escape(panel.summary)}</p>"
        f'<canvas id="panel{index}"></canvas>'
        for index, panel in enumerate(panels)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        '<div><button id="in">+</button><button id="out">&minus;</button>'
        f'<button id="all">all</button>{_legend()}</div>\n{bodies}\n<div id="tip"></div>\n'
        f"<script>const DATA = {encoded};{SCRIPT}</script>\n</body></html>\n"
    )


def _panel_data(panel: Panel, colors: list[str]) -> dict[str, Any]:
    place = {color: index for index, color in enumerate(colors)}

    def entries(boxes: tuple[Box, ...]) -> list[list[Any]]:
        return [[b.rank, b.start, b.end, b.label, b.name, place[b.color]] for b in boxes]

    return {
        "ranks": panel.num_ranks,
        "end": panel.end,
        "tasks": entries(panel.tasks),
        "messages": entries(panel.messages),
        "memory": panel.memory,
    }


def _legend() -> str:
    names: dict[str, list[str]] = {}
    for kind, color in COLORS.items():
        names.setdefault(color, []).append(kind.name)
    entries = [(color, " or ".join(kinds)) for color, kinds in names.items()]
    entries += [(MESSAGE_COLOR, "message"), (IDLE_COLOR, "bubble")]
    return "".join(
        f'<span class="key" style="background:{color}"></span>{escape(name)}'
        for color, name in entries
    )
