"""The op set, by family; OPS maps each name to its op."""

from plait.core_ir.op import Op
from plait.core_ir.ops import (
    attention,
    collective,
    control,
    convolution,
    elementwise,
    index,
    linalg,
    random,
    reduce,
    shape,
    window,
)

FAMILIES: dict[str, tuple[Op, ...]] = {
    "elementwise": elementwise.FAMILY,
    "shape": shape.FAMILY,
    "reduce": reduce.FAMILY,
    "window": window.FAMILY,
    "index": index.FAMILY,
    "linalg": linalg.FAMILY,
    "convolution": convolution.FAMILY,
    "attention": attention.FAMILY,
    "random": random.FAMILY,
    "control": control.FAMILY,
    "collective": collective.FAMILY,
}

OPS: dict[str, Op] = {op.name: op for family in FAMILIES.values() for op in family}
