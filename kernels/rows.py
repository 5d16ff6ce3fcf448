"""What kernels over rows share: tiles of whole or partial rows, what finishes a row, sums of partial column sums.

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
from .philox.kernel import drop_tile

WARPS_PER_SM = 16  # at least so many are resident, hence the registers that a thread may have
ELEMENTS = 32  # of a tile per thread: four loads of 16 bytes in flight at 16 bits
LOOPED_COLUMNS = 4096  # of a row that is not kept in registers
SUM_ROWS, SUM_COLUMNS = 64, 32


class RowTile(NamedTuple):
    """A tile: `columns`, a power of two, of each of `rows` rows, for a program of so many warps."""

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
def store_tile(target, value, rows, columns, mask, stride):
    """Rounded once, to the target's dtype."""
    pointers = target + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointers, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def load_row(source, columns, n):
    """A vector (n,) as one row (1, COLUMNS) in float32."""
    return tl.load(source + columns[None, :], mask=(columns < n)[None, :], other=0.0).to(tl.float32)


@triton.jit
def finished_tile(x, addends, key, rows, column, m, n, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """residual + dropout(x + bias) in float32, zeros beyond column n. ALIGNED: as in random_tile."""
    columns = column + tl.arange(0, TILE.columns)
    mask = tile_mask(rows, columns, m, n)
    value = load_tile(x, rows, columns, mask)
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
    """first = the sum of partials[0] (count, n) over rows, second that of partials[1]; the grid's axis 1 chooses."""
    if tl.program_id(1) == 0:
        sum_column_block(partials, first, count, n, ROWS, COLUMNS)
    else:
        sum_column_block(partials + tl.cast(count, tl.int64) * n, second, count, n, ROWS, COLUMNS)


def sum_partials(partials: Tensor, outputs: list[Tensor]) -> None:
    """outputs[i] (N,) = partials[i] (P, N), float32, summed over P in an order that depends on P alone; one or two."""
    count, n = partials.shape[1:]
    sum_partials_kernel[(triton.cdiv(n, SUM_COLUMNS), len(outputs))](
        partials, outputs[0], outputs[-1], count, n, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, **row_options(4)
    )  # fmt: skip


def vectorised(n: int) -> bool:
    """Whether rows of n elements move 16 bytes at a time: Triton knows of an integer if it is a multiple of 16."""
    return n % 16 == 0


def row_tile(n: int, widest: int, elements: int = ELEMENTS) -> RowTile:
    """For kernels that want whole rows, several short ones at once; a part of one row that is wider than `widest`.

    Half of both limits where rows are not vectorised: each element then has an address in registers.
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
    """(programs, rows of each): the rows cut into contiguous shares, for all programs that are resident at once.

    rows: of a tile, which divides a share. blocks: programs that share the same rows. programs: at most this many
    instead (the interpreter's default is 2).
    """
    if programs is None:
        programs = 2 if is_interpreted() else multiprocessors(device) * (WARPS_PER_SM // warps)
    tiles = triton.cdiv(m, rows)
    share = triton.cdiv(tiles, max(1, programs // blocks))
    return triton.cdiv(tiles, share), share * rows


def with_contiguous_columns(x: Tensor) -> Tensor:
    """x (M, N), whose rows may lie anywhere; a copy if its columns are not side by side."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def row_argument(x: Tensor) -> Rows:
    """What kernels take for a matrix whose columns are contiguous."""
    return Rows(x, x.stride(0))
