"""quantized_grouped_matmul: a persistent GEMM of groups of rows in blocks of e4m3, each with a matrix of its own.

How tiles find their groups is in kernel.py of grouped_matmul, why each block's product is scaled in that of
quantized_matmul. All groups' matrices are one matrix of blocks here, in which a group's begins at whole blocks: so one
descriptor serves them, and the transposed copy of all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..configurations import select_grouped_tile
from ..grouped_matmul.kernel import GroupedForm, find_tile, load_rows, numbers, pointer_stages
from ..launch import Tile, launch_options, operand, persistent_programs, triton_dtype
from ..quantize.format import Blocks
from ..quantize.kernel import require_capability
from ..quantized_matmul.kernel import BLOCK, CAPABILITIES, NO_TILE, add_scaled
from ..replay import launch, replayed
from ..tile import load_block, store_activated
from .reference import check_operands


@triton.jit
def multiply_group(
    a, a_exponents, m, row, rows, inside, weights, exponents, virtual, group, column, n, k, steps, groups,
    FORM: tl.constexpr,
):  # fmt: skip
    """A tile of a group's rows times its matrix, from this column on.

    a, a_exponents: (m, k) and (k / BLOCK, m), of which rows number `rows` are loaded, those that are inside, or by a
    descriptor those from `row` on, unless that is None. weights, exponents: as of quantized_grouped_matmul_kernel, but
    of all virtual ranks, one below the other, of which this is number `virtual`. steps: k / BLOCK.
    """
    TILE: tl.constexpr = FORM.tile
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    if FORM.transposed:
        height, width, first, begin = n, groups * k, column, group * k
    else:
        height, width, first, begin = groups * n, k, group * n + column, 0
    first += virtual * height
    blocks = exponents + first // BLOCK * (width // BLOCK) + begin // BLOCK
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(steps):
        at = step * BLOCK
        if row is not None:
            left = a.load([row, at])  # the rows of the next group among them are not stored
        else:
            left = load_rows(a, rows, inside, at, k, k, BLOCK)
        right = load_block(weights, first, begin + at, (virtual + 1) * height, width, width, BLOCK_N, BLOCK, TILE.tma)
        result = add_scaled(result, left, right, a_exponents + step * m + rows, inside, blocks + step)
    return result


@triton.jit(do_not_specialize=["m", "groups"])
def quantized_grouped_matmul_kernel(
    a,  # (m, k); a descriptor if it is loaded without index and the tile has TMA
    a_exponents,  # (k / BLOCK, m)
    index,  # (R,) int32 or None
    weights,  # (groups * n, k), or transposed (n, groups * k); a descriptor if the tile has TMA
    exponents,  # of these blocks of BLOCK x BLOCK
    offsets,  # (groups + 1,) int32
    y,  # (R, n)
    m,
    n,
    k,
    groups,
    FORM: tl.constexpr,
):
    """y[r] = W_e a[index[r]] for the rows r of each group e, of the numbers that blocks stand for."""
    TILE: tl.constexpr = FORM.tile
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    each = tl.arange(0, FORM.groups)
    begins = tl.load(offsets + each, mask=each < groups, other=0)
    counts = tl.load(offsets + each + 1, mask=each < groups, other=0) - begins
    ends = tl.cumsum(tl.cdiv(counts, BLOCK_M))
    tiles_n, steps = tl.cdiv(n, BLOCK_N), k // BLOCK
    for tile in range(tl.program_id(0), tl.max(ends) * tiles_n, tl.num_programs(0)):
        group, row, row_end, column_block = find_tile(offsets, ends, tile, tiles_n, BLOCK_M)
        column = column_block * BLOCK_N
        rows, inside = numbers(index, row, row_end, BLOCK_M), row + tl.arange(0, BLOCK_M) < row_end
        if TILE.tma and index is None:
            first_row = row
        else:
            first_row = None
        result = multiply_group(
            a, a_exponents, m, first_row, rows, inside, weights, exponents, 0, group, column, n, k, steps, groups, FORM
        )
        store_activated(y, result, None, row, column, row_end, n, "", BLOCK_M, BLOCK_N)


@replayed
def quantized_grouped_matmul(
    a: Blocks,
    weights: Blocks,
    offsets: Tensor,
    index: Tensor | None = None,
    *,
    transposed: bool = False,
    dtype: torch.dtype,
    tile: Tile | None = None,
    programs: int | None = None,
) -> Tensor:
    """y (R, N), in this dtype, with y[r] = W_e a[r] for each row r of group e of the numbers that the blocks stand for.

    Math:     quantized_grouped_matmul of reference.py
    Shapes:   as there; dtype bfloat16, float16 or float32. N and K multiples of 128
    Numerics: as the kernel of quantized_matmul
    Traffic:  quantized_grouped_matmul_cost, as that of grouped_matmul
    Order:    as grouped_matmul; no communication, deterministic
    Source:   as in reference.py
    Errors:   ValueError for operands of other shapes or dtypes, or on a GPU for which no tile ships
    """
    n, k = check_operands(a, weights, offsets, index, transposed, dtype)
    triton_dtype(dtype)  # an error for what kernels do not take
    values, device = a.values.contiguous(), a.values.device
    require_capability(values, *CAPABILITIES, NO_TILE)
    rows, groups = len(values if index is None else index), len(offsets) - 1
    y = values.new_empty((rows, n), dtype=dtype)
    if rows == 0:
        return y
    tile = tile or select_grouped_tile(device, values.dtype, rows, groups, n)
    tiles = (rows // tile.m + groups) * triton.cdiv(n, tile.n)  # at most
    launch(
        quantized_grouped_matmul_kernel, (persistent_programs(device, tiles, tile, programs, itemsize=1),),
        values if index is not None else operand(values, (tile.m, BLOCK.value), tile), a.exponents.contiguous(),
        None if index is None else index.contiguous(),
        operand(weights.values.contiguous(), (tile.n, BLOCK.value), tile), weights.exponents.contiguous(),
        offsets.contiguous(), y, len(values), n, k, groups,
        GroupedForm(tile, triton.next_power_of_2(groups), transposed),
        **launch_options(tile.warps, tile.stages if index is None else pointer_stages(tile)),
    )  # fmt: skip
    return y
