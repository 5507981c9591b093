"""One step in progress: tasks run by the actions of a schedule, for any kind of array.

A `Step` holds an environment for each (stage, microbatch), from port to array, runs tasks, hands values along edges,
and adds gradients by microbatch from zero. Engines decide the order of actions and move what leaves the plan's stages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from plait.backends.order import TaskOf, pair_of, tasks_of
from plait.backends.runtime import Arrays, Plan, StepInputs
from plait.core_ir.errors import ExecutionError, PlaitError
from plait.core_ir.graph import Port
from plait.core_ir.program import PAIR, EdgeKind, Program, TaskKind
from plait.core_ir.schedule.ir import Action
from plait.core_ir.schedule.kinds import REDUCE_GRAD, RESHARD, UNSHARD, ActionKind
from plait.core_ir.types import TensorType

_PAIR: tuple[TaskKind, TaskKind] = ("B", "F")


def _nothing() -> None:
    pass


_Env: TypeAlias = dict[Port, Any]


@dataclass
class Step:
    """One step in progress. `after_part` is called between the parts of an action: something may be ready to leave."""

    plan: Plan
    inputs: StepInputs
    after_part: Callable[[], None] = _nothing
    _params: dict[tuple[int, str], Any] = field(default_factory=dict)
    _envs: dict[tuple[int, int], _Env] = field(default_factory=dict)
    _outbox: dict[tuple[int, int, int, EdgeKind], list[Any]] = field(default_factory=dict)
    _grads: dict[tuple[int, str], Any] = field(default_factory=dict)
    _losses: dict[int, Any] = field(default_factory=dict)
    _aux: dict[str, dict[int, Any]] = field(default_factory=dict)
    _buffers: dict[str, Any] = field(default_factory=dict)
    _gathering: dict[int, Callable[[], Sequence[Any]]] = field(default_factory=dict)
    _reducing: dict[int, Callable[[], Sequence[Any]]] = field(default_factory=dict)

    def compute(self, action: Action) -> list[Any]:
        """Run the tasks of one action, of an F&B pair its backward first; the arrays they made. Of a stage that is
        gathered or freed, or whose gradients are reduced: do so, or begin to.

        ExecutionError names stage, microbatch and action where one fails.
        """
        if not action.kind.is_compute:
            with _naming(action, str(action.kind), action.stage, action.microbatch):
                self._change(action.kind, _number(action.stage))
            return []
        pair = pair_of(action)
        if pair in self.plan.pairs and self.inputs.backward:
            with _naming(action, PAIR, action.stage, action.microbatch):
                return list(self.run_pair(action))
        made: list[Any] = []
        for number, (kind, stage, microbatch) in enumerate(tasks_of(action)):
            if number:
                self.after_part()
            if kind == "F" or self.inputs.backward:
                with _naming(action, kind, stage, microbatch):
                    made += self.run_task(stage, kind, microbatch)
        return made

    def run_task(self, stage: int, kind: TaskKind, microbatch: int) -> Sequence[Any]:
        """Run one task, keep and pass on what it makes; the arrays it made."""
        task: TaskOf = (kind, stage, microbatch)
        graph, operands = self.plan.program.task(stage, kind), self._operands(task)
        outputs = self.plan.tasks[stage, kind](operands) if graph.outputs else ()
        written = dict(zip(graph.output_ports, outputs, strict=True))
        self._deliver(task, written)
        self._keep(task, written)
        return outputs

    def run_pair(self, action: Action) -> Sequence[Any]:
        """Run an F&B action as one task, and pass on what leaves as soon as it is ready; the arrays it made."""
        halves = list(_halves(self.plan.program, action))
        (_, backward, _), (_, forward, _) = (half.task for half in halves)
        operands = [array for half in halves for array in self._operands(half.task)]
        ready: dict[int, Any] = {}
        pair = self.plan.pairs[forward, backward]
        waiting = list(zip(halves, pair.messages, strict=True))
        for number, outputs in enumerate(pair.run(operands), start=1):
            ready.update(outputs)
            for half, message in [each for each in waiting if each[1] <= ready.keys()]:
                waiting.remove((half, message))
                self._deliver(half.task, half.of(ready))
            if number < len(pair.parts):
                self.after_part()
        for half in halves:
            self._keep(half.task, half.of(ready))
        return [ready[number] for number in sorted(ready)]

    def _operands(self, task: TaskOf) -> list[Any]:
        """What a task reads, in the order of its inputs."""
        kind, stage, microbatch = task
        graph = self.plan.program.task(stage, kind)
        env = self._envs.setdefault((stage, microbatch), {})
        later = self.plan.later_reads(stage, kind, backward=self.inputs.backward)
        return [
            self._read(env, port, value.type, stage, microbatch, keep=port in later)
            for port, value in zip(graph.input_ports, graph.inputs, strict=True)
        ]

    def _keep(self, task: TaskOf, written: Mapping[Port, Any]) -> None:
        """Keep of what a task made what later ones read, and forget what none does."""
        kind, stage, microbatch = task
        env = self._envs[stage, microbatch]
        later = self.plan.later_reads(stage, kind, backward=self.inputs.backward)
        self._collect(stage, microbatch, written)
        env.update((port, array) for port, array in written.items() if port in later)
        for port in [p for p in env if p not in later and self._is_spent(stage, kind, p)]:
            del env[port]
        if not env and kind in ("W", "B"):
            del self._envs[stage, microbatch]

    def is_ready(self, stage: int, peer: int, microbatch: int, kind: EdgeKind) -> bool:
        """Whether `stage` has made what goes to `peer`, and nobody has taken it."""
        return (stage, peer, microbatch, kind) in self._outbox

    def outgoing(self, stage: int, peer: int, microbatch: int, kind: EdgeKind) -> list[Any]:
        """The arrays that `stage` made for `peer`, in the order of the program's edges; each is given once."""
        return self._outbox.pop((stage, peer, microbatch, kind))

    def incoming(
        self, stage: int, peer: int, microbatch: int, kind: EdgeKind, arrays: Sequence[Any]
    ) -> None:
        """Hand `stage` the arrays that `peer` made for it, in the order of the program's edges."""
        edges = [e for e in self.plan.program.edges_into(stage, kind) if e.source == peer]
        env = self._envs.setdefault((stage, microbatch), {})
        env.update((edge.input, array) for edge, array in zip(edges, arrays, strict=True))

    def gradients(self) -> dict[tuple[int, str], Any]:
        """The gradient of each parameter by (stage, name): the sum over microbatches of what the stage gave, once it
        has been reduced (`end_reductions`) over ranks too."""
        return self._grads

    # Stages whose parameters are sharded.

    def unshard(self, stage: int) -> None:
        """Begin to gather a stage's parameters; the first task that reads one waits for them."""
        begin = self.plan.step_tasks.get((stage, "UNSHARD"))
        if begin is not None:
            shards = self.plan.program.task(stage, "UNSHARD").inputs_of("shard")
            move = self.plan.arrays.move
            self._gathering[stage] = begin([move(self.inputs.params[n], stage) for n, _ in shards])

    def reshard(self, stage: int) -> None:
        """Free a stage's gathered parameters."""
        self._end_gathering(stage)
        for name in self.plan.gathered(stage):
            self._params.pop((stage, name), None)

    def reduce_grad(self, stage: int) -> None:
        """Begin to reduce a stage's gradients: until `end_reductions` they are not among `gradients`."""
        begin = self.plan.step_tasks.get((stage, "REDUCE_GRAD"))
        if begin is not None:
            grads = self.plan.program.task(stage, "REDUCE_GRAD").inputs_of("param_grad")
            self._reducing[stage] = begin([self._grads.pop((stage, name)) for name, _ in grads])

    def end_reductions(self) -> list[tuple[int, str]]:
        """Wait for the gradients that are being reduced; which they are."""
        ended = []
        for stage, end in self._reducing.items():
            names = self.plan.program.task(stage, "REDUCE_GRAD").outputs_of("shard_grad")
            for (name, _), grad in zip(names, end(), strict=True):
                self._grads[stage, name] = grad
                ended.append((stage, name))
        self._reducing.clear()
        return ended

    def _change(self, kind: ActionKind, stage: int) -> None:
        if kind is UNSHARD:
            self.unshard(stage)
        elif kind is RESHARD:
            self.reshard(stage)
        elif kind is REDUCE_GRAD:
            self.reduce_grad(stage)

    def _end_gathering(self, stage: int) -> None:
        end = self._gathering.pop(stage, None)
        if end is not None:
            whole = self.plan.program.task(stage, "UNSHARD").outputs_of("param")
            self._params.update(
                ((stage, name), array) for (name, _), array in zip(whole, end(), strict=True)
            )

    def losses(self) -> list[Any]:
        """The loss of each microbatch, where the stage that makes it runs here; else empty."""
        return [self._losses[m] for m in sorted(self._losses)]

    def aux(self) -> dict[str, Any]:
        """Aux outputs of stages that run here, stacked by microbatch."""
        return {
            name: self.plan.arrays.stack([parts[m] for m in sorted(parts)])
            for name, parts in self._aux.items()
        }

    def buffers(self) -> dict[str, Any]:
        """Buffers that stages here changed, as the last microbatch left them."""
        return self._buffers

    # Inside.

    def _is_spent(self, stage: int, kind: TaskKind, port: Port) -> bool:
        """Whether no later task reads the port; a gradient may arrive before F's successors ran."""
        return kind != "F" or port.role != "gradient"

    def _read(
        self, env: _Env, port: Port, type_: TensorType, stage: int, microbatch: int, *, keep: bool
    ) -> Any:
        if port in env:
            return env[port] if keep else env.pop(port)
        inputs, arrays = self.inputs, self.plan.arrays
        match port.role:
            case "param":
                return self._param(port.name, stage)
            case "buffer":
                array = self._buffers.get(port.name)
                if array is None:
                    array = arrays.move(inputs.buffers[port.name], stage)
                if keep:  # a later task must see what F saw, not what a later microbatch leaves
                    env[port] = array
                return array
            case "batch":
                return arrays.move(inputs.microbatches[microbatch][port.name], stage)
            case "rng_key":
                return arrays.key(inputs.keys[microbatch], stage)
            case "loss_grad":
                return arrays.scalar(inputs.loss_grad, type_, stage)
        raise ExecutionError(
            f"stage {stage}, microbatch {microbatch}: {port} was never delivered; the schedule runs a task "
            "before what it depends on"
        )

    def _param(self, name: str, stage: int) -> Any:
        self._end_gathering(stage)
        placed = self._params.get((stage, name))
        if placed is None:
            if name in self.plan.gathered(stage):
                raise ExecutionError(
                    f"stage {stage} reads {name!r} while it is sharded; the schedule has no UNSHARD before the task"
                )
            placed = self.plan.arrays.move(self.inputs.params[name], stage)
            self._params[stage, name] = placed
        return placed

    def _collect(self, stage: int, microbatch: int, written: Mapping[Port, Any]) -> None:
        arrays = self.plan.arrays
        for port, array in written.items():
            match port.role:
                case "param_grad":
                    key = (stage, port.name)
                    total = self._grads.get(key)
                    if total is None:
                        total = arrays.zeros(self.plan.program.param_types[port.name], stage)
                    self._grads[key] = arrays.add(total, array)
                case "loss":
                    self._losses[microbatch] = array
                case "aux":
                    self._aux.setdefault(port.name, {})[microbatch] = array
                case "buffer_update":
                    self._buffers[port.name] = array

    def _deliver(self, task: TaskOf, written: Mapping[Port, Any]) -> None:
        """Hand what a task made to stages here, and lay out what goes to others."""
        stage, microbatch = task[1:]
        kind: EdgeKind = "activation" if task[0] == "F" else "gradient"
        for edge in self.plan.program.edges_from(stage, kind):
            if edge.output not in written:
                continue
            array = written[edge.output]
            if edge.target in self.plan.stages:
                moved = self.plan.arrays.move(array, edge.target)
                self._envs.setdefault((edge.target, microbatch), {})[edge.input] = moved
            elif kind == "activation" or self.inputs.backward:
                self._outbox.setdefault((stage, edge.target, microbatch, kind), []).append(array)


