"""The sum of each token's rows, which lie in several experts' groups: a program gathers the rows of its tokens.

Letters: R rows, T tokens with at most K rows each, H columns.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..replay import launch, replayed
from ..rows import load_tile, row_argument, row_options, row_tile, store_tile, tile_mask, with_contiguous_columns
from .reference import check_operands

COLUMNS, ELEMENTS = 1024, 8  # the widest tile, and its elements for each thread, of each of K rows


@triton.jit(do_not_specialize=["m", "count"])
def combine_kernel(rows, positions, y, m, count, n, K: tl.constexpr, TILE: tl.constexpr):
    """One tile of y. Programs of one tile of tokens are neighbours, so that they read from the same rows."""
    TOKENS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    blocks = tl.cdiv(n, COLUMNS)
    tokens = tl.program_id(0) // blocks * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for j in tl.static_range(K):
        position = tl.load(positions + tokens.to(tl.int64) * K + j, mask=tokens < m, other=-1)
        exists = (position >= 0) & (position < count)
        total += load_tile(rows, position, columns, exists[:, None] & (columns < n)[None, :])
        total += tl.where(exists | (position == -1), 0.0, float("nan"))[:, None]
    store_tile(y, total, tokens, columns, tile_mask(tokens, columns, m, n), n)


@replayed
def combine(rows: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """y (T, H) with y[t] the sum of rows[positions[t, j]] over j, without those j whose position is -1.

    Math:     combine of reference.py
    Shapes:   rows (R, H) bf16|fp16|fp32, any R, any H >= 1, rows may lie apart; positions (T, K) int32, K up to 16,
              a position outside of [-1, R) makes its token's sum NaN; y (T, H). tokens is not read
    Numerics: float32 from left to right over K, rounded once
    Traffic:  combine_cost; 16-byte accesses if H and the row stride are multiples of 16 elements and the memory is
              aligned
    Order:    each element of y by one thread; no atomics, no communication, deterministic
    Source:   as in reference.py
    """
    check_operands(rows, tokens, positions)
    rows = with_contiguous_columns(rows)
    (m, k), n = positions.shape, rows.shape[1]
    if not len(rows):
        return rows.new_zeros(m, n)
    y = rows.new_empty(m, n)
    if m:
        tile = row_tile(n, COLUMNS, ELEMENTS)
        launch(
            combine_kernel, (triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),),
            row_argument(rows), positions.contiguous(), y, m, len(rows), n, K=k, TILE=tile, **row_options(tile.warps),
        )  # fmt: skip
    return y
