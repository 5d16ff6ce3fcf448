"""norm_forward, norm_backward and finish_norm_forward: LayerNorm and RMSNorm over whole rows, one read of each operand.

Rows of up to a given width stay in registers between the statistics and the result; wider ones are read a second time.
Letters: M rows (tokens), N columns (hidden).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..finish import NOTHING, Finish, Norm
from ..rows import (
    RowTile,
    finished_tile,
    load_row,
    load_tile,
    row_options,
    row_tile,
    shares,
    store_tile,
    sum_partials,
    tile_mask,
    with_contiguous_columns,
)
from .reference import Statistics

WIDEST_FORWARD = 16384  # columns of a row that registers hold
WIDEST_BACKWARD = 8192  # with the sums for dweight and dbias, one float32 each per column
GRADIENT_ELEMENTS = 16  # of a tile per thread in backward kernels, half of a forward's: they keep sums as well
WEIGHT_GRADIENT = RowTile(8, 256, 4)


@triton.jit
def moments(value, mask, width, LAYERNORM: tl.constexpr):
    """Mean (layernorm) and sum of squares (around the mean for layernorm) of each row's `width` columns, two passes."""
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
    y, value, average, reciprocal, weight, shift, rows, columns, mask, n, LAYERNORM: tl.constexpr, SHIFT: tl.constexpr
):
    if LAYERNORM:
        value -= average[:, None]
    value = value * reciprocal[:, None] * load_row(weight, columns, n)
    if SHIFT:
        value += load_row(shift, columns, n)
    store_tile(y, value, rows, columns, mask, n)


