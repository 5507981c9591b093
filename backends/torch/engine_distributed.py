"""The `distributed` engine: one rank a process, messages by torch.distributed (gloo on CPU, NCCL on CUDA).

Every rank compiles the tasks of its own stages and runs its row of the lowered schedule.
"""

import time
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch.distributed import Work

from plait.backends.messages import largest_messages, num_bytes, stage_elsewhere
from plait.backends.replicas import Counted, interleave, own_part
from plait.backends.runtime import Begin, Spans, StepInputs, StepOutputs
from plait.backends.spans import Recorder, by_rank
from plait.backends.step import Step
from plait.backends.timing import (
    TaskTimer,
    median_seconds,
    task_times,
    transfer_times,
)
from plait.backends.torch.clock import clock_offset
from plait.backends.torch.engine_local import TorchArrays, compile_plan, sum_losses
from plait.backends.torch.mail import Mail
from plait.backends.torch.process_group import group
from plait.backends.torch.shards import Shards
from plait.backends.torch.standing import Standing
from plait.core_ir.errors import UsageError
from plait.core_ir.mesh import Layout, Mesh
from plait.core_ir.program import STEP_KINDS, EdgeKind, Program, TaskKind
from plait.core_ir.schedule.ir import Action
from plait.core_ir.schedule.kinds import REDUCE_GRAD
from plait.core_ir.schedule.rewrite import add_reductions
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.times import Times

_T = TypeVar("_T")


