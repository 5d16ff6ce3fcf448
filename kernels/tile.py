"""Device functions on one tile of a GEMM: order of tiles, loads, the K loop, activations, stores.

Belongs here: code that several GEMM kernels inline. No communication (protocol.py), no host code (launch.py).
"""

import triton
import triton.language as tl

from .philox.kernel import random_tile

# columns that an epilogue takes at a time: with more, values between accumulator and store spill
DERIVATIVE_COLUMNS = tl.constexpr(32)
ACTIVATION_COLUMNS = tl.constexpr(32)
PACKED_ELEMENTS = tl.constexpr(128 * 128)
GROUP_M = tl.constexpr(8)  # row blocks that share their columns' operand in L2


@triton.jit
def swizzle(tile, tiles_m, tiles_n):
    """(row block, column block) of a tile: columns run fastest over groups of GROUP_M row blocks."""
    width = GROUP_M * tiles_n
    first = (tile // width) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + (tile % width) % height, (tile % width) // height


@triton.jit
def load_block(
    source, row, column, row_end, column_end, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr
):
    """A block of a row-major matrix, zero outside of it: by a TMA descriptor, or by pointers."""
    if TMA:
        block = source.load([row, column])
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        mask = (rows < row_end)[:, None] & (columns < column_end)[None, :]
        block = tl.load(source + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    return block


@triton.jit
def add_product(accumulator, part, left, right, step, steps):
    """Add the product of one step of K; after the last of the `steps` the accumulator has the sum, and part is zero.

    float32 products go into `part` for four steps at a time: one sum over a long K would lose digits that cuBLAS keeps.
    Others go into the accumulator at once.
    """
    if left.dtype == tl.float32:
        part = tl.dot(left, right, part, input_precision="ieee")
        if (step % 4 == 3) | (step == steps - 1):
            accumulator += part
            part = tl.zeros_like(part)
    else:
        accumulator = tl.dot(left, right, accumulator)
    return accumulator, part


@triton.jit
def multiply(
    accumulator,
    a,
    b,
    a_row,
    b_row,
    m,
    n,
    m_end,
    n_end,
    k,
    a_stride,
    b_stride,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """accumulator + A B^T of one tile, A (m_end, k) and B (n_end, k), whose first row and column are m and n.

    A_TRANSPOSED: A is stored as (k, m_end), B_TRANSPOSED: B as (k, n_end). a_row, b_row: where the served rank's matrix
    starts in a stack of them. The loop holds no wait: the pipeliner would move its loads over it.
    """
    part, steps = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.cdiv(k, BLOCK_K)
    for step in range(steps):
        at = step * BLOCK_K
        if A_TRANSPOSED:
            left = load_block(a, a_row + at, m, a_row + k, m_end, a_stride, BLOCK_K, BLOCK_M, TMA).T
        else:
            left = load_block(a, a_row + m, at, a_row + m_end, k, a_stride, BLOCK_M, BLOCK_K, TMA)
        if B_TRANSPOSED:
            right = load_block(b, b_row + at, n, b_row + k, n_end, b_stride, BLOCK_K, BLOCK_N, TMA)
        else:
            right = load_block(b, b_row + n, at, b_row + n_end, k, b_stride, BLOCK_N, BLOCK_K, TMA).T
        accumulator, part = add_product(accumulator, part, left, right, step, steps)
    return accumulator


@triton.jit
def multiply_inputs(
    a0, a1, a2, b0, b1, b2, k0, k1, k2, a0_stride, a1_stride, a2_stride, b0_stride, b1_stride, b2_stride,
    a_row, virtual, m, n, m_end, n_end, INPUTS: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One tile of sum_i A_i B_i^T for up to three pairs: K loops one after another into one accumulator."""
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    result = multiply(
        result, a0, b0, a_row, virtual * (k0 if B_TRANSPOSED else n_end), m, n, m_end, n_end, k0, a0_stride, b0_stride,
        False, B_TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
    )  # fmt: skip
    if INPUTS > 1:
        result = multiply(
            result, a1, b1, a_row, virtual * (k1 if B_TRANSPOSED else n_end), m, n, m_end, n_end, k1, a1_stride,
            b1_stride, False, B_TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
        )  # fmt: skip
    if INPUTS > 2:
        result = multiply(
            result, a2, b2, a_row, virtual * (k2 if B_TRANSPOSED else n_end), m, n, m_end, n_end, k2, a2_stride,
            b2_stride, False, B_TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
        )  # fmt: skip
    return result


@triton.jit
def sum_sources(slot, source_stride, WORLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The float32 sum of every source's ROWS x COLUMNS packed values, in rank order: the same bits every time."""
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for source in tl.static_range(WORLD):
        total += tl.load(slot + source * source_stride + offsets).to(tl.float32)
    return total


@triton.jit
def finish(
    total, bias, residual, start, key_low, key_high, threshold, scale, row, column, row_end, column_end,
    BIAS: tl.constexpr, DROPOUT: tl.constexpr, RESIDUAL: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """residual + dropout(total + bias), in float32; what a row-parallel linear adds once, after the reduction.

    ALIGNED: as in random_tile."""
    if BIAS:
        total = add_bias(total, bias, column, column_end, COLUMNS)
    if DROPOUT:
        rows = row + tl.arange(0, ROWS)
        starts = tl.load(start + rows, mask=rows < row_end, other=0)
        keep = random_tile(key_low, key_high, starts, column, ALIGNED, ROWS, COLUMNS) >= threshold
        total = tl.where(keep, total * scale, 0.0)
    if RESIDUAL:
        added = load_block(residual, row, column, row_end, column_end, column_end, ROWS, COLUMNS, False)
        total += added.to(tl.float32)
    return total


@triton.jit
def store_block(target, block, row, column, row_end, column_end, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Round a block to the target's dtype and store what lies inside; plain stores, so that a release covers them."""
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    mask = (rows < row_end)[:, None] & (columns < column_end)[None, :]
    pointers = target + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointers, block.to(target.dtype.element_ty), mask=mask)


@triton.jit
def sigmoid(x):
    """tl.sigmoid, its exponential without the three instructions for results below 2**-126."""
    result, _ = sigmoid_and_rest(x)
    return result


@triton.jit
def sigmoid_and_rest(x):
    """sigmoid(x), and 1 - sigmoid(x) without the cancellation that large factors of it would show."""
    exponential = tl.exp2(x * -1.4426950408889634)  # infinite only where x < 0
    result = 1.0 / (1.0 + exponential)
    return result, tl.where(x < 0.0, 1.0 - result, exponential * result)


@triton.jit
def normal_tail(x):
    """Phi(-|x|) of the normal distribution, and exp(-x**2 / 2), in float32.

    Their quotient is a polynomial in s = |x| / (|x| + 5), whose constant is 1/2 and whose other coefficients are a
    weighted least-squares fit: x * Phi(x) is off by at most 2.2e-9 before rounding. In float32 as accurate as
    (1 + erf(-|x| / sqrt 2)) / 2, more so where that cancels, and with fewer instructions: those of erf, not memory,
    would set an element-wise kernel's time.
    """
    magnitude = tl.abs(x)
    s = magnitude / (magnitude + 5.0)
    bell = tl.exp2(x * (x * -0.7213475204444817))
    tail = 1.0971336 * s - 3.6620913
    tail = tail * s + 5.9603216
    tail = tail * s - 6.1181078
    tail = tail * s + 4.2553165
    tail = tail * s - 1.9947117
    tail = (tail * s + 0.5) * bell
    return tail, bell


@triton.jit
def activate(x, KIND: tl.constexpr):
    """gelu (erf), gelu_tanh, silu, relu2 or "" (none), in float32; formulas in activation/reference.py."""
    if KIND == "gelu":
        tail, _ = normal_tail(x)
        x = tl.maximum(x, 0.0) - tl.abs(x) * tail
    elif KIND == "gelu_tanh":
        x = x * sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * (x * x)))
    elif KIND == "silu":
        x = x * sigmoid(x)
    elif KIND == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)  # a NaN stays one, unlike with tl.maximum
        x = positive * positive
    return x


@triton.jit
def differentiate(x, KIND: tl.constexpr):
    """The activation and its derivative at x, in float32."""
    if KIND == "gelu":
        tail, bell = normal_tail(x)
        cumulative = tl.where(x < 0.0, tail, 1.0 - tail)
        value = x * cumulative
        slope = cumulative + x * 0.3989422804014327 * bell
    elif KIND == "gelu_tanh":
        weight, rest = sigmoid_and_rest(x * (1.5957691216057308 + 0.07135481627260025 * (x * x)))
        value = x * weight
        slope = weight + value * rest * (1.5957691216057308 + 0.21406444881780076 * (x * x))
    elif KIND == "silu":
        weight, rest = sigmoid_and_rest(x)
        value = x * weight
        slope = weight + value * rest
    elif KIND == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)
        value = positive * positive
        slope = 2.0 * positive
    else:
        value = x
        slope = x * 0.0 + 1.0
    return value, slope


@triton.jit
def add_bias(accumulator, bias, column, column_end, BLOCK_N: tl.constexpr):
    columns = column + tl.arange(0, BLOCK_N)
    return accumulator + tl.load(bias + columns, mask=columns < column_end, other=0.0).to(tl.float32)[None, :]


@triton.jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and right half of a block's columns: epilogues go piece by piece, or they spill."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def store_activated(
    target, block, row, column, row_end, column_end, stride,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """store_block of the activation."""
    if ACTIVATION != "" and COLUMNS > ACTIVATION_COLUMNS:
        left, right = halves(block, ROWS, COLUMNS)
        HALF: tl.constexpr = COLUMNS // 2
        store_activated(target, left, row, column, row_end, column_end, stride, ACTIVATION, ROWS, HALF)
        store_activated(target, right, row, column + HALF, row_end, column_end, stride, ACTIVATION, ROWS, HALF)
    else:
        store_block(target, activate(block, ACTIVATION), row, column, row_end, column_end, stride, ROWS, COLUMNS)


@triton.jit
def store_packed(target, block, stride: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A whole block, rounded to the target's dtype, into memory with rows of `stride`: unmasked 16-byte stores."""
    if ROWS * COLUMNS > PACKED_ELEMENTS:
        left, right = halves(block, ROWS, COLUMNS)
        HALF: tl.constexpr = COLUMNS // 2
        store_packed(target, left, stride, ROWS, HALF)
        store_packed(target + HALF, right, stride, ROWS, HALF)
    else:
        offsets = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
        tl.store(target + offsets, block.to(target.dtype.element_ty))


@triton.jit
def store_derivative(
    accumulator, x, gate, dx, dgate, rebuilt, row, column, row_end, column_end,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """From the gradient of act(x), or of act(gate) * x: dx, dgate, and the value itself for the weight gradient."""
    if COLUMNS > DERIVATIVE_COLUMNS:
        left, right = halves(accumulator, ROWS, COLUMNS)
        HALF: tl.constexpr = COLUMNS // 2
        store_derivative(left, x, gate, dx, dgate, rebuilt, row, column, row_end, column_end,
                         ACTIVATION, GATED, ROWS, HALF)  # fmt: skip
        store_derivative(right, x, gate, dx, dgate, rebuilt, row, column + HALF, row_end, column_end,
                         ACTIVATION, GATED, ROWS, HALF)  # fmt: skip
    else:
        source = load_block(x, row, column, row_end, column_end, column_end, ROWS, COLUMNS, False).to(tl.float32)
        if GATED:
            gated = load_block(gate, row, column, row_end, column_end, column_end, ROWS, COLUMNS, False)
            value, slope = differentiate(gated.to(tl.float32), ACTIVATION)
            store_block(dgate, accumulator * source * slope, row, column, row_end, column_end, column_end,
                        ROWS, COLUMNS)  # fmt: skip
            store_block(dx, accumulator * value, row, column, row_end, column_end, column_end, ROWS, COLUMNS)
            store_block(rebuilt, value * source, row, column, row_end, column_end, column_end, ROWS, COLUMNS)
        else:
            value, slope = differentiate(source, ACTIVATION)
            store_block(dx, accumulator * slope, row, column, row_end, column_end, column_end, ROWS, COLUMNS)
            store_block(rebuilt, value, row, column, row_end, column_end, column_end, ROWS, COLUMNS)


@triton.jit
def column_blocks(n0, n1, n2, WEIGHTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the column blocks of the first, the second and the third weight end."""
    end_0 = tl.cdiv(n0, BLOCK_N)
    end_1 = end_0 + (tl.cdiv(n1, BLOCK_N) if WEIGHTS > 1 else 0)
    return end_0, end_1, end_1 + (tl.cdiv(n2, BLOCK_N) if WEIGHTS > 2 else 0)


@triton.jit
def linear_tile(
    source, source_row, chunk, tile, tiles_m, tiles_0, tiles_1, tiles_n, virtual,
    b0, b1, b2, bias0, bias1, bias2, c0, c1, c2, x, gate,
    rows, n0, n1, n2, k, a_stride, b0_stride, b1_stride, b2_stride,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, WEIGHTS: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, DERIVATIVE: tl.constexpr, GATED: tl.constexpr, WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One tile of epilogue(A B_i^T), for up to three weights whose column blocks follow one another in one launch.

    A is the `rows` rows of `source` from source_row on, chunk number `chunk` of WORLD in the output of the virtual-th
    served rank. Tiles restart at every chunk, so that a row does not depend on how many ranks there are.
    """
    row_block, column_block = swizzle(tile, tiles_m, tiles_n)
    b, bias, c, n, b_stride, first = b0, bias0, c0, n0, b0_stride, 0
    if WEIGHTS > 1:  # a descriptor chosen by `if` costs one select; a K loop for each would double the shared memory
        if column_block >= tiles_0:
            b, bias, c, n, b_stride, first = b1, bias1, c1, n1, b1_stride, tiles_0
        if WEIGHTS > 2:
            if column_block >= tiles_1:
                b, bias, c, n, b_stride, first = b2, bias2, c2, n2, b2_stride, tiles_1
    row, column = row_block * BLOCK_M, (column_block - first) * BLOCK_N
    b_row = tl.cast(virtual * (k if B_TRANSPOSED else n), tl.int32)
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    result = multiply(
        result, source, b, source_row, b_row, row, column, rows, n, k, a_stride, b_stride,
        A_TRANSPOSED, B_TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
    )  # fmt: skip
    at = tl.cast(virtual * WORLD + chunk, tl.int64) * rows * n
    if DERIVATIVE:
        store_derivative(result, x + at, gate + at, c0 + at, c1 + at, c2 + at, row, column, rows, n,
                         ACTIVATION, GATED, BLOCK_M, BLOCK_N)  # fmt: skip
    else:
        if BIAS:
            result = add_bias(result, bias + virtual * n, column, n, BLOCK_N)
        store_activated(c + at, result, row, column, rows, n, n, ACTIVATION, BLOCK_M, BLOCK_N)
