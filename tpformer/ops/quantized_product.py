"""The GEMM of quantised rows and a weight: by torch's library, by our kernel, or by their specification.

Belongs here: which of them multiplies, and how torch's takes blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tpformer.kernels.quantize.format import Blocks

from .implementation import implementation

LIBRARY = (9, 0)  # the capability for which cuBLASLt scales blocks of 1 x 128 and 128 x 128
LIBRARY_ROWS = 4  # it reads the scales of so many rows together


def quantized_product(x: Blocks, weight: Blocks, bias: Tensor | None, like: Tensor) -> Tensor:
    """x W^T + bias (M, N), in the dtype of `like` and on its device, of blocks of rows (M, K) and of a weight (N, K).

    In bfloat16 on sm_90 torch.nn.functional.scaled_mm multiplies, unless 4 does not divide M; else the Triton kernel on
    a GPU, and its reference elsewhere and in float64.
    """
    if served_by_library(x, like):
        return library_product(x, weight, bias, like.dtype)
    return implementation("quantized_matmul", like).quantized_matmul(x, weight, bias, dtype=like.dtype)


def served_by_library(x: Blocks, like: Tensor) -> bool:
    """Whether torch multiplies these rows: where cuBLASLt does, and rows are whole groups, as their scales are."""
    if not like.is_cuda or like.dtype != torch.bfloat16 or len(x.values) % LIBRARY_ROWS:
        return False
    return torch.cuda.get_device_capability(like.device) == LIBRARY and hasattr(F, "scaled_mm")


def float_scales(exponents: Tensor) -> Tensor:
    """2**exponent in float32, in three launches. A block with NOT_A_NUMBER gets 2**127, and its values are NaN."""
    bits = exponents.to(torch.int32).add_(127).bitwise_left_shift_(23)
    return bits.flatten().view(exponents.shape).view(torch.float32)  # strides also of a single row as torch asks for


def library_product(x: Blocks, weight: Blocks, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """quantized_product by torch.nn.functional.scaled_mm, with sums in float32.

    It takes scales in float32: of rows (M, K / 128), whose rows lie side by side, and of a weight (K / 128, N / 128),
    whose columns begin at multiples of four scales.
    """
    scales = float_scales(weight.exponents)
    padding = -scales.shape[1] % 4
    return F.scaled_mm(
        x.values,
        weight.values.t(),
        float_scales(x.exponents).t(),
        F.ScalingType.BlockWise1x128,
        (F.pad(scales, (0, padding)) if padding else scales).t(),
        F.ScalingType.BlockWise128x128,
        bias=bias,
        output_dtype=dtype,
    )
