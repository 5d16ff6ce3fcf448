"""norm_forward, norm_backward and finish_norm_forward: LayerNorm and RMSNorm over whole rows.

Rows of up to a given width are read once and stay in registers; wider ones are read a second time for the result.
Letters: M rows (tokens), N columns (hidden).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import Rows
from ..finish import NOTHING, Finish, Norm
from ..launch import is_interpreted, triton_dtype
from ..pack.format import Packed
from ..quantize.format import Blocks
from ..quantize.kernel import empty_result, store_blocks
from ..replay import launch, replayed
from ..rows import (
    RowTile,
    finished_tile,
    load_kept,
    load_row,
    load_tile,
    row_argument,
    row_options,
    row_tile,
    shares,
    store_tile,
    sum_partials,
    tile_mask,
    with_contiguous_columns,
)
from .reference import Statistics, check_operands

WIDEST_FORWARD = 16384  # columns of a row that registers hold
WIDEST_BACKWARD = 8192  # fewer, because registers also hold dweight and dbias sums, one float32 each per column
GRADIENT_ELEMENTS = 16  # a thread: half of the forward's, because of those sums; half again of short rows or blocks
WEIGHT_GRADIENT = RowTile(8, 256, 4)


class Scaling(NamedTuple):
    """What kernels take for a norm."""

    weight: Any
    """(N,)."""
    shift: Any
    """(N,), layernorm's bias, or None."""
    eps: Any


class GradientOperands(NamedTuple):
    """What the kernels of the backward read of each row."""

    dy: Rows
    x: Rows
    mean: Any
    """float32 (M,), None for rmsnorm."""
    rstd: Any
    """float32 (M,)."""


@triton.jit
def moments(value, mask, width, LAYERNORM: tl.constexpr):
    """Mean and sum of squares around it, of each row's `width` columns, in two passes. For rmsnorm the mean is 0."""
    average = tl.zeros((value.shape[0],), tl.float32)
    if LAYERNORM:
        average = tl.div_rn(tl.sum(value, 1), average + width)
        value = tl.where(mask, value - average[:, None], 0.0)
    return average, tl.sum(value * value, 1)


@triton.jit
def join_moments(average, squares, count, tile_average, tile_squares, width, LAYERNORM: tl.constexpr):
    """Moments of the first `count` columns and of the next `width` together (Chan et al. 1979)."""
    squares += tile_squares
    if LAYERNORM:
        difference = tile_average - average
        fraction = tl.div_rn(width, count + width)
        average += difference * fraction
        squares += difference * difference * (count * fraction)
    return average, squares


