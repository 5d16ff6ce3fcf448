"""Device functions on one tile of a matrix: order of tiles, loads, the K loop, epilogues, stores.

Belongs here: device code that several GEMMs call. Activations are in activation/formulas.py, communication in
protocol.py, host code in launch.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .activation.formulas import activate, differentiate
from .pack.kernel import read_block
from .philox.kernel import drop_tile

# An epilogue takes so many columns or bytes at a time. With more, the values that it computes would spill.
EPILOGUE_COLUMNS = tl.constexpr(16)
PLAIN_COLUMNS = tl.constexpr(32)
PACKED_BYTES = tl.constexpr(16 << 10)
GROUP_M = tl.constexpr(8)  # row blocks that share their columns' operand in L2


class Operand(NamedTuple):
    """One matrix of a product, on the device."""

    source: Any
    """A TMA descriptor, or a pointer."""
    row: Any
    """The row of `source` where the matrix begins; not 0 if `source` holds the matrices of several virtual ranks."""
    stride: Any
    """Elements from one row to the next."""


@triton.jit
def swizzle(tile, tiles_m, tiles_n):
    """(row block, column block) of a tile. In each group of GROUP_M row blocks the row block changes fastest."""
    width = GROUP_M * tiles_n
    first = (tile // width) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + (tile % width) % height, (tile % width) // height


@triton.jit
def load_block(
    source, row, column, row_end, column_end, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr
):
    """A block of a row-major matrix, with zeros outside of it; `source` is a TMA descriptor or a pointer."""
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
    """(accumulator, part) with the product of one step of K added. After the last step the accumulator has the sum.

    float32 products are summed in `part` for four steps, then added to the accumulator: one sum over a long K would
    lose digits that cuBLAS keeps. Products of other dtypes are added to the accumulator in each step.
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
def multiply_step(
    accumulator, part, a, b, m, n, m_end, n_end, k, step,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(accumulator, part) with one step of K of a tile of A B^T added, for A (m_end, k) and B (n_end, k).

    The tile begins at row m and column n. A_TRANSPOSED: A is stored as (k, m_end). B_TRANSPOSED: B is stored as
    (k, n_end). The loop around it must not wait for a flag, because the pipeliner would move loads to before the wait.
    """
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    TMA: tl.constexpr = TILE.tma
    at = step * BLOCK_K
    if A_TRANSPOSED:
        left = load_block(a.source, a.row + at, m, a.row + k, m_end, a.stride, BLOCK_K, BLOCK_M, TMA).T
    else:
        left = load_block(a.source, a.row + m, at, a.row + m_end, k, a.stride, BLOCK_M, BLOCK_K, TMA)
    if B_TRANSPOSED:
        right = load_block(b.source, b.row + at, n, b.row + k, n_end, b.stride, BLOCK_K, BLOCK_N, TMA)
    else:
        right = load_block(b.source, b.row + n, at, b.row + n_end, k, b.stride, BLOCK_N, BLOCK_K, TMA).T
    return add_product(accumulator, part, left, right, step, tl.cdiv(k, BLOCK_K))


@triton.jit
def multiply_inputs(
    pairs, lefts, rights, a_row, virtual, m, n, m_end, n_end, B_TRANSPOSED: tl.constexpr, TILE: tl.constexpr
):
    """One tile of sum_i A_i B_i^T for up to three pairs: K loops one after another into one accumulator."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.static_range(3):  # triton 3.6 has no len of a tuple with a None in it
        if pairs[i] is not None:
            b_row = virtual * (pairs[i].k if B_TRANSPOSED else n_end)
            a, b = Operand(lefts[i], a_row, pairs[i].a_stride), Operand(rights[i], b_row, pairs[i].b_stride)
            k = pairs[i].k
            part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for step in range(tl.cdiv(k, TILE.k)):
                result, part = multiply_step(result, part, a, b, m, n, m_end, n_end, k, step, False, B_TRANSPOSED, TILE)
    return result


@triton.jit
def load_packed(source, ROWS: tl.constexpr, COLUMNS: tl.constexpr, rows=None):
    """ROWS x COLUMNS values that lie without gaps; zeros behind the first `rows` rows, unless that is None."""
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = None if rows is None else (tl.arange(0, ROWS) < rows)[:, None]
    return tl.load(source + offsets, mask=mask, other=None if rows is None else 0.0)


@triton.jit
def sum_sources(slot, source_stride, WORLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, rows=None):
    """The float32 sum of every source's block (load_packed), in rank order: the same bits every time."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for source in tl.static_range(WORLD):
        total += load_packed(slot + source * source_stride, ROWS, COLUMNS, rows).to(tl.float32)
    return total


@triton.jit
def finish_tile(
    total, addends, key, first, virtual, row, column, row_end, column_end,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """residual + dropout(total + bias), in float32, which a row-parallel linear does once, after the reduction.

    Row 0 of the tile's matrix is row `first` of the addends. virtual: which of several stacked biases to add. ALIGNED:
    as in random_tile.
    """
    if addends.bias is not None:
        total = add_bias(total, addends.bias + virtual * column_end, column, column_end, COLUMNS)
    if addends.mask is not None:
        rows = row + tl.arange(0, ROWS)
        total = drop_tile(total, addends.mask, key, first, rows, column, row_end, ALIGNED, ROWS, COLUMNS)
    if addends.residual is not None:
        stride = addends.residual.stride
        source = addends.residual.pointer + tl.cast(first, tl.int64) * stride
        total += load_block(source, row, column, row_end, column_end, stride, ROWS, COLUMNS, False).to(tl.float32)
    return total


@triton.jit
def store_block(target, block, row, column, row_end, column_end, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Round a block to the target's dtype and store what lies inside, plainly, so that a release covers the stores."""
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    mask = (rows < row_end)[:, None] & (columns < column_end)[None, :]
    pointers = target + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointers, block.to(target.dtype.element_ty), mask=mask)


