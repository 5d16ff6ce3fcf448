"""All-gather, then a grouped GEMM of the dispatched rows, also of blocks of e4m3 (format.py of quantize): the
specification for all ranks in one process (torch only), where each source's rows begin, and the cost.

Letters: T tokens on t ranks; R rows in E groups, one for each expert of a rank; N output and K input features.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import operands
from ..all_gather_quantized_matmul.reference import shard_rows, unpacked_shards
from ..cost import Cost
from ..grouped_matmul.reference import grouped_matmul
from ..operands import FLOATS, next_divisible, require, require_within
from ..quantize.format import BLOCK, EXPONENTS, VALUES, Blocks, blocks_bytes, shard_bytes, weight_exponents
from ..quantized_grouped_matmul.reference import quantized_grouped_matmul


def all_gather_grouped_matmul_reference(
    shards: Sequence[Tensor],
    weights: Sequence[Tensor],
    counts: Sequence[Tensor],
    tokens: Sequence[Tensor],
    *,
    transposed: bool = False,
) -> list[Tensor]:
    """For every rank r: grouped_matmul of the rows tokens[r] of concat(shards), by r's matrices.

    Shapes: shards t of (T / t, K); weights[r] (E, N, K), or (E, K, N) if transposed; counts[r] (t, E) int32; tokens[r]
    (R_r,) int32; results (R_r, N).
    """
    gathered = torch.cat(list(shards))
    return [
        grouped_matmul(gathered, matrices, offsets_of(own), index, transposed=transposed)
        for matrices, own, index in zip(weights, counts, tokens, strict=True)
    ]


def all_gather_quantized_grouped_matmul_reference(
    shards: Sequence[Tensor],
    weights: Sequence[Blocks],
    counts: Sequence[Tensor],
    tokens: Sequence[Tensor],
    *,
    transposed: bool = False,
    dtype: torch.dtype,
) -> list[Tensor]:
    """For every rank r: quantized_grouped_matmul of the gathered rows tokens[r], by r's matrices, in this dtype.

    Shapes: shards t of (1, shard_bytes), as packed_shard makes them; weights[r] blocks of its experts' matrices, or if
    transposed their transposed copy, as of quantized_grouped_matmul; counts, tokens and results as above.
    """
    results = []
    for matrices, own, index in zip(weights, counts, tokens, strict=True):
        offsets, columns = offsets_of(own), matrices.values.shape[1] // (own.shape[1] if transposed else 1)
        gathered = unpacked_shards(torch.cat(list(shards)), columns)
        results.append(quantized_grouped_matmul(gathered, matrices, offsets, index, transposed=transposed, dtype=dtype))
    return results


def check_operands(
    like: Any, shard: Tensor, weights: Tensor, counts: Tensor, tokens: Tensor, transposed: bool, served: int, world: int
) -> None:
    """ValueError unless one rank's tensors, or those of the served virtual ranks, have the shapes above, one dtype and
    the device of `like`; on a CPU also for a token that is not there."""
    k, groups = shard.shape[-1], weights.shape[0]
    matrix = (k, weights.shape[-1]) if transposed else (weights.shape[1], k)
    require(
        "all_gather_grouped_matmul", like, ("the shard", shard, (next_divisible(shard.shape[0], served), k), FLOATS),
        ("the matrices", weights, (groups // served * served, *matrix), (shard.dtype,)),
        ("counts", counts, (served * world, groups // served), (torch.int32,)),
        ("tokens", tokens, tokens.shape[:1], (torch.int32,)),
    )  # fmt: skip
    check_tokens(counts, tokens, shard.shape[0] // served * world)


def check_tokens(counts: Tensor, tokens: Tensor, total: int) -> None:
    """ValueError on a CPU for a token that is not among so many, or unless each counted row has one."""
    require_within("tokens", tokens, 0, total)
    if operands.readable(counts) and int(counts.sum()) != len(tokens):
        raise ValueError(f"counts of {int(counts.sum())} rows, but {len(tokens)} tokens: give the token of each row")


def check_blocks(
    operation: str, like: Any, shard: Tensor, weights: Blocks, counts: Tensor, tokens: Tensor, transposed: bool,
    dtype: torch.dtype, served: int, world: int,
) -> tuple[int, int, int, int]:  # fmt: skip
    """(rows of a rank, its experts, N, K). As check_operands, for a shard of bytes, blocks of matrices, and results of
    this dtype."""
    groups, (height, width) = counts.shape[-1], weights.values.shape
    each = max(groups, 1)  # a rank without experts is refused by its counts
    n, k = (height // served, width // each) if transposed else (height // (served * each), width)
    rows = shard_rows(shard, k) if shard.dim() == 2 and k else 0
    if k % BLOCK or n % BLOCK or 0 in (n, rows) or dtype not in FLOATS:
        raise ValueError(
            f"{operation}: a shard of {tuple(shard.shape)} {shard.dtype} beside matrices of ({n}, {k}), and results in "
            f"{dtype}: give what packed_shard makes of at least one row of whole blocks of {BLOCK}, matrices of whole "
            f"blocks, and a dtype of {' or '.join(map(str, FLOATS))}"
        )
    shape = (served * n, groups * k) if transposed else (served * groups * n, k)
    require(
        operation, like, ("the shard", shard, (served, shard_bytes(rows, k)), (torch.uint8,)),
        ("the matrices' values", weights.values, shape, (VALUES,)),
        ("the matrices' exponents", weights.exponents, weight_exponents(*shape), (EXPONENTS,)),
        ("counts", counts, (served * world, groups), (torch.int32,)),
        ("tokens", tokens, tokens.shape[:1], (torch.int32,)),
    )  # fmt: skip
    check_tokens(counts, tokens, rows * world)
    return rows, groups, n, k


def offsets_of(counts: Tensor) -> Tensor:
    """(E + 1,) int32: where each expert's rows begin, and where the last one's end. counts: (t, E)."""
    return F.pad(counts.sum(0).cumsum(0), (1, 0)).to(torch.int32)


def starts_of(counts: Tensor, served: int = 1) -> Tensor:
    """(served, t + 1, E) int32: the row at which an expert's rows from each source begin. They end where those from the
    next source begin, as rows are sorted by expert, then by token. counts: (served * t, E), of the served ranks, whose
    rows follow one another."""
    sums = F.pad(counts.unflatten(0, (served, -1)).cumsum(1), (0, 0, 1, 0))
    rows = sums[:, -1].flatten()
    return (sums + (rows.cumsum(0) - rows).view(served, 1, -1)).to(torch.int32)


def all_gather_grouped_matmul_cost(
    rows: int, n: int, k: int, groups: int, tokens: int, world: int, itemsize: int
) -> Cost:
    """Of one rank: the grouped GEMM, with every matrix once for each source's rows, and a write of the tokens that it
    receives."""
    received = (world - 1) * tokens // world * k
    return Cost(2 * rows * n * k, itemsize * (rows * (n + k) + world * groups * n * k + received))


def all_gather_quantized_grouped_matmul_cost(
    rows: int, n: int, k: int, groups: int, tokens: int, world: int, itemsize: int
) -> Cost:
    """The same of blocks: operands have a byte a value and a byte a block, the result has itemsize bytes a value."""
    received, matrix = (world - 1) * blocks_bytes(tokens // world, k), n * k + (n // BLOCK) * (k // BLOCK)
    return Cost(2 * rows * n * k, blocks_bytes(rows, k) + rows * n * itemsize + world * groups * matrix + received)
