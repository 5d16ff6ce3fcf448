"""Quantisation of activations, gradients and weights to blocks of e4m3, and back, each in one pass.

Belongs here: the passes, and device code by which other kernels quantise a tile. format.py has the layout.
Letters: a matrix of M rows and K columns; a weight has N rows.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import is_interpreted, launch_options, triton_dtype
from ..replay import launch, replayed
from . import format as blocks_format
from .format import Blocks, empty_rows, empty_weight
from .reference import check_blocks, check_rows, check_shards, check_weight, check_weight_blocks, check_width

ROWS, ROW_WARPS = 32, 4  # of a program: in 16 bits each thread has four loads of 16 bytes in flight
WEIGHT_WARPS = 8
CAPABILITY = (8, 9)  # the first that has e4m3
BLOCK, LOWEST, NOT_A_NUMBER = map(tl.constexpr, (blocks_format.BLOCK, blocks_format.LOWEST, blocks_format.NOT_A_NUMBER))


@triton.jit
def magnitude_bits(x):
    """The bits of |x|, int32, of float32: as integers they are ordered as the magnitudes are, infinity and then every
    NaN above all numbers. A maximum of floating-point numbers would drop a NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponent_of(largest):
    """The exponents, int32, of blocks whose largest magnitudes have these bits: exponents_of of reference.py."""
    exceeds = ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)  # the mantissa of 1.75
    exponent = tl.maximum((largest >> 23) - 135 + exceeds, LOWEST)
    return tl.where(largest >= 0x7F800000, NOT_A_NUMBER, exponent)


@triton.jit
def power(exponent, NEGATIVE: tl.constexpr):
    """2**exponent, or 2**-exponent, in float32, exactly; NaN for NOT_A_NUMBER."""
    if NEGATIVE:
        field = 127 - exponent
    else:
        field = 127 + exponent
    bits = tl.where(exponent == NOT_A_NUMBER, 0x7FC00000, field << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x, INTERPRETED: tl.constexpr):
    """The nearest e4m3 of float32 up to LARGEST, of two the even one, and 0x7f for NaN.

    The interpreter's own cast rounds ties up, carries into the exponent by OR, and makes a number of NaN. There the
    bytes are computed as integers: below 2**-6 they count multiples of 2**-9, which are what a sum with 2**14 leaves.
    """
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        byte = tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
        byte = tl.where(magnitude > 0x7F800000, 0x7F, byte)
        return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e4nv)


@triton.jit(do_not_specialize=["m"])
def quantize_rows_kernel(x, values, exponents, m, k, ROWS: tl.constexpr, INTERPRETED: tl.constexpr):
    """ROWS rows of one column of blocks; programs side by side have blocks side by side."""
    width = k // BLOCK
    block = tl.program_id(0) % width
    rows = tl.program_id(0) // width * ROWS + tl.arange(0, ROWS)
    at = rows.to(tl.int64)[:, None] * k + block * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = rows < m
    tile = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    exponent = exponent_of(tl.max(magnitude_bits(tile), 1))
    quantized = to_e4m3(tile * power(exponent, True)[:, None], INTERPRETED)
    tl.store(values + at, quantized, mask=inside[:, None])
    tl.store(exponents + block.to(tl.int64) * m + rows, exponent.to(tl.int8), mask=inside)


@triton.jit
def in_blocks(tile, INTERPRETED: tl.constexpr):
    """(values, exponents int32) of float32 blocks, which are the last dim of a tile (ROWS, WIDTH, BLOCK)."""
    exponent = exponent_of(tl.max(magnitude_bits(tile), 2))
    return to_e4m3(tile * power(exponent, True)[:, :, None], INTERPRETED), exponent