class DistributedEngine:
    """Runs this process's rank of a schedule."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        *,
        device: torch.device,
        codegen: str,
        mesh: Mesh | None = None,
        layouts: Mapping[str, Layout] | None = None,
    ) -> None:
        started = time.perf_counter()
        self.group = group()
        mesh = Mesh({"stage": schedule.num_ranks}) if mesh is None else mesh
        if self.group.size != mesh.num_ranks:
            times = mesh.num_ranks // schedule.num_ranks
            raise UsageError(
                f"the schedule is for {schedule.num_ranks} ranks"
                + ("" if times == 1 else f", the mesh for {times} times as many")
                + f", but the process group has {self.group.size}; start {mesh.num_ranks} processes, or cut the model "
                "into another number of stages"
            )
        self._counted = Counted(program, mesh, layouts or {})
        axis, _ = program.shard_axis or (None, 1)
        self.standing = Standing(mesh, self.group, layouts or {}, axis)
        self.shards = Shards(program, self.standing.place)
        self.pipe = self.standing.pipe
        self._types = {**program.param_types, **program.buffer_types}
        self._grad_types = {**program.param_types, **program.shard_types}
        self.arrays = TorchArrays(device)
        self.stages = tuple(s for s, r in enumerate(schedule.placement) if r == self.pipe.rank)
        self._program, self._placement = program, schedule.placement
        self.reschedule(schedule)
        self.standing.enter()
        compiling = partial(compile_plan, program, self.stages, device=device, codegen=codegen)
        self._plan = self.standing.in_turn(compiling) if codegen == "inductor" else compiling()
        self.compile_seconds = time.perf_counter() - started

    def reschedule(self, schedule: Schedule) -> None:
        """Go on under another order of the same tasks, each stage on the rank where it is; alike on every rank."""
        edges, rank = self._program.edge_kinds(), self.pipe.rank
        sharded = self._program.sharded_stages
        lowered = schedule.lower(edges, sharded)
        if self.standing.mesh.sums_gradients:
            lowered = add_reductions(lowered)
        self._actions = lowered.rank(rank)
        self._forward_actions = schedule.forward_only().lower(edges, sharded).rank(rank)

    def agree(self, error: Exception | None) -> None:
        """Raise what any rank met, on every rank."""
        self.group.agree(error, self.arrays.device)

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        """One step of this rank; loss and aux come back on every rank.

        ExecutionError on every rank, naming rank, stage, microbatch and action, where one of them fails.
        """
        step = Step(self._plan, self._own(inputs))
        self._execute(step, self._actions if inputs.backward else self._forward_actions)
        try:
            return self._as_given(self._collect(step), inputs)
        except Exception as error:
            self.group.fail(error, "at the end of a step")

    @torch.no_grad()
    def profile(self, inputs: StepInputs) -> Times:
        """Tasks and messages of some steps, as all ranks ran them at once."""
        latency, alone = self._transfers()
        timer = TaskTimer(self.arrays.wait)
        offset = clock_offset(self.pipe, self.arrays.device)
        for step in timer.steps(self._plan, self._own(inputs)):
            self.agree(None)  # all begin together
            self._execute(step, self._actions)
        rounds = _joined(self.pipe.gather(timer.shifted(offset)))
        pair_rounds = _joined(self.pipe.gather(timer.pair_rounds))
        transfer = transfer_times(rounds, self._program, self._placement, alone)
        times = task_times(
            rounds,
            self._program.num_stages,
            pair_rounds,
            comm=latency,
            transfer={pair: max(0.0, seconds - latency) for pair, seconds in transfer.items()},
        )
        unshard, reduce_grad = (self._seconds_by_stage(kind) for kind in STEP_KINDS)
        return replace(times, unshard=unshard, reduce_grad=reduce_grad)

    def _seconds_by_stage(self, kind: TaskKind) -> list[float]:
        """How long a task that runs once a step takes alone, in each stage that has it."""
        own = {}
        for stage in self.stages:
            run = self._plan.step_tasks.get((stage, kind))
            if run is not None:
                types = self._program.task(stage, kind).input_types
                own[stage] = self._alone(run, [self.arrays.zeros(type, stage) for type in types])
        everywhere = ChainMap(*self.pipe.gather(own))
        return [everywhere.get(stage, 0.0) for stage in range(self._program.num_stages)]

    def _alone(self, begin: Begin, operands: Sequence[Any]) -> float:
        def run() -> None:
            begin(operands)()
            self.arrays.wait()

        return median_seconds(run)

    @torch.no_grad()
    def measure(self, inputs: StepInputs) -> Spans:
        """As the actions of all ranks ran, by the clock of rank 0; what an action waits for is not part of it."""
        self.run(inputs)
        offset = clock_offset(self.pipe, self.arrays.device)
        self.agree(None)  # all begin together
        recorder = Recorder(self.arrays.wait)
        self._execute(Step(self._plan, self._own(inputs)), self._actions, recorder.run)
        everywhere = self.pipe.gather((recorder.began + offset, recorder.shifted(offset)))
        began = min(begun for begun, _ in everywhere)
        spans = (span for _, own in everywhere for span in own)
        return by_rank(spans, self._placement, began)

    def _own(self, inputs: StepInputs) -> StepInputs:
        """This replica's part of a step."""
        own = own_part(inputs, self.standing.mesh, self.standing.part)
        params = self.standing.own(own.params, self._types)
        for name, array in params.items():
            if name in self.shards:
                shard = self.arrays.move(self.shards.own(name, array), 0)
                params[name] = self.shards.padded(name, shard)
        buffers = self.standing.own(own.buffers, self._types)
        return self._counted.from_zero(replace(own, params=params, buffers=buffers))

    def _execute(
        self,
        step: Step,
        actions: Sequence[Action],
        compute: Callable[[Step, Action], object] = Step.compute,
    ) -> None:
        self.standing.enter()
        mail = Mail(self._program, self._placement, self.pipe, self.arrays.device)
        action: Action | None = None
        row = deque(actions)

        def move_what_is_ready() -> None:
            """Messages that are next in line leave, and are awaited, before the task that made them has ended."""
            while row and row[0].kind.is_message and _can_move(step, row[0]):
                _move(step, mail, row.popleft())

        step.after_part = move_what_is_ready
        sums: list[Work] = []
        try:
            while row:
                action = row.popleft()
                if action.kind.is_message:
                    _move(step, mail, action)
                elif action.kind.is_compute:
                    for part in action.parts:
                        self._open_mail(step, mail, part)
                    compute(step, action)
                elif action.kind.has_stage:
                    step.compute(action)
                    if action.kind is REDUCE_GRAD:
                        sums += self._start_sums(step, action.stage)
            mail.finish()
            for stage, name in sorted(step.end_reductions()):
                sums += self.standing.sums_of_reduced(name).start_sum(step.gradients()[stage, name])
            for work in sums:
                work.wait()
        except Exception as error:
            self.group.fail(error, f"in {_described(action)}")

    def _start_sums(self, step: Step, stage: int | None) -> list[Work]:
        """Begin to add those of a stage's gradients over replicas that no task reduces, in one order on all of them."""
        own = sorted(key for key in step.gradients() if key[0] == stage)
        return [
            work
            for key in own
            for work in self.standing.sums(key[1]).start_sum(step.gradients()[key])
        ]

    def _open_mail(self, step: Step, mail: Mail, task: Action) -> None:
        """Wait for the messages that a task reads, and hand them over."""
        kind: EdgeKind = "activation" if task.kind.forward else "gradient"
        assert task.stage is not None
        assert task.microbatch is not None
        for peer in dict.fromkeys(e.source for e in self._program.edges_into(task.stage, kind)):
            tensors = mail.open(task.stage, peer, task.microbatch, kind)
            if tensors is not None:
                step.incoming(task.stage, peer, task.microbatch, kind, tensors)

    def _collect(self, step: Step) -> StepOutputs:
        loss = sum_losses(step.losses(), step.inputs.loss_grad)
        aux = step.aux()
        count = len(step.inputs.microbatches)
        for stage in self._program.stages:  # on every rank in one order: loss and aux go to all
            forward, maker = stage.tasks["F"], self._placement[stage.index]
            for _, value in forward.outputs_of("loss"):
                if loss is None:
                    loss = self.arrays.zeros(value.type, stage.index)
                self.pipe.broadcast(loss, maker)
            for name, value in forward.outputs_of("aux"):
                if name not in aux:
                    stacked = value.type.with_shape((count, *value.type.shape))
                    aux[name] = self.arrays.zeros(stacked, stage.index)
                self.pipe.broadcast(aux[name], maker)
        twins = self.standing.twins
        if loss is not None:
            twins.sum(loss)
        aux = {
            name: interleave(twins.gather_tensor(aux[name]), self.arrays) for name in sorted(aux)
        }
        partials = step.gradients()
        shared = self._program.shared_params
        grads = {name: grad for (_, name), grad in partials.items() if name not in shared}
        if step.inputs.backward:
            grads.update(self._shared_grads(partials))
        totals = step.buffers()
        for name in sorted(self._counted.names.intersection(totals)):
            self.standing.replicas.sum(totals[name])
        return StepOutputs(loss, grads, totals, aux)

    def _as_given(self, outputs: StepOutputs, inputs: StepInputs) -> StepOutputs:
        """Gradients of parameters that were given whole, and buffers that were, are whole too."""
        before = self.standing.own(inputs.buffers, self._types)
        buffers = self._counted.added(outputs.buffers, before, self.arrays)
        for name, buffer in sorted(buffers.items()):
            if tuple(inputs.buffers[name].shape) != tuple(buffer.shape):
                buffers[name] = self.standing.whole(name, buffer)
        grads = {}
        for name, grad in sorted(outputs.grads.items()):
            given = tuple(inputs.params[name].shape)
            if name in self.shards:
                if given == self.shards.type(name).shape:
                    grads[name] = self.shards.unpadded(name, grad)
                    continue
                grad = self.shards.whole(name, self.standing.joined(grad))
            grads[name] = grad if given == tuple(grad.shape) else self.standing.whole(name, grad)
        return replace(outputs, grads=grads, buffers=buffers)

    def _shared_grads(self, partials: Mapping[tuple[int, str], Any]) -> dict[str, torch.Tensor]:
        """The full sum of each shared parameter's partials, in stage order, on every rank that holds it.

        Every rank walks all of them in one order: a partial goes from the rank that made it to each other holder.
        """
        sums: dict[str, torch.Tensor] = {}
        for name, stages in self._program.shared_params.items():
            holders = sorted({self._placement[s] for s in stages})
            if self.pipe.rank not in holders:
                continue
            for stage in stages:
                outputs = self._program.task(stage, "B").outputs_of("param_grad")
                if any(own == name for own, _ in outputs):
                    partial = self._exchanged(partials, stage, name, holders)
                    sums[name] = sums[name] + partial if name in sums else partial
        return sums

    def _exchanged(
        self,
        partials: Mapping[tuple[int, str], torch.Tensor],
        stage: int,
        name: str,
        holders: Sequence[int],
    ) -> torch.Tensor:
        """The partial that `stage` made, on each of its holders."""
        maker = self._placement[stage]
        if maker == self.pipe.rank:
            partial = partials[stage, name]
            works = [self.pipe.isend(partial, other) for other in holders if other != maker]
        else:
            partial = self.arrays.zeros(self._grad_types[name], stage)
            works = [self.pipe.irecv(partial, maker)]
        for work in works:
            work.wait()
        return partial

    def _transfers(self) -> tuple[float, dict[tuple[int, int], float]]:
        """Seconds that the shortest message takes, and the longest by pair of stages, when nothing else runs."""
        pairs = {
            pair: (
                self._placement[pair[0]],
                self._placement[stage_elsewhere(self._placement, *pair)],
                types,
            )
            for pair, types in largest_messages(self._program).items()
        }
        if self.pipe.size == 1 or not pairs:
            return 0.0, dict.fromkeys(pairs, 0.0)
        latency = self._message_seconds(0, 1, 1)
        return latency, {
            pair: self._message_seconds(sender, receiver, num_bytes(types))
            for pair, (sender, receiver, types) in pairs.items()
        }

    def _message_seconds(self, sender: int, receiver: int, size: int) -> float:
        """How long a message between two ranks takes; known to all."""
        message = torch.zeros(size, dtype=torch.uint8, device=self.arrays.device)

        def there_and_back() -> None:
            if self.pipe.rank == sender:
                self.pipe.isend(message, receiver).wait()
                self.pipe.irecv(message, receiver).wait()
            elif self.pipe.rank == receiver:
                self.pipe.irecv(message, sender).wait()
                self.pipe.isend(message, sender).wait()
            self.arrays.wait()

        self.agree(None)
        return self.pipe.gather(median_seconds(there_and_back) / 2)[sender]


