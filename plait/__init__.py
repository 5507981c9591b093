"""Plait: a compiler stack for pipeline-parallel training of PyTorch and JAX models.

What stands in `__all__` is the public API; everything else is internal.
"""

from plait import passes
from plait.api import compile, stage_boundary
from plait.core_ir.arrays import to_numpy
from plait.core_ir.errors import PlaitError
from plait.core_ir.hardware import Hardware, Link
from plait.core_ir.schedule.registry import build as schedule
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.timeline import Timeline
from plait.core_ir.schedule.times import Memory, Times
from plait.pipeline import Pipeline

__version__ = "0.1.0"

__all__ = [
    "Hardware",
    "Link",
    "Memory",
    "Pipeline",
    "PlaitError",
    "Schedule",
    "Timeline",
    "Times",
    "compile",
    "passes",
    "schedule",
    "stage_boundary",
    "to_numpy",
]
