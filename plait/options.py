"""The options of `compile`, checked before anything is captured: unknown, misplaced and not yet built values."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from plait.core_ir.arrays import is_array
from plait.core_ir.errors import NotBuiltError, UsageError
from plait.core_ir.hardware import Hardware
from plait.core_ir.mesh import Mesh
from plait.core_ir.named_hardware import NAMED, find_hardware
from plait.core_ir.passes.pipeline import Passes
from plait.extras import Framework
from plait.mesh import read_mesh

ENGINES: dict[str, tuple[str, ...]] = {
    "torch": ("local", "distributed"),
    "jax": ("mpmd", "spmd"),
}
CODEGENS: dict[str, tuple[str, ...]] = {"torch": ("inductor", "eager"), "jax": ()}
REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class Options:
    """Options that passed the checks, with defaults filled in.

    hardware: what the cost model takes the ranks for; None: what the device is.
    """

    framework: Framework
    backend: Framework
    engine: str
    codegen: str | None
    reduction: str
    seed: int
    has_aux: bool
    mesh: Mesh | None = None
    hardware: Hardware | None = None


def framework_of(model: object) -> Framework:
    """The framework a model is written in; UsageError with its type for anything else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return "torch"
    jax = sys.modules.get("jax")
    if jax is not None:
        leaves = jax.tree_util.tree_leaves(model)
    else:
        leaves = list(_leaves(model))
    if any(is_array(leaf) and not _is_torch(leaf) for leaf in leaves):
        return "jax"
    kind = type(model)
    raise UsageError(
        f"model is a {kind.__module__}.{kind.__qualname__}; expected a torch.nn.Module, or a pytree of JAX or NumPy "
        "arrays (an nnx module or state, linen variables, an equinox module)"
    )


def _is_torch(leaf: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.Tensor)


def _leaves(tree: Any) -> Any:
    if isinstance(tree, dict):
        for item in tree.values():
            yield from _leaves(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
    else:
        yield tree


def check_options(
    framework: Framework,
    *,
    backend: str | None,
    engine: str | None,
    codegen: str | None,
    reduction: str,
    split: object,
    remat: object,
    mesh: object,
    stage_axis: str,
    data_axes: Sequence[str] | None,
    passes: object,
    hardware: object,
    device: object,
    seed: object,
    has_aux: bool,
    num_microbatches: object,
    num_ranks: object,
    world_size: int,
) -> Options:
    """Options with defaults, or UsageError (NotBuiltError for what is still to come)."""
    backend = framework if backend is None else backend
    if backend not in get_args(Framework):
        raise UsageError(f"unknown backend {backend!r}; there are: {', '.join(ENGINES)}")
    _check_not_built(split, remat)
    engines = ENGINES[backend]
    if engine is None:
        distributed = backend == "torch" and world_size > 1
        engine = "distributed" if distributed else engines[0]
    if engine not in engines:
        raise UsageError(_misplaced("engine", engine, backend, ENGINES))
    if codegen is None:
        codegen = next(iter(CODEGENS[backend]), None)
    elif codegen not in CODEGENS[backend]:
        raise UsageError(_misplaced("codegen", codegen, backend, CODEGENS))
    if device is not None and not isinstance(device, str) and backend == "jax":
        raise UsageError(f"device must be a platform's name for the jax backend, got {device!r}")
    if reduction not in REDUCTIONS:
        raise UsageError(f"unknown reduction {reduction!r}; there are: {', '.join(REDUCTIONS)}")
    for name, number in (("num_microbatches", num_microbatches), ("num_ranks", num_ranks)):
        optional = number is None and name == "num_ranks"
        if not optional and (not _is_int(number) or number < 1):  # type: ignore[operator]
            raise UsageError(f"{name} must be an integer of at least 1, got {number!r}")
    if passes is not None and not isinstance(passes, Passes):
        raise UsageError(
            f"passes must be a plait.passes.Passes, got {type(passes).__name__}; for example "
            "plait.passes.Passes(joint=(*plait.passes.CLEANING, my_pass))"
        )
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise UsageError(f"seed must be an integer of 64 bits, got {seed!r}")
    chosen: Framework = "torch" if backend == "torch" else "jax"
    read = read_mesh(mesh, stage_axis, data_axes)
    if read is not None and num_ranks not in (None, read.axes[stage_axis]):
        raise UsageError(
            f"num_ranks is {num_ranks}, but the mesh has {read.axes[stage_axis]} ranks along {stage_axis!r}; leave "
            "num_ranks out"
        )
    taken = _read_hardware(hardware)
    return Options(framework, chosen, engine, codegen, reduction, seed, has_aux, read, taken)


def _read_hardware(hardware: object) -> Hardware | None:
    if hardware is None or isinstance(hardware, Hardware):
        return hardware
    if isinstance(hardware, (str, os.PathLike)):
        return find_hardware(hardware)
    raise UsageError(
        f"hardware must be a name ({', '.join(NAMED)}), a .json or .toml file or a plait.Hardware, got {hardware!r}"
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _misplaced(option: str, value: object, backend: str, table: dict[str, tuple[str, ...]]) -> str:
    own = ", ".join(table[backend]) or "none"
    others = [name for name, values in table.items() if value in values]
    hint = f"; {value!r} belongs to the {others[0]} backend" if others else ""
    return f"unknown {option} {value!r} for the {backend} backend; it has: {own}{hint}"


def _check_not_built(split: object, remat: object) -> None:
    pending = {
        "split=int": _is_int(split),
        "remat": remat != "none",
    }
    for name, asked in pending.items():
        if asked:
            raise NotBuiltError(f"{name} is not built yet; leave it at its default")
    if split is None:
        return
    if isinstance(split, str) or not isinstance(split, Sequence):
        raise UsageError(
            f"split must be None or a sequence of module paths, got {split!r}"
            + (f"; write [{split!r}]" if isinstance(split, str) else "")
        )
    for path in split:
        if not isinstance(path, str):
            raise UsageError(f"split holds module paths (strings), got {path!r}")
