"""Matrix modes that round more than their dtype says are off while tasks run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """On CUDA: f32 convolutions without TF32, f16 and bf16 products accumulated in f32 throughout.

    TF32 in matrix products is off by default, and stays as the user has set it. What was set is put back.
    """
    matmul: Any = torch.backends.cuda.matmul
    conv: Any = getattr(torch.backends.cudnn, "conv")  # noqa: B009  torch's types do not know it
    saved = (
        conv.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )
    conv.fp32_precision = "ieee"
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        conv.fp32_precision = saved[0]
        matmul.allow_fp16_reduced_precision_reduction = saved[1]
        matmul.allow_bf16_reduced_precision_reduction = saved[2]
