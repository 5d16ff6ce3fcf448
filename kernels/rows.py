"""What kernels over rows share: tiles of whole or partial rows, bias, dropout and residual, and column sums.

Belongs here: device and host code of the kernels that multiply no matrices and work on (M, N) row by row. Device code
on tiles of a GEMM is in tile.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import Rows
from .launch import REGISTERS, is_interpreted, launch_options
from .pack.format import Packed
from .pack.kernel import kept_source, read_block
from .philox.kernel import drop_tile
from .replay import launch

WARPS_PER_SM = 16  # at least so many are resident; row_options limits a thread's registers to allow that
ELEMENTS = 32  # of a tile for each thread; in 16 bits these are four loads of 16 bytes in flight
LOOPED_COLUMNS = 4096  # columns of a tile when a row is too wide for registers
SUM_ROWS, SUM_COLUMNS = 64, 32


class RowTile(NamedTuple):
    """The tile of a program with `warps` warps: `columns` elements, a power of two, of each of `rows` rows."""

    rows: int
    columns: int
    warps: int


@triton.jit
def tile_mask(rows, columns, m, n):
    return (rows < m)[:, None] & (columns < n)[None, :]


@triton.jit
def load_tile(source, rows, columns, mask):
    """Elements (rows, columns) of Rows in float32, zeros where the mask is false."""
    pointers = source.pointer + rows.to(tl.int64)[:, None] * source.stride + columns[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_kept(source, row, column, m, n, TILE: tl.constexpr):
    """The tile at (row, column) of Rows (m, n), which may be packed, in float32; zeros outside."""
    rows, columns = row + tl.arange(0, TILE.rows), column + tl.arange(0, TILE.columns)
    if source.pointer.dtype.element_ty == tl.uint8:
        value = read_block(source.pointer, 0, row, column, m, n, TILE.rows, TILE.columns)
    else:
        value = load_tile(source, rows, columns, tile_mask(rows, columns, m, n))
    return value


@triton.jit
def store_tile(target, value, rows, columns, mask, stride):
    """Store a float32 tile, rounded to the target's dtype."""
    pointers = target + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointers, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def load_row(source, columns, n):
    """A vector (n,) as one row (1, COLUMNS) in float32."""
    return tl.load(source + columns[None, :], mask=(columns < n)[None, :], other=0.0).to(tl.float32)


@triton.jit
def finished_tile(x, addends, key, row, column, m, n, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """residual + dropout(x + bias) in float32, zeros beyond column n. x may be packed. ALIGNED: as in random_tile."""
    rows, columns = row + tl.arange(0, TILE.rows), column + tl.arange(0, TILE.columns)
    mask = tile_mask(rows, columns, m, n)
    value = load_kept(x, row, column, m, n, TILE)
    if addends.bias is not None:
        value += load_row(addends.bias, columns, n)
    if addends.mask is not None:
        value = drop_tile(value, addends.mask, key, 0, rows, column, m, ALIGNED, TILE.rows, TILE.columns)
    if addends.residual is not None:
        value += load_tile(addends.residual, rows, columns, mask)
    return value


@triton.jit
def sum_column_block(partials, out, count, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in tl.range(0, count, ROWS):
        rows = row + tl.arange(0, ROWS)
        total += load_tile(Rows(partials, n), rows, columns, tile_mask(rows, columns, count, n))
    tl.store(out + columns, tl.sum(total, 0).to(out.dtype.element_ty), mask=columns < n)


@triton.jit(do_not_specialize=["count"])
def sum_partials_kernel(partials, first, second, count, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """first = partials[0].sum(0), second = partials[1].sum(0), each of (count, n). Axis 1 of the grid chooses one."""
    if tl.program_id(1) == 0:
        sum_column_block(partials, first, count, n, ROWS, COLUMNS)
    else:
        sum_column_block(partials + tl.cast(count, tl.int64) * n, second, count, n, ROWS, COLUMNS)


def sum_partials(partials: Tensor, outputs: list[Tensor]) -> None:
    """outputs[i] (N,) = partials[i].sum(0) of float32 (P, N), for one or two outputs. P alone decides the order."""
    count, n = partials.shape[1:]
    launch(
        sum_partials_kernel, (triton.cdiv(n, SUM_COLUMNS), len(outputs)),
        partials, outputs[0], outputs[-1], count, n, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, **row_options(4)
    )  # fmt: skip


def vectorised(n: int) -> bool:
    """Whether rows of n elements move 16 bytes at a time, which Triton does if n is a multiple of 16."""
    return n % 16 == 0


def row_tile(n: int, widest: int, elements: int = ELEMENTS) -> RowTile:
    """The tile for rows of n elements: whole rows, several short ones at once; part of one row if n exceeds `widest`.

    If rows are not vectorised, both limits are halved, because each element then has its address in registers.
    """
    factor = 1 if vectorised(n) else 2
    columns = triton.next_power_of_2(n) if n <= widest // factor else min(widest // factor, LOOPED_COLUMNS)
    warps = max(4, min(WARPS_PER_SM, columns * factor // 512))
    rows = elements * 32 * warps // (columns * factor) if n <= columns else 1
    return RowTile(max(1, rows), columns, warps)


def row_options(warps: int) -> dict[str, Any]:
    options = launch_options(warps, 1)
    if "maxnreg" in options:
        options["maxnreg"] = min(options["maxnreg"], REGISTERS // (32 * WARPS_PER_SM))
    return options


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def shares(
    m: int, rows: int, device: torch.device, warps: int, programs: int | None, blocks: int = 1
) -> tuple[int, int]:
    """(programs, rows of each): m rows in contiguous shares, for as many programs as are resident at once.

    rows: those of a tile; a share is a multiple of them. blocks: how many programs work on the same rows, on different
    columns. programs: replaces the number of resident programs (2 in the interpreter).
    """
    if programs is None:
        programs = 2 if is_interpreted() else multiprocessors(device) * (WARPS_PER_SM // warps)
    tiles = triton.cdiv(m, rows)
    share = triton.cdiv(tiles, max(1, programs // blocks))
    return triton.cdiv(tiles, share), share * rows


def with_contiguous_columns(x: Any) -> Any:
    """x (M, N), whose rows may lie anywhere; a copy if its columns are not side by side. Packed rows stay packed."""
    return x if isinstance(x, Packed) or x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def row_argument(x: Tensor | Packed) -> Rows:
    """What kernels take for a matrix whose columns are contiguous."""
    return Rows(kept_source(x), x.shape[1]) if isinstance(x, Packed) else Rows(x, x.stride(0))
