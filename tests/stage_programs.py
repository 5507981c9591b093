"""Programs written by hand, stage by stage, and their meaning: the tasks interpreted one microbatch after the other."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from plait.backends.runtime import StepInputs
from plait.core_ir.build import Builder
from plait.core_ir.graph import Graph, Port, Role, Value
from plait.core_ir.interpret import interpret
from plait.core_ir.op import Array, Op
from plait.core_ir.ops import elementwise, index, linalg, random, reduce, shape
from plait.core_ir.program import Edge, EdgeKind, Program, Stage
from plait.core_ir.types import KEY, TensorType, bf16, bool_, c64, f32, f64, i32, i64, u32

ROWS = 2
SCALAR = TensorType(f32, ())


class Task(Builder):
    """A builder whose inputs are made when first read."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._read: dict[Port, Value] = {}

    def read(self, role: Role, name: str, type_: TensorType) -> Value:
        port = Port(role, name)
        if port not in self._read:
            self._read[port] = self.input(type_, role, name)
        return self._read[port]

    def product(self, a: Value, b: Value, over_a: int, over_b: int) -> Value:
        return self(linalg.dot_general, a, b, batch=((), ()), contract=((over_a,), (over_b,)))

    def all(self, op: Op, *operands: Value) -> Value:
        return self(op, *(self.expand(x, operands[0].type.shape) for x in operands))


def graph(name: str, fill: Callable[[Task], None]) -> Graph:
    task = Task(name)
    fill(task)
    return task.build()


def edge(source: int, output: Port, target: int, input: Port, kind: EdgeKind) -> Edge:
    return Edge(source, output, target, input, kind, 0)


def layers(
    widths: Sequence[int],
    *,
    skip: tuple[int, int] | None = None,
    frozen: Collection[int] = (),
    shared: Collection[int] = (),
    vocabulary: int = 0,
) -> Program:
    """Stages h -> tanh(h @ w), the last with the loss sum((h - t)^2).

    widths: of h before each stage and behind the last. skip: (source, target): what enters the stage behind `source`
    is added before the tanh of `target` too. frozen: stages whose w has no gradient. shared: stages with one w.
    vocabulary: where not 0, stage 0 looks tokens up in a table instead.
    """
    num_stages = len(widths) - 1
    trainable = [s for s in range(num_stages) if s not in frozen]
    first_needed = min(trainable, default=num_stages)
    stages, edges = [], []
    for s in range(num_stages):
        stages.append(
            _layer(
                s,
                widths,
                skip,
                s in trainable,
                s in shared,
                first_needed,
                vocabulary if s == 0 else 0,
            )
        )
        if s:
            h, g = Port("activation", f"h{s}"), Port("gradient", f"g{s}")
            edges.append(edge(s - 1, h, s, h, "activation"))
            if s - 1 >= first_needed:
                edges.append(edge(s, g, s - 1, g, "gradient"))
    if skip:
        source, target = skip
        edges.append(
            edge(
                source,
                Port("activation", f"h{source + 1}"),
                target,
                Port("activation", "skip"),
                "activation",
            )
        )
        if source >= first_needed:
            g = Port("gradient", "skip")
            edges.append(edge(target, g, source, g, "gradient"))
    return Program("layers", tuple(stages), tuple(edges))


