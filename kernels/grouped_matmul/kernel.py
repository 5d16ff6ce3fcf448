"""grouped_matmul and grouped_weight_gradient: persistent GEMMs of groups of rows, each with a matrix of its own.

Only the device knows how many rows a group has. A program of the first kernel counts every group's row blocks from the
offsets when it begins, and finds the group of a tile among the sums. So there is no table to make by another launch, no
host that waits, and nothing is padded: a group's last row block is masked.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..configurations import select_grouped_tile, select_tile
from ..launch import Tile, launch_options, operand, padded, persistent_programs, zero_padded
from ..replay import launch, replayed
from ..tile import add_product, store_activated, swizzle
from .reference import check_gradient, check_operands

FENCED = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7)


class GroupedForm(NamedTuple):
    """What the compiler must know of a grouped GEMM."""

    tile: Tile
    groups: int
    """A power of two that is at least the number of groups."""
    transposed: bool
    """Each group's matrix is stored as (k, n)."""


@triton.jit
def load_rows(source, rows, inside, column, column_end, stride, COLUMNS: tl.constexpr):
    """A block of the rows of these numbers, with zeros in rows that are not inside, and from column_end on."""
    columns = column + tl.arange(0, COLUMNS)
    mask = inside[:, None] & (columns < column_end)[None, :]
    return tl.load(source + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def aligned(columns, source):
    """Columns or a stride of zero_padded rows, rounded up so that the compiler sees a multiple of 16 bytes. If it did
    not know that, each element would be loaded alone, and registers would spill."""
    ELEMENTS: tl.constexpr = 128 // source.dtype.element_ty.primitive_bitwidth
    return tl.cdiv(columns, ELEMENTS) * ELEMENTS


@triton.jit
def numbers(index, row, end, ROWS: tl.constexpr):
    """The numbers of rows from `row` on, below `end`: the index's, or without one these themselves."""
    rows = row + tl.arange(0, ROWS)
    if index is not None:
        rows = tl.load(index + rows, mask=rows < end, other=0)
    return rows


@triton.jit
def load_matrix(
    source, group, row, column, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr
):
    """A block of a group's matrix (rows, columns), with zeros outside of the matrix."""
    if TMA:
        block = source.load([group, row, column]).reshape(ROWS, COLUMNS)
    else:
        within = row + tl.arange(0, ROWS)
        matrix = source + tl.cast(group, tl.int64) * rows * stride
        block = load_rows(matrix, within, within < rows, column, columns, stride, COLUMNS)
    return block


@triton.jit
def find_tile(offsets, ends, tile, tiles_n, BLOCK_M: tl.constexpr, following=1):
    """(group, first row, end of the group's rows, column block) of a tile. offsets: where each group's rows begin; they
    end with what lies `following` elements behind. ends: each group's row blocks and those of the groups before it."""
    passed = ends <= tile // tiles_n
    group = tl.sum(passed.to(tl.int32))
    before = tl.max(tl.where(passed, ends, 0))
    begin, end = tl.load(offsets + group), tl.load(offsets + group + following)
    row_block, column_block = swizzle(tile - before * tiles_n, tl.cdiv(end - begin, BLOCK_M), tiles_n)
    return group, begin + row_block * BLOCK_M, end, column_block


@triton.jit(do_not_specialize=["groups"])
def grouped_matmul_kernel(
    a,  # (T, k), zero_padded; a descriptor if it is loaded without index and the tile has TMA
    index,  # (R,) int32 or None
    weights,  # (groups, n, k) or (groups, k, n), a descriptor if the tile has TMA
    offsets,  # (groups + 1,) int32
    y,  # (R, n)
    n,
    k,
    a_stride,
    weight_stride,
    groups,
    FORM: tl.constexpr,
):
    """y[r] = W_e a[index[r]] for the rows r of each group e."""
    TILE: tl.constexpr = FORM.tile
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    each = tl.arange(0, FORM.groups)
    begins = tl.load(offsets + each, mask=each < groups, other=0)
    counts = tl.load(offsets + each + 1, mask=each < groups, other=0) - begins
    ends = tl.cumsum(tl.cdiv(counts, BLOCK_M))
    tiles_n, steps, columns = tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K), aligned(k, y)
    a_stride, weight_stride = aligned(a_stride, y), aligned(weight_stride, y)
    for tile in range(tl.program_id(0), tl.max(ends) * tiles_n, tl.num_programs(0)):
        group, row, row_end, column_block = find_tile(offsets, ends, tile, tiles_n, BLOCK_M)
        column = column_block * BLOCK_N
        rows, inside = numbers(index, row, row_end, BLOCK_M), row + tl.arange(0, BLOCK_M) < row_end
        result, part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            at = step * BLOCK_K
            if TILE.tma and index is None:
                left = a.load([row, at])  # the rows of the next group among them are not stored
            else:
                left = load_rows(a, rows, inside, at, columns, a_stride, BLOCK_K)
            if FORM.transposed:
                right = load_matrix(weights, group, at, column, k, n, weight_stride, BLOCK_K, BLOCK_N, TILE.tma)
            else:
                right = load_matrix(weights, group, column, at, n, columns, weight_stride, BLOCK_N, BLOCK_K, TILE.tma).T
            result, part = add_product(result, part, left, right, step, steps)
        store_activated(y, result, None, row, column, row_end, n, "", BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["groups"])
