"""A user's mistakes: each gives one clear error that says where, what was expected, what was found, what to do."""

import dataclasses
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import plait
from plait.core_ir.errors import (
    BatchError,
    CaptureError,
    NotBuiltError,
    ScheduleError,
    UnsupportedError,
    UsageError,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.shared = nn.Linear(3, 3)
        self.idle = nn.Linear(3, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.shared(self.shared(self.first(x)))
        return self.last(h)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).mean()


def compile_net(loss: Any = loss_fn, batch: Any = None, **options: Any) -> plait.Pipeline:
    batch = {"x": torch.ones(4, 3)} if batch is None else batch
    return plait.compile(
        loss, Net(), batch, **{"num_microbatches": 2, "codegen": "eager", **options}
    )


def jax_loss(p: Any, batch: Any) -> Any:
    return jnp.sum(plait.stage_boundary(batch["x"] * p["w"]))


def compile_jax(p: Any = None, batch: Any = None, **options: Any) -> plait.Pipeline:
    p = {"w": jnp.ones(3)} if p is None else p
    batch = {"x": jnp.ones((4, 3))} if batch is None else batch
    return plait.compile(jax_loss, p, batch, **{"num_microbatches": 2, **options})


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(BatchError, match=r"'x' has 5 rows.*num_microbatches=2"):
        compile_net(batch={"x": torch.ones(5, 3)})


@pytest.mark.parametrize("mesh", [None, {"stage": 2, "data": 2}], ids=["alone", "data"])
def test_a_batch_without_rows(mesh: Any) -> None:
    empty = np.ones((0, 3), np.float32)
    for compiled, options in ((compile_net, {"split": ["last"]}), (compile_jax, {})):
        with pytest.raises(BatchError, match=r"leaf 'x' has 0 rows.*leave empty batches out"):
            compiled(batch={"x": empty}, mesh=mesh, **options)
        with pytest.raises(BatchError, match=r"'x': compiled for.*got \[0, 3\]; leave empty"):
            compiled(mesh=mesh, **options).loss_and_grads({"x": empty})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("layer", r"'layer'"),
        ("lasst", r"'lasst'.*last"),
        ("idle", r"never calls 'idle'"),
        ("shared", r"'shared'.*called.*(twice|2 times|more than once)"),
    ],
)
def test_module_paths(path: str, message: str) -> None:
    with pytest.raises((UsageError, CaptureError), match=message):
        compile_net(split=[path])


def test_a_path_in_a_function() -> None:
    with pytest.raises(plait.PlaitError, match=r"stage_boundary"):
        compile_jax(split=["layers.1"])


def test_a_string_for_a_list_of_paths() -> None:
    with pytest.raises(UsageError, match=r"write \['last'\]"):
        compile_net(split="last")


def test_a_loss_that_is_not_a_scalar() -> None:
    with pytest.raises(CaptureError, match=r"scalar.*\[2, 1\]"):
        compile_net(lambda model, batch: model(batch["x"]))
    with pytest.raises(CaptureError, match=r"scalar"):
        plait.compile(
            lambda p, b: b["x"] * p["w"],
            {"w": jnp.ones(3)},
            {"x": jnp.ones((4, 3))},
            num_microbatches=2,
        )


