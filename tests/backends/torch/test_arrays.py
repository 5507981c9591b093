"""Tensors of arrays of any framework: types, memory, errors."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from plait.backends.torch.arrays import plait_dtype, to_torch, torch_dtype
from plait.core_ir.arrays import array_type, to_numpy
from plait.core_ir.errors import UsageError
from plait.core_ir.types import DTYPES, KEY, DType, TensorType, f32

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)], ids=str)
def test_numpy_arrays_come_back_equal(dtype: DType, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype.numpy)
    tensor = to_torch(array, TensorType(dtype, shape), CPU)
    assert tensor.dtype == torch_dtype(dtype)
    assert plait_dtype(tensor.dtype) == dtype
    assert array_type(tensor) == TensorType(dtype, shape)
    assert to_numpy(tensor).tobytes() == array.tobytes()


def test_writable_numpy_memory_and_contiguous_tensors_are_shared() -> None:
    array = np.zeros(3, np.float32)
    assert to_torch(array, None, CPU).data_ptr() == array.ctypes.data
    tensor = torch.zeros(3, requires_grad=True)
    same = to_torch(tensor, None, CPU)
    assert same.data_ptr() == tensor.data_ptr()
    assert not same.requires_grad


def test_read_only_and_jax_arrays_are_taken_without_a_warning() -> None:
    array = np.arange(3, dtype=np.float32)
    array.setflags(write=False)
    assert to_torch(array, None, CPU).tolist() == [0, 1, 2]
    halves = to_torch(jnp.array([0.5, 1.5], jnp.bfloat16), None, CPU)
    assert halves.dtype == torch.bfloat16
    assert halves.tolist() == [0.5, 1.5]


def test_strided_and_conjugate_tensors_become_plain() -> None:
    turned = torch.arange(6.0).reshape(2, 3).T
    assert to_torch(turned, None, CPU).is_contiguous()
    conjugate = to_torch(torch.tensor([1 + 2j]).conj(), None, CPU)
    assert not conjugate.is_conj()
    assert conjugate.tolist() == [1 - 2j]
    flipped = to_torch(np.arange(4, dtype=np.float32)[::-1], None, CPU)
    assert flipped.tolist() == [3, 2, 1, 0]


def test_another_type_is_a_usage_error_with_both() -> None:
    with pytest.raises(UsageError, match=r"expected an array of type f32\[3\], got f64\[3\]"):
        to_torch(np.zeros(3), TensorType(f32, (3,)), CPU)
    assert to_torch(np.array([1, 2], np.uint32), KEY, CPU).dtype == torch.uint32
