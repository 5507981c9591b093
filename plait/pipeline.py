"""`Pipeline`: a compiled program under a schedule, as the user holds it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.backends.runtime import Engine, StepInputs, StepOutputs
from plait.core_ir.arrays import array_type, is_torch
from plait.core_ir.errors import UsageError
from plait.core_ir.hardware import Hardware
from plait.core_ir.interpret import interpret
from plait.core_ir.mesh import whole_type
from plait.core_ir.ops.random import fold_in, seed_key
from plait.core_ir.program import Program
from plait.core_ir.schedule.auto import reorder
from plait.core_ir.schedule.estimate import estimate, simulate_program
from plait.core_ir.schedule.kinds import IS_COMPUTE
from plait.core_ir.schedule.rewrite import keep
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.timeline import Timeline
from plait.core_ir.schedule.times import Times
from plait.core_ir.types import TensorType
from plait.frontends.captured import Captured, Leaf
from plait.options import Options


@dataclass(repr=False)
class Pipeline:
    """A model compiled for a pipeline: made by `plait.compile`.

    program: stages, tasks and edges; its `str()` is the text form. schedule: which rank runs what, in which order.
    hardware: what the cost model takes the ranks for.
    """

    program: Program
    schedule: Schedule
    hardware: Hardware
    options: Options
    captured: Captured = field(repr=False)
    engine: Engine = field(repr=False)
    store: Any = field(repr=False)
    """The parameters of a torch model on the torch backend (`backends.torch.store.Store`), else None."""
    is_searched: bool = field(default=False, repr=False)
    """Whether `schedule="auto"` chose the schedule: `profile` then looks for a better one."""
    _state: Any = field(default=None, repr=False)
    _buffers: dict[str, Any] = field(default_factory=dict, repr=False)
    _profile: Times | None = field(default=None, repr=False)
    _steps: int = field(default=0, repr=False)

    def __repr__(self) -> str:
        return (
            f"<Pipeline {self.captured.framework} on {self.options.backend} {self.options.engine}: "
            f"{self.program.num_stages} stages on {self.schedule.num_ranks} ranks, "
            f"{self.schedule.num_microbatches} microbatches, {self.schedule.name}>"
        )

    @property
    def compile_seconds(self) -> float:
        """What compiling the tasks took in this process."""
        return self.engine.compile_seconds

    @property
    def state(self) -> Any:
        """What the last `loss_and_grads` left of the model's buffers; None before the first.

        For a torch source a dict of the buffers that changed. For a JAX source the user's `state` structure, from which
        the next call goes on; another may be set, of an nnx module its own or the module itself, or None, to go on from
        the model's. UsageError where the structure or a type differs. In a distributed run a rank has the new values of
        its own stages' buffers, and of others what it was given.
        """
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        buffers = {} if state is None else self.captured.flatten_state(state)
        self._check_values(buffers)
        self._buffers = buffers = {name: _own(array) for name, array in buffers.items()}
        self._state = None if state is None else self.captured.pack_state(buffers)

    # Steps.

    def loss_and_grads(self, batch: Any, params: Any = None, *, step: int | None = None) -> Any:
        """`(loss, grads)` of one batch; `((loss, aux), grads)` with `has_aux`, aux arrays stacked by microbatch.

        params: default the model's own; for a torch source a dict with exactly the keys of `named_parameters()`, else a
            pytree like the model. Of an nnx module its Params alone are read: its other variables are `state`.
        grads: for a torch source a dict (frozen: None, unused: zeros), for an nnx module a State of its Params, as
            nnx.grad gives, else a pytree like the model. On the JAX backend each lies where its parameter lies.
        step: the number that random ops fold into the seed (default: the number of calls before).

        Arrays are of the backend's kind. No array of the caller is changed.

        Raises BatchError where the batch is not what the pipeline was compiled for.
        """
        inputs = self._inputs(batch, params, step, backward=True)
        outputs = self.engine.run(inputs)
        self._keep_state(outputs)
        return self._loss(outputs), self.captured.pack_grads(self._all_grads(outputs))

    def forward(self, batch: Any, params: Any = None, *, step: int | None = None) -> Any:
        """The loss of one batch (`(loss, aux)` with `has_aux`): forward only; no state is kept."""
        return self._loss(self.engine.run(self._inputs(batch, params, step, backward=False)))

    def step(self, batch: Any) -> Any:
        """The loss of one batch; gradients are added to `.grad`, changed buffers are written to the model.

        For a torch model on the torch backend, so that any torch optimizer works; post-accumulate hooks fire once.
        """
        store = self._own_store("step")
        outputs = self.engine.run(self._inputs(batch, None, None, backward=True))
        store.write(outputs.grads, outputs.buffers)
        return self._loss(outputs)

    # The rank's view of a torch model.

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """`(name, parameter)` of the parameters whose stages run in this process; of sharded ones this rank's rows."""
        return iter(self._own_store("named_parameters").named_parameters())

    def parameters(self) -> Iterator[Any]:
        """The parameters whose stages run in this process: what an optimizer of this rank takes."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of the stages that run in this process, under the model's own names; of sharded
        parameters this rank's rows of dim 0: joined in the order of ranks they are the whole."""
        state: dict[str, Any] = self._own_store("state_dict").state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy values in; names of other ranks' stages are allowed, and sharded parameters may come whole. UsageError
        names what is missing or misshapen."""
        self._own_store("load_state_dict").load_state_dict(state)

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Scale `.grad` so that their norm over all ranks, shared parameters once, is at most `max_norm`; the norm."""
        return self._own_store("clip_grad_norm_").clip_grad_norm_(max_norm)

    # Times.

    def profile(self, batch: Any, params: Any = None) -> Times:
        """Run the batch task by task and measure: seconds of F, I and W of each stage, and of a transfer.

        params: as of `loss_and_grads`.

        `simulate` uses what was measured. Under `schedule="auto"` the order is searched again for these times, where
        `compile` had but the cost model's, and later steps run it; stages stay on their ranks.
        """
        self._profile = self.engine.profile(self._inputs(batch, params, 0, backward=True))
        if self.is_searched:
            better = Schedule.from_table(reorder(self.schedule, self._profile))
            check_fits(better, self.program)
            self.engine.reschedule(better)
            self.schedule = better
        return self._profile

    def measure(self, batch: Any, params: Any = None) -> Timeline:
        """Run a step, after one to warm up, and note when each compute action runs, in seconds from the step's start.

        params: as of `loss_and_grads`. Nothing is written: neither `.grad` nor state. On a `distributed` engine every
        rank returns the actions of all ranks, without what they waited for; on `local` the ranks take turns in this
        process, so no two overlap; on `mpmd` an action starts once it is dispatched, its rank is free and what it reads
        is there, and ends when its results are. UsageError on `spmd`, whose one program cannot be timed by action.
        """
        rows = self.engine.measure(self._inputs(batch, params, 0, backward=True))
        table = keep(self.schedule, IS_COMPUTE[self.schedule.kind])
        start, end = np.array([span for row in rows for span in row]).T
        return Timeline(table, start, end)

    def simulate(self, times: Times | None = None) -> Timeline:
        """The schedule in time: by `times`, else as `profile` measured, else as estimated for `hardware`."""
        chosen = times or self._profile or self._estimated()
        return simulate_program(self.schedule, self.program, chosen)

    # Inside.

    def _estimated(self) -> Times:
        """By the cost model; without the optimizer's step, which is the user's."""
        mesh = self.options.mesh
        times, _ = estimate(self.program, self.schedule.placement, self.hardware, mesh)
        return replace(times, optimizer=0.0)

    def _own_store(self, method: str) -> Any:
        if self.store is None:
            raise UsageError(
                f"Pipeline.{method} is for a torch model on the torch backend; this pipeline runs a "
                f"{self.captured.framework} model on the {self.options.backend} backend: use loss_and_grads"
            )
        return self.store

    def _inputs(self, batch: Any, params: Any, step: int | None, *, backward: bool) -> StepInputs:
        stages = [self.program.stages[s] for s in self.engine.stages]
        error: Exception | None = None
        try:
            needed = frozenset(name for stage in stages for name in stage.batch)
            leaves = self.captured.flatten_batch(batch)
            microbatches = self.captured.batch.microbatches(leaves, needed)
            values = self._values(params)
            needed_values = {n for stage in stages for n in (*stage.params, *stage.buffers)}
            self._check_values({name: values[name] for name in needed_values})
            _check_step(step)
        except Exception as caught:  # whatever it is, the other ranks must hear of it
            error = caught
        self.engine.agree(error)
        if step is None:
            step = self._steps
            self._steps += backward
        return StepInputs(
            params={name: values[name] for stage in stages for name in stage.params},
            buffers={name: values[name] for stage in stages for name in stage.buffers},
            microbatches=microbatches,
            keys=step_keys(self.options.seed, step, len(microbatches)),
            loss_grad=1 / len(microbatches) if self.options.reduction == "mean" else 1.0,
            backward=backward,
        )

    def _values(self, params: Any) -> dict[str, Any]:
        """Current parameters and buffers by name: the caller's params, the carried state, else the model's own."""
        values = self.captured.read_leaves() if self.store is None else self.store.read()
        if params is not None:
            values = {**values, **self.captured.flatten_params(params)}
        return {**values, **self._buffers}

    def _check_values(self, values: Mapping[str, Any]) -> None:
        """UsageError for a parameter or buffer that is not of the type compiled for, or has no content."""
        for leaf in self.captured.leaves:
            value = values.get(leaf.name)
            if value is None:
                continue
            if getattr(value, "is_meta", False):
                raise UsageError(
                    f"{leaf.name!r} is on meta, without content; build the model on a device, or pass params="
                )
            found, expected = array_type(value), self._given_type(leaf)
            if found != expected:
                if expected != leaf.type and found == leaf.type:
                    raise UsageError(
                        f"{leaf.name!r} is {found}, the part of one rank; the engine {self.options.engine!r} runs all "
                        f"ranks of the mesh in this process and takes the whole, {expected}: pass params="
                    )
                raise UsageError(
                    f"{leaf.name!r} was {expected} when the pipeline was compiled and is {found}; compile again, or "
                    "pass it as it was"
                )

    def _given_type(self, leaf: Leaf) -> TensorType:
        """What a step takes of a parameter or buffer: all of it, but from a torch model whose ranks have parts each."""
        has_part = self.captured.framework == "torch" and self.options.engine == "distributed"
        mesh = self.options.mesh
        if has_part or mesh is None:
            shard: TensorType | None = self.store.shard_type(leaf.name) if has_part else None
            return shard or leaf.type
        return whole_type(leaf.type, leaf.layout, mesh.axes)

    def _keep_state(self, outputs: StepOutputs) -> None:
        if self.captured.framework == "torch":
            self._state = dict(outputs.buffers)
            return
        names = [leaf.name for leaf in self.captured.leaves if leaf.role == "buffer"]
        if names:
            before = self._buffers or self.captured.read_leaves()
            self._buffers = {name: outputs.buffers.get(name, before[name]) for name in names}
            self._state = self.captured.pack_state(self._buffers)

    def _loss(self, outputs: StepOutputs) -> Any:
        if not self.options.has_aux:
            return outputs.loss
        return outputs.loss, self.captured.pack_aux(outputs.aux)

    def _all_grads(self, outputs: StepOutputs) -> dict[str, Any]:
        """A gradient for each leaf that has one; zeros for an unused leaf; None for one of another rank's stages."""
        grads: dict[str, Any] = {}
        for leaf in self.captured.leaves:
            if leaf.role == "param" and leaf.trainable:
                grad = outputs.grads.get(leaf.name)
                if grad is None and leaf.name in self._unused:
                    grad = self.engine.arrays.zeros(self._given_type(leaf), self.engine.stages[0])
                grads[leaf.name] = grad
        return grads

    @cached_property
    def _unused(self) -> frozenset[str]:
        """Trainable leaves that no stage gives a gradient of; they count as stage 0's."""
        if 0 not in self.engine.stages:
            return frozenset()
        used = {
            name
            for stage in self.program.stages
            for graph in stage.tasks.values()
            for name, _ in graph.outputs_of("param_grad")
        }
        return frozenset(leaf.name for leaf in self.captured.leaves) - used


def _own(array: Any) -> Any:
    """A copy of an array that others could write to."""
    if is_torch(array):
        return array.clone()
    return array.copy() if isinstance(array, np.ndarray) else array


def _check_step(step: object) -> None:
    if step is None:
        return
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**32:
        raise UsageError(f"step must be an integer from 0 to 2**32 - 1, got {step!r}")


def check_fits(schedule: Schedule, program: Program) -> None:
    """ScheduleError for a schedule that cannot run this program."""
    ordered = [stage.index for stage in program.stages if stage.updates_buffers]
    schedule.validate(edges=program.edge_kinds(), ordered_forward=ordered)


def step_keys(seed: int, step: int, num_microbatches: int) -> NDArray[np.uint32]:
    """u32[M, 2]: fold_in(fold_in(seed, step), microbatch) for each microbatch."""
    (key,) = seed_key.evaluate([np.asarray(seed, np.int64)], {}, interpret)
    (key,) = fold_in.evaluate([key, np.asarray(step, np.uint32)], {}, interpret)
    keys: Sequence[Any] = [
        fold_in.evaluate([key, np.asarray(index, np.uint32)], {}, interpret)[0]
        for index in range(num_microbatches)
    ]
    return np.stack(keys)
