"""dropout_apply, finish_forward and finish_backward: bias, Philox dropout and residual in one pass.

Letters: M rows (tokens), N columns (hidden).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..finish import Dropout, Finish
from ..launch import is_interpreted
from ..philox.kernel import drop_tile
from ..quantize.format import Blocks
from ..quantize.kernel import empty_result, quantize_rows, store_blocks
from ..replay import launch, replayed
from ..rows import (
    RowTile,
    finished_tile,
    load_tile,
    row_argument,
    row_options,
    shares,
    store_tile,
    sum_partials,
    tile_mask,
    vectorised,
    with_contiguous_columns,
)

WARPS = 4
FORWARD_COLUMNS = 1024  # of a tile at most, so that its rows, 4 or 2, share one load of the bias
FORWARD_ELEMENTS = 4096  # of a tile with vector loads; without them half as many
BACKWARD_COLUMNS = 256
BACKWARD_ELEMENTS = 2048


@triton.jit(do_not_specialize=["m", "key"])
def finish_forward_kernel(x, addends, key: tl.int64, z, m, n, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """One program per tile; the tiles of the same rows have consecutive programs."""
    blocks = tl.cdiv(n, TILE.columns)
    row, column = tl.program_id(0) // blocks * TILE.rows, tl.program_id(0) % blocks * TILE.columns
    value = finished_tile(x, addends, key, row, column, m, n, ALIGNED, TILE)
    rows, columns = row + tl.arange(0, TILE.rows), column + tl.arange(0, TILE.columns)
    store_tile(z, value, rows, columns, tile_mask(rows, columns, m, n), n)


@triton.jit(do_not_specialize=["m", "key", "share"])
def finish_backward_kernel(
    dz, drop, key: tl.int64, dx, blocks,
    partials,  # (programs of axis 0, n): each program's sum over its rows
    m, n, share, ALIGNED: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Axis 0 of the grid counts shares of rows, axis 1 blocks of columns. Sums stay in registers.

    dx, or in its place its blocks of e4m3; partials: what is None is not made.
    """
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    first = tl.program_id(0) * share
    column = tl.program_id(1) * COLUMNS
    columns = column + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in tl.range(first, tl.minimum(first + share, m), ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, ROWS)
        mask = tile_mask(rows, columns, m, n)
        value = load_tile(dz, rows, columns, mask)
        if drop is not None:
            value = drop_tile(value, drop, key, 0, rows, column, m, ALIGNED, ROWS, COLUMNS)
            if blocks is None:
                store_tile(dx, value, rows, columns, mask, n)
            value = value.to(dz.pointer.dtype.element_ty).to(tl.float32)
        if blocks is not None:
            values, exponents = blocks
            store_blocks(values, exponents, value, row, column, m, n, TILE, INTERPRETED)
        total += value
    if partials is not None:
        tl.store(partials + tl.program_id(0).to(tl.int64) * n + columns, tl.sum(total, 0), mask=columns < n)


@replayed
def finish_forward(x: Tensor, finish: Finish) -> Tensor:
    """residual + dropout(x + bias); a part that is None is left out, and finish.norm is ignored.

    Math:     finish_forward of reference.py
    Shapes:   x, residual, result (M, N), any N >= 1, rows of the inputs may lie apart; bias (N,); dropout start (M,)
    Numerics: bfloat16, float16 or float32 in, computed in float32, rounded once; dropout bits as in the reference
    Traffic:  finish_cost; if nothing is given, x itself is returned and no memory is touched
    Order:    one program per tile; no communication, deterministic
    Source:   Philox (kernels/philox), drawn a block of four words at a time where rows begin at multiples of 4
    """
    if not finish.adds:
        return x
    finish.check("finish_forward", x)
    x = with_contiguous_columns(x)
    m, n = x.shape
    z = x.new_empty(m, n)
    columns = min(triton.next_power_of_2(n), FORWARD_COLUMNS)
    tile = RowTile((FORWARD_ELEMENTS if vectorised(n) else FORWARD_ELEMENTS // 2) // columns, columns, WARPS)
    if m:
        launch(
            finish_forward_kernel, (triton.cdiv(m, tile.rows) * triton.cdiv(n, columns),),
            row_argument(x), finish.arguments(), finish.key, z, m, n, n % 4 == 0, tile, **row_options(WARPS)
        )  # fmt: skip
    return z


def dropout_apply(x: Tensor, start: Tensor, key: int, p: float) -> Tensor:
    """x with each element zeroed with probability p and the rest scaled by 1 / (1 - p). It is its own backward.

    The bits are those of dropout_apply in reference.py, and the traffic is dropout_cost. All else is as in
    finish_forward.
    """
    return finish_forward(x, Finish(dropout=Dropout(start, key, p)))


@replayed
def finish_backward(
    dz: Tensor, dropout: Dropout | None, bias: bool, *, blocks: bool = False, programs: int | None = None
) -> tuple[Tensor | Blocks, Tensor | None]:
    """(dx, dbias or None) of finish_forward; the residual's gradient is dz. blocks: dx in blocks of e4m3.

    Math:     finish_backward of reference.py; without dropout dx is dz itself
    Shapes:   dz, dx (M, N), rows of dz may lie apart; dbias (N,)
    Numerics: dx as in dropout_apply; dbias is a float32 sum of the rounded dx, rounded once to dz.dtype. Blocks are
              those of dx as it would be stored, to the byte, and dbias has the same bits beside them
    Traffic:  finish_cost, and 4 N bytes per share of rows, written and read once
    Order:    programs take contiguous shares of rows. The order of all sums depends on M and the number of programs
              only, so results are bitwise repeatable on one device
    Source:   as finish_forward; the two-stage sum of norm_backward
    """
    if not bias and not blocks:
        return dz if dropout is None else dropout_apply(dz, *dropout), None
    if not bias and dropout is None:
        return quantize_rows(dz), None
    finish = Finish(dropout=dropout)
    finish.check("finish_backward", dz)
    m, n = dz.shape
    source = with_contiguous_columns(dz)
    dx = dz if dropout is None and not blocks else empty_result(dz, m, n, blocks)
    dbias = dz.new_empty(n) if bias else None
    if m == 0:
        return dx, None if dbias is None else dbias.zero_()
    columns = min(triton.next_power_of_2(n), BACKWARD_COLUMNS)
    tile, across = RowTile(BACKWARD_ELEMENTS // columns, columns, WARPS), triton.cdiv(n, columns)
    count, share = shares(m, tile.rows, dz.device, WARPS, programs, across)
    partials = None if dbias is None else dz.new_empty(1, count, n, dtype=torch.float32)
    launch(
        finish_backward_kernel, (count, across), row_argument(source), finish.arguments().mask, finish.key,
        None if blocks else dx, dx if blocks else None, partials, m, n, share, n % 4 == 0, tile,
        STAGES=3 if dz.element_size() == 2 else 2, INTERPRETED=is_interpreted(), **row_options(WARPS),
    )  # fmt: skip
    if dbias is not None:
        sum_partials(partials, [dbias])
    return dx, dbias
