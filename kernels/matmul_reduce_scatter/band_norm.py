"""The norm in the finishing band: statistics of rows that come column block by column block, then the rows again.

Belongs here: device code that only the reduce-scatter's kernel inlines.
"""

import triton
import triton.language as tl

from ..tile import load_block, store_block

NORM_BLOCKS = tl.constexpr(4)  # column blocks that a norm's second pass has in flight at once


@triton.jit
def no_statistics(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of rows of which no column block has come yet: what each row's values are shifted by, and their squares; then
    sums of the shifted values and of the shifted squares, kept apart for each column of the blocks."""
    nothing, none = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    return nothing, nothing, none, none


@triton.jit
def add_to_statistics(statistics, block, index, column_end, KIND: tl.constexpr, COLUMNS: tl.constexpr):
    """With the index-th column block of the rows. The shifts are means of the first block: of its values for a
    layernorm, so that no offset of a row costs its variance precision, and of its squares, so that the sum of squares
    stays near 0 and is rounded there, not near the width of the row."""
    shift, square_shift, sums, squares = statistics
    inside = (index * COLUMNS + tl.arange(0, COLUMNS) < column_end)[None, :]
    x = block.to(tl.float32)
    if KIND == "layernorm":
        if index == 0:
            shift = tl.sum(tl.where(inside, x, 0.0), 1) / tl.minimum(column_end, COLUMNS)
        x = tl.where(inside, x - shift[:, None], 0.0)
        sums += x
    if index == 0:
        square_shift = tl.sum(tl.where(inside, x * x, 0.0), 1) / tl.minimum(column_end, COLUMNS)
    return shift, square_shift, sums, squares + tl.where(inside, x * x - square_shift[:, None], 0.0)


@triton.jit
def normalise(
    source, statistics, norm, virtual, row, row_end, column_end,
    KIND: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store statistics of rows and norm(source), which this program has stored before: it comes from a cache.

    norm: a finish.NormArgument.
    """
    shift, square_shift, sums, squares = statistics
    rest = tl.sum(sums, 1) / column_end
    mean = shift + rest
    rstd = tl.rsqrt(square_shift + tl.sum(squares, 1) / column_end - rest * rest + norm.eps)
    rows = row + tl.arange(0, ROWS)
    first = virtual.to(tl.int64) * row_end
    if KIND == "layernorm":
        tl.store(norm.mean + first + rows, mean, mask=rows < row_end)
    tl.store(norm.rstd + first + rows, rstd, mask=rows < row_end)
    tl.debug_barrier()  # a thread reads what others have stored
    WIDTH: tl.constexpr = NORM_BLOCKS * COLUMNS
    for column in range(0, column_end, WIDTH):
        x = load_block(source, row, column, row_end, column_end, column_end, ROWS, WIDTH, False)
        columns = column + tl.arange(0, WIDTH)
        weight = tl.load(norm.weight + virtual * column_end + columns, mask=columns < column_end, other=0.0)
        if BIAS:  # all loads come before what waits for one
            bias = tl.load(norm.bias + virtual * column_end + columns, mask=columns < column_end, other=0.0)
        y = (x.to(tl.float32) - mean[:, None]) * rstd[:, None] * weight.to(tl.float32)[None, :]
        if BIAS:
            y += bias.to(tl.float32)[None, :]
        store_block(norm.y + first * column_end, y, row, column, row_end, column_end, column_end, ROWS, WIDTH)
