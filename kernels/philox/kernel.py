"""Philox4x32-10 words by element index, as philox/reference.py has them, and dropout by these words.

Belongs here: device code only, which other kernels inline.
"""

import triton
import triton.language as tl


@triton.jit
def philox_block(key, block):
    """The four uint32 words of every int64 Philox block."""
    low, high = (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32)
    zero = low * 0
    return tl.philox(key.to(tl.int64), low, high, zero, zero)


@triton.jit
def random_words(key, index):
    """The 32-bit word of every int64 element index, as int64: word index % 4 of Philox block index // 4.

    It computes a whole block for each element. For rows that start at multiples of 4, random_tile does a quarter of the
    work.
    """
    w0, w1, w2, w3 = philox_block(key, index >> 2)
    lane = index & 3
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)).to(tl.int64)


@triton.jit
def random_tile(key, start, column, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Words (ROWS, COLUMNS) of rows whose elements begin at the int64 indices `start` (ROWS,), from `column` on.

    ALIGNED: start, column and COLUMNS are multiples of 4. Each block's words then lie side by side. A thread that loads
    or stores at least 4 columns draws just these, so the joins are free.
    """
    first = (start + column)[:, None]
    if ALIGNED:
        w0, w1, w2, w3 = philox_block(key, (first >> 2) + tl.arange(0, COLUMNS // 4)[None, :])
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, COLUMNS)).to(tl.int64)
    else:
        words = random_words(key, first + tl.arange(0, COLUMNS)[None, :])
    return words


@triton.jit
def drop_tile(
    value, drop, key, first, rows, column, row_end, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Dropout, by the Mask `drop`, of a float32 tile whose first column is `column`. ALIGNED: as in random_tile.

    rows: of the tile, counted from row `first` of the mask on; those from row_end on do not exist.
    """
    starts = tl.load(drop.start + first + rows, mask=rows < row_end, other=0)
    keep = random_tile(key, starts, column, ALIGNED, ROWS, COLUMNS) >= drop.threshold
    return tl.where(keep, value * drop.scale, 0.0)
