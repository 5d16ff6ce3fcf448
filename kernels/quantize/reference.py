"""Quantisation of activations, gradients and weights to blocks of e4m3: the specification (torch only), and the cost.

format.py has the layout. Nothing here is differentiable: whoever quantises says what the gradient is.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tpformer.torch_private import is_fake

from ..cast import cast
from ..cost import Cost
from ..operands import FLOATS, require, wide_dtype
from .format import (
    BLOCK,
    EXPONENTS,
    HIGHEST,
    LOWEST,
    NAN,
    NOT_A_NUMBER,
    VALUES,
    Blocks,
    empty_rows,
    empty_weight,
    row_exponents,
    weight_exponents,
)

MANTISSAS = {torch.float32: 23, torch.float64: 52}  # bits, without the leading one
BIASES = {torch.float32: 127, torch.float64: 1023}  # of exponent fields
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}  # as wide
KEPT = 3  # bits of e4m3's mantissa
SMALLEST_NORMAL = 2.0**-6  # of e4m3; below, values are multiples of 2**-9


def check_rows(x: Tensor) -> None:
    """ValueError unless x is a floating (M, K) with whole blocks along K."""
    check_matrix("quantize_rows", x)
    check_width("quantize_rows: x", "columns", x.shape[1])


def check_weight(operation: str, w: Tensor) -> None:
    """ValueError unless w is a floating (N, K) with whole blocks along both."""
    check_matrix(operation, w)
    check_width(f"{operation}: w", "rows", w.shape[0])
    check_width(f"{operation}: w", "columns", w.shape[1])


def check_matrix(operation: str, x: Tensor) -> None:
    """ValueError unless x is a floating matrix."""
    if x.dim() != 2 or x.dtype not in FLOATS:
        raise ValueError(
            f"{operation}: the operand is {tuple(x.shape)} {x.dtype}: give a matrix of {' or '.join(map(str, FLOATS))}"
        )


def check_width(what: str, dim: str, size: int) -> None:
    """ValueError unless so many elements are whole blocks."""
    if size % BLOCK:
        raise ValueError(
            f"{what} has {size} {dim}, and a scale belongs to {BLOCK} of them: give a multiple of {BLOCK}, such as "
            f"{size + -size % BLOCK}, or compute in 16 bits"
        )


def check_blocks(operation: str, blocks: Blocks, dtype: torch.dtype) -> None:
    """ValueError unless these are blocks of rows, and the dtype floats."""
    check_parts(operation, blocks, row_exponents, ("columns",), dtype)


def check_weight_blocks(operation: str, blocks: Blocks, dtype: torch.dtype) -> None:
    """ValueError unless these are blocks of a weight, and the dtype floats."""
    check_parts(operation, blocks, weight_exponents, ("columns", "rows"), dtype)


def check_shards(operation: str, blocks: Blocks, out: Tensor) -> None:
    """ValueError unless these are blocks of several weights, one for each matrix of `out`, and none has gaps."""
    require(operation, blocks.values, ("values", blocks.values, out.shape, (VALUES,)), ("out", out, out.shape, FLOATS))
    if out.dim() != 3 or not all(x[:1].is_contiguous() for x in (*blocks, out)):
        shapes = ", ".join(f"{tuple(x.shape)} with strides {x.stride()}" for x in (*blocks, out))
        raise ValueError(f"{operation}: {shapes}: give three dims, and each matrix without gaps")
    for dim in (1, 2):
        check_width(f"{operation}: values", ("rows", "columns")[dim - 1], out.shape[dim])
    wanted = len(out), *weight_exponents(*out.shape[1:])
    require(operation, blocks.values, ("exponents", blocks.exponents, wanted, (EXPONENTS,)))


def check_parts(operation: str, blocks: Blocks, shape: Callable, whole: Sequence[str], dtype: torch.dtype) -> None:
    """ValueError unless the values are a matrix, with whole blocks along these dims, the exponents of the shape that
    follows, and the dtype floats."""
    values, exponents = blocks
    if dtype not in FLOATS:
        raise ValueError(f"{operation}: the result's dtype is {dtype}: give {' or '.join(map(str, FLOATS))}")
    if values.dim() != 2:
        raise ValueError(f"{operation}: values are {tuple(values.shape)}: give a matrix")
    for dim in whole:
        check_width(f"{operation}: values", dim, values.shape[dim == "columns"])
    wanted = ("exponents", exponents, shape(*values.shape), (EXPONENTS,))
    require(operation, values, ("values", values, values.shape, (VALUES,)), wanted)


def exponents_of(largest: Tensor) -> Tensor:
    """The exponents, int8, of blocks whose largest magnitudes are these, float32 or float64.

    From the bits: the exponent of a number (1 + m) 2**x is x - 8, and one more if its mantissa m exceeds LARGEST's. A
    logarithm would be rounded, and wrong where amax is LARGEST times a power of two.
    """
    mantissa, dtype = MANTISSAS[largest.dtype], largest.dtype
    bits = largest.view(INTEGERS[dtype])
    exceeds = (bits & ((1 << mantissa) - 1)) > 3 << (mantissa - 2)
    exponents = (bits >> mantissa).sub_(BIASES[dtype] + 8).add_(exceeds).clamp_(min=LOWEST)
    # float64 also has numbers that are too large; as float32 they would be infinite
    exponents.masked_fill_(~largest.isfinite() | (exponents > HIGHEST), NOT_A_NUMBER)
    return exponents.to(EXPONENTS)


def powers(exponents: Tensor, dtype: torch.dtype, sign: int = 1) -> Tensor:
    """2**(sign * exponent) in float32 or float64, exactly; NaN for NOT_A_NUMBER."""
    fields = exponents.to(INTEGERS[dtype]).mul_(sign).add_(BIASES[dtype])
    power = (fields << MANTISSAS[dtype]).view(dtype)
    return power.masked_fill(exponents == NOT_A_NUMBER, torch.nan)


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest e4m3 of x, float32 or float64, of magnitudes up to LARGEST; of two the even one.

    torch's cast of float64 goes by float32 and rounds twice, so a float64 is rounded here first.
    """
    return (x if x.dtype == torch.float32 else rounded(x)).to(VALUES)


