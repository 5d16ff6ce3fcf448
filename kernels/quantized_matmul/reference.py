"""GEMM of two matrices in blocks of e4m3: the specification (torch only), and the cost. format.py of quantize has the
blocks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cost import Cost
from ..operands import next_divisible, require
from ..quantize.format import BLOCK, Blocks
from ..quantize.reference import check_blocks, check_weight_blocks, dequantize, dequantize_weight

OPERATION = "quantized_matmul"


def check_operands(a: Blocks, b: Blocks, bias: Tensor | None, dtype: torch.dtype) -> None:
    """ValueError unless a is blocks of rows, b a weight's with as many columns, bias (N,) of the result's dtype."""
    check_blocks(OPERATION, a, dtype)
    check_weight_blocks(OPERATION, b, dtype)
    k, n = a.values.shape[1], b.values.shape[0]
    require(
        OPERATION, a.values, ("the weight's values", b.values, (n, k), (b.values.dtype,)),
        ("the bias", bias, (n,), (dtype,)),
    )  # fmt: skip


def check_products(
    operation: str, like: Any, inputs: Sequence[Blocks], weights: Sequence[Blocks], dtype: torch.dtype,
    served: int = 1, chunks: int = 1,
) -> None:  # fmt: skip
    """ValueError unless inputs are blocks of equally many rows, weights those of equally many columns of the result in
    this dtype, and each pair has one K; all on the device of `like`.

    served: of virtual ranks, whose tensors are stacked along dim 0, and whose rows are so many chunks.
    """
    if len(inputs) != len(weights):
        raise ValueError(f"{operation}: {len(inputs)} inputs and {len(weights)} weights: give one for each")
    for a, weight in zip(inputs, weights, strict=True):
        check_blocks(operation, a, dtype)
        check_weight_blocks(operation, weight, dtype)
        rows, n = next_divisible(len(inputs[0].values), served * chunks), len(weights[0].values)
        n = n // (served * BLOCK) * served * BLOCK
        k = a.values.shape[1]
        require(
            operation, like, ("an input", a.values, (rows, k), (a.values.dtype,)),
            ("its weight", weight.values, (n, k), (weight.values.dtype,)),
        )  # fmt: skip


def quantized_matmul(a: Blocks, b: Blocks, bias: Tensor | None = None, *, dtype: torch.dtype) -> Tensor:
    """A B^T + bias (M, N) of the numbers that the blocks stand for, in this dtype.

    Math:     sum_j 2^(ea_mj + eb_nj) sum_{i < 128} a_m,128j+i b_n,128j+i, where ea and eb are the exponents of block j
              of K. Sums are in float32, or in float64 for a result in float64; rounded once
    Shapes:   a: rows (M, K), exponents (K / 128, M); b: a weight (N, K), exponents (N / 128, K / 128), or the
              transposed copy of one (K, N) for the gradient of its input; bias (N,); result (M, N)
    Numerics: products are exact; a block that is NaN makes its rows or columns NaN
    Traffic:  see quantized_matmul_cost
    Source:   the promotion of each block's sum to float32: DeepSeek-V3 (arXiv:2412.19437), section 3.3.2
    Errors:   ValueError for operands of other shapes or dtypes
    """
    check_operands(a, b, bias, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    y = dequantize(a, wide) @ dequantize_weight(b, wide).t()
    return (y if bias is None else y + bias.to(wide)).to(dtype)


def quantized_matmul_cost(m: int, n: int, k: int, itemsize: int) -> Cost:
    """2 M N K flops; A and B are read, a byte a value and a byte a block; the result has itemsize bytes a value."""
    blocks = m * (k // BLOCK) + (n // BLOCK) * (k // BLOCK)
    return Cost(2 * m * n * k, m * k + n * k + blocks + m * n * itemsize)
