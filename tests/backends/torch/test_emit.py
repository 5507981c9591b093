"""Every op's emitter against its NumPy meaning, run as it is; and what leaves an emitted graph."""

import numpy as np
import pytest
import torch
from op_cases import CASES, OpCase

from plait.backends.torch.arrays import to_torch
from plait.backends.torch.emit import EMITTERS, emit, trace
from plait.core_ir.arrays import array_type, to_numpy
from plait.core_ir.build import Builder
from plait.core_ir.errors import UnsupportedError
from plait.core_ir.graph import Graph, Source
from plait.core_ir.op import Array, Literal
from plait.core_ir.ops import OPS
from plait.core_ir.types import DType, TensorType, c64, f32, i32, u32

CPU = torch.device("cpu")
MATRIX = TensorType(f32, (3, 4))


def run(graph: Graph, *inputs: Array) -> tuple[torch.Tensor, ...]:
    outputs = emit(graph, CPU)(*(to_torch(x, None, CPU) for x in inputs))
    assert isinstance(outputs, tuple)
    return outputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_emitted_graph_computes_the_numpy_meaning(case: OpCase) -> None:
    outputs = run(case.graph, *case.inputs)
    assert all(x.is_contiguous() for x in outputs)
    assert tuple(array_type(x) for x in outputs) == case.graph.output_types
    case.check([to_numpy(x) for x in outputs])


def test_every_op_is_emitted() -> None:
    assert set(EMITTERS) == set(OPS.values())


# What leaves a graph.


