"""The adapter to torch's private capture interfaces. Tested with torch 2.13.0.

It holds every use of private names: AOTAutograd's joint export and its descriptors, the tracer that makes nodes, fake
tensors, and whether autograd runs a backward or torch.func a transform. All else in this folder sees `JointGraph`.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, make_fx
from torch.utils import _pytree as pytree

from plait.core_ir.errors import CaptureError, PlaitError
from plait.core_ir.graph import UNKNOWN, Source
from plait.frontends.torch.aot_errors import explained, hooked, refusal
from plait.frontends.torch.backward import Running
from plait.frontends.torch.checkpoint import recomputation
from plait.frontends.torch.dtensors import loss_parallel_kept
from plait.frontends.torch.permute import permuting
from plait.frontends.torch.plain_collectives import functional_forms
from plait.frontends.torch.sources import calling_source, raising_source

Kind: TypeAlias = Literal[
    "param", "buffer", "argument", "loss_grad", "zero", "mesh", "output", "grad", "update"
]


@dataclass(frozen=True)
class Slot:
    """What an input or an output of the joint graph is: a kind, and the name or the position of what it stands for.

    inputs   param and buffer (name), argument (position), loss_grad, zero (the cotangent of what is changed in place),
             mesh (that of a DTensor: no tensor)
    outputs  output (position), grad (of a param by name), update (of a buffer by name, or an argument by position)
    """

    kind: Kind
    name: str = ""
    index: int = 0


@dataclass(frozen=True)
class JointGraph:
    """A forward with its backward as one functional fx graph, with what each input and output is.

    `outputs` has None where the graph returns nothing that matters.
    """

    module: fx.GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot | None, ...]

    def nodes(self) -> list[fx.Node]:
        """The calls, in order."""
        return [n for n in self.module.graph.nodes if n.op not in ("placeholder", "output")]

    def placeholders(self) -> list[fx.Node]:
        """The input nodes, one for each of `inputs`."""
        return [n for n in self.module.graph.nodes if n.op == "placeholder"]

    def results(self) -> list[fx.Node | None]:
        """What is returned, one for each of `outputs`."""
        (output,) = (n for n in self.module.graph.nodes if n.op == "output")
        return list(output.args[0])


SOURCE = "plait_source"
"""Key in `node.meta`: where the user wrote the node."""
RANDOM = "plait_random"
"""Key in `node.meta` of a random op: its number."""
PARTS = "plait_parts"
"""Key in `node.meta` of a random op: the axes over which what it fills is cut."""
RECOMPUTATION = "plait_recomputation"
"""Key in `node.meta`: the number of the recomputation that made the node; None for most."""


def in_backward() -> bool:
    """Whether autograd runs a backward: a forward inside it is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_transform() -> bool:
    """Whether a function transform of torch.func runs, such as vmap or grad."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have a type and no content.

    Without symbolic sizes: an op whose result shape depends on data raises. Real tensors that the model reaches by
    other ways than its parameters and buffers become constants.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


class Recorder:
    """Notes on each node, while it is made, where the user wrote it and which random op it is.

    A recomputation takes the generator's state back; here the state is the number of the next random op, so a random op
    that is recomputed has the number it had the first time.
    """

    def __init__(self, module_path: Callable[[], str]) -> None:
        self._module_path = module_path
        self.parts: tuple[str, ...] = ()
        self._next_random = 0
        self._by_sequence: dict[int, Source] = {}
        self._running = Running()

    def restart(self) -> None:
        """The forward runs again from its start."""
        self._next_random = 0

    def place(self, where: Source) -> str:
        """`where`; if that is unknown while torch's own part of a backward runs, or has just raised: the forward line
        that this backward is of."""
        if where is not UNKNOWN or not self._running.name:
            return str(where)
        forward = self._by_sequence.get(self._running.sequence, UNKNOWN)
        return f"{forward}, in its backward ({self._running.name})"

    def note(self, node: fx.Node) -> None:
        """Complete the metadata of a node just made."""
        source = calling_source(self._module_path())
        sequence = node.meta.get("seq_nr", -1)
        if not in_backward():
            self._by_sequence.setdefault(sequence, source)
        elif not source.module:  # made by autograd: it has the number of the forward op
            forward = self._by_sequence.get(sequence, UNKNOWN)
            source = forward if source is UNKNOWN else replace(source, module=forward.module)
        node.meta[SOURCE] = source
        node.meta[RECOMPUTATION] = recomputation()
        if _is_random(node.target):
            node.meta[RANDOM] = self._next_random
            node.meta[PARTS] = self.parts
            self._next_random += 1

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Nodes made inside are noted."""
        create = PythonKeyTracer.create_node

        def create_node(tracer: PythonKeyTracer, *args: Any, **kwargs: Any) -> fx.Node:
            node = create(tracer, *args, **kwargs)
            self.note(node)
            return node

        def get_state() -> Any:
            return _RandomState(self._next_random)

        def set_state(state: Any) -> None:
            self._next_random = state.next_random

        @contextlib.contextmanager
        def fork(*_: Any, **__: Any) -> Iterator[None]:
            before = self._next_random
            yield
            self._next_random = before

        with (
            self._running.following(),
            mock.patch.object(PythonKeyTracer, "create_node", create_node),
            mock.patch.object(torch, "get_rng_state", get_state),
            mock.patch.object(torch, "set_rng_state", set_state),
            mock.patch.object(torch.random, "fork_rng", fork),
            # nothing is drawn while tensors are fake, so no generator needs its state back
            mock.patch.object(torch.cuda, "set_rng_state"),
        ):
            yield