@dataclass(frozen=True)
class _Half:
    """One half of a pair: its task, and the place of each of its outputs among the pair's."""

    task: TaskOf
    numbers: Mapping[Port, int]

    def of(self, ready: Mapping[int, Any]) -> dict[Port, Any]:
        """Those of its outputs that are ready."""
        return {port: ready[n] for port, n in self.numbers.items() if n in ready}


def _halves(program: Program, action: Action) -> Iterator[_Half]:
    """The backward, then the forward."""
    first = 0
    for kind, part in zip(_PAIR, reversed(action.parts), strict=True):
        stage = _number(part.stage)
        graph = program.task(stage, kind)
        numbers = {port: first + n for n, port in enumerate(graph.output_ports)}
        yield _Half((kind, stage, _number(part.microbatch)), numbers)
        first += len(numbers)


@contextmanager
def _naming(action: Action, task: str, stage: int | None, microbatch: int | None) -> Iterator[None]:
    """Say which stage, microbatch and action failed."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        raise ExecutionError(
            f"stage {stage}, microbatch {microbatch}, action {action} (task {task}) "
            f"failed: {type(error).__name__}: {error}"
        ) from error


def _number(number: int | None) -> int:
    assert number is not None
    return number


def add_shared(grads: Mapping[tuple[int, str], Any], arrays: Arrays) -> dict[str, Any]:
    """Gradients by name: the partials of shared parameters added in the order of stages, where the first one is."""
    total: dict[str, Any] = {}
    first: dict[str, int] = {}
    for stage, name in sorted(grads):
        grad = grads[stage, name]
        if name in total:
            grad = arrays.add(total[name], arrays.move(grad, first[name]))
        total[name] = grad
        first.setdefault(name, stage)
    return total