@triton.jit
def store_blocks(values, exponents, tile, row, column, m, n, TILE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Store a float32 tile at (row, column) of rows (m, n) as blocks, of which it has whole ones."""
    WIDTH: tl.constexpr = TILE.columns // BLOCK
    quantized, exponent = in_blocks(tl.reshape(tile, (TILE.rows, WIDTH, BLOCK)), INTERPRETED)
    rows, columns = row + tl.arange(0, TILE.rows), column + tl.arange(0, WIDTH) * BLOCK  # the first of each block
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    at = rows.to(tl.int64)[:, None, None] * n + columns[None, :, None] + tl.arange(0, BLOCK)[None, None, :]
    tl.store(values + at, quantized, mask=mask[:, :, None])
    tl.store(exponents + (columns // BLOCK).to(tl.int64)[None, :] * m + rows[:, None], exponent.to(tl.int8), mask=mask)


@triton.jit
def store_quantized(x, target, inverse, INTERPRETED: tl.constexpr):
    """Store x * inverse as e4m3 in target, and return its bytes as int32."""
    quantized = to_e4m3(x * inverse, INTERPRETED)
    tl.store(target, quantized)
    return quantized.to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def quantize_weight_kernel(
    w, values, exponents, transposed, transposed_exponents, n, k, byte, TWICE: tl.constexpr, INTERPRETED: tl.constexpr
):
    """One block, as four tiles of every fourth row, and with TWICE its transposed copy.

    Four rows make words of four bytes, which are what is transposed, and stored: transposed is int32 (K, N / 4).
    Triton moves 8-bit values through shared memory a byte at a time, and has lost some on the way. byte is 256, an
    argument because of what LLVM makes of shifts by known numbers: ptxas 12.8 dies of its permutations of bytes.
    """
    WORDS: tl.constexpr = BLOCK // 4
    width = k // BLOCK
    row, column = tl.program_id(0) // width, tl.program_id(0) % width
    at = (row.to(tl.int64) * BLOCK + 4 * tl.arange(0, WORDS)[:, None]) * k + column * BLOCK
    at += tl.arange(0, BLOCK)[None, :]
    x0, x1 = tl.load(w + at).to(tl.float32), tl.load(w + at + k).to(tl.float32)
    x2, x3 = tl.load(w + at + 2 * k).to(tl.float32), tl.load(w + at + 3 * k).to(tl.float32)
    largest = tl.maximum(
        tl.maximum(magnitude_bits(x0), magnitude_bits(x1)), tl.maximum(magnitude_bits(x2), magnitude_bits(x3))
    )
    exponent = exponent_of(tl.max(tl.max(largest, 1), 0))
    inverse, values = power(exponent, True), values + at
    words = store_quantized(x0, values, inverse, INTERPRETED)
    words += store_quantized(x1, values + k, inverse, INTERPRETED) * byte
    words += store_quantized(x2, values + 2 * k, inverse, INTERPRETED) * (byte * byte)
    words += store_quantized(x3, values + 3 * k, inverse, INTERPRETED) * (byte * byte * byte)
    tl.store(exponents + row.to(tl.int64) * width + column, exponent.to(tl.int8))
    if TWICE:
        place = (column.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]) * (n // 4) + row * WORDS
        tl.store(transposed + place + tl.arange(0, WORDS)[None, :], tl.trans(words))
        tl.store(transposed_exponents + column.to(tl.int64) * (n // BLOCK) + row, exponent.to(tl.int8))


class Strides(NamedTuple):
    """Elements from one matrix to the next of each tensor."""

    of_values: Any
    of_exponents: Any
    of_x: Any


@triton.jit(do_not_specialize=["m"])
def dequantize_kernel(values, exponents, x, m, k, strides: Strides, WEIGHT: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows of one column of blocks, of the matrix of program_id(1)."""
    matrix = tl.program_id(1).to(tl.int64)
    values += matrix * strides.of_values
    exponents += matrix * strides.of_exponents
    x += matrix * strides.of_x
    width = k // BLOCK
    block = tl.program_id(0) % width
    rows = tl.program_id(0) // width * ROWS + tl.arange(0, ROWS)
    # Triton is told of as many neighbours as are 16 bytes of x. For more, which are fewer bytes of values, loads and
    # stores would have two layouts, and shared memory between them
    columns = tl.max_contiguous(tl.arange(0, BLOCK), 128 // x.dtype.element_ty.primitive_bitwidth)
    at = rows.to(tl.int64)[:, None] * k + block * BLOCK + columns[None, :]
    inside = rows < m
    if WEIGHT:
        places = (rows // BLOCK).to(tl.int64) * width + block
    else:
        places = block.to(tl.int64) * m + rows
    scale = power(tl.load(exponents + places, mask=inside, other=0).to(tl.int32), False)
    tile = tl.load(values + at, mask=inside[:, None], other=0.0).to(tl.float32) * scale[:, None]
    tl.store(x + at, tile.to(x.dtype.element_ty), mask=inside[:, None])


def require_e4m3(x: Tensor) -> None:
    """ValueError for a tensor on a GPU that has no e4m3."""
    require_capability(x, CAPABILITY, (100, 0), "which has no e4m3: quantise on sm_89 or later")


def require_capability(x: Tensor, first: tuple[int, int], behind: tuple[int, int], lack: str) -> None:
    """ValueError for a tensor on a GPU of a capability below `first`, or from `behind` on; other devices run no
    compiled kernel. lack: what such a GPU lacks, and which one does not."""
    if x.is_cuda and not first <= (found := torch.cuda.get_device_capability(x.device)) < behind:
        name = torch.cuda.get_device_name(x.device)
        raise ValueError(f"{name} is sm_{found[0]}{found[1]}, {lack}, or compute in 16 bits")


@replayed
def quantize_rows(x: Tensor) -> Blocks:
    """x in blocks of 1 x 128 along its columns.

    Math:     quantize_rows of reference.py, the same bytes
    Shapes:   x (M, K), K a multiple of 128, bfloat16, float16 or float32, which is copied first if it is not
              contiguous; values (M, K) float8_e4m3fn, exponents (K / 128, M) int8
    Numerics: the exponent follows from the bits of the largest magnitude, an integer maximum, which carries NaN; x is
              multiplied by the exact inverse of the scale and rounded once
    Traffic:  quantize_cost; 16-byte accesses of x and of values
    Order:    each block by itself; no communication, deterministic
    Source:   as in reference.py
    Errors:   ValueError for another shape or dtype, or on a GPU before sm_89
    """
    check_rows(x)
    require_e4m3(x)
    m, k = x.shape
    values, exponents = made = empty_rows(x, m, k)
    if x.numel():
        programs = triton.cdiv(m, ROWS) * (k // BLOCK.value)
        launch(
            quantize_rows_kernel, (programs,), x.contiguous(), values, exponents, m, k,
            ROWS=ROWS, INTERPRETED=is_interpreted(), **launch_options(ROW_WARPS, 1),
        )  # fmt: skip
    return made


def empty_result(like: Any, m: int, k: int, blocks: bool) -> Any:
    """A result (m, k) to be written, on the device of a tensor or of packed rows: in its dtype, or in blocks.

    ValueError for blocks of a width that is not whole ones, or on a GPU before sm_89.
    """
    if not blocks:
        return like.new_empty(m, k)
    check_width("a result in blocks", "columns", k)
    require_e4m3(like)
    return empty_rows(like, m, k)


@replayed
def quantize_weight(w: Tensor) -> Blocks:
    """w in blocks of 128 x 128.

    Math:     quantize_weight of reference.py, the same bytes
    Shapes:   w (N, K), both multiples of 128, bfloat16, float16 or float32, which is copied first if it is not
              contiguous; values (N, K) float8_e4m3fn, exponents (N / 128, K / 128) int8
    Numerics, order, source, errors: as in quantize_rows
    Traffic:  quantize_cost; 16-byte accesses of w and of values
    """
    check_weight("quantize_weight", w)
    require_e4m3(w)
    return launch_weight(w, False)[0]


@replayed
def quantize_weight_twice(w: Tensor) -> tuple[Blocks, Blocks]:
    """(w, w transposed) in blocks of 128 x 128: the same numbers, for the forward and for the gradient of its input.

    Math:     quantize_weight_twice of reference.py, the same bytes
    Shapes:   w (N, K) as in quantize_weight; the second has values (K, N) and exponents (K / 128, N / 128)
    Numerics, order, source, errors: as in quantize_rows
    Traffic:  quantize_cost with two copies: w is read once; 16-byte accesses
    """
    check_weight("quantize_weight_twice", w)
    require_e4m3(w)
    return launch_weight(w, True)


def launch_weight(w: Tensor, twice: bool) -> tuple[Blocks, Blocks]:
    """Quantise w, of which the second copy is the first one unless it is asked for."""
    n, k = w.shape
    first = empty_weight(w, n, k)
    second = empty_weight(w, k, n) if twice else first
    if w.numel():
        programs = n // BLOCK.value * (k // BLOCK.value)
        launch(
            quantize_weight_kernel, (programs,),
            w.contiguous(), *first, second.values.view(torch.int32), second.exponents, n, k, 256,
            TWICE=twice, INTERPRETED=is_interpreted(), **launch_options(WEIGHT_WARPS, 1),
        )  # fmt: skip
    return first, second


@replayed
def dequantize(blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """The numbers that blocks of rows stand for, (M, K), in this dtype.

    Math:     dequantize of reference.py, the same bits
    Shapes:   blocks as quantize_rows makes them, copied first if they are not contiguous; the result (M, K) bfloat16,
              float16 or float32
    Numerics: as in reference.py
    Traffic:  quantize_cost; accesses of 16 bytes of the result
    Order:    each block by itself; no communication, deterministic
    Errors:   ValueError for tensors of other shapes or dtypes, or on a GPU before sm_89
    """
    check_blocks("dequantize", blocks, dtype)
    return launch_dequantize(blocks, dtype, False)


@replayed
def dequantize_weight(blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """The numbers that blocks of a weight, or of its transposed copy, stand for, (N, K), in this dtype.

    Math:     dequantize_weight of reference.py, the same bits
    Shapes:   blocks as quantize_weight makes them, copied first if they are not contiguous; the result (N, K)
    Numerics, traffic, order, errors: as in dequantize
    """
    check_weight_blocks("dequantize_weight", blocks, dtype)
    return launch_dequantize(blocks, dtype, True)


@replayed
def dequantize_shards(blocks: Blocks, out: Tensor) -> Tensor:
    """dequantize_weight of several weights, as several ranks have sent them, written to `out`, which is the result.

    Math:     dequantize_shards of reference.py, the same bits
    Shapes:   values and out (R, N, K), exponents (R, N / 128, K / 128); each of the R matrices lies without gaps, and
              out is bfloat16, float16 or float32
    Numerics, order: as in dequantize
    Traffic:  quantize_cost of all rows; accesses of 16 bytes of out, if each matrix begins at multiples of them
    Errors:   ValueError for tensors of other shapes, strides or dtypes, or on a GPU before sm_89
    """
    check_shards("dequantize_shards", blocks, out)
    return launch_dequantize(blocks, out.dtype, True, out)


def launch_dequantize(blocks: Blocks, dtype: torch.dtype, weight: bool, x: Tensor | None = None) -> Tensor:
    """Dequantise blocks of rows, or of a weight; or of several weights to their x."""
    triton_dtype(dtype)  # an error for what kernels do not take
    values, exponents = blocks
    require_e4m3(values)
    if x is None:
        values, exponents = values.contiguous(), exponents.contiguous()
        x = values.new_empty(values.shape, dtype=dtype)
    (m, k), matrices = x.shape[-2:], x.shape[:-2].numel()
    # of a single one nothing is read, and zeros do not make Triton compile once more
    strides = Strides(*(each.stride(0) if matrices > 1 else 0 for each in (values, exponents, x)))
    if x.numel():
        programs = triton.cdiv(m, ROWS) * (k // BLOCK.value)
        launch(
            dequantize_kernel, (programs, matrices), values, exponents, x, m, k, strides,
            WEIGHT=weight, ROWS=ROWS, **launch_options(ROW_WARPS, 1),
        )  # fmt: skip
    return x