def storages(tensors: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> list[int]:
    return [x.untyped_storage().data_ptr() for x in tensors]


def test_outputs_share_storage_with_no_input_and_no_other_output() -> None:
    b = Builder("shared")
    x = b.input(MATRIX)
    turned = b.transpose(x, (1, 0))
    row = b(OPS["slice"], x, start=(0, 0), limit=(1, 4), strides=(1, 1))
    doubled = b(OPS["add"], x, x)
    for value in (x, x, turned, row, doubled, doubled, b.reshape(doubled, (12,))):
        b.output(value)
    source = torch.randn(3, 4)
    outputs = emit(b.build(), CPU)(source)
    assert len(set(storages([source, *outputs]))) == 1 + len(outputs)
    assert all(y.is_contiguous() for y in outputs)
    torch.testing.assert_close(outputs[2], source.T)
    torch.testing.assert_close(outputs[6], 2 * source.reshape(-1))


def test_graph_without_equations_and_graph_without_anything_are_legal() -> None:
    b = Builder("through")
    b.output(b.input(MATRIX))
    x = np.ones((3, 4), np.float32)
    (y,) = run(b.build(), x)
    np.testing.assert_array_equal(to_numpy(y), x)
    assert run(Builder("nothing").build()) == ()


def test_unsigned_ports_keep_their_dtype() -> None:
    b = Builder("key")
    key = b.input(TensorType(u32, (2,)))
    b.output(key)
    b.output(b(OPS["add"], key, key))
    same, doubled = run(b.build(), np.array([1, 0xFFFFFFFF], np.uint32))
    assert same.dtype == doubled.dtype == torch.uint32
    assert to_numpy(doubled).tolist() == [2, 0xFFFFFFFE]


def test_constants_are_buffers_of_the_module_and_uniform_ones_are_not() -> None:
    table = np.arange(20, dtype=np.float32)
    b = Builder("constants")
    x = b.input(TensorType(f32, (20,)))
    b.output(b(OPS["add"], x, b(OPS["constant"], value=Literal(table))))
    b.output(b(OPS["add"], x, b(OPS["constant"], value=Literal(np.ones(20, np.float32)))))
    module = emit(b.build(), CPU)
    assert [name for name, _ in module.named_buffers()] == [f"constant_{Literal(table).digest}"]
    first, second = module(torch.ones(20))
    np.testing.assert_array_equal(to_numpy(first), table + 1)
    np.testing.assert_array_equal(to_numpy(second), np.full(20, 2))


# Which kernels.


def targets(graph: Graph, device: str = "cpu") -> list[str]:
    nodes = trace(graph, device).module.graph.nodes
    return [str(n.target) for n in nodes if n.op == "call_function"]


def test_linear_layer_and_its_gradients_are_matrix_products_and_views() -> None:
    b = Builder("linear")
    x, w = b.input(TensorType(f32, (2, 5, 4))), b.input(TensorType(f32, (3, 4)))
    grad = b.input(TensorType(f32, (2, 5, 3)))
    b.output(b(OPS["dot_general"], x, w, batch=((), ()), contract=((2,), (1,))))
    b.output(b(OPS["dot_general"], grad, w, batch=((), ()), contract=((2,), (0,))))
    b.output(b(OPS["dot_general"], grad, x, batch=((), ()), contract=((0, 1), (0, 1))))
    used = targets(b.build())
    assert used.count("aten.mm.default") == 3
    assert set(used) <= {
        f"aten.{n}.default" for n in ("mm", "view", "t", "permute", "_unsafe_view")
    }


def test_row_lookup_is_one_index() -> None:
    b = Builder("embed")
    table, ids = b.input(TensorType(f32, (10, 4))), b.input(TensorType(i32, (2, 3, 1)))
    rows = b(
        OPS["gather"],
        *(table, ids),
        offset_dims=(2,),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
        operand_batching_dims=(),
        start_indices_batching_dims=(),
        slice_sizes=(1, 4),
        mode="clip",
    )
    b.output(rows)
    assert targets(b.build()).count("aten.index.Tensor") == 1


# What torch cannot do.


def test_op_of_jax_is_refused_with_op_and_line() -> None:
    b = Builder("foreign")
    with b.at(Source("model.layers.0", "model.py", 42)):
        x = b.input(MATRIX)
        b.output(b(OPS["extern"], x, target="jax:my_op", results=(MATRIX,), spec="{}"))
    with pytest.raises(
        UnsupportedError, match=r"model\.layers\.0 model\.py:42.*my_op.*jax backend only"
    ):
        emit(b.build(), CPU)


def test_order_of_complex_numbers_is_refused_with_line() -> None:
    b = Builder("order")
    with b.at(Source("", "model.py", 7)):
        x = b.input(TensorType(c64, (3,)))
        b.output(b(OPS["max"], x, x))
    with pytest.raises(UnsupportedError, match=r"model\.py:7.*max.*complex"):
        emit(b.build(), CPU)


@pytest.mark.parametrize("dtype", [c64, i32], ids=str)
def test_convolution_without_a_kernel_is_refused(dtype: DType) -> None:
    b = Builder("convolve")
    grad, w = b.input(TensorType(dtype, (1, 2, 4))), b.input(TensorType(dtype, (2, 3, 1)))
    how = dict(strides=(1,), padding=((0, 0),), rhs_dilation=(1,), groups=1)
    b.output(b(OPS["convolution_input_grad"], grad, w, input_spatial=(4,), **how))
    with pytest.raises(
        UnsupportedError, match=rf"convolution_input_grad of {dtype}.*no such kernel on cpu"
    ):
        emit(b.build(), CPU)


def test_unknown_torch_op_is_refused_with_its_name() -> None:
    b = Builder("unknown")
    spec = '{"args": [{"operand": 0}], "kwargs": {}}'
    x = b.input(MATRIX)
    b.output(b(OPS["extern"], x, target="torch:nowhere.op.default", results=(MATRIX,), spec=spec))
    with pytest.raises(UnsupportedError, match=r"nowhere\.op\.default"):
        emit(b.build(), CPU)


def test_extern_calls_the_op_with_operands_and_static_arguments() -> None:
    b = Builder("extern")
    x, y = b.input(MATRIX), b.input(MATRIX)
    spec = '{"args": [[{"operand": 1}, {"operand": 0}], 1], "kwargs": {}}'
    joined = TensorType(f32, (3, 8))
    b.output(b(OPS["extern"], x, y, target="torch:aten.cat.default", results=(joined,), spec=spec))
    spec = '{"args": [{"operand": 0}], "kwargs": {"dtype": {"dtype": "float32"}, "device": {"device": true}}}'
    call = dict(target="torch:aten.ones_like.default", results=(MATRIX,), spec=spec)
    b.output(b(OPS["extern"], x, **call))
    left, right = np.zeros((3, 4), np.float32), np.full((3, 4), 2, np.float32)
    both, ones = run(b.build(), left, right)
    np.testing.assert_array_equal(to_numpy(both), np.concatenate([right, left], 1))
    np.testing.assert_array_equal(to_numpy(ones), np.ones((3, 4)))