@triton.jit(do_not_specialize=["m", "key_low", "key_high", "threshold", "scale"])
def norm_forward_kernel(
    x, bias, residual, start, key_low, key_high, threshold, scale,
    z, y, mean, rstd, weight, shift, eps, m, n, x_stride, residual_stride,
    LAYERNORM: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr, LOOPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """z = finish(x), its statistics, y = norm(z as stored). LOOPED: rows wider than a tile, y in a second pass."""
    FINISH: tl.constexpr = BIAS or DROPOUT or RESIDUAL
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    average, squares = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    value = tl.zeros((ROWS, COLUMNS), tl.float32)
    for column in tl.range(0, n if LOOPED else 1, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        mask = tile_mask(rows, columns, m, n)
        value = finished_tile(
            x, bias, residual, start, key_low, key_high, threshold, scale, rows, column, m, n, x_stride,
            residual_stride, BIAS, DROPOUT, RESIDUAL, ALIGNED, ROWS, COLUMNS,
        )  # fmt: skip
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
    reciprocal = tl.rsqrt(squares / n + eps)
    if LAYERNORM:
        tl.store(mean + rows, average, mask=rows < m)
    tl.store(rstd + rows, reciprocal, mask=rows < m)
    if LOOPED:
        source, stride = x, x_stride
        if FINISH:
            source, stride = z, n
            tl.debug_barrier()  # before a thread reads what another has stored
        for column in tl.range(0, n, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            mask = tile_mask(rows, columns, m, n)
            value = load_tile(source, rows, columns, mask, stride)
            store_normalised(y, value, average, reciprocal, weight, shift, rows, columns, mask, n, LAYERNORM, SHIFT)
    else:
        columns = tl.arange(0, COLUMNS)
        mask = tile_mask(rows, columns, m, n)
        store_normalised(y, value, average, reciprocal, weight, shift, rows, columns, mask, n, LAYERNORM, SHIFT)


@triton.jit
def load_normalised(x, mean, rstd, rows, columns, mask, m, stride, LAYERNORM: tl.constexpr):
    """(xhat, rstd (ROWS, 1)). Beyond n, xhat is not zero for layernorm: it meets only factors that are."""
    value = load_tile(x, rows, columns, mask, stride)
    if LAYERNORM:
        value -= tl.load(mean + rows, mask=rows < m, other=0.0)[:, None]
    reciprocal = tl.load(rstd + rows, mask=rows < m, other=0.0)[:, None]
    return value * reciprocal, reciprocal


@triton.jit
def store_input_gradient(
    dx, dresidual, g, normalised, reciprocal, g_sum, product_sum, rows, columns, mask, n, dresidual_stride,
    LAYERNORM: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) (+ dresidual), from the sums of each row."""
    value = g - normalised * (product_sum / n)[:, None]
    if LAYERNORM:
        value -= (g_sum / n)[:, None]
    value *= reciprocal
    if RESIDUAL:
        value += load_tile(dresidual, rows, columns, mask, dresidual_stride)
    store_tile(dx, value, rows, columns, mask, n)


@triton.jit(do_not_specialize=["m", "share"])
def norm_backward_kernel(
    dy, x, mean, rstd, weight, dresidual, dx,
    partials,  # (2 with SHIFT or 1, programs, n): dweight and dbias of each program's rows
    m, n, dy_stride, x_stride, dresidual_stride, share,
    LAYERNORM: tl.constexpr, SHIFT: tl.constexpr, RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes `share` rows one tile after another and keeps its sums over them in registers."""
    first = tl.program_id(0) * share
    columns = tl.arange(0, COLUMNS)
    scale = load_row(weight, columns, n)
    dweight, dbias = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in tl.range(first, tl.minimum(first + share, m), ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, ROWS)
        mask = tile_mask(rows, columns, m, n)
        gradient = load_tile(dy, rows, columns, mask, dy_stride)
        normalised, reciprocal = load_normalised(x, mean, rstd, rows, columns, mask, m, x_stride, LAYERNORM)
        g = gradient * scale
        store_input_gradient(
            dx, dresidual, g, normalised, reciprocal, tl.sum(g, 1), tl.sum(g * normalised, 1), rows, columns, mask, n,
            dresidual_stride, LAYERNORM, RESIDUAL,
        )  # fmt: skip
        dweight += gradient * normalised
        dbias += gradient
    target = partials + tl.program_id(0).to(tl.int64) * n + columns
    tl.store(target, tl.sum(dweight, 0), mask=columns < n)
    if SHIFT:
        tl.store(target + tl.num_programs(0).to(tl.int64) * n, tl.sum(dbias, 0), mask=columns < n)


@triton.jit(do_not_specialize=["m"])
def wide_norm_backward_kernel(
    dy, x, mean, rstd, weight, dresidual, dx, m, n, dy_stride, x_stride, dresidual_stride,
    LAYERNORM: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx of rows wider than a tile: one pass for the sums, one for the result."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g_sums, product_sums = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for column in tl.range(0, n, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        mask = tile_mask(rows, columns, m, n)
        g = load_tile(dy, rows, columns, mask, dy_stride) * load_row(weight, columns, n)
        normalised, _ = load_normalised(x, mean, rstd, rows, columns, mask, m, x_stride, LAYERNORM)
        g_sums += g
        product_sums += g * normalised
    g_sum, product_sum = tl.sum(g_sums, 1), tl.sum(product_sums, 1)
    for column in tl.range(0, n, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        mask = tile_mask(rows, columns, m, n)
        g = load_tile(dy, rows, columns, mask, dy_stride) * load_row(weight, columns, n)
        normalised, reciprocal = load_normalised(x, mean, rstd, rows, columns, mask, m, x_stride, LAYERNORM)
        store_input_gradient(
            dx, dresidual, g, normalised, reciprocal, g_sum, product_sum, rows, columns, mask, n, dresidual_stride,
            LAYERNORM, RESIDUAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["m", "share"])
def norm_weight_gradient_kernel(
    dy, x, mean, rstd, partials, m, n, dy_stride, x_stride, share,
    LAYERNORM: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """partials as in norm_backward_kernel, for rows too wide for it. Axis 0 of the grid: shares of rows, 1: columns."""
    first = tl.program_id(0) * share
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dweight, dbias = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in tl.range(first, tl.minimum(first + share, m), ROWS):
        rows = row + tl.arange(0, ROWS)
        mask = tile_mask(rows, columns, m, n)
        gradient = load_tile(dy, rows, columns, mask, dy_stride)
        normalised, _ = load_normalised(x, mean, rstd, rows, columns, mask, m, x_stride, LAYERNORM)
        dweight += gradient * normalised
        dbias += gradient
    target = partials + tl.program_id(0).to(tl.int64) * n + columns
    tl.store(target, tl.sum(dweight, 0), mask=columns < n)
    if SHIFT:
        tl.store(target + tl.num_programs(0).to(tl.int64) * n, tl.sum(dbias, 0), mask=columns < n)


def complete(norm: Norm, x: Tensor) -> Norm:
    """The norm with the weight and the eps that kernels read, where it has none of its own."""
    weight = x.new_ones(x.shape[1]) if norm.weight is None else norm.weight
    return norm._replace(weight=weight, eps=torch.finfo(torch.float32).eps if norm.eps is None else norm.eps)


def launch_forward(x: Tensor, finish: Finish, norm: Norm, widest: int) -> tuple[Tensor, Tensor, Statistics]:
    x, norm = with_contiguous_columns(x), complete(norm, x)
    residual = None if finish.residual is None else with_contiguous_columns(finish.residual)
    finish = finish._replace(residual=residual)
    (m, n), layernorm = x.shape, norm.kind == "layernorm"
    y, rstd = x.new_empty(m, n), x.new_empty(m, 1, dtype=torch.float32)
    shift = norm.bias if layernorm else None
    z = x.new_empty(m, n) if any(finish.flags().values()) else x
    mean = torch.empty_like(rstd) if layernorm else None
    tile = row_tile(n, widest)
    if m:
        norm_forward_kernel[(triton.cdiv(m, tile.rows),)](
            x, *finish.arguments(y), z, y, rstd if mean is None else mean, rstd,
            norm.weight, norm.weight if shift is None else shift, norm.eps,
            m, n, x.stride(0), n if residual is None else residual.stride(0),
            LAYERNORM=layernorm, SHIFT=shift is not None, **finish.flags(), ALIGNED=n % 4 == 0,
            LOOPED=n > tile.columns, ROWS=tile.rows, COLUMNS=tile.columns, **row_options(tile.warps),
        )  # fmt: skip
    return z, y, (mean, rstd)


def norm_forward(x: Tensor, norm: Norm, *, widest: int = WIDEST_FORWARD) -> tuple[Tensor, Statistics]:
    """Normalise each row of x, then scale (and shift): (y, (mean or None, rstd)).

    Math:     norm_forward of reference.py
    Shapes:   x (M, N), any N >= 1, rows may lie apart; weight, bias (N,); y (M, N); statistics (M, 1)
    Numerics: bfloat16, float16 or float32 in, computed in float32 with the variance around the mean, one rounding at
              the store; statistics float32
    Traffic:  norm_cost; rows of more than `widest` columns are read twice, the second time from L2
    Order:    one program per tile of rows; no communication, deterministic
    Source:   Ba et al. 2016 (arXiv:1607.06450); Zhang & Sennrich 2019 (arXiv:1910.07467); Chan et al. 1979 for the
              moments of rows in several tiles
    """
    _, y, statistics = launch_forward(x, NOTHING, norm, widest)
    return y, statistics


def norm_rebuilt(x: Tensor, statistics: Statistics, norm: Norm) -> Tensor:
    """norm_forward's y once more, to the bit. The statistics are made again, as reading them would save nothing."""
    return norm_forward(x, norm)[0]


def finish_norm_forward(
    x: Tensor, finish: Finish, *, widest: int = WIDEST_FORWARD
) -> tuple[Tensor, Tensor, Statistics]:
    """(z, norm(z), statistics) of z = residual + dropout(x + bias), in one pass.

    Math:     finish_norm_forward of reference.py
    Shapes:   as norm_forward; residual like x, bias (N,), dropout start (M,); z (M, N), x itself if nothing is added
    Numerics: z in float32 from the operands, rounded once; the norm is of z as rounded; dropout bits as in torch
    Traffic:  norm_cost with what is given: x (and residual) in, z and y out; rows wider than `widest`: z in again
    Order:    as norm_forward
    Source:   the fused residual-dropout-norm of Apex and flash-attention; Philox as in kernels/philox
    """
    assert finish.norm is not None
    return launch_forward(x, finish, finish.norm, widest)


def norm_backward(
    dy: Tensor,
    x: Tensor,
    statistics: Statistics,
    norm: Norm,
    dresidual: Tensor | None = None,
    *,
    widest: int = WIDEST_BACKWARD,
    programs: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dweight or None, dbias or None) of norm_forward; dx includes dresidual, the residual path's gradient.

    Math:     norm_backward of reference.py
    Shapes:   dy, x, dresidual and dx (M, N), rows of the inputs may lie apart; dweight, dbias (N,)
    Numerics: float32, dx (with dresidual) rounded once; dweight and dbias summed in float32, rounded once
    Traffic:  norm_cost, and 4 N bytes per program and gradient of a weight, written and read once; rows of more than
              `widest` columns: x and dy twice from memory (dx, then the sums) and once more from L2
    Order:    programs take contiguous shares of rows; their sums are added in an order given by M and the number of
              programs alone: bitwise repeatable on one device
    Source:   the two-stage sum of Triton's layer norm tutorial and Apex, without its atomics
    """
    dy, x = with_contiguous_columns(dy), with_contiguous_columns(x)
    weighted, norm = norm.weight is not None, complete(norm, x)
    dresidual = None if dresidual is None else with_contiguous_columns(dresidual)
    (m, n), (mean, rstd) = x.shape, statistics
    layernorm, dx = norm.kind == "layernorm", x.new_empty(m, n)
    outputs = [torch.empty_like(norm.weight)]
    if layernorm and norm.bias is not None:
        outputs.append(torch.empty_like(norm.bias))
    dbias = outputs[1] if len(outputs) > 1 else None
    dweight = outputs[0] if weighted else None
    if m == 0:
        return dx, dweight if dweight is None else dweight.zero_(), None if dbias is None else dbias.zero_()
    tile = row_tile(n, widest, GRADIENT_ELEMENTS)
    looped = n > tile.columns
    sums = WEIGHT_GRADIENT if looped else tile
    blocks = triton.cdiv(n, sums.columns)
    count, share = shares(m, sums.rows, x.device, sums.warps, programs, blocks)
    partials = x.new_empty(len(outputs), count, n, dtype=torch.float32)
    operands = (dy, x, rstd if mean is None else mean, rstd)
    residual, residual_stride = (dx, n) if dresidual is None else (dresidual, dresidual.stride(0))
    if looped:
        wide_norm_backward_kernel[(triton.cdiv(m, tile.rows),)](
            *operands, norm.weight, residual, dx, m, n, dy.stride(0), x.stride(0), residual_stride,
            LAYERNORM=layernorm, RESIDUAL=dresidual is not None, ROWS=tile.rows, COLUMNS=tile.columns,
            **row_options(tile.warps),
        )  # fmt: skip
        norm_weight_gradient_kernel[(count, blocks)](
            *operands, partials, m, n, dy.stride(0), x.stride(0), share,
            LAYERNORM=layernorm, SHIFT=dbias is not None, ROWS=sums.rows, COLUMNS=sums.columns,
            **row_options(sums.warps),
        )  # fmt: skip
    else:
        norm_backward_kernel[(count,)](
            *operands, norm.weight, residual, dx, partials, m, n, dy.stride(0), x.stride(0), residual_stride, share,
            LAYERNORM=layernorm, SHIFT=dbias is not None, RESIDUAL=dresidual is not None,
            ROWS=tile.rows, COLUMNS=tile.columns, STAGES=3 if x.element_size() == 2 else 2, **row_options(tile.warps),
        )  # fmt: skip
    sum_partials(partials, outputs)
    return dx, dweight, dbias
