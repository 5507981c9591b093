"""What each gloo rank runs: models over a mesh, as torch runs them, as they are captured, and the plain models."""

import copy
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks_of_models import Results, check_captured, compare, eager, everywhere, local
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import plait
from plait.core_ir.mesh import Mesh, part_of
from plait.models.deepseek_v3 import config as deepseek_config
from plait.models.deepseek_v3 import parallel_torch as parallel_deepseek
from plait.models.deepseek_v3 import torch as deepseek_v3
from plait.models.llama import config as llama_config
from plait.models.llama import parallel_torch as parallel_llama
from plait.models.llama import torch as llama
from plait.models.llama.parallel_torch import Form

LLAMA = replace(llama_config.CONFIGS["tiny"], num_layers=1, seq_len=16, dim=32, hidden_dim=48)
DEEPSEEK_V3 = replace(deepseek_config.CONFIGS["tiny"], num_layers=2, seq_len=8, dim=32)
FORMS = {
    "tensor": partial(Form, model_axis="model"),
    "sequence": partial(Form, model_axis="model", sequence_parallel=True),
    "context": partial(Form, context_axis="context"),
    "all": partial(Form, model_axis="model", context_axis="context", sequence_parallel=True),
}


def check_llama(name: str, sizes: dict[str, int]) -> None:
    config = replace(LLAMA, tied_head=name == "all")
    batch = torch_batch(next(llama_config.batches(config, "train", 2, seed=0)))
    mesh = Mesh({"stage": 1, **sizes})
    devices = init_device_mesh("cpu", tuple(mesh.axes.values()), mesh_dim_names=tuple(mesh.axes))
    form = FORMS[name](devices)
    plain = llama.build(config)
    model = parallel_llama.distribute(copy.deepcopy(plain), form)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]

    def in_torch(_: Any, model: Any, batch: Any) -> Results:
        with nullcontext() if form.model_axis is None else loss_parallel():
            within = replace(form, model_axis=None)  # leaves no context of its own
            return eager(partial(parallel_llama.loss_fn, form=within), model, batch)

    loss = partial(parallel_llama.loss_fn, form=form)
    captured, found = check_captured(loss, model, batch, mesh, in_torch)
    expected, place = eager(llama.loss_fn, plain, batch), mesh.place(dist.get_rank())
    parts = {
        (role, n): part_of(x, captured.layouts.get(n, ()), mesh.axes, place)
        for (role, n), x in expected.items()
    }
    compare(found, parts, 1e-5)
    named = {axis for axis, size in sizes.items() if size > 1}
    assert captured.named_axes == named & {form.model_axis, form.context_axis}
    cut = {n.rpartition(".")[0].rpartition(".")[2] for n in captured.layouts}
    linear = {"wq", "wk", "wv", "wo", "w1", "w2", "w3", "tok_embed"}
    head = set() if config.tied_head else {"head"}
    assert cut == (linear | head if form.model_axis is not None else set())


def check_deepseek_v3() -> None:
    """Both ways to give ranks their tokens."""
    ranks = dist.get_world_size()
    batch = torch_batch(next(deepseek_config.batches(DEEPSEEK_V3, "train", 2 * ranks, seed=0)))
    mesh = Mesh({"stage": 1, "expert": ranks}, data_axes=("expert",))
    devices = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("stage", "expert"))
    plain = deepseek_v3.build(DEEPSEEK_V3)
    model = parallel_deepseek.expert_parallel(copy.deepcopy(plain), devices["expert"])
    loss = partial(parallel_deepseek.loss_fn, mesh=devices["expert"])
    captured, found = check_captured(loss, model, batch, replace(mesh, data_axes=()))
    counts = {key for key in found if key[0] == "buffer_update"}
    assert counts == {("buffer_update", "layers.1.moe.router.counts")}
    layouts = {f"layers.1.moe.experts.{name}": (("expert",),) for name in ("w1", "w2", "w3")}
    assert captured.layouts == layouts
    place, expected = mesh.place(dist.get_rank()), eager(deepseek_v3.loss_fn, plain, batch)
    for _, name in counts:
        expected["buffer_update", name] = local(dict(plain.named_buffers())[name])
    parts = {
        (role, n): part_of(x, layouts.get(n, ()), mesh.axes, place)
        for (role, n), x in expected.items()
    }
    compare(found, parts, 1e-5)

    own = {name: x.chunk(ranks)[dist.get_rank()] for name, x in batch.items()}
    captured, alone = check_captured(deepseek_v3.loss_fn, model, own, mesh)
    assert captured.layouts == layouts
    sums = {
        (role, n): x if n in layouts else sum(others[role, n] for others in everywhere(alone))
        for (role, n), x in alone.items()
        if role != "buffer_update"
    }
    means = {key: x / ranks for key, x in sums.items()}
    compare({key: means.get(key, alone[key]) for key in parts}, parts, 1e-5)


def check_compiled(name: str) -> None:
    """Two stages of two ranks each: a step gives the loss and the gradients of the plain model."""
    axis = {"context": "context", "expert": "expert"}.get(name, "model")
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", axis))
    options: dict[str, Any] = {}
    if name == "expert":
        config: Any = DEEPSEEK_V3
        batch = torch_batch(next(deepseek_config.batches(config, "train", 8, seed=0)))
        plain: Any = deepseek_v3.build(config).eval()
        model: Any = parallel_deepseek.expert_parallel(copy.deepcopy(plain), devices["expert"])
        loss: Any = deepseek_v3.loss_fn
        options = {"data_axes": ("expert",)}
    else:
        config = replace(LLAMA, num_layers=2)
        batch = torch_batch(next(llama_config.batches(config, "train", 4, seed=0)))
        plain, form = llama.build(config), FORMS[name](devices)
        model = parallel_llama.distribute(copy.deepcopy(plain), form)
        loss = partial(parallel_llama.loss_fn, form=form)
    pipeline = plait.compile(
        loss,
        model,
        batch,
        num_microbatches=2,
        split=["layers.1"],
        schedule="zb-h1",
        mesh=devices,
        codegen="eager",
        **options,
    )
    assert pipeline.options.mesh is not None
    assert pipeline.options.mesh.named_axes == (axis,)
    mean = (deepseek_v3 if name == "expert" else llama).loss_fn(plain, batch)
    mean.backward()
    torch.testing.assert_close(pipeline.step(batch), mean.detach(), rtol=1e-6, atol=0)
    expected = {n: p.grad for n, p in plain.named_parameters()}
    for n, parameter in pipeline.named_parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(whole, expected[n], rtol=1e-5, atol=1e-6, msg=n)


def torch_batch(batch: Any) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(np.asarray(x)) for name, x in batch.items()}


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    for name in sys.argv[2:]:
        if sys.argv[1] == "compiled":
            check_compiled(name)
        elif name in ("tensor", "sequence"):
            check_llama(name, {"model": ranks})
        elif name == "expert":
            check_deepseek_v3()
        elif name == "context":
            check_llama(name, {"context": ranks})
        else:
            check_llama(name, {"context": ranks // 2, "model": 2})
        print(name)
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
