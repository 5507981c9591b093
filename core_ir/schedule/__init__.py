"""Schedules: which rank runs which task in which order, and what that costs.

Passes (`validate`, `lower`, `simulate`, ...) are functions in the modules of those names, and
methods of `Schedule`. Timelines are drawn by `draw`, `render_svg`, `render_html` and `render_trace`.
"""

from plait.core_ir.schedule.draw import draw, draw_spans
from plait.core_ir.schedule.edges import Edge
from plait.core_ir.schedule.html import render_html
from plait.core_ir.schedule.ir import Action
from plait.core_ir.schedule.kinds import KINDS, ActionKind
from plait.core_ir.schedule.recipe import Recipe, Request
from plait.core_ir.schedule.registry import build, find, ranks_for, recipes, register, shape_for
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.svg import render_svg
from plait.core_ir.schedule.sweep import SweepRow, sweep
from plait.core_ir.schedule.text import parse_action
from plait.core_ir.schedule.timeline import Timeline
from plait.core_ir.schedule.times import Memory, Times
from plait.core_ir.schedule.trace import render_trace

__all__ = [
    "KINDS",
    "Action",
    "ActionKind",
    "Edge",
    "Memory",
    "Recipe",
    "Request",
    "Schedule",
    "SweepRow",
    "Timeline",
    "Times",
    "build",
    "draw",
    "draw_spans",
    "find",
    "parse_action",
    "ranks_for",
    "recipes",
    "register",
    "render_html",
    "render_svg",
    "render_trace",
    "shape_for",
    "sweep",
]