def _layer(
    s: int,
    widths: Sequence[int],
    skip: tuple[int, int] | None,
    is_trainable: bool,
    is_shared: bool,
    first_needed: int,
    vocabulary: int,
) -> Stage:
    num_stages = len(widths) - 1
    is_last = s == num_stages - 1
    x_type, y_type = (TensorType(f32, (ROWS, n)) for n in (widths[s], widths[s + 1]))
    tokens_type = TensorType(i32, (ROWS,))
    w_type = TensorType(f32, (vocabulary or widths[s], widths[s + 1]))
    name = "shared" if is_shared else f"w{s}"
    takes_skip = skip is not None and skip[1] == s
    gives_skip = skip is not None and skip[0] == s
    has_backward = s >= first_needed

    def x(t: Task) -> Value:
        return t.read("activation", f"h{s}", x_type) if s else t.read("batch", "x", x_type)

    def forward(t: Task) -> None:
        w = t.read("param", name, w_type)
        if vocabulary:
            rows = t.reshape(t.read("batch", "tokens", tokens_type), (ROWS, 1))
            y = t(
                index.gather,
                w,
                rows,
                offset_dims=(1,),
                collapsed_slice_dims=(0,),
                start_index_map=(0,),
                operand_batching_dims=(),
                start_indices_batching_dims=(),
                slice_sizes=(1, widths[s + 1]),
                mode="clip",
            )
        else:
            y = t.product(x(t), w, 1, 0)
        if takes_skip:
            y = t(elementwise.add, y, t.read("activation", "skip", y_type))
        y = t(elementwise.tanh, y)
        if has_backward:
            t.output(y, "residual", "y")
        if is_last:
            error = t(elementwise.sub, y, t.read("batch", "t", y_type))
            square = t(elementwise.mul, error, error)
            t.output(t(reduce.reduce_sum, square, dims=(0, 1)), "loss", "")
            t.output(error, "aux", "error")
            if has_backward:
                t.output(error, "residual", "error")
        else:
            t.output(y, "activation", f"h{s + 1}")

    def before_tanh(t: Task) -> Value:
        if is_last:
            error = t.read("residual", "error", y_type)
            g = t.all(
                elementwise.mul, t(elementwise.add, error, error), t.read("loss_grad", "", SCALAR)
            )
        else:
            g = t.read("gradient", f"g{s + 1}", y_type)
        if gives_skip:
            g = t(elementwise.add, g, t.read("gradient", "skip", y_type))
        y = t.read("residual", "y", y_type)
        slope = t(elementwise.sub, t.full(y_type, 1.0), t(elementwise.mul, y, y))
        return t(elementwise.mul, g, slope)

    def input_part(t: Task) -> None:
        if not has_backward:
            return
        g = before_tanh(t)
        if s > first_needed:
            t.output(t.product(g, t.read("param", name, w_type), 1, 1), "gradient", f"g{s}")
        if takes_skip and skip is not None and skip[0] >= first_needed:
            t.output(g, "gradient", "skip")
        if is_trainable:
            t.output(g, "handover", "g")

    def weight_part(t: Task) -> None:
        if not is_trainable:
            return
        g = t.read("handover", "g", y_type)
        if vocabulary:
            rows = t.reshape(t.read("batch", "tokens", tokens_type), (ROWS, 1))
            grad = t(
                index.scatter,
                t.full(w_type, 0.0),
                rows,
                g,
                kind="add",
                update_window_dims=(1,),
                inserted_window_dims=(0,),
                scatter_dims_to_operand_dims=(0,),
                operand_batching_dims=(),
                scatter_indices_batching_dims=(),
                mode="drop",
            )
        else:
            grad = t.product(x(t), g, 0, 0)
        t.output(grad, "param_grad", name)

    return Stage(
        s,
        {
            "F": graph(f"stage{s}.forward", forward),
            "I": graph(f"stage{s}.backward_input", input_part),
            "W": graph(f"stage{s}.backward_weight", weight_part),
        },
    )