def test_a_loss_that_is_not_a_tensor() -> None:
    with pytest.raises(CaptureError, match=r"float"):
        compile_net(lambda model, batch: 1.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"schedule": "2f2b"},
            ScheduleError,
            r"unknown schedule '2f2b'; there are: .*gpipe.*1f1b.*zb-h1",
        ),
        ({"schedule": 3}, UsageError, r"schedule must be a name"),
        ({"backend": "tvm"}, UsageError, r"unknown backend 'tvm'; there are: torch, jax"),
        (
            {"engine": "threads"},
            UsageError,
            r"unknown engine 'threads'.*it has: local, distributed",
        ),
        ({"engine": "spmd"}, UsageError, r"unknown engine 'spmd'.*belongs to the jax backend"),
        ({"codegen": "triton"}, UsageError, r"unknown codegen 'triton'.*inductor, eager"),
        ({"reduction": "max"}, UsageError, r"unknown reduction 'max'; there are: mean, sum"),
        ({"num_microbatches": 0}, UsageError, r"num_microbatches must be an integer of at least 1"),
        ({"num_microbatches": 2.0}, UsageError, r"num_microbatches must be an integer"),
        ({"num_ranks": 2}, ScheduleError, r"1 stage cannot be put on 2 ranks"),
        ({"device": "tpu"}, UsageError, r"device 'tpu'"),
        ({"device": "cuda"}, UsageError, r"no CUDA device"),
        (
            {"hardware": "tpu"},
            UsageError,
            r"unknown hardware 'tpu'; there are: cpu-core, a100, .*; or name a .json or .toml file",
        ),
        ({"hardware": "gone.toml"}, UsageError, r"cannot read gone.toml"),
        (
            {"hardware": 5},
            UsageError,
            r"hardware must be a name \(cpu-core, a100, .*\), .* plait.Hardware, got 5",
        ),
        ({"seed": "a"}, UsageError, r"seed must be an integer"),
        ({"engine": "distributed"}, UsageError, r"needs a process group.*torchrun"),
        ({"state": {}}, UsageError, r"state"),
        ({"trainable": lambda p, x: True}, UsageError, r"trainable"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    if torch.cuda.is_available() and options.get("device") == "cuda":
        options = {"device": "cuda:99"}
        message = "cuda:99"
    with pytest.raises(error, match=message):
        compile_net(**options)


def test_an_option_of_the_other_backend() -> None:
    with pytest.raises(
        UsageError, match=r"unknown codegen 'eager' for the jax backend; it has: none"
    ):
        compile_jax(codegen="eager")
    with pytest.raises(UsageError, match=r"unknown engine 'local' for the jax backend"):
        compile_jax(engine="local")


@pytest.mark.parametrize(
    "options",
    [
        {"split": 2},
        {"remat": "full"},
    ],
    ids=str,
)
def test_what_is_to_come_is_one_error(options: dict[str, Any]) -> None:
    with pytest.raises(NotBuiltError, match="not built yet"):
        compile_net(**options)


def test_passes_that_are_none() -> None:
    with pytest.raises(UsageError, match=r"passes must be a plait\.passes\.Passes, got tuple"):
        compile_net(passes=())
    with pytest.raises(UsageError, match=r"Passes\.joint must hold functions, got 'sort'"):
        plait.passes.Passes(joint=("sort",))  # type: ignore[arg-type]


def test_a_pass_that_gives_nonsense_is_named() -> None:
    def drop_outputs(graph: Any) -> Any:
        return dataclasses.replace(graph, eqns=())

    def forget(graph: Any) -> Any:
        return None

    for wrong, message in (
        (drop_outputs, "pass drop_outputs gave what is not valid: .*is not defined"),
        (forget, "pass forget gave what is not valid: it must return a Graph, got NoneType"),
    ):
        with pytest.raises(plait.PlaitError, match=message):
            compile_net(passes=plait.passes.Passes(joint=(wrong,)))
    with pytest.raises(plait.PlaitError, match="pass drop_outputs gave what is not valid"):
        compile_net(
            passes=plait.passes.Passes(
                program=(*plait.passes.PROGRAM_PASSES, plait.passes.each_task(drop_outputs))
            )
        )


def test_a_model_of_no_framework() -> None:
    with pytest.raises(UsageError, match=r"model is a builtins\.str; expected a torch\.nn\.Module"):
        plait.compile(loss_fn, "llama", {"x": torch.ones(4, 3)}, num_microbatches=2)


def test_more_ranks_than_devices() -> None:
    def many(p: Any, batch: Any) -> Any:
        h = batch["x"] * p["w"]
        for _ in range(64):
            h = plait.stage_boundary(h)
        return jnp.sum(h)

    with pytest.raises(
        UsageError, match=r"65 ranks need 65 devices.*force_host_platform_device_count=65"
    ):
        plait.compile(
            many, {"w": jnp.ones(3)}, {"x": jnp.ones((4, 3))}, num_microbatches=2, engine="spmd"
        )


def test_a_schedule_for_other_stages() -> None:
    schedule = plait.schedule("1f1b", 4, 2)
    with pytest.raises(
        ScheduleError, match=r"is for 4 stages and 2 microbatches; the program has 2 stages"
    ):
        compile_jax(schedule=schedule)


def test_a_batch_whose_shape_changed() -> None:
    for pipeline in (compile_net(), compile_jax()):
        with pytest.raises(BatchError, match=r"compiled for shape \[4, 3\].*got \[8, 3\]"):
            pipeline.loss_and_grads({"x": np.ones((8, 3), np.float32)})
        with pytest.raises(BatchError, match=r"missing \['x'\], unexpected \['y'\]"):
            pipeline.loss_and_grads({"y": np.ones((4, 3), np.float32)})


def test_parameters_of_another_model() -> None:
    pipeline = compile_net()
    with pytest.raises(UsageError, match=r"first\.weight"):
        pipeline.loss_and_grads({"x": torch.ones(4, 3)}, {})


def test_step_is_for_torch_on_torch() -> None:
    with pytest.raises(
        UsageError, match=r"step is for a torch model on the torch backend.*loss_and_grads"
    ):
        compile_jax().step({"x": jnp.ones((4, 3))})


def test_a_changed_mode_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    batch = {"x": torch.ones(4, 3)}
    pipeline = plait.compile(loss_fn, model, batch, num_microbatches=2, codegen="eager")
    model.eval()
    with pytest.raises(UsageError, match="compiled in train mode"):
        pipeline.step(batch)


def data_dependent(model: nn.Module, batch: Any) -> torch.Tensor:
    x = model.first(batch["x"])
    return x[x > 0].sum()


def test_a_shape_that_depends_on_data_is_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"test_mistakes\.py:\d+"):
        compile_net(data_dependent)