@triton.jit
def store_normalised(
    y, exponents, value, average, reciprocal, norm, row, column, m, n,
    LAYERNORM: tl.constexpr, TILE: tl.constexpr, ROUNDED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of y, or with exponents of its blocks, which are those of y in ROUNDED."""
    rows, columns = row + tl.arange(0, TILE.rows), column + tl.arange(0, TILE.columns)
    if LAYERNORM:
        value -= average[:, None]
    value = value * reciprocal[:, None] * load_row(norm.weight, columns, n)
    if norm.shift is not None:
        value += load_row(norm.shift, columns, n)
    if exponents is None:
        store_tile(y, value, rows, columns, tile_mask(rows, columns, m, n), n)
    else:
        store_blocks(y, exponents, value.to(ROUNDED).to(tl.float32), row, column, m, n, TILE, INTERPRETED)


@triton.jit(do_not_specialize=["m", "key"])
def norm_forward_kernel(
    x, addends, key: tl.int64, z, y, exponents, mean, rstd, norm, m, n,
    ALIGNED: tl.constexpr, LOOPED: tl.constexpr, TILE: tl.constexpr, ROUNDED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """z = finish(x), then statistics and norm y of z as it is stored. mean is None for rmsnorm, z is None if it is x.

    LOOPED: rows are wider than a tile, and a second pass makes y. exponents: of the blocks that y then is; else None.
    """
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    LAYERNORM: tl.constexpr = mean is not None
    FINISH: tl.constexpr = z is not None
    row = tl.program_id(0) * ROWS
    rows = row + tl.arange(0, ROWS)
    average, squares = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    value = tl.zeros((ROWS, COLUMNS), tl.float32)
    for column in tl.range(0, n if LOOPED else 1, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        mask = tile_mask(rows, columns, m, n)
        value = finished_tile(x, addends, key, row, column, m, n, ALIGNED, TILE)
        if FINISH:
            store_tile(z, value, rows, columns, mask, n)
            value = value.to(z.dtype.element_ty).to(tl.float32)
        width = tl.cast(tl.minimum(n - column, COLUMNS), tl.float32)
        tile_average, tile_squares = moments(value, mask, width, LAYERNORM)
        if LOOPED:
            count = tl.cast(column, tl.float32)
            average, squares = join_moments(average, squares, count, tile_average, tile_squares, width, LAYERNORM)
        else:
            average, squares = tile_average, tile_squares
    reciprocal = tl.rsqrt(squares / n + norm.eps)
    if LAYERNORM:
        tl.store(mean + rows, average, mask=rows < m)
    tl.store(rstd + rows, reciprocal, mask=rows < m)
    if LOOPED:
        source = x
        if FINISH:
            source = Rows(z, n)
            tl.debug_barrier()  # threads read what others have stored
        for column in tl.range(0, n, COLUMNS):
            value = load_kept(source, row, column, m, n, TILE)
            store_normalised(
                y, exponents, value, average, reciprocal, norm, row, column, m, n, LAYERNORM, TILE, ROUNDED, INTERPRETED
            )
    else:
        store_normalised(
            y, exponents, value, average, reciprocal, norm, row, 0, m, n, LAYERNORM, TILE, ROUNDED, INTERPRETED
        )


@triton.jit
def load_normalised(x, mean, rstd, row, column, m, n, TILE: tl.constexpr):
    """(xhat, rstd (ROWS, 1)). Beyond column n layernorm's xhat is not zero, but all that multiplies it there is."""
    rows = row + tl.arange(0, TILE.rows)
    value = load_kept(x, row, column, m, n, TILE)
    if mean is not None:
        value -= tl.load(mean + rows, mask=rows < m, other=0.0)[:, None]
    reciprocal = tl.load(rstd + rows, mask=rows < m, other=0.0)[:, None]
    return value * reciprocal, reciprocal


@triton.jit
def store_input_gradient(
    dx, blocks, dresidual, g, normalised, reciprocal, g_sum, product_sum, row, column, m, n,
    LAYERNORM: tl.constexpr, TILE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) (+ dresidual), from each row's sums. blocks: of dx, or None."""
    rows, columns = row + tl.arange(0, TILE.rows), column + tl.arange(0, TILE.columns)
    mask = tile_mask(rows, columns, m, n)
    value = g - normalised * (product_sum / n)[:, None]
    if LAYERNORM:
        value -= (g_sum / n)[:, None]
    value *= reciprocal
    if dresidual is not None:
        value += load_tile(dresidual, rows, columns, mask)
    store_tile(dx, value, rows, columns, mask, n)
    if blocks is not None:
        stored = value.to(dx.dtype.element_ty).to(tl.float32)
        store_blocks(blocks[0], blocks[1], stored, row, column, m, n, TILE, INTERPRETED)


@triton.jit(do_not_specialize=["m", "share"])
def norm_backward_kernel(
    operands, weight, dresidual, dx, blocks,
    partials,  # (2 with SHIFT, else 1, programs, n): each program's sums for dweight and dbias
    m, n, share, SHIFT: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A program takes `share` rows, one tile after another, and keeps dweight and dbias sums in registers."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    dy, x, mean, rstd = operands
    first = tl.program_id(0) * share
    columns = tl.arange(0, COLUMNS)
    scale = load_row(weight, columns, n)
    dweight, dbias = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in tl.range(first, tl.minimum(first + share, m), ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, ROWS)
        mask = tile_mask(rows, columns, m, n)
        normalised, reciprocal = load_normalised(x, mean, rstd, row, 0, m, n, TILE)
        gradient = load_tile(dy, rows, columns, mask)
        if blocks is not None:
            scale = load_row(weight, columns, n)  # again, because blocks leave no registers to keep it
        g = gradient * scale
        store_input_gradient(
            dx, blocks, dresidual, g, normalised, reciprocal, tl.sum(g, 1), tl.sum(g * normalised, 1), row, 0, m, n,
            mean is not None, TILE, INTERPRETED,
        )  # fmt: skip
        dweight += gradient * normalised
        dbias += gradient
    target = partials + tl.program_id(0).to(tl.int64) * n + columns
    tl.store(target, tl.sum(dweight, 0), mask=columns < n)
    if SHIFT:
        tl.store(target + tl.num_programs(0).to(tl.int64) * n, tl.sum(dbias, 0), mask=columns < n)


@triton.jit(do_not_specialize=["m"])
def wide_norm_backward_kernel(
    operands, weight, dresidual, dx, blocks, m, n, TILE: tl.constexpr, INTERPRETED: tl.constexpr
):
    """dx of rows wider than a tile: one pass for the sums, one for the result."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    dy, x, mean, rstd = operands
    row = tl.program_id(0) * ROWS
    rows = row + tl.arange(0, ROWS)
    g_sums, product_sums = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for column in tl.range(0, n, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        mask = tile_mask(rows, columns, m, n)
        g = load_tile(dy, rows, columns, mask) * load_row(weight, columns, n)
        normalised, _ = load_normalised(x, mean, rstd, row, column, m, n, TILE)
        g_sums += g
        product_sums += g * normalised
    g_sum, product_sum = tl.sum(g_sums, 1), tl.sum(product_sums, 1)
    for column in tl.range(0, n, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        mask = tile_mask(rows, columns, m, n)
        g = load_tile(dy, rows, columns, mask) * load_row(weight, columns, n)
        normalised, reciprocal = load_normalised(x, mean, rstd, row, column, m, n, TILE)
        store_input_gradient(
            dx, blocks, dresidual, g, normalised, reciprocal, g_sum, product_sum, row, column, m, n, mean is not None,
            TILE, INTERPRETED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["m", "share"])
def norm_weight_gradient_kernel(operands, partials, m, n, share, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """partials of norm_backward_kernel, for wider rows. Axis 0 of the grid counts shares of rows, axis 1 columns."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    dy, x, mean, rstd = operands
    first = tl.program_id(0) * share
    first_column = tl.program_id(1) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    dweight, dbias = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in tl.range(first, tl.minimum(first + share, m), ROWS):
        rows = row + tl.arange(0, ROWS)
        mask = tile_mask(rows, columns, m, n)
        gradient = load_tile(dy, rows, columns, mask)
        normalised, _ = load_normalised(x, mean, rstd, row, first_column, m, n, TILE)
        dweight += gradient * normalised
        dbias += gradient
    target = partials + tl.program_id(0).to(tl.int64) * n + columns
    tl.store(target, tl.sum(dweight, 0), mask=columns < n)
    if SHIFT:
        tl.store(target + tl.num_programs(0).to(tl.int64) * n, tl.sum(dbias, 0), mask=columns < n)


def complete(norm: Norm, x: Tensor | Packed) -> Norm:
    """The norm with a weight of ones and float32's epsilon in place of None, because kernels read both; its tensors
    without gaps."""
    weight = torch.ones(x.shape[1], dtype=x.dtype, device=x.device) if norm.weight is None else norm.weight.contiguous()
    bias = None if norm.bias is None else norm.bias.contiguous()
    return Norm(norm.kind, weight, bias, torch.finfo(torch.float32).eps if norm.eps is None else norm.eps)


def launch_forward(x: Any, finish: Finish, norm: Norm, widest: int, blocks: bool) -> tuple[Any, Any, Statistics]:
    """(z, which is x if nothing is added, its norm, statistics). x may be packed. blocks: as in norm_forward."""
    check_operands(x, norm)
    finish.check("finish_norm_forward", x)
    x, norm = with_contiguous_columns(x), complete(norm, x)
    (m, n), layernorm = x.shape, norm.kind == "layernorm"
    y, rstd = empty_result(x, m, n, blocks), x.new_empty(m, 1, dtype=torch.float32)
    values, exponents = y if isinstance(y, Blocks) else (y, None)
    scaling = Scaling(norm.weight, norm.bias if layernorm else None, norm.eps)
    z = x.new_empty(m, n) if finish.adds else None
    mean = torch.empty_like(rstd) if layernorm else None
    tile = row_tile(n, widest)
    if m:
        launch(
            norm_forward_kernel, (triton.cdiv(m, tile.rows),),
            row_argument(x), finish.arguments(), finish.key, z, values, exponents, mean, rstd, scaling, m, n,
            ALIGNED=n % 4 == 0, LOOPED=n > tile.columns, TILE=tile, ROUNDED=triton_dtype(x.dtype),
            INTERPRETED=is_interpreted(), **row_options(tile.warps),
        )  # fmt: skip
    return x if z is None else z, y, (mean, rstd)


@replayed
def norm_forward(
    x: Tensor | Packed, norm: Norm, *, blocks: bool = False, widest: int = WIDEST_FORWARD
) -> tuple[Any, Statistics]:
    """Normalise each row of x, then scale (and shift): (y, (mean or None, rstd)). blocks: y in blocks of e4m3.

    Math:     norm_forward of reference.py
    Shapes:   x (M, N), any N >= 1, rows may lie apart, or packed, to be unpacked in registers; weight, bias (N,);
              y (M, N), with blocks values and exponents as quantize_rows makes them; statistics (M, 1)
    Numerics: bfloat16, float16 or float32 in, computed in float32 with the variance around the mean, one rounding at
              the store; statistics float32. Blocks are those of y as it would be stored, to the byte
    Traffic:  norm_cost; rows of more than `widest` columns are read twice, the second time from L2
    Order:    one program per tile of rows; no communication, deterministic
    Source:   Ba et al. 2016 (arXiv:1607.06450); Zhang & Sennrich 2019 (arXiv:1910.07467); Chan et al. 1979 for the
              moments of rows in several tiles
    """
    _, y, statistics = launch_forward(x, NOTHING, norm, widest, blocks)
    return y, statistics


def norm_rebuilt(x: Tensor | Packed, statistics: Statistics, norm: Norm, blocks: bool = False) -> Any:
    """norm_forward's y again: of a tensor to the bit, of packed rows as near as float32 sums in another order are. The
    statistics are computed again, because reading them saves no time."""
    check_operands(x, norm, statistics=statistics)
    return norm_forward(x, norm, blocks=blocks)[0]


@replayed
def finish_norm_forward(
    x: Tensor, finish: Finish, *, blocks: bool = False, widest: int = WIDEST_FORWARD
) -> tuple[Tensor, Any, Statistics]:
    """(z, norm(z), statistics) of z = residual + dropout(x + bias), in one pass. blocks: as in norm_forward.

    Math:     finish_norm_forward of reference.py
    Shapes:   as norm_forward; residual like x, bias (N,), dropout start (M,); z (M, N), x itself if nothing is added
    Numerics: z is computed in float32 and rounded once; the norm is of the rounded z; dropout bits as in the reference
    Traffic:  norm_cost with what is given: reads x (and residual), writes z and y; reads z of rows wider than `widest`
    Order:    as norm_forward
    Source:   the fused residual-dropout-norm of Apex and flash-attention; Philox as in kernels/philox
    """
    assert finish.norm is not None
    return launch_forward(x, finish, finish.norm, widest, blocks)


@replayed
def norm_backward(
    dy: Tensor, x: Tensor | Packed, statistics: Statistics, norm: Norm, dresidual: Tensor | None = None,
    *, blocks: bool = False, widest: int = WIDEST_BACKWARD, programs: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(dx, dweight or None, dbias or None) of norm_forward; dx includes dresidual, the residual path's gradient.
    blocks: behind them dx in blocks of e4m3, too.

    Math:     norm_backward of reference.py
    Shapes:   dy, x, dresidual and dx (M, N), rows of the inputs may lie apart; x may be packed; dweight, dbias (N,)
    Numerics: float32, dx (with dresidual) rounded once; dweight and dbias summed in float32, rounded once. Blocks are
              those of dx as it is stored, to the byte
    Traffic:  norm_cost, and 4 N bytes per program for each of dweight and dbias, written and read once. x and dy of
              rows wider than `widest` are read twice from memory (for dx, then for the sums) and once more from L2
    Order:    programs take contiguous shares of rows. The order of all sums depends on M, the number of programs and
              `blocks`, with which a tile may lie otherwise in registers. Results are bitwise repeatable on one device
    Source:   the two-stage sum of Triton's layer norm tutorial and Apex, without its atomics
    """
    check_operands(x, norm, dy, statistics, dresidual)
    dy, x = with_contiguous_columns(dy), with_contiguous_columns(x)
    weighted, norm = norm.weight is not None, complete(norm, x)
    (m, n), (mean, rstd) = x.shape, (None if each is None else each.contiguous() for each in statistics)
    dx, of_dx = dy.new_empty(m, n), empty_result(dy, m, n, True) if blocks else None
    layernorm = norm.kind == "layernorm"
    outputs = [torch.empty_like(each) for each in (norm.weight, norm.bias if layernorm else None) if each is not None]
    dweight, dbias = outputs[0] if weighted else None, outputs[1] if len(outputs) > 1 else None
    gradients = (dx, dweight, dbias, of_dx) if blocks else (dx, dweight, dbias)
    if m == 0:
        for each in outputs:
            each.zero_()
        return gradients
    tile = row_tile(n, widest, GRADIENT_ELEMENTS // (2 if blocks or n <= 512 else 1))
    looped = n > tile.columns
    sums = WEIGHT_GRADIENT if looped else tile
    across = triton.cdiv(n, sums.columns)
    count, share = shares(m, sums.rows, dy.device, sums.warps, programs, across)
    partials = dy.new_empty(len(outputs), count, n, dtype=torch.float32)
    operands = GradientOperands(row_argument(dy), row_argument(x), mean if layernorm else None, rstd)
    residual = None if dresidual is None else row_argument(with_contiguous_columns(dresidual))
    given, options = (operands, norm.weight, residual, dx, of_dx), row_options(tile.warps)
    if looped:
        launch(wide_norm_backward_kernel, (triton.cdiv(m, tile.rows),), *given, m, n,
               TILE=tile, INTERPRETED=is_interpreted(), **options)  # fmt: skip
        launch(norm_weight_gradient_kernel, (count, across), operands, partials, m, n, share, SHIFT=dbias is not None,
               TILE=sums, **row_options(sums.warps))  # fmt: skip
    else:
        # unpacking leaves registers for two stages, or for three where the weight is read again
        stages = 3 if dy.element_size() == 2 and (blocks or isinstance(x, Tensor)) else 2
        launch(norm_backward_kernel, (count,), *given, partials, m, n, share, SHIFT=dbias is not None,
               TILE=tile, STAGES=stages, INTERPRETED=is_interpreted(), **options)  # fmt: skip
    sum_partials(partials, outputs)
    return gradients