def every_kind_of_value() -> Program:
    """Two stages that hand each other values of many dtypes, without elements and without dimensions.

    Stage 0: y = where(keep, sin(s) x + mean, 0), keep drawn by the key; it changes `mean`, and its backward reads the
    old one. Stage 1: loss = sum(y w) + s sum(table), where the table crosses without a gradient. `s` is shared.
    """
    row, scalar = TensorType(f32, (ROWS, 3)), SCALAR
    mean, flags = TensorType(f32, (3,)), TensorType(bool_, (ROWS, 3))
    table, wide = TensorType(bf16, (4,)), TensorType(f64, (2,))
    kept = {
        "sin": scalar,
        "count": TensorType(i32, ()),
        "flag": TensorType(bool_, ()),
        "empty": TensorType(f32, (0, 2)),
        "keep": flags,
        "half": TensorType(bf16, (2,)),
        "wide": wide,
        "phase": TensorType(c64, ()),
    }

    def forward_0(t: Task) -> None:
        x, s, old = (
            t.read("batch", "x", row),
            t.read("param", "s", scalar),
            t.read("buffer", "mean", mean),
        )
        bits = t(random.random_bits, t.read("rng_key", "", KEY), shape=(ROWS, 3), dtype=u32)
        half = t.full(bits.type, 2**31)
        made = {
            "sin": t(elementwise.sin, s),
            "count": t.convert(t.read("batch", "n", TensorType(i64, ())), i32),
            "flag": t(elementwise.compare, s, t.full(scalar, 0.0), direction="gt"),
            "empty": t(shape.slice_, x, start=(0, 0), limit=(0, 2), strides=(1, 1)),
            "keep": t(elementwise.compare, bits, half, direction="lt"),
            "half": t.convert(
                t(
                    shape.slice_,
                    t.read("buffer", "scale", mean),
                    start=(0,),
                    limit=(2,),
                    strides=(1,),
                ),
                bf16,
            ),
            "wide": t(elementwise.exp, t.read("param", "frozen", wide)),
            "phase": t.convert(s, c64),
        }
        y = t(
            elementwise.add, t.all(elementwise.mul, x, made["sin"]), t.expand(old, row.shape, (1,))
        )
        y = t(elementwise.select, made["keep"], y, t.full(row, 0.0))
        t.output(t.full(table, 0.5), "activation", "table")
        t.output(y, "activation", "y")
        for name, value in made.items():
            t.output(value, "residual", name)
        t.output(
            t(elementwise.add, old, t(reduce.reduce_sum, x, dims=(0,))), "buffer_update", "mean"
        )
        t.output(made["count"], "aux", "count")

    def input_0(t: Task) -> None:
        g = t.read("gradient", "y", row)
        g = t(elementwise.select, t.read("residual", "keep", flags), g, t.full(row, 0.0))
        t.output(g, "handover", "g")
        t.output(t(elementwise.not_, t.read("residual", "flag", kept["flag"])), "handover", "flag")

    def weight_0(t: Task) -> None:
        g, x = t.read("handover", "g", row), t.read("batch", "x", row)
        sin, old = t.read("residual", "sin", scalar), t.read("buffer", "mean", mean)
        grad = t(reduce.reduce_sum, t(elementwise.mul, g, x), dims=(0, 1))
        grad = t(elementwise.mul, grad, t(elementwise.cos, t.read("param", "s", scalar)))
        terms = [t(elementwise.mul, sin, t(reduce.reduce_sum, old, dims=(0,)))]
        for name in ("count", "empty", "half", "wide", "phase"):
            value = t.read("residual", name, kept[name])
            value = t(reduce.reduce_sum, value, dims=tuple(range(value.type.rank)))
            terms.append(t.convert(value, f32))
        terms.append(t.convert(t.read("handover", "flag", kept["flag"]), f32))
        for term in terms:
            grad = t(elementwise.add, grad, term)
        t.output(grad, "param_grad", "s")

    def forward_1(t: Task) -> None:
        y, w = t.read("activation", "y", row), t.read("param", "w", mean)
        told = t.convert(t.read("activation", "table", table), f32)
        loss = t(
            reduce.reduce_sum, t(elementwise.mul, y, t.expand(w, row.shape, (1,))), dims=(0, 1)
        )
        total = t(reduce.reduce_sum, told, dims=(0,))
        loss = t(elementwise.add, loss, t(elementwise.mul, t.read("param", "s", scalar), total))
        t.output(loss, "loss", "")

    def input_1(t: Task) -> None:
        loss_grad = t.read("loss_grad", "", scalar)
        w = t.expand(t.read("param", "w", mean), row.shape, (1,))
        t.output(t.all(elementwise.mul, w, loss_grad), "gradient", "y")
        total = t(
            reduce.reduce_sum, t.convert(t.read("activation", "table", table), f32), dims=(0,)
        )
        t.output(t(elementwise.mul, total, loss_grad), "param_grad", "s")

    def weight_1(t: Task) -> None:
        grad = t(reduce.reduce_sum, t.read("activation", "y", row), dims=(0,))
        t.output(t.all(elementwise.mul, grad, t.read("loss_grad", "", scalar)), "param_grad", "w")

    stages = tuple(
        Stage(
            s,
            {
                kind: graph(f"stage{s}.{kind}", fill)
                for kind, fill in zip("FIW", fills, strict=True)
            },
        )
        for s, fills in enumerate(((forward_0, input_0, weight_0), (forward_1, input_1, weight_1)))
    )
    y, grad = Port("activation", "y"), Port("gradient", "y")
    crossing = Port("activation", "table")
    edges = (
        edge(0, crossing, 1, crossing, "activation"),
        edge(0, y, 1, y, "activation"),
        edge(1, grad, 0, grad, "gradient"),
    )
    return Program("every_kind_of_value", stages, edges)


def rows_of_one_weight(num_stages: int) -> Program:
    """Each stage adds x_s . w of its own row x_s to what came before; all share w; the loss is the last sum."""
    row = TensorType(f32, (2,))

    def stage(s: int) -> Stage:
        def forward(t: Task) -> None:
            x, w = t.read("batch", f"x{s}", row), t.read("param", "w", row)
            total = t(reduce.reduce_sum, t(elementwise.mul, x, w), dims=(0,))
            if s:
                total = t(elementwise.add, t.read("activation", "sum", SCALAR), total)
            is_last = s == num_stages - 1
            t.output(total, "loss" if is_last else "activation", "" if is_last else "sum")

        def weight_part(t: Task) -> None:
            g = t.read("loss_grad", "", SCALAR)
            t.output(t.all(elementwise.mul, t.read("batch", f"x{s}", row), g), "param_grad", "w")

        tasks = {
            "F": graph("F", forward),
            "I": graph("I", lambda t: None),
            "W": graph("W", weight_part),
        }
        return Stage(s, tasks)

    port = Port("activation", "sum")
    edges = [edge(s, port, s + 1, port, "activation") for s in range(num_stages - 1)]
    return Program("rows", tuple(map(stage, range(num_stages))), tuple(edges))


