"""Schedules: which rank runs which task in which order, and what that costs.

Passes (`validate`, `lower`, `simulate`, ...) are functions in the modules of those names, and
methods of `Schedule`.
"""

from plait.core_ir.schedule.edges import Edge
from plait.core_ir.schedule.ir import Action
from plait.core_ir.schedule.kinds import KINDS, ActionKind
from plait.core_ir.schedule.recipe import Recipe, Request
from plait.core_ir.schedule.registry import build, find, ranks_for, recipes, register
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.timeline import Timeline
from plait.core_ir.schedule.times import Memory, Times

__all__ = [
    "KINDS",
    "Action",
    "ActionKind",
    "Edge",
    "Memory",
    "Recipe",
    "Request",
    "Schedule",
    "Timeline",
    "Times",
    "build",
    "find",
    "ranks_for",
    "recipes",
    "register",
]