@triton.jit
def add_bias(accumulator, bias, column, column_end, BLOCK_N: tl.constexpr):
    columns = column + tl.arange(0, BLOCK_N)
    return accumulator + tl.load(bias + columns, mask=columns < column_end, other=0.0).to(tl.float32)[None, :]


@triton.jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and right half of a block's columns. Epilogues take a block in pieces: a whole one would spill."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def store_activated(
    target, block, bias, row, column, row_end, column_end,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store activate(block + bias), as store_block does, into rows without gaps."""
    if COLUMNS > (EPILOGUE_COLUMNS if ACTIVATION != "" else PLAIN_COLUMNS):
        left, right = halves(block, ROWS, COLUMNS)
        HALF: tl.constexpr = COLUMNS // 2
        store_activated(target, left, bias, row, column, row_end, column_end, ACTIVATION, ROWS, HALF)
        store_activated(target, right, bias, row, column + HALF, row_end, column_end, ACTIVATION, ROWS, HALF)
    else:
        if bias is not None:
            block = add_bias(block, bias, column, column_end, COLUMNS)
        store_block(target, activate(block, ACTIVATION), row, column, row_end, column_end, column_end, ROWS, COLUMNS)


@triton.jit
def store_packed(target, block, stride: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, rows=None):
    """A block's first `rows` rows, or all if that is None, rounded to the target's dtype, into memory with rows of
    `stride`: 16-byte stores, as no column is masked."""
    if ROWS * COLUMNS * (target.dtype.element_ty.primitive_bitwidth // 8) > PACKED_BYTES:
        left, right = halves(block, ROWS, COLUMNS)
        HALF: tl.constexpr = COLUMNS // 2
        store_packed(target, left, stride, ROWS, HALF, rows)
        store_packed(target + HALF, right, stride, ROWS, HALF, rows)
    else:
        offsets = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
        mask = None if rows is None else (tl.arange(0, ROWS) < rows)[:, None]
        tl.store(target + offsets, block.to(target.dtype.element_ty), mask=mask)


@triton.jit
def load_kept(source, at, row, column, row_end, column_end, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A block, in float32, of a matrix without gaps that begins at element `at` of what a forward kept: of `source`, or
    of the values that are packed in it."""
    if source.dtype.element_ty == tl.uint8:
        block = read_block(source, at, row, column, row_end, column_end, ROWS, COLUMNS)
    else:
        block = load_block(source + at, row, column, row_end, column_end, column_end, ROWS, COLUMNS, False)
        block = block.to(tl.float32)
    return block


