"""A timeline as an HTML page of its own: zoom, times under the pointer, memory below."""

import json
from html import escape
from typing import Any

from plait.core_ir.schedule.palette import IDLE_COLOR, LEGEND, SHADES, ink_on
from plait.core_ir.schedule.picture import Box, Panel, Titled, panels_of
from plait.core_ir.schedule.timeline import Timeline
from plait.core_ir.schedule.viewer import BUTTONS, SCRIPT, STYLE


def render_html(timelines: Timeline | Titled, *, title: str | None = None, unit: str = "") -> str:
    """The text of an HTML file that needs nothing else.

    Both lanes of every rank, the memory of all ranks over time below; the wheel zooms, dragging
    moves, keys do both, the pointer shows names and times, in `unit`. Several timelines, by title,
    stand below each other and move together, on one scale. `title` is the first timeline's unless
    given.
    """
    panels = panels_of(timelines, unit)
    colors = sorted({box.color for panel in panels for box in (*panel.tasks, *panel.messages)})
    data = {
        "colors": colors,
        "inks": [ink_on(color) for color in colors],
        "unit": unit,
        "panels": [_panel_data(panel, colors) for panel in panels],
    }
    # "</" would end the script.
    encoded = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    bodies = "\n".join(
        f"<h2>{escape(panel.title)}</h2><p>{escape(panel.summary)}</p>"
        f'<canvas id="panel{index}" role="img" aria-label="{escape(panel.title)}"></canvas>'
        for index, panel in enumerate(panels)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title or panels[0].title)}</title>"
        f"<style>:root {{ --idle: {IDLE_COLOR}; }}{STYLE}</style></head>\n<body>\n"
        f"<header>{BUTTONS}{_legend()}</header>\n{bodies}\n"
        f'<div id="tip"></div>\n<script>const DATA = {encoded};{SCRIPT}</script>\n</body></html>\n'
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
        "memoryUnit": panel.memory_unit,
    }


def _legend() -> str:
    entries = (
        f'<span><i style="background:{"var(--idle)" if color == IDLE_COLOR else color}"></i>'
        f"{escape(name)}</span>"
        for color, name in LEGEND
    )
    return "".join(entries) + f"<span>{SHADES}</span>"
