"""Programs with collectives written by hand, and what they mean by NumPy on whole arrays, without any.

Types are those of one rank; `layouts` says how the parameters, which are given whole, are cut.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stage_programs import SCALAR, Task, edge, graph

from plait.backends.runtime import StepInputs, StepOutputs
from plait.core_ir.graph import Port, Role, Value
from plait.core_ir.mesh import Layout, Mesh
from plait.core_ir.op import Array, Op
from plait.core_ir.ops import collective, elementwise, reduce
from plait.core_ir.program import Program, Stage
from plait.core_ir.types import TensorType, f32

WIDTH, HIDDEN, ROWS = 4, 8, 2

Params = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class MeshProgram:
    """A program for a mesh, and `block(params, stage, h, g)`: what a stage makes of h, what it gives back for the
    gradient g of that, and the gradients of its parameters, on whole arrays of one part of a microbatch."""

    program: Program
    mesh: Mesh
    layouts: Mapping[str, Layout]
    whole: Mapping[str, tuple[int, ...]]
    forward: Callable[[Params, int, NDArray[Any]], NDArray[Any]]
    backward: Callable[
        [Params, int, NDArray[Any], NDArray[Any]], tuple[NDArray[Any], dict[str, NDArray[Any]]]
    ]
    rows: int = field(default=ROWS)

    def inputs(self, num_microbatches: int, *, seed: int = 0) -> StepInputs:
        """Random whole parameters, and batches for every part of so many microbatches."""
        rng = np.random.default_rng(seed)

        def array(*shape: int) -> Array:
            return (rng.standard_normal(shape) * 0.5).astype(np.float32)

        count = num_microbatches * self.mesh.num_parts
        return StepInputs(
            params={name: array(*shape) for name, shape in self.whole.items()},
            buffers={},
            microbatches=[
                {"x": array(self.rows, WIDTH), "t": array(self.rows, WIDTH)} for _ in range(count)
            ],
            keys=rng.integers(0, 2**32, (count, 2), dtype=np.uint32),
            loss_grad=1 / count,
        )

    def check(self, outputs: StepOutputs, inputs: StepInputs) -> None:
        """AssertionError unless loss, gradients and aux are those of the whole model."""
        loss, grads, errors = self._meaning(inputs)
        np.testing.assert_allclose(np.asarray(outputs.loss), loss, rtol=1e-5)
        np.testing.assert_allclose(np.asarray(outputs.aux["error"]), errors, rtol=1e-4, atol=1e-5)
        assert set(outputs.grads) == (set(grads) if inputs.backward else set())
        for name, got in outputs.grads.items():
            assert got.shape == self.whole[name]
            scale = np.abs(grads[name]).max()
            np.testing.assert_allclose(
                np.asarray(got), grads[name], rtol=0, atol=1e-5 * scale, err_msg=name
            )

    def _meaning(self, inputs: StepInputs) -> tuple[float, dict[str, NDArray[Any]], NDArray[Any]]:
        params = {name: np.asarray(x, np.float64) for name, x in inputs.params.items()}
        grads = {name: np.zeros(x.shape) for name, x in params.items()}
        loss, errors = 0.0, []
        for leaves in inputs.microbatches:
            entered = [np.asarray(leaves["x"], np.float64)]
            for stage in range(self.program.num_stages):
                entered.append(self.forward(params, stage, entered[-1]))
            error = entered.pop() - np.asarray(leaves["t"], np.float64)
            errors.append(error)
            loss += float((error * error).sum()) * inputs.loss_grad
            g = 2 * error * inputs.loss_grad
            for stage in reversed(range(self.program.num_stages)):
                g, own = self.backward(params, stage, entered[stage], g)
                for name, grad in own.items():
                    grads[name] += grad
        return loss, grads, np.stack(errors)


def tensor_parallel(
    num_stages: int, mesh: Mesh, axis: str = "model", *, is_turned: bool = False
) -> MeshProgram:
    """Stages h -> tanh(h @ up) @ down + shared, `up` cut by columns and `down` by rows; `shared` is every stage's.

    is_turned: whether each rank sends its part of tanh(h @ up) to the next one.
    """
    size = mesh.axes[axis]
    h_type = TensorType(f32, (ROWS, WIDTH))
    up_type = TensorType(f32, (WIDTH, HIDDEN // size))
    down_type = TensorType(f32, (HIDDEN // size, WIDTH))
    y_type = TensorType(f32, (ROWS, HIDDEN // size))
    bias_type = TensorType(f32, (WIDTH,))

    block = HIDDEN // size if is_turned else 0

    def turned(t: Task, x: Value, step: int) -> Value:
        if not is_turned:
            return x
        pairs = tuple((rank, (rank + step) % size) for rank in range(size))
        return over(t, collective.permute, x, axis, size, pairs=pairs)

    def summed(t: Task, x: Value) -> Value:
        return over(t, collective.all_reduce, x, axis, size, reduction="sum")

    def forward(t: Task, s: int, h: Value) -> Value:
        y = t(elementwise.tanh, t.product(h, t.read("param", f"up{s}", up_type), 1, 0))
        t.output(y, "residual", "y")
        sent = turned(t, y, 1)
        t.output(sent, "residual", "sent")
        out = summed(t, t.product(sent, t.read("param", f"down{s}", down_type), 1, 0))
        return t.all(elementwise.add, out, t.read("param", "shared", bias_type))

    def input_part(t: Task, s: int, g: Value) -> Value:
        y = t.read("residual", "y", y_type)
        slope = t(elementwise.sub, t.full(y_type, 1.0), t(elementwise.mul, y, y))
        back = turned(t, t.product(g, t.read("param", f"down{s}", down_type), 1, 1), -1)
        before = t(elementwise.mul, back, slope)
        t.output(before, "handover", "before")
        return summed(t, t.product(before, t.read("param", f"up{s}", up_type), 1, 1))

    def weight_part(t: Task, s: int, h: Value, g: Value) -> None:
        t.output(t.product(h, t.read("handover", "before", y_type), 0, 0), "param_grad", f"up{s}")
        t.output(t.product(t.read("residual", "sent", y_type), g, 0, 0), "param_grad", f"down{s}")
        t.output(t(reduce.reduce_sum, g, dims=(0,)), "param_grad", "shared")

    def run(params: Params, s: int, h: NDArray[Any]) -> NDArray[Any]:
        sent = np.roll(np.tanh(h @ params[f"up{s}"]), block, axis=1)
        out: NDArray[Any] = sent @ params[f"down{s}"] + params["shared"]
        return out

    def back(params: Params, s: int, h: NDArray[Any], g: NDArray[Any]) -> Any:
        up, down = params[f"up{s}"], params[f"down{s}"]
        y = np.tanh(h @ up)
        sent = np.roll(y, block, axis=1)
        before = np.roll(g @ down.T, -block, axis=1) * (1 - y * y)
        return before @ up.T, {f"up{s}": h.T @ before, f"down{s}": sent.T @ g, "shared": g.sum(0)}

    stages = range(num_stages)
    return MeshProgram(
        _program("tensor_parallel", num_stages, h_type, forward, input_part, weight_part),
        mesh,
        {
            **{f"up{s}": ((), (axis,)) for s in stages},
            **{f"down{s}": ((axis,),) for s in stages},
        },
        {
            **{f"up{s}": (WIDTH, HIDDEN) for s in stages},
            **{f"down{s}": (HIDDEN, WIDTH) for s in stages},
            "shared": (WIDTH,),
        },
        run,
        back,
    )


def experts(num_stages: int, mesh: Mesh, axis: str = "expert") -> MeshProgram:
    """Stages whose row i goes to expert i, h_i -> tanh(h_i @ w_i) * scale, on the rank that has it and back.

    The batch lies along the axis of the experts too.
    """
    size = mesh.axes[axis]
    h_type = TensorType(f32, (size, WIDTH))
    w_type = TensorType(f32, (1, WIDTH, WIDTH))
    scale_type = TensorType(f32, (WIDTH,))

    def exchange(t: Task, x: Value) -> Value:
        return over(t, collective.all_to_all, x, axis, size, split_dim=0, concat_dim=0)

    def weight(t: Task, s: int) -> Value:
        return t.reshape(t.read("param", f"w{s}", w_type), (WIDTH, WIDTH))

    def scaled(t: Task, s: int, x: Value) -> Value:
        return t.all(elementwise.mul, x, t.read("param", f"scale{s}", scale_type))

    def forward(t: Task, s: int, h: Value) -> Value:
        rows = exchange(t, h)
        y = t(elementwise.tanh, t.product(rows, weight(t, s), 1, 0))
        t.output(rows, "residual", "rows")
        t.output(y, "residual", "y")
        back = exchange(t, y)
        t.output(back, "residual", "back")
        return scaled(t, s, back)

    def input_part(t: Task, s: int, g: Value) -> Value:
        y = t.read("residual", "y", h_type)
        slope = t(elementwise.sub, t.full(h_type, 1.0), t(elementwise.mul, y, y))
        before = t(elementwise.mul, exchange(t, scaled(t, s, g)), slope)
        t.output(before, "handover", "before")
        return exchange(t, t.product(before, weight(t, s), 1, 1))

    def weight_part(t: Task, s: int, _: Value, g: Value) -> None:
        rows, before = t.read("residual", "rows", h_type), t.read("handover", "before", h_type)
        grad = t.reshape(t.product(rows, before, 0, 0), w_type.shape)
        t.output(grad, "param_grad", f"w{s}")
        back = t.read("residual", "back", h_type)
        of_rows = t(elementwise.mul, back, g)
        t.output(t(reduce.reduce_sum, of_rows, dims=(0,)), "param_grad", f"scale{s}")

    def run(params: Params, s: int, h: NDArray[Any]) -> NDArray[Any]:
        y: NDArray[Any] = np.tanh(np.einsum("ij,ijk->ik", h, params[f"w{s}"]))
        return y * params[f"scale{s}"]

    def back(params: Params, s: int, h: NDArray[Any], g: NDArray[Any]) -> Any:
        w, scale = params[f"w{s}"], params[f"scale{s}"]
        y = np.tanh(np.einsum("ij,ijk->ik", h, w))
        before = g * scale * (1 - y * y)
        grads = {f"w{s}": np.einsum("ij,ik->ijk", h, before), f"scale{s}": (y * g).sum(0)}
        return np.einsum("ik,ijk->ij", before, w), grads

    stages = range(num_stages)
    return MeshProgram(
        _program("experts", num_stages, h_type, forward, input_part, weight_part),
        mesh,
        {f"w{s}": ((axis,),) for s in stages},
        {
            **{f"w{s}": (size, WIDTH, WIDTH) for s in stages},
            **{f"scale{s}": (WIDTH,) for s in stages},
        },
        run,
        back,
        rows=size,
    )


def over(t: Task, op: Op, x: Value, axis: str, size: int, **attrs: Any) -> Value:
    """A collective and its end."""
    return t(collective.wait, t(op, x, axis=axis, size=size, **attrs))


class _Backward(Task):
    """I and W in one: what one hands over, the other reads."""

    def output(self, value: Value, role: Role = "", name: str = "") -> None:
        if role == "handover":
            self._read[Port(role, name)] = value
        else:
            super().output(value, role, name)


def _program(
    name: str,
    num_stages: int,
    h_type: TensorType,
    forward: Callable[[Task, int, Value], Value],
    input_part: Callable[[Task, int, Value], Value],
    weight_part: Callable[[Task, int, Value, Value], None],
) -> Program:
    """The stages of a model whose blocks are these, with loss sum((h - t)^2) and aux h - t."""

    def stage(s: int) -> Stage:
        is_last = s == num_stages - 1

        def entered(t: Task) -> Value:
            return t.read("activation" if s else "batch", f"h{s}" if s else "x", h_type)

        def gradient(t: Task) -> Value:
            if not is_last:
                return t.read("gradient", f"g{s + 1}", h_type)
            error = t.read("residual", "error", h_type)
            twice = t(elementwise.add, error, error)
            return t.all(elementwise.mul, twice, t.read("loss_grad", "", SCALAR))

        def run(t: Task) -> None:
            h = forward(t, s, entered(t))
            if not is_last:
                t.output(h, "activation", f"h{s + 1}")
                return
            error = t(elementwise.sub, h, t.read("batch", "t", h_type))
            square = t(elementwise.mul, error, error)
            t.output(t(reduce.reduce_sum, square, dims=(0, 1)), "loss", "")
            t.output(error, "aux", "error")
            t.output(error, "residual", "error")

        def for_inputs(t: Task) -> None:
            out = input_part(t, s, gradient(t))
            if s:
                t.output(out, "gradient", f"g{s}")

        def for_weights(t: Task) -> None:
            weight_part(t, s, entered(t), gradient(t))

        backward = _Backward(f"stage{s}.backward")
        for_inputs(backward)
        for_weights(backward)
        tasks = {
            "F": graph(f"stage{s}.forward", run),
            "B": backward.build(),
            "I": graph(f"stage{s}.backward_input", for_inputs),
            "W": graph(f"stage{s}.backward_weight", for_weights),
        }
        return Stage(s, tasks)

    edges = []
    for s in range(1, num_stages):
        h, g = Port("activation", f"h{s}"), Port("gradient", f"g{s}")
        edges += [edge(s - 1, h, s, h, "activation"), edge(s, g, s - 1, g, "gradient")]
    return Program(name, tuple(map(stage, range(num_stages))), tuple(edges))


def mesh_of(
    axes: Mapping[str, int], *, data: Sequence[str] = (), named: Sequence[str] = ()
) -> Mesh:
    """A mesh with the stages along "stage"."""
    return Mesh(dict(axes), "stage", tuple(data), tuple(named))
