"""Joint programs of any number of layers: what size and shape a transformer's has, made by a loop."""

from joint_programs import cut, differentiate, matmul, matrix, total

from plait.core_ir.build import Builder
from plait.core_ir.graph import Graph, Value
from plait.core_ir.ops.elementwise import add, cos, mul, tanh
from plait.core_ir.ops.reduce import reduce_sum
from plait.core_ir.ops.shape import iota
from plait.core_ir.types import f64

DIM, HIDDEN = 4, 8


def layered(num_layers: int, num_stages: int) -> Graph:
    """Layers of a norm, a rotary factor, a gated product and a residual connection; about 80 equations each."""
    b = Builder(f"layered{num_layers}")
    h = matrix(b, "batch", "x", 2, DIM)
    params: dict[str, Value] = {}
    table = b(cos, b(iota, dtype=f64, shape=(2, DIM), dim=1))
    cuts = {index * num_layers // num_stages: index - 1 for index in range(1, num_stages)}
    for layer in range(num_layers):
        if layer in cuts:
            (h,) = cut(b, cuts[layer], h)

        def weight(name: str, *shape: int, layer: int = layer) -> Value:
            value = matrix(b, "param", f"layers.{layer}.{name}", *shape)
            params[f"layers.{layer}.{name}"] = value
            return value

        size = b.expand(b(reduce_sum, b(mul, h, h), dims=(1,)), (2, DIM), (0,))
        normal = b(mul, b(mul, h, b(tanh, size)), b.expand(weight("scale", DIM), (2, DIM)))
        turned = b(mul, normal, table)
        rows = b.reshape(b.transpose(b.reshape(turned, (1, 2, DIM)), (0, 2, 1)), (DIM, 2))
        turned = b.transpose(rows, (1, 0))
        mixed = b(tanh, matmul(b, turned, weight("mix", DIM, DIM)))
        h = b(add, h, mixed)
        gate = b(tanh, matmul(b, h, weight("w1", DIM, HIDDEN)))
        hidden = b(mul, gate, matmul(b, h, weight("w3", DIM, HIDDEN)))
        h = b(add, h, matmul(b, hidden, weight("w2", HIDDEN, DIM)))
    return differentiate(b, total(b, h), params)