def rounded(x: Tensor) -> Tensor:
    """x, float64, rounded to what e4m3 has. Adding and subtracting 1.5 * 2**43 leaves multiples of 2**-9."""
    drop = MANTISSAS[x.dtype] - KEPT
    bits = x.view(torch.int64)
    normal = (bits + (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)) & -(1 << drop)
    shift = 1.5 * 2.0 ** (MANTISSAS[x.dtype] - 9)
    small = torch.copysign((x + shift).sub_(shift), x)
    return torch.where(x.abs() < SMALLEST_NORMAL, small, normal.view(x.dtype))


def in_blocks(x: Tensor, exponents: Tensor) -> Tensor:
    """The values of x, float32 or float64, whose elements' blocks have these exponents, which are broadcast."""
    values = to_e4m3(x * powers(exponents, x.dtype, -1))
    values.view(torch.uint8).masked_fill_(exponents == NOT_A_NUMBER, NAN)  # as a product, NaN might have a sign
    return values


def quantize_rows(x: Tensor) -> Blocks:
    """x in blocks of 1 x 128 along its columns.

    Math:     values = e4m3(x / s), s = 2**exponent the smallest power of two with max|x / s| <= 448 in each block, at
              least 2**-120. A block with a NaN or an infinity (in float64 also with a number beyond 448 * 2**120) is
              NaN altogether
    Shapes:   x (M, K), K a multiple of 128, bfloat16, float16, float32 or float64, any strides; values (M, K)
              float8_e4m3fn, exponents (K / 128, M) int8
    Numerics: one rounding, of x itself, to the nearest and of two to the even one. Equal numbers give equal blocks,
              whatever their dtype
    Traffic:  see quantize_cost
    Order:    each block by itself: a slice of x by rows, or by 128 columns, gives the same slice of the result
    Source:   blocks of 1 x 128 and 128 x 128: DeepSeek-V3 (arXiv:2412.19437); powers of two: OCP MX v1.0, and
              TransformerEngine's Float8BlockScaling
    Errors:   ValueError for another shape or dtype
    """
    check_rows(x)
    if is_fake(x):  # of a dry run, which has no values
        return empty_rows(x, *x.shape)
    x = cast(x.detach(), wide_dtype(x.dtype)).unflatten(1, (x.shape[1] // BLOCK, BLOCK))
    exponents = exponents_of(x.abs().amax(2))
    values = in_blocks(x, exponents[:, :, None])
    return Blocks(values.flatten(1).contiguous(), exponents.t().contiguous())


def quantize_weight(w: Tensor) -> Blocks:
    """w in blocks of 128 x 128.

    Math:     as in quantize_rows, for blocks of 128 rows and 128 columns
    Shapes:   w (N, K), both multiples of 128, dtypes as in quantize_rows; values (N, K) float8_e4m3fn, exponents
              (N / 128, K / 128) int8
    Numerics, order, source, errors: as in quantize_rows
    Traffic:  see quantize_cost
    """
    check_weight("quantize_weight", w)
    return _quantize_weight(w)


def quantize_weight_twice(w: Tensor) -> tuple[Blocks, Blocks]:
    """(w, w transposed) in blocks of 128 x 128: the same numbers, for the forward and for the gradient of its input.

    Shapes:   w (N, K) as in quantize_weight; the second has values (K, N) and exponents (K / 128, N / 128), without
              gaps, because matrix units multiply 8-bit values along rows only
    Math, numerics, order, source, errors: as in quantize_weight
    Traffic:  see quantize_cost
    """
    check_weight("quantize_weight_twice", w)
    values, exponents = blocks = _quantize_weight(w)
    transposed = values.view(torch.uint8).t().contiguous().view(VALUES)
    return blocks, Blocks(transposed, exponents.t().contiguous())


def _quantize_weight(w: Tensor) -> Blocks:
    rows, columns = w.shape
    if is_fake(w):
        return empty_weight(w, rows, columns)
    x = (
        cast(w.detach(), wide_dtype(w.dtype))
        .unflatten(1, (columns // BLOCK, BLOCK))
        .unflatten(0, (rows // BLOCK, BLOCK))
    )
    exponents = exponents_of(x.abs().amax((1, 3)))
    values = in_blocks(x, exponents[:, None, :, None])
    return Blocks(values.flatten(2).flatten(0, 1).contiguous(), exponents)


def dequantize(blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """The numbers that blocks of rows stand for, (M, K), in this dtype.

    Math:     value * 2**exponent; NaN in a block with exponent NOT_A_NUMBER
    Shapes:   blocks as quantize_rows makes them; the result (M, K)
    Numerics: exact in bfloat16, float32 and float64, but for 448 * 2**120 > number >= 2**128, which a float32 near its
              maximum is rounded up to: it is infinite but in float64. In float16 rounded once, and infinite from 65520
    Traffic:  see quantize_cost, which is the same
    Order:    each block by itself
    Errors:   ValueError for tensors of other shapes or dtypes
    """
    check_blocks("dequantize", blocks, dtype)
    if is_fake(blocks.values):
        return blocks.values.new_empty(blocks.values.shape, dtype=dtype)
    columns = blocks.values.shape[1]
    wide = wide_dtype(dtype)
    values = blocks.values.to(wide).unflatten(1, (columns // BLOCK, BLOCK))
    return cast((values * powers(blocks.exponents, wide).t()[:, :, None]).flatten(1), dtype)


def dequantize_weight(blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """The numbers that blocks of a weight, or of its transposed copy, stand for, (N, K), in this dtype.

    Shapes:   blocks as quantize_weight makes them; the result (N, K)
    Math, numerics, traffic, order, errors: as in dequantize
    """
    check_weight_blocks("dequantize_weight", blocks, dtype)
    if is_fake(blocks.values):
        return blocks.values.new_empty(blocks.values.shape, dtype=dtype)
    rows, columns = blocks.values.shape
    wide = wide_dtype(dtype)
    values = blocks.values.to(wide).unflatten(1, (columns // BLOCK, BLOCK)).unflatten(0, (rows // BLOCK, BLOCK))
    return cast((values * powers(blocks.exponents, wide)[:, None, :, None]).flatten(2).flatten(0, 1), dtype)


def dequantize_shards(blocks: Blocks, out: Tensor) -> Tensor:
    """dequantize_weight of several weights, as several ranks have sent them, written to `out`, which is the result.

    Shapes:   values and out (R, N, K), exponents (R, N / 128, K / 128); each of the R matrices lies without gaps
    Math, numerics, traffic, order: as in dequantize
    Errors:   ValueError for tensors of other shapes, strides or dtypes
    """
    check_shards("dequantize_shards", blocks, out)
    for values, exponents, of_rank in zip(*blocks, out, strict=True):
        of_rank.copy_(dequantize_weight(Blocks(values, exponents), out.dtype))
    return out


def quantize_cost(m: int, k: int, itemsize: int, block_rows: int = 1, copies: int = 1) -> Cost:
    """Of quantising (m, k), and of dequantising one copy: itemsize bytes a value on one side, on the other for each
    copy a byte a value and a byte a block of block_rows x 128. Two operations a value: magnitude and multiplication."""
    return Cost(2 * m * k, m * k * itemsize + copies * (m * k + m * k // (block_rows * BLOCK)))
