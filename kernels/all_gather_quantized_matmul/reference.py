"""All-gather of rows in blocks of e4m3, then GEMMs: how a shard travels, and the specification for all ranks in one
process (torch only), and the cost. format.py of quantize has the blocks."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activation.reference import check_operands as check_activation
from ..cost import Cost
from ..matmul.reference import matmul_derivative_reference
from ..operands import FLOATS, Operand, require
from ..pack.format import Packed
from ..quantize.format import (
    BLOCK,
    EXPONENTS,
    VALUES,
    Blocks,
    blocks_bytes,
    row_exponents,
    shard_bytes,
    weight_exponents,
)
from ..quantize.reference import dequantize, dequantize_weight
from ..quantized_matmul.reference import quantized_matmul


def packed_shard(blocks: Blocks) -> Tensor:
    """A rank's rows as they travel, (1, shard_bytes) uint8: all values, then all exponents, then zeros.

    They are one piece of memory, so one copy or push sends them, and one flag says that both are there.
    """
    rows, columns = blocks.values.shape
    parts = [part.reshape(-1).view(torch.uint8) for part in blocks]
    return F.pad(torch.cat(parts), (0, shard_bytes(rows, columns) - blocks_bytes(rows, columns)))[None]


def unpacked_shards(shards: Tensor, columns: int) -> Blocks:
    """The blocks of the rows of all shards (t, shard_bytes), in memory of their own."""
    ranks, rows = len(shards), shard_rows(shards, columns)
    end = rows * columns
    values = shards[:, :end].reshape(ranks * rows, columns)
    exponents = shards[:, end : blocks_bytes(rows, columns)].view(ranks, -1, rows).transpose(0, 1)
    return Blocks(values.view(VALUES), exponents.reshape(row_exponents(ranks * rows, columns)).view(EXPONENTS))


def shard_rows(shards: Tensor, columns: int) -> int:
    """The rows of each of these shards. What is added behind exponents is less than a row."""
    return shards.shape[1] // blocks_bytes(1, columns)


def check_operands(
    operation: str, like: Tensor, shard: Tensor, weights: Sequence[Blocks], biases: Sequence[Tensor | None] | None,
    dtype: torch.dtype, served: int,
) -> int:  # fmt: skip
    """The rows of a rank. ValueError unless the shard is the bytes of whole rows with the columns of all weights, which
    are blocks, and each bias has its weight's rows and this dtype; all on the device of `like`.

    served: of virtual ranks, whose tensors are stacked along dim 0.
    """
    n, k = weights[0].values.shape
    rows = shard_rows(shard, k) if shard.dim() == 2 else 0
    operands: list[Operand] = [("the shard", shard, (served, shard_bytes(rows, k)), (torch.uint8,))]
    for weight, bias in zip(weights, biases or [None] * len(weights), strict=True):
        n = weight.values.shape[0] // served // BLOCK * BLOCK * served
        operands += ("a weight's values", weight.values, (n, k), (VALUES,)), ("a bias", bias, (n,), (dtype,))
        operands.append(("a weight's exponents", weight.exponents, weight_exponents(n, k), (EXPONENTS,)))
    if k % BLOCK or rows == 0 or dtype not in FLOATS:
        raise ValueError(
            f"{operation}: a shard of {tuple(shard.shape)} {shard.dtype} beside a weight of {k} columns, and results "
            f"in {dtype}: give what packed_shard makes of at least one row of whole blocks of {BLOCK}, and a dtype of "
            f"{' or '.join(map(str, FLOATS))}"
        )
    require(operation, like, *operands)
    return rows


def check_derivative(
    operation: str, like: Tensor, shard: Tensor, weight: Blocks, x: Tensor | Packed, gate: Tensor | Packed | None,
    activation: str | None, served: int, world: int,
) -> int:  # fmt: skip
    """As check_operands, for one weight, and x and gate with all ranks' rows of its width."""
    rows = check_operands(operation, like, shard, [weight], None, x.dtype, served)
    check_activation(x, activation, gate)
    require(operation, like, ("x", x, (served * world * rows, len(weight.values) // served), (x.dtype,)))
    return rows


def all_gather_quantized_matmul_reference(
    shards: Sequence[Tensor],
    weights: Sequence[Sequence[Blocks]],
    biases: Sequence[Sequence[Tensor | None]] | None = None,
    *,
    dtype: torch.dtype,
) -> list[list[Tensor]]:
    """For every rank r and weight i: quantized_matmul of the gathered rows and of W[r][i], + bias[r][i], in this dtype.

    Shapes: shards t of (1, shard_bytes), as packed_shard makes them; weights[r][i] blocks of (N_i, K); results (M, N_i)
    """
    gathered = unpacked_shards(torch.cat(list(shards)), weights[0][0].values.shape[1])
    biases = biases or [[None] * len(row) for row in weights]
    return [
        [quantized_matmul(gathered, weight, bias, dtype=dtype) for weight, bias in zip(row, row_biases, strict=True)]
        for row, row_biases in zip(weights, biases, strict=True)
    ]


def all_gather_quantized_matmul_derivative_reference(
    shards: Sequence[Tensor],
    weights: Sequence[Blocks],
    xs: Sequence[Tensor],
    activation: str | None,
    gates: Sequence[Tensor | None] | None = None,
) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """For every rank: matmul_derivative_reference of the gathered rows and of its own weight, x and gate.

    Shapes: shards as above; weights[r] blocks of (N, K), the transposed copy of one (K, N); xs[r], gates[r] and results
    (M, N), in the dtype of xs
    """
    dtype = xs[0].dtype
    rows = dequantize(unpacked_shards(torch.cat(list(shards)), weights[0].values.shape[1]), dtype)
    return [
        matmul_derivative_reference(rows, dequantize_weight(weight, dtype).t(), x, activation, gate)
        for weight, x, gate in zip(weights, xs, gates or [None] * len(xs), strict=True)
    ]


def all_gather_quantized_matmul_cost(m: int, n: int, k: int, world: int, itemsize: int) -> Cost:
    """Of one rank with M gathered rows and N columns: the GEMM, and a write of the rows that it receives. Operands have
    a byte a value and a byte a block, the result has itemsize bytes a value."""
    received = (world - 1) * blocks_bytes(m // world, k)
    weight = n * k + (n // BLOCK) * (k // BLOCK)
    return Cost(2 * m * n * k, blocks_bytes(m, k) + weight + m * n * itemsize + received)
