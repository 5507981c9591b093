"""Every schedule with a name but `auto`, which picks from these, in the order that `list` shows them."""

from plait.core_ir.schedule.controllable import V_HALF, V_MIN
from plait.core_ir.schedule.dual_pipe import DUALPIPEV
from plait.core_ir.schedule.gpipe import GPIPE
from plait.core_ir.schedule.interleaved import INTERLEAVED_1F1B, INTERLEAVED_ZB, LOOPED_BFS
from plait.core_ir.schedule.naive import NAIVE
from plait.core_ir.schedule.one_f_one_b import ONE_F_ONE_B
from plait.core_ir.schedule.recipe import Recipe
from plait.core_ir.schedule.zbv import ZBV
from plait.core_ir.schedule.zero_bubble import ZB_H1, ZB_H2
from plait.core_ir.schedule.zero_bubble_limited import ZB_1P, ZB_2P

FAMILIES: tuple[Recipe, ...] = (
    NAIVE,
    GPIPE,
    ONE_F_ONE_B,
    ZB_H1,
    ZB_H2,
    ZB_1P,
    ZB_2P,
    INTERLEAVED_1F1B,
    LOOPED_BFS,
    INTERLEAVED_ZB,
    ZBV,
    V_HALF,
    V_MIN,
    DUALPIPEV,
)
