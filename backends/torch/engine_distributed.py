"""The `distributed` engine: one rank a process, messages by torch.distributed (gloo on CPU, NCCL on CUDA).

Every rank compiles the tasks of its own stages and runs its row of the lowered schedule. A message is one packed
tensor for each (stage, microbatch, peer stage). Ranks agree on errors before a step sends anything.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from plait.backends.runtime import Step, StepInputs, StepOutputs
from plait.backends.timing import PROFILE_ROUNDS, TaskTimer
from plait.backends.torch.agreement import agree_on
from plait.backends.torch.engine_local import (
    TorchArrays,
    compile_plan,
    sum_losses,
)
from plait.backends.torch.message import pack, unpack
from plait.core_ir.errors import UsageError
from plait.core_ir.program import EdgeKind, Program, TaskKind
from plait.core_ir.schedule.ir import Action
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.times import Times
from plait.core_ir.types import TensorType


class DistributedEngine:
    """Runs this process's rank of a schedule."""

    def __init__(
        self, program: Program, schedule: Schedule, *, device: torch.device, codegen: str
    ) -> None:
        started = time.perf_counter()
        size = dist.get_world_size()
        if size != schedule.num_ranks:
            raise UsageError(
                f"the schedule is for {schedule.num_ranks} ranks, but the process group has {size}; start "
                f"{schedule.num_ranks} processes, or cut the model into another number of stages"
            )
        self.rank = dist.get_rank()
        self.arrays = TorchArrays(device)
        self.stages = tuple(s for s, r in enumerate(schedule.placement) if r == self.rank)
        self._program, self._placement = program, schedule.placement
        edges = program.edge_kinds()
        self._actions = schedule.lower(edges).rank(self.rank)
        self._forward_actions = schedule.forward_only().lower(edges).rank(self.rank)
        self._plan = compile_plan(program, self.stages, device=device, codegen=codegen)
        self.compile_seconds = time.perf_counter() - started

    def agree(self, error: Exception | None) -> None:
        """Raise what any rank met, on every rank."""
        agree_on(error, self.arrays.device)

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        """One step of this rank; the loss comes back on every rank."""
        step = Step(self._plan, inputs)
        self._execute(step, self._actions if inputs.backward else self._forward_actions)
        return self._collect(step)

    @torch.no_grad()
    def profile(self, inputs: StepInputs) -> Times:
        """Medians of the tasks of all ranks over some steps, and of the latency of a message between two of them."""
        timer = TaskTimer(self._program, self.arrays.wait)
        for _ in range(PROFILE_ROUNDS):
            step = Step(timer.timed(self._plan), inputs)
            self._execute(step, self._actions)
        gathered: list[dict[tuple[int, TaskKind], float]] = [
            {} for _ in range(dist.get_world_size())
        ]
        dist.all_gather_object(gathered, timer.medians())
        for medians in gathered:
            timer.include(medians)
        return timer.times(comm=self._latency())

    def _execute(self, step: Step, actions: Sequence[Action]) -> None:
        pending: list[tuple[dist.Work, torch.Tensor]] = []
        arriving: dict[tuple[int, int, int, EdgeKind], tuple[dist.Work, torch.Tensor]] = {}
        for action in actions:
            kind = action.kind
            if not kind.is_message:
                if kind.is_compute:
                    for part in action.parts:
                        self._await_inputs(step, part, arriving)
                    step.compute(action)
                continue
            stage, peer, microbatch = action.stage, action.peer, action.microbatch
            assert stage is not None
            assert peer is not None
            assert microbatch is not None
            payload: EdgeKind = "activation" if kind.payload == "activation" else "gradient"
            other = self._placement[peer]
            if kind.direction == "send":
                packed = pack(step.outgoing(stage, peer, microbatch, payload))
                work = dist.isend(packed, other)
                assert work is not None
                pending.append((work, packed))
            else:
                buffer = torch.empty(
                    self._message_bytes(peer, stage, payload),
                    dtype=torch.uint8,
                    device=self.arrays.device,
                )
                work = dist.irecv(buffer, other)
                assert work is not None
                arriving[stage, peer, microbatch, payload] = (work, buffer)
        for work, _ in pending:
            work.wait()

    def _await_inputs(
        self,
        step: Step,
        action: Action,
        arriving: dict[tuple[int, int, int, EdgeKind], tuple[dist.Work, torch.Tensor]],
    ) -> None:
        """Wait for the messages that one task reads, and hand them over."""
        kind: EdgeKind = "activation" if action.kind.forward else "gradient"
        stage, microbatch = action.stage, action.microbatch
        assert stage is not None
        assert microbatch is not None
        for peer in dict.fromkeys(e.source for e in self._program.edges_into(stage, kind)):
            message = arriving.pop((stage, peer, microbatch, kind), None)
            if message is not None:
                work, buffer = message
                work.wait()
                arrays = unpack(buffer, self._message_types(peer, stage, kind))
                step.incoming(stage, peer, microbatch, kind, arrays)

    def _message_types(self, source: int, target: int, kind: EdgeKind) -> list[TensorType]:
        program = self._program
        task: TaskKind = "F" if kind == "activation" else "I"
        graph = program.task(source, task)
        types = dict(zip(graph.output_ports, graph.output_types, strict=True))
        return [types[e.output] for e in program.edges_from(source, kind) if e.target == target]

    def _message_bytes(self, source: int, target: int, kind: EdgeKind) -> int:
        return sum(t.num_bytes for t in self._message_types(source, target, kind))

    def _collect(self, step: Step) -> StepOutputs:
        program = self._program
        loss = sum_losses(step.losses(), step.inputs.loss_grad)
        for stage in program.stages:
            for _, value in stage.tasks["F"].outputs_of("loss"):
                if loss is None:
                    loss = self.arrays.zeros(value.type, stage.index)
                dist.broadcast(loss, self._placement[stage.index])
        grads: dict[str, Any] = {}
        partials = step.gradients()
        for (_, name), grad in sorted(partials.items(), key=lambda item: item[0][0]):
            if name not in program.shared_params:
                grads[name] = grad
        if step.inputs.backward:
            grads.update(self._shared_grads(partials))
        return StepOutputs(loss, grads, step.buffers(), step.aux())

    def _shared_grads(self, partials: dict[tuple[int, str], Any]) -> dict[str, Any]:
        """The full sum of each shared parameter's partials, in stage order, on every rank that holds it.

        Every rank walks all of them in one order: a partial goes from the rank that made it to each other holder.
        """
        sums: dict[str, Any] = {}
        for name, stages in self._program.shared_params.items():
            holders = sorted({self._placement[s] for s in stages})
            total: torch.Tensor | None = None
            for stage in stages:
                if not any(
                    n == name for n, _ in self._program.task(stage, "B").outputs_of("param_grad")
                ):
                    continue
                partial = self._exchanged(partials, stage, name, holders)
                if partial is not None:
                    total = partial if total is None else total + partial
            if total is not None:
                sums[name] = total
        return sums

    def _exchanged(
        self, partials: dict[tuple[int, str], Any], stage: int, name: str, holders: list[int]
    ) -> torch.Tensor | None:
        maker = self._placement[stage]
        if self.rank not in holders:
            return None
        if maker == self.rank:
            partial: torch.Tensor = partials[stage, name]
            for other in holders:
                if other != maker:
                    dist.send(partial, other)
            return partial
        received = self.arrays.zeros(self._program.param_types[name], stage)
        dist.recv(received, maker)
        return received

    def _latency(self) -> float:
        """Seconds of a small message from rank 0 to rank 1: half a round trip, the median of some."""
        if dist.get_world_size() == 1:
            return 0.0
        word = torch.zeros(1, device=self.arrays.device)
        samples = []
        for _ in range(20):
            dist.barrier()
            started = time.perf_counter()
            if self.rank == 0:
                dist.send(word, 1)
                dist.recv(word, 1)
            elif self.rank == 1:
                dist.recv(word, 0)
                dist.send(word, 0)
            self.arrays.wait()
            samples.append((time.perf_counter() - started) / 2)
        measured = torch.tensor([sorted(samples)[len(samples) // 2]], dtype=torch.float64)
        measured = measured.to(self.arrays.device)
        dist.broadcast(measured, 0)
        return float(measured.item())