@dataclass(frozen=True)
class _RandomState:
    next_random: int


def _is_random(target: Any) -> bool:
    tags = getattr(target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def export_joint(module: nn.Module, args: Sequence[Tensor], recorder: Recorder) -> JointGraph:
    """The joint graph of a module that returns `(loss, ...)`; the module and the arguments hold fake tensors.

    CaptureError for an op whose result's shape, or a Python value, depends on data, and for whatever is raised.
    """

    def refuse(op: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
        raise refusal(recorder.place(calling_source()), op, args)

    def hook(hooks: saved_tensors_hooks) -> None:
        kind = type(hooks)
        if kind is saved_tensors_hooks or not kind.__module__.startswith("torch."):
            raise hooked(recorder.place(calling_source()))
        enter(hooks)  # torch's own kinds keep values as they are

    enter = saved_tensors_hooks.__enter__
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.compiler._compile_session_context())
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # the user's compile
            stack.enter_context(mock.patch.object(HigherOrderOperator, "__call__", refuse))
            stack.enter_context(mock.patch.object(saved_tensors_hooks, "__enter__", hook))
            stack.enter_context(recorder.recording())
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Error detected in ")  # the place is in the exception
            stack.enter_context(functional_forms())
            stack.enter_context(permuting())
            stack.enter_context(loss_parallel_kept())
            joint = aot_export_joint_with_descriptors(stack, module, tuple(args))
    except (PlaitError, Warning):
        raise
    except Exception as error:
        place = recorder.place(raising_source(error.__traceback__))
        raise explained(error, place) from error
    module_ = joint.graph_module
    (output,) = (n for n in module_.graph.nodes if n.op == "output")
    inputs = tuple(
        _input_slot(n.meta.get("desc")) for n in module_.graph.nodes if n.op == "placeholder"
    )
    returned = zip(output.meta["desc"], output.args[0], strict=True)
    outputs = tuple(None if node is None else _output_slot(desc) for desc, node in returned)
    return JointGraph(module_, inputs, outputs)


def _changed(param: str) -> CaptureError:
    return CaptureError(
        f"the forward changes parameter {param.removeprefix('model.')!r} in place; a captured step may change buffers "
        "only: make it a buffer, or change it outside the loss"
    )


def _input_slot(desc: Any) -> Slot:
    match desc:
        case ParamAOTInput(target=name):
            return Slot("param", name)
        case BufferAOTInput(target=name):
            return Slot("buffer", name)
        case PlainAOTInput(idx=index):
            return Slot("argument", index=index)
        case TangentAOTInput(output=PlainAOTOutput(idx=0)):
            return Slot("loss_grad")
        case TangentAOTInput(
            output=InputMutationAOTOutput(mutated_input=ParamAOTInput(target=name))
        ):
            raise _changed(name)
        case TangentAOTInput(output=InputMutationAOTOutput()):
            return Slot("zero")
        case SubclassGetAttrAOTInput(base=base, attr="_local_tensor"):
            return _input_slot(base)
        case SubclassGetAttrAOTInput(attr="device_mesh"):
            return Slot("mesh")
    raise CaptureError(f"the captured program has an input that Plait does not know: {desc}")


def _output_slot(desc: Any) -> Slot | None:
    match desc:
        case PlainAOTOutput(idx=index):
            return Slot("output", index=index)
        case GradAOTOutput(grad_of=ParamAOTInput(target=name)):
            return Slot("grad", name)
        case GradAOTOutput():
            return None  # of a buffer or an argument: nobody asked for it
        case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=name)):
            return Slot("update", name)
        case InputMutationAOTOutput(mutated_input=PlainAOTInput(idx=index)):
            return Slot("update", index=index)
        case InputMutationAOTOutput(mutated_input=ParamAOTInput(target=name)):
            raise _changed(name)
        case SubclassGetAttrAOTOutput(base=base, attr="_local_tensor"):
            return _output_slot(base)
        case SubclassGetAttrAOTOutput(attr="device_mesh"):
            return None
    raise CaptureError(f"the captured program has an output that Plait does not know: {desc}")


def decomposed(node: fx.Node) -> fx.GraphModule | None:
    """torch's own decomposition of a call, as a graph over its tensor arguments; None where torch has none."""
    decomposition = _decompositions().get(node.target)
    if decomposition is None:
        return None
    args, kwargs = _mutable(fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"]))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(*tensors: Tensor) -> list[Tensor | None]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        result = decomposition(*args, **kwargs)
        return [result] if isinstance(result, Tensor) else list(result)

    tensors = [leaves[i] for i in places]
    mode = tensors[0].fake_mode if tensors else fake_mode()
    with mode:
        inner = make_fx(functionalize(call), decomposition_table={})(*tensors)
    inner.graph.eliminate_dead_code()
    return inner


def _mutable(tree: Any) -> Any:
    """The arguments of a node with lists that may be changed, as a call has them."""
    if isinstance(tree, list | tuple):
        kind = tuple if isinstance(tree, tuple) else list
        return kind(map(_mutable, tree))
    if isinstance(tree, dict):
        return {key: _mutable(value) for key, value in tree.items()}
    return tree


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return dict(torch._decomp.decomposition_table)