def test_a_jax_op_on_the_torch_backend() -> None:
    def loss(p: Any, batch: Any) -> Any:
        return jnp.sum(jnp.linalg.eigh(batch["x"].T @ batch["x"] + p["w"])[0])

    with pytest.raises(UnsupportedError, match=r"test_mistakes\.py:\d+: eigh"):
        plait.compile(
            loss,
            {"w": jnp.eye(3)},
            {"x": jnp.ones((4, 3))},
            num_microbatches=2,
            backend="torch",
            codegen="eager",
        )


BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == {missing!r} else real(name, *a)
import plait
try:
    {action}
except plait.PlaitError as error:
    print(type(error).__name__, error)
"""


def run_without(missing: str, action: str) -> str:
    code = BLOCK.format(missing=missing, action=action.replace("\n", "\n    "))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_jax_that_is_not_installed() -> None:
    out = run_without(
        "jax",
        "import torch\n"
        "plait.compile(lambda m, b: m(b).sum(), torch.nn.Linear(2, 1), torch.ones(2, 2), num_microbatches=1,"
        " backend='jax')",
    )
    assert "MissingExtraError" in out
    assert "pip install 'plait[jax]'" in out


def test_torch_that_is_not_installed() -> None:
    out = run_without(
        "torch",
        "import jax.numpy as jnp\n"
        "plait.compile(lambda p, b: (b * p).sum(), jnp.ones(2), jnp.ones((2, 2)), num_microbatches=1,"
        " backend='torch')",
    )
    assert "MissingExtraError" in out
    assert "pip install 'plait[torch]'" in out


def test_each_half_works_without_the_other() -> None:
    out = run_without(
        "torch",
        "import jax.numpy as jnp\n"
        "p = plait.compile(lambda p, b: (b * p).sum(), jnp.ones(2), jnp.ones((2, 2)), num_microbatches=1)\n"
        "print(float(p.loss_and_grads(jnp.ones((2, 2)))[0]))",
    )
    assert out.strip() == "4.0"
    out = run_without(
        "jax",
        "import torch\n"
        "m = torch.nn.Linear(2, 1, bias=False)\n"
        "torch.nn.init.ones_(m.weight)\n"
        "p = plait.compile(lambda m, b: m(b).sum(), m, torch.ones(2, 2), num_microbatches=1, codegen='eager')\n"
        "print(float(p.step(torch.ones(2, 2))))",
    )
    assert out.strip() == "4.0"


def test_another_parameter_object_is_an_error() -> None:
    model, batch = Net(), {"x": torch.ones(4, 3)}
    pipeline = plait.compile(loss_fn, model, batch, num_microbatches=2, codegen="eager")
    model.first.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(UsageError, match=r"'first\.weight' is another tensor since.*compile again"):
        pipeline.step(batch)


def test_a_tensor_hook_after_compiling_is_refused() -> None:
    model, batch = Net(), {"x": torch.ones(4, 3)}
    pipeline = plait.compile(loss_fn, model, batch, num_microbatches=2, codegen="eager")
    model.last.weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(UsageError, match=r"'last\.weight' has a tensor hook"):
        pipeline.step(batch)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_parameter_of_another_type_is_an_error(backend: str) -> None:
    model, batch = Net(), {"x": torch.ones(4, 3)}
    options = {"codegen": "eager"} if backend == "torch" else {}
    pipeline = plait.compile(loss_fn, model, batch, num_microbatches=2, backend=backend, **options)
    params = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(UsageError, match=r"'last\.weight' was f32\[1, 3\] .*is f32\[1, 4\]"):
        pipeline.loss_and_grads(batch, {**params, "last.weight": torch.ones(1, 4)})
    model.double()
    with pytest.raises(UsageError, match=r"'first\.weight' was f32\[3, 3\] .*is f64\[3, 3\]"):
        pipeline.loss_and_grads(batch)


def test_a_model_without_content() -> None:
    with torch.device("meta"):
        model = Net()
    batch = {"x": torch.ones(4, 3)}
    pipeline = plait.compile(loss_fn, model, batch, num_microbatches=2, backend="jax")
    with pytest.raises(UsageError, match=r"is on meta, without content"):
        pipeline.loss_and_grads(batch)


def test_numbers_out_of_range() -> None:
    with pytest.raises(UsageError, match=r"seed must be an integer of 64 bits"):
        compile_net(seed=2**70)
    pipeline = compile_net()
    for step in (-1, 1.5, 2**65):
        with pytest.raises(UsageError, match=r"step must be an integer"):
            pipeline.loss_and_grads({"x": torch.ones(4, 3)}, step=step)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"max_norm must be"):
        pipeline.clip_grad_norm_(float("nan"))


def test_buffers_that_are_not_persistent_are_in_no_state_dict() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
            self.register_buffer("shift", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale + self.shift

    def compiled(model: nn.Module) -> plait.Pipeline:
        x = torch.ones(4, 3)
        loss = lambda m, x: m(x).square().mean()  # noqa: E731
        options = {"split": ["1"], "num_microbatches": 2, "codegen": "eager"}
        return plait.compile(loss, model, x, **options)

    plain, model = nn.Sequential(Scaled(), Scaled()), nn.Sequential(Scaled(), Scaled())
    pipeline = compiled(model)
    assert pipeline.state_dict().keys() == plain.state_dict().keys()
    pipeline.load_state_dict(plain.state_dict())
    assert torch.equal(model[0].linear.weight, plain[0].linear.weight)
    plain.load_state_dict(pipeline.state_dict())
    with torch.device("meta"):
        empty = compiled(nn.Sequential(Scaled(), Scaled()))
    with pytest.raises(UsageError, match=r"missing \['0\.scale', '1\.scale'\]"):
        empty.load_state_dict(plain.state_dict())  # nobody else has their values
    scales = {f"{n}.scale": torch.full((3,), 2.0) for n in range(2)}
    empty.load_state_dict({**plain.state_dict(), **scales})
    x = torch.ones(4, 3)
    assert torch.equal(empty.forward(x), pipeline.forward(x))


def test_a_state_dict_of_another_model() -> None:
    pipeline = compile_net()
    state = pipeline.state_dict()
    with pytest.raises(UsageError, match=r"missing \[\], not in the model \['zzz'\]"):
        pipeline.load_state_dict({**state, "zzz": torch.ones(1)})
    with pytest.raises(UsageError, match=r"missing \['first\.weight'\]"):
        pipeline.load_state_dict({n: v for n, v in state.items() if n != "first.weight"})


def test_a_step_inside_inference_mode() -> None:
    model, batch = Net(), {"x": torch.ones(4, 3)}
    pipeline = plait.compile(loss_fn, model, batch, num_microbatches=2, codegen="eager")
    with torch.inference_mode():
        pipeline.step(batch)
    assert model.last.weight.grad is not None


def test_a_pipeline_shows_itself_in_a_line() -> None:
    assert repr(compile_net()) == (
        "<Pipeline torch on torch local: 1 stages on 1 ranks, 2 microbatches, 1f1b>"
    )