PROGRAMS: dict[str, Program] = {
    "alike": layers([3] * 5),
    "one": layers([3, 3]),
    "unlike": layers([4, 4, 6, 3], vocabulary=7),
    "skip": layers([3] * 5, skip=(0, 2)),
    "frozen": layers([3] * 5, frozen=(0, 2)),
    "all_frozen_but_first": layers([3] * 4, frozen=(1, 2)),
    "all_frozen_but_last": layers([3] * 4, frozen=(0, 1)),
    "tied": layers([3] * 4, shared=(0, 2)),
    "every_kind_of_value": every_kind_of_value(),
}


def inputs_for(program: Program, num_microbatches: int, *, seed: int = 0) -> StepInputs:
    """Random values for everything a program reads."""
    rng = np.random.default_rng(seed)
    types: dict[tuple[str, str], TensorType] = {}
    for stage in program.stages:
        for task in stage.tasks.values():
            for port, value in zip(task.input_ports, task.inputs, strict=True):
                types[port.role, port.name] = value.type

    def array(type_: TensorType) -> Array:
        if type_.dtype.is_integer:
            return rng.integers(0, 5, type_.shape).astype(type_.dtype.numpy)
        return np.asarray(rng.standard_normal(type_.shape) * 0.5).astype(type_.dtype.numpy)

    def named(role: str) -> dict[str, Array]:
        return {name: array(t) for (r, name), t in types.items() if r == role}

    return StepInputs(
        params=named("param"),
        buffers=named("buffer"),
        microbatches=[named("batch") for _ in range(num_microbatches)],
        keys=rng.integers(0, 2**32, (num_microbatches, 2), dtype=np.uint32),
        loss_grad=1 / num_microbatches,
    )


def meaning(program: Program, inputs: StepInputs) -> dict[str, Any]:
    """loss, grads, buffers and aux by the NumPy meaning of the tasks, run one after the other."""
    losses, aux = [], {}
    partials: dict[tuple[str, int], Array] = {}
    buffers = dict(inputs.buffers)
    order = [("F", s) for s in program.stages]
    if inputs.backward:
        order += [(kind, s) for s in reversed(program.stages) for kind in ("I", "W")]
    for m, leaves in enumerate(inputs.microbatches):
        seen = dict(buffers)
        known: dict[tuple[int, Port], Array] = {}
        for kind, stage in order:
            task = stage.tasks[kind]
            operands = [
                _operand(inputs, seen, leaves, m, known, stage.index, port, value.type)
                for port, value in zip(task.input_ports, task.inputs, strict=True)
            ]
            for port, x in zip(task.output_ports, interpret(task, operands), strict=True):
                known[stage.index, port] = x
                if port.role == "loss":
                    losses.append(x)
                elif port.role == "aux":
                    aux.setdefault(port.name, []).append(x)
                elif port.role == "buffer_update":
                    buffers[port.name] = x
                elif port.role == "param_grad":
                    key = (port.name, stage.index)
                    partials[key] = partials.get(key, np.zeros_like(x)) + x
            for e in program.edges:
                if e.source == stage.index and (e.source, e.output) in known:
                    known[e.target, e.input] = known[e.source, e.output]
    grads: dict[str, Array] = {}
    for (name, _), x in sorted(partials.items()):
        grads[name] = grads[name] + x if name in grads else x
    total = np.zeros_like(losses[0])
    for loss in losses:
        total = total + loss
    changed = {
        p.name
        for s in program.stages
        for p in s.tasks["F"].output_ports
        if p.role == "buffer_update"
    }
    return {
        "loss": total * total.dtype.type(inputs.loss_grad),
        "grads": grads,
        "buffers": {name: buffers[name] for name in changed},
        "aux": {name: np.stack(parts) for name, parts in aux.items()},
    }


def _operand(
    inputs: StepInputs,
    buffers: dict[str, Array],
    leaves: Any,
    m: int,
    known: dict[tuple[int, Port], Array],
    stage: int,
    port: Port,
    type_: TensorType,
) -> Array:
    match port.role:
        case "param":
            return np.asarray(inputs.params[port.name])
        case "buffer":
            return np.asarray(buffers[port.name])
        case "batch":
            return np.asarray(leaves[port.name])
        case "rng_key":
            return np.asarray(inputs.keys[m])
        case "loss_grad":
            return np.full(type_.shape, inputs.loss_grad, type_.dtype.numpy)
    return known[stage, port]
