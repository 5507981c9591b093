"""A timeline as an SVG picture: tasks by colour with their microbatches, messages below each rank."""

import math
from html import escape

from plait.core_ir.schedule.palette import IDLE_COLOR, LEGEND, MESSAGE_COLOR, SHADES, ink_on
from plait.core_ir.schedule.picture import Box, Panel, Titled, panels_of
from plait.core_ir.schedule.timeline import Timeline

_LEFT, _RIGHT, _TOP = 64, 16, 34
_ROW, _LANE, _GAP = 24, 6, 4
_TITLE, _AXIS = 40, 30
# Sizes of labels, and the width of a digit as a share of them.
_FONTS, _DIGIT = (11, 8), 0.6


def render_svg(timelines: Timeline | Titled, *, width: int = 1200) -> str:
    """The picture as text of an SVG file; several timelines, by title, stand below each other on one
    scale.

    Tasks are coloured by kind, darker for later stages of a rank, and bear their microbatch; what is
    left of a rank's row is its bubble. Every box names itself and its times when pointed at.
    """
    panels = panels_of(timelines)
    end = max(panel.end for panel in panels) or 1.0
    scale, step = (width - _LEFT - _RIGHT) / end, tick(end)
    parts = [_legend()]
    y = _TOP
    for panel in panels:
        parts += _panel(panel, y, scale, step)
        y += _TITLE + panel.num_ranks * (_ROW + _LANE + _GAP) + _AXIS
    style = "text-anchor: middle; pointer-events: none"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}"'
        f' viewBox="0 0 {width} {y}" font-family="sans-serif" font-size="{_FONTS[0]}">\n'
        f"<style>text {{ {style} }} .left {{ text-anchor: start }}"
        " .title { font-weight: bold; font-size: 13px }</style>\n"
        f'<rect width="{width}" height="{y}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _legend() -> str:
    parts = []
    x = _LEFT
    for color, name in LEGEND:
        shape = f'<rect x="{x}" y="10" width="12" height="12" fill="{color}"{_opacity(color)}/>'
        parts.append(f'{shape}<text class="left" x="{x + 17}" y="20">{escape(name)}</text>')
        x += 36 + round(len(name) * _FONTS[0] * _DIGIT)
    return "\n".join([*parts, f'<text class="left" x="{x}" y="20">{SHADES}</text>'])


def _panel(panel: Panel, y: int, scale: float, step: float) -> list[str]:
    parts = [
        f'<text class="left title" x="{_LEFT}" y="{y + 14}">{escape(panel.title)}</text>',
        f'<text class="left" x="{_LEFT}" y="{y + 30}">{escape(panel.summary)}</text>',
    ]
    top = y + _TITLE
    length = panel.end * scale
    for rank in range(panel.num_ranks):
        row = top + rank * (_ROW + _LANE + _GAP)
        parts.append(f'<text class="left" x="8" y="{row + 16}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{row}" width="{length:.2f}" height="{_ROW}" fill="{IDLE_COLOR}"/>'
        )
    for box in panel.tasks:
        parts.append(_box(box, top + box.rank * (_ROW + _LANE + _GAP), _ROW, scale))
    for box in panel.messages:
        parts.append(_box(box, top + box.rank * (_ROW + _LANE + _GAP) + _ROW, _LANE, scale))
    bottom = top + panel.num_ranks * (_ROW + _LANE + _GAP)
    parts.append(f'<text class="left" x="8" y="{bottom + 17}">time</text>')
    return [*parts, *_axis(panel.end, bottom, scale, step)]


def _box(box: Box, y: int, height: int, scale: float) -> str:
    x, length = _LEFT + box.start * scale, (box.end - box.start) * scale
    times = f"{box.start:g} to {box.end:g} ({box.end - box.start:g})"
    edge = ' stroke="white" stroke-width="0.7"' if height == _ROW else _opacity(box.color)
    rect = (
        f'<rect x="{x:.2f}" y="{y}" width="{length:.2f}" height="{height}" fill="{box.color}"{edge}>'
        f"<title>rank {box.rank}: {escape(box.name)}: {times}</title></rect>"
    )
    fonts = (font for font in _FONTS if len(box.label) * font * _DIGIT <= length)
    font = next(fonts, 0) if height == _ROW else 0
    if not font:
        return rect
    style = f'font-size="{font}" fill="{ink_on(box.color)}"'
    return f'{rect}<text x="{x + length / 2:.2f}" y="{y + 16}" {style}>{escape(box.label)}</text>'


def _opacity(color: str) -> str:
    """Messages on their way at once lie on each other."""
    return ' fill-opacity="0.7"' if color == MESSAGE_COLOR else ""


def _axis(end: float, y: int, scale: float, step: float) -> list[str]:
    parts = []
    for count in range(int(end / step + 1e-9) + 1):
        x = _LEFT + count * step * scale
        parts.append(
            f'<path d="M{x:.2f} {y}v5" stroke="black"/>'
            f'<text x="{x:.2f}" y="{y + 17}">{count * step:g}</text>'
        )
    return parts


def tick(end: float) -> float:
    """A round number, 1, 2 or 5 times a power of ten, that cuts `end` into 5 to 12 parts."""
    power = 10.0 ** math.floor(math.log10(end))
    return next(step * power for step in (0.1, 0.2, 0.5, 1.0) if end / (step * power) <= 12)