def _joined(of_ranks: Sequence[Sequence[Iterable[_T]]]) -> list[list[_T]]:
    """Each round, of all ranks."""
    return [list(chain.from_iterable(parts)) for parts in zip(*of_ranks, strict=True)]


def _described(action: Action | None) -> str:
    if action is None:
        return "no action"
    return f"stage {action.stage}, microbatch {action.microbatch}, action {action}"


def _can_move(step: Step, action: Action) -> bool:
    """Whether a message is there to be sent; one to be received can be awaited at any time."""
    return action.kind.direction != "send" or step.is_ready(*_message(action))


def _move(step: Step, mail: Mail, action: Action) -> None:
    """Send or begin to receive one message."""
    stage, peer, microbatch, kind = _message(action)
    if action.kind.direction == "send":
        mail.send(peer, step.outgoing(stage, peer, microbatch, kind))
    else:
        mail.receive(stage, peer, microbatch, kind)


def _message(action: Action) -> tuple[int, int, int, EdgeKind]:
    """Stage, peer, microbatch and what it carries."""
    stage, peer, microbatch = action.stage, action.peer, action.microbatch
    assert stage is not None, action
    assert peer is not None, action
    assert microbatch is not None, action
    return (
        stage,
        peer,
        microbatch,
        "activation" if action.kind.payload == "activation" else "gradient",
    )