def grouped_weight_gradient_kernel(
    dy,  # (T, n)
    dy_index,  # (R,) int32 or None
    x,  # (T, k)
    x_index,  # (R,) int32 or None
    offsets,  # (groups + 1,) int32
    gradient,  # (groups, n, k)
    n,
    k,
    dy_stride,
    x_stride,
    groups,
    TILE: tl.constexpr,
):
    """gradient[e] = the sum of dy[r]^T x[r] over the rows r of group e."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    tiles_n, tiles_k = tl.cdiv(n, BLOCK_M), tl.cdiv(k, BLOCK_N)
    for tile in range(tl.program_id(0), groups * tiles_n * tiles_k, tl.num_programs(0)):
        group = tile // (tiles_n * tiles_k)
        row_block, column_block = swizzle(tile % (tiles_n * tiles_k), tiles_n, tiles_k)
        begin, end = tl.load(offsets + group), tl.load(offsets + group + 1)
        steps = tl.cdiv(end - begin, BLOCK_K)
        result, part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        within = tl.arange(0, BLOCK_K)
        left_rows, right_rows = numbers(dy_index, begin, end, BLOCK_K), numbers(x_index, begin, end, BLOCK_K)
        for step in range(steps):
            row = begin + step * BLOCK_K
            inside = row + within < end
            left = load_rows(dy, left_rows, inside, row_block * BLOCK_M, n, dy_stride, BLOCK_M)
            right = load_rows(x, right_rows, inside, column_block * BLOCK_N, k, x_stride, BLOCK_N)
            # those of the next step: loads that need a load of their own step would run one step ahead instead of all
            left_rows = numbers(dy_index, row + BLOCK_K, end, BLOCK_K)
            right_rows = numbers(x_index, row + BLOCK_K, end, BLOCK_K)
            result, part = add_product(result, part, left.T, right, step, steps)
        target = gradient + tl.cast(group, tl.int64) * n * k
        store_activated(target, result, None, row_block * BLOCK_M, column_block * BLOCK_N, n, k, "", BLOCK_M, BLOCK_N)


def pointer_stages(tile: Tile) -> int:
    """The stages of a K loop in which pointers load a factor.

    Before triton 3.7 no fence stands between what cp.async has written and a wgmma that reads it
    (triton-lang/triton#9610). Loads that do not run ahead have one.
    """
    return tile.stages if FENCED or not tile.tma else 1


def matrices(weights: Tensor, transposed: bool, tile: Tile) -> tuple[Tensor | TensorDescriptor, int]:
    """(what kernels take for the matrices of all groups, elements from one row to the next)."""
    flat = (padded if transposed else zero_padded)(weights.flatten(0, 1))
    stride = flat.stride(0)
    if not tile.tma:
        return flat, stride
    block = [1, tile.k, tile.n] if transposed else [1, tile.n, tile.k]
    return TensorDescriptor(flat, list(weights.shape), [weights.shape[1] * stride, stride, 1], block), stride


@replayed
def grouped_matmul(
    a: Tensor,
    weights: Tensor,
    offsets: Tensor,
    index: Tensor | None = None,
    *,
    transposed: bool = False,
    tile: Tile | None = None,
    programs: int | None = None,
) -> Tensor:
    """y (R, N) with y[r] = W_e a[r] for each row r of group e, or W_e^T a[r] if transposed.

    Math:     the reference's; transposed is the gradient of the rows
    Shapes:   a (R, K), or with an index (R,) int32 any number of rows (T, K), of which row r takes a[index[r]];
              weights (E, N, K), or (E, K, N) if transposed; offsets (E + 1,) int32, from 0 to R. Groups may be empty
    Numerics: bfloat16, float16 or float32 in, products exact, sums in float32, one rounding at the store
    Traffic:  grouped_matmul_cost, each matrix once from memory if a group's row blocks run at the same time, as up to
              8 of them do; indexed rows are never in memory side by side
    Order:    persistent programs walk tiles group by group, and in a group in groups of 8 row blocks; no communication,
              deterministic
    Source:   MegaBlocks (arXiv:2211.15841), without its padding; the grouped GEMM of the CUTLASS documentation
    """
    check_operands(a, weights, offsets, index, transposed)
    n, k = weights.shape[2 if transposed else 1], weights.shape[1 if transposed else 2]
    rows, groups = len(a if index is None else index), len(offsets) - 1
    y = a.new_empty(rows, n)
    if rows == 0:
        return y
    tile = tile or select_grouped_tile(a.device, a.dtype, rows, groups, n)
    a, (stored, stride) = zero_padded(a), matrices(weights, transposed, tile)
    tiles = (rows // tile.m + groups) * triton.cdiv(n, tile.n)  # at most
    launch(
        grouped_matmul_kernel, (persistent_programs(a.device, tiles, tile, programs),),
        a if index is not None else operand(a, (tile.m, tile.k), tile),
        None if index is None else index.contiguous(), stored, offsets.contiguous(), y,
        n, k, a.stride(0), stride, groups, GroupedForm(tile, triton.next_power_of_2(groups), transposed),
        **launch_options(tile.warps, tile.stages if index is None else pointer_stages(tile)),
    )  # fmt: skip
    return y


@replayed
def grouped_weight_gradient(
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    dy_index: Tensor | None = None,
    x_index: Tensor | None = None,
    *,
    tile: Tile | None = None,
    programs: int | None = None,
) -> Tensor:
    """dW (E, N, K) with dW_e = sum over the rows r of group e of dy[r] x[r]^T; 0 for an empty group.

    Math:     the reference's
    Shapes:   dy (R, N) and x (R, K), or with an index (R,) int32 any number of rows, of which row r takes that one
    Numerics: as grouped_matmul
    Traffic:  grouped_matmul_cost; a group's rows of dy and x come once from memory, then from L2
    Order:    persistent programs walk tiles group by group, and a group's rows in order; no communication,
              deterministic
    Source:   as grouped_matmul. Pointers load both factors in every step, as TMA cannot mask a group's last rows
    """
    check_gradient(dy, x, offsets, dy_index, x_index)
    n, k, groups = dy.shape[1], x.shape[1], len(offsets) - 1
    tile = tile or select_tile(dy.device, dy.dtype, n, k, chunks=groups)
    gradient = dy.new_empty(groups, n, k)
    dy, x, offsets = padded(dy), padded(x), offsets.contiguous()
    dy_index, x_index = (None if index is None else index.contiguous() for index in (dy_index, x_index))
    tiles = groups * triton.cdiv(n, tile.m) * triton.cdiv(k, tile.n)
    launch(
        grouped_weight_gradient_kernel, (persistent_programs(dy.device, tiles, tile, programs),),
        dy, dy_index, x, x_index, offsets, gradient, n, k, dy.stride(0), x.stride(0), groups, tile,
        **launch_options(tile.warps, pointer_stages(tile)),
    )  # fmt: skip
    return gradient