@triton.jit
def store_derivative(
    accumulator, derivative, at, row, column, row_end, column_end,
    ACTIVATION: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store dx, dgate, and act(x) or act(gate) * x rebuilt; `accumulator` is the gradient of what is rebuilt.

    at: how many elements lie before row 0 in each operand of `derivative`. PIECE: columns at a time.
    """
    if COLUMNS > PIECE:
        left, right = halves(accumulator, ROWS, COLUMNS)
        HALF: tl.constexpr = COLUMNS // 2
        store_derivative(left, derivative, at, row, column, row_end, column_end, ACTIVATION, PIECE, ROWS, HALF)
        store_derivative(right, derivative, at, row, column + HALF, row_end, column_end, ACTIVATION, PIECE, ROWS, HALF)
    else:
        x = load_kept(derivative.x, at, row, column, row_end, column_end, ROWS, COLUMNS)
        if derivative.gate is not None:
            gate = load_kept(derivative.gate, at, row, column, row_end, column_end, ROWS, COLUMNS)
            value, slope = differentiate(gate, ACTIVATION)
            dgate = accumulator * x * slope
            store_block(derivative.dgate + at, dgate, row, column, row_end, column_end, column_end, ROWS, COLUMNS)
            dx, rebuilt = accumulator * value, value * x
        else:
            rebuilt, slope = differentiate(x, ACTIVATION)
            dx = accumulator * slope
        store_block(derivative.dx + at, dx, row, column, row_end, column_end, column_end, ROWS, COLUMNS)
        store_block(derivative.rebuilt + at, rebuilt, row, column, row_end, column_end, column_end, ROWS, COLUMNS)


@triton.jit
def column_blocks(weights, BLOCK_N: tl.constexpr):
    """Where the column blocks of the first, the second and the third weight end."""
    end_0 = tl.cdiv(weights[0].n, BLOCK_N)
    end_1 = end_0
    if weights[1].n is not None:
        end_1 += tl.cdiv(weights[1].n, BLOCK_N)
    end_2 = end_1
    if weights[2].n is not None:
        end_2 += tl.cdiv(weights[2].n, BLOCK_N)
    return end_0, end_1, end_2


@triton.jit
def place_tile(problem, b0, b1, b2, tile, rows, virtual, FORM: tl.constexpr):
    """(second operand, its Weight's n, bias and out, first row, first column) of a tile.

    Tiles count through all weights. Triton 3.6 cannot return None, so a bias or an out that is None is 0 here.
    """
    TILE: tl.constexpr = FORM.tile
    tiles_0, tiles_1, tiles_n = column_blocks(problem.weights, TILE.n)
    row_block, column_block = swizzle(tile, tl.cdiv(rows, TILE.m), tiles_n)
    b, weight, first = b0, problem.weights[0], 0
    # One K loop serves all weights, and a select chooses its descriptor: several loops would double shared memory.
    if problem.weights[1].n is not None:
        if column_block >= tiles_0:
            b, weight, first = b1, problem.weights[1], tiles_0
        if problem.weights[2].n is not None:
            if column_block >= tiles_1:
                b, weight, first = b2, problem.weights[2], tiles_1
    b_row = tl.cast(virtual * (problem.k if FORM.b_transposed else weight.n), tl.int32)
    bias = 0 if weight.bias is None else weight.bias
    out = 0 if weight.out is None else weight.out
    right = Operand(b, b_row, weight.stride)
    return right, weight.n, bias, out, row_block * TILE.m, (column_block - first) * TILE.n


@triton.jit
def store_linear(problem, result, n, bias, out, chunk, row, column, rows, virtual, FORM: tl.constexpr):
    """The epilogue of a tile: bias and activation, or the derivative, and the stores."""
    TILE: tl.constexpr = FORM.tile
    ACTIVATION: tl.constexpr = FORM.activation  # triton 3.6 takes no str of a tuple as an argument
    derivative = problem.derivative
    at = tl.cast(virtual * FORM.world + chunk, tl.int64) * rows * n
    if derivative.x is not None:
        store_derivative(result, derivative, at, row, column, rows, n, ACTIVATION, FORM.piece, TILE.m, TILE.n)
    else:
        if problem.weights[0].bias is None:
            of_rank = None
        else:
            of_rank = bias + virtual * n
        store_activated(out + at, result, of_rank, row, column, rows, n, ACTIVATION, TILE.m, TILE.n)


@triton.jit
def linear_tiles(
    problem, source, b0, b1, b2, source_row, chunk, begin, end, programs, rows, virtual, FORM: tl.constexpr
):
    """Compute and store tiles begin, begin + programs, ... below `end` of epilogue(A B_i^T), for up to three weights.

    A is `rows` rows of `source`, from source_row on. The result is chunk number `chunk` of the output of virtual rank
    `virtual`. Each chunk has tiles of its own, so that a row's bits do not depend on how many ranks there are.
    One loop has the steps of K of all tiles. Its loads run ahead of its products, so a tile's epilogue runs while the
    next tile's first loads are under way. The caller must have waited for all of A.
    """
    TILE: tl.constexpr = FORM.tile
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    k, steps = problem.k, tl.cdiv(problem.k, TILE.k)
    tile, step, done, last = begin - programs, steps - 1, begin, steps - 1
    left = Operand(source, source_row, problem.a_stride)
    right, n, _bias, _out, row, column = place_tile(problem, b0, b1, b2, 0, rows, virtual, FORM)
    result, part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(tl.cdiv(end - begin, programs) * steps):
        # All that the next loads need stands before the product, or they would not run ahead of it.
        step += 1
        if step == steps:
            tile, step = tile + programs, 0
            right, n, _bias, _out, row, column = place_tile(problem, b0, b1, b2, tile, rows, virtual, FORM)
        result, part = multiply_step(
            result, part, left, right, row, column, rows, n, k, step, FORM.a_transposed, FORM.b_transposed, TILE
        )
        # Products have a count of their own. That of the loads would be copied in each step, once for every step ahead.
        if i == last:
            _used, width, bias, out, m, at = place_tile(problem, b0, b1, b2, done, rows, virtual, FORM)
            store_linear(problem, result, width, bias, out, chunk, m, at, rows, virtual, FORM)
            result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            done, last = done + programs, last + steps
