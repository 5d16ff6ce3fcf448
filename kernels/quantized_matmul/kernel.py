"""quantized_matmul: a persistent GEMM of matrices in blocks of e4m3, one rank, no communication."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..configurations import select_tile
from ..launch import Tile, launch_options, operand, persistent_programs, triton_dtype
from ..quantize import format as blocks_format
from ..quantize.format import Blocks
from ..quantize.kernel import power, require_capability
from ..replay import launch, replayed
from ..tile import load_block, store_activated, swizzle
from .reference import check_operands

BLOCK = tl.constexpr(blocks_format.BLOCK)
CAPABILITIES = (9, 0), (12, 0)  # with TMA, and enough shared memory for the tiles
NO_TILE = "for which no tile of blocks of e4m3 ships: multiply on sm_90 or sm_100"


@triton.jit
def add_scaled(result, left, right, rows, inside, weight):
    """result + left right^T of one block of K, scaled by the rows' exponents and the weight's, to which `rows` and
    `weight` point; inside: which rows there are.

    The product begins at zero, because tensor cores keep fewer digits of a sum of e4m3 than float32 has, and is scaled
    and added in float32.
    """
    scale = power(tl.load(rows, mask=inside, other=0).to(tl.int32), False)
    scale *= power(tl.load(weight).to(tl.int32), False)
    return result + tl.dot(left, right.T) * scale[:, None]


@triton.jit(do_not_specialize=["m"])
def quantized_matmul_kernel(a, b, a_exponents, b_exponents, bias, out, m, n, k, TILE: tl.constexpr):
    """C = A B^T + bias. A step of K is one block of both operands."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    steps = k // BLOCK
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row_block, column_block = swizzle(tile, tiles_m, tiles_n)
        row, column = row_block * BLOCK_M, column_block * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        b_blocks = b_exponents + column // BLOCK * steps
        result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            left = load_block(a, row, step * BLOCK, m, k, k, BLOCK_M, BLOCK, TILE.tma)
            right = load_block(b, column, step * BLOCK, n, k, k, BLOCK_N, BLOCK, TILE.tma)
            result = add_scaled(result, left, right, a_exponents + step * m + rows, rows < m, b_blocks + step)
        store_activated(out, result, bias, row, column, m, n, "", BLOCK_M, BLOCK_N)


@replayed
def quantized_matmul(
    a: Blocks,
    b: Blocks,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    tile: Tile | None = None,
    programs: int | None = None,
) -> Tensor:
    """A B^T + bias (M, N) of the numbers that the blocks stand for, in this dtype.

    Math:     quantized_matmul of reference.py
    Shapes:   as there; dtype bfloat16, float16 or float32. Any M >= 1, N and K multiples of 128
    Numerics: the 128 products of a block are summed by the tensor cores, their sums in float32, one rounding at the
              store. Where the sum of two exponents is beyond float32's, a product is infinite, NaN or 0
    Traffic:  quantized_matmul_cost
    Order:    persistent programs walk tiles in groups of 8 row blocks; no communication, deterministic
    Source:   as in reference.py
    Errors:   ValueError for operands of other shapes or dtypes, or on a GPU for which no tile ships
    """
    check_operands(a, b, bias, dtype)
    triton_dtype(dtype)  # an error for what kernels do not take
    require_capability(a.values, *CAPABILITIES, NO_TILE)
    (m, k), n = a.values.shape, b.values.shape[0]
    tile = tile or select_tile(a.values.device, a.values.dtype, m, n)
    out = a.values.new_empty((m, n), dtype=dtype)
    left, right = (each.values.contiguous() for each in (a, b))
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    programs = persistent_programs(out.device, tiles, tile, programs, itemsize=1)
    launch(
        quantized_matmul_kernel, (programs,),
        operand(left, (tile.m, BLOCK.value), tile), operand(right, (tile.n, BLOCK.value), tile),
        a.exponents.contiguous(), b.exponents.contiguous(), None if bias is None else bias.contiguous(), out,
        m, n, k, TILE=tile, **launch_options(tile.warps, tile.stages),
    )  # fmt: skip
    return out
