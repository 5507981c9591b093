"""Capture of a torch model with its loss: forward and backward as one Graph with markers.

Parameters, buffers and the batch are fake while the model runs, so nothing is computed and no memory is used.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from plait.core_ir.build import Builder
from plait.core_ir.errors import CaptureError, UsageError
from plait.core_ir.graph import Graph, Value
from plait.core_ir.mesh import Mesh
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.types import KEY, TensorType
from plait.frontends.batch import BatchSpec, batch_spec
from plait.frontends.captured import Captured
from plait.frontends.torch import aot, checkpoint
from plait.frontends.torch.attributes import attributes_kept
from plait.frontends.torch.boundary import marking
from plait.frontends.torch.devices import capture_device, device_wanted
from plait.frontends.torch.dtensor_random import drawing
from plait.frontends.torch.dtensors import like, local_part
from plait.frontends.torch.dtypes import TO_TORCH, type_of
from plait.frontends.torch.elsewhere import Stand, standing
from plait.frontends.torch.fsdp import batch_axes, without_hooks
from plait.frontends.torch.groups import own_rank
from plait.frontends.torch.lower import lower_nodes
from plait.frontends.torch.merge_places import Sample, merged
from plait.frontends.torch.model_state import ModelState, fake_tensors, model_state, read_leaves
from plait.frontends.torch.program import LossFn, Program
from plait.frontends.torch.refusals import refuse_modules, told
from plait.frontends.torch.sources import ModuleStack
from plait.frontends.torch.trees import kind_of, named_leaves


def capture(
    loss_fn: LossFn,
    model: nn.Module,
    batch: Any,
    *,
    num_microbatches: int,
    mesh: Mesh | None = None,
    split: Sequence[str] | None,
    has_aux: bool = False,
    state: Any = None,
    trainable: Any = None,
    device: str | torch.device | None = None,
) -> Captured:
    """Capture `loss_fn(model, microbatch) -> loss` (or `(loss, aux)`) and its gradients.

    mesh: whose axes the model's collectives may be over.

    Raises
    ------
    UsageError: an option for JAX models, a split path the model does not have.
    BatchError: a batch that does not divide into microbatches.
    CaptureError: a loss that is no scalar tensor with a gradient, a split module that is not called exactly once, an op
        whose shape depends on data, hooks on parameters, parameters changed in the forward, a change in place that is
        read across a cut, state outside buffers, and whatever the loss raises (as the cause).

    NOTE: a captured step does not raise for an index out of range, as torch does. A read gives NaN (of integers the
    lowest number, of unsigned ones the highest); a write, as of scatter or index_fill, is dropped; a row of one_hot is
    all zeros, and so are its gradients: check labels that go into one_hot where the batch is made.
    """
    if state is not None or trainable is not None:
        name = "state" if state is not None else "trainable"
        raise UsageError(
            f"{name}= is for JAX models; a torch model holds its own state in buffers, and requires_grad_(False) "
            "freezes a parameter"
        )
    with told():
        refuse_modules(model)
        held = model_state(model, mesh)
        flat = named_leaves(batch)
        spec = batch_spec(flat, num_microbatches, narrow=False)
        treespec = pytree.tree_structure(batch)

        def run() -> tuple[Program, Graph]:
            program, joint = trace(
                loss_fn, model, spec, treespec, split or (), has_aux, device, mesh
            )
            return program, lower_joint(joint, held, spec, program, mesh)

        program, graph = _at_places(run, mesh)
    return Captured(
        graph=graph,
        framework="torch",
        num_cuts=program.marks.num_cuts,
        leaves=held.leaves,
        batch=spec,
        flatten_batch=named_leaves,
        read_leaves=lambda: dict(read_leaves(model, held)),
        flatten_params=lambda params: _flatten_params(held, params),
        pack_grads=lambda grads: _pack_grads(held, grads),
        pack_aux=program.aux.pack,
        pack_state=lambda _: None,
        flatten_state=_refuse_state,
        batch_axes=batch_axes(model, mesh),
    )


def _refuse_state(state: Any) -> dict[str, Any]:
    raise UsageError(
        "Pipeline.state of a torch model is what a step left of its buffers; steps read the model's own: write to those"
    )


def _at_places(
    run: Callable[[], tuple[Program, Graph]], mesh: Mesh | None
) -> tuple[Program, Graph]:
    """What `run` captures, as one program for all ranks: where it asks for its rank, it runs at several places.

    Beside this rank's own place, these are the first along the axes that it asks about, and of each such axis the last,
    and the second, while the others are at the first.
    """
    if mesh is None or not dist.is_available() or not dist.is_initialized():
        return run()
    if dist.get_world_size() != mesh.num_ranks:
        return run()
    own = Stand(mesh, mesh.place(own_rank()))
    with standing(own):
        program, graph = run()
    asked = [axis for axis, size in mesh.axes.items() if axis in own.asked and size > 1]
    if not asked:
        return program, graph
    first = {**own.place, **dict.fromkeys(asked, 0)}
    ends = [{**first, axis: at} for axis in asked for at in {mesh.axes[axis] - 1, 1}]
    samples = [Sample(own.place, graph)]
    for place in (first, *ends):
        if place not in [sample.place for sample in samples]:
            with standing(Stand(mesh, place)):
                samples.append(Sample(place, run()[1]))
    return program, merged(samples, mesh)


def trace(
    loss_fn: LossFn,
    model: nn.Module,
    spec: BatchSpec,
    treespec: pytree.TreeSpec,
    split: Sequence[str],
    has_aux: bool,
    device: str | torch.device | None,
    mesh: Mesh | None = None,
) -> tuple[Program, aot.JointGraph]:
    """The joint graph of aten ops, before lowering, with the program it was taken from."""
    stack_of_modules = ModuleStack(model)
    recorder = aot.Recorder(lambda: stack_of_modules.path)
    program = Program(loss_fn, model, spec, treespec, has_aux, recorder.restart, mesh)
    mode = aot.fake_mode()
    with ExitStack() as stack:
        stack.enter_context(attributes_kept(model))
        stack.enter_context(without_hooks(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # else recurrent layers are one op of oneDNN, with a workspace that only its own backward can read
        stack.enter_context(torch.backends.mkldnn.flags(False, None, None, None))
        where = stack.enter_context(capture_device(device_wanted(model, device)))
        stack.enter_context(fake_tensors(model, mode, where))
        stack.enter_context(stack_of_modules.following())
        stack.enter_context(marking(model, split, program.marks))
        stack.enter_context(checkpoint.following())
        stack.enter_context(drawing(mesh, partial(setattr, recorder, "parts")))
        with mode:
            args = [_fake(leaf.type, where) for leaf in spec.leaves if leaf.type is not None]
        joint = aot.export_joint(program, args, recorder)
        program.marks.require_met(split)
    return program, joint


def _fake(type: TensorType, device: torch.device) -> Tensor:
    return torch.empty(type.shape, dtype=TO_TORCH[type.dtype], device=device)


def lower_joint(
    joint: aot.JointGraph,
    held: ModelState,
    spec: BatchSpec,
    program: Program,
    mesh: Mesh | None = None,
) -> Graph:
    """The joint graph as a Graph with the ports of `frontends.captured`."""
    b = Builder("joint")
    inputs = {leaf.name: b.input(leaf.type, leaf.role, leaf.name) for leaf in held.leaves}
    arguments = [
        b.input(leaf.type, "batch", leaf.name) for leaf in spec.leaves if leaf.type is not None
    ]
    rng_key = b.input(KEY, "rng_key")
    env: dict[fx.Node, Any] = {}
    for slot, node in zip(joint.inputs, joint.placeholders(), strict=True):
        match slot.kind:
            case "param" | "buffer":
                env[node] = inputs[held.first_names[_own(slot.name)]]
            case "argument":
                env[node] = arguments[slot.index]
            case "loss_grad":
                env[node] = b.input(type_of(node.meta["val"]), "loss_grad")
            case "zero":
                env[node] = b.full(type_of(node.meta["val"]), 0)
            case "mesh":
                env[node] = None
    lower_nodes(b, joint.nodes(), env, rng_key, mesh)
    _outputs(b, joint, held, program, env)
    return b.build()


def _own(name: str) -> str:
    return name.removeprefix("model.")


def _outputs(
    b: Builder,
    joint: aot.JointGraph,
    held: ModelState,
    program: Program,
    env: Mapping[fx.Node, Any],
) -> None:
    aux_names = program.aux.tensor_names
    grads: dict[str, Value] = {}
    updates: dict[str, Value] = {}
    for slot, node in zip(joint.outputs, joint.results(), strict=True):
        if slot is None or node is None:
            continue
        value = env[node]
        match slot.kind:
            case "output" if slot.index == 0:
                b.output(value, "loss")
            case "output" if slot.index <= len(aux_names):
                b.output(value, "aux", aux_names[slot.index - 1])
            case "output":
                updates[_buffer(held, program.replaced[slot.index - 1 - len(aux_names)])] = value
            case "grad":
                name = held.first_names[_own(slot.name)]
                grads[name] = b(ew.add, grads[name], value) if name in grads else value
            case "update" if slot.name:
                updates[_buffer(held, _own(slot.name))] = value
    for leaf in held.leaves:
        if leaf.name in updates:
            b.output(updates[leaf.name], "buffer_update", leaf.name)
    for leaf in held.leaves:
        if leaf.name in grads:
            b.output(grads[leaf.name], "param_grad", leaf.name)


def _buffer(held: ModelState, name: str) -> str:
    aliases = held.aliases(held.first_names[name])
    if len(aliases) > 1:
        raise CaptureError(
            f"the forward changes buffer {name!r}, which stands in the model under {len(aliases)} names "
            f"({', '.join(aliases)}); register it once"
        )
    return name


def _flatten_params(held: ModelState, params: Any) -> dict[str, Any]:
    names = [leaf.name for leaf in held.leaves if leaf.role == "param"]
    if not isinstance(params, Mapping):
        raise UsageError(f"params: expected a dict by parameter name, got {kind_of(params)}")
    missing, extra = [n for n in names if n not in params], [n for n in params if n not in names]
    if missing or extra:
        raise UsageError(
            f"params: the keys must be those of named_parameters(); missing {missing}, unexpected {extra}"
        )
    return {name: local_part(params[name]) for name in names}


def _pack_grads(held: ModelState, grads: Mapping[str, Any]) -> dict[str, Any]:
    return {
        leaf.name: _as_held(held, leaf.name, grads[leaf.name]) if leaf.trainable else None
        for leaf in held.leaves
        if leaf.role == "param"
    }


def _as_held(held: ModelState, name: str, grad: Any) -> Any:
    """A gradient as a DTensor where the parameter is one."""
    return like(grad, held.wholes[name]) if name in held.wholes else grad
