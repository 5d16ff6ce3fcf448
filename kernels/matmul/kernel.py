"""matmul, gated_matmul and matmul_derivative: persistent GEMMs with their epilogues, one rank, no communication."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..configurations import select_tile
from ..launch import Tile, launch_options, operand, padded, persistent_programs
from ..tile import activate, add_product, column_blocks, linear_tile, load_block, store_block, swizzle

MAXIMUM_WEIGHTS = 3  # q, k, v


@triton.jit(do_not_specialize=["m"])
def matmul_kernel(
    a, b0, b1, b2, bias0, bias1, bias2, c0, c1, c2, x, gate,
    m, n0, n1, n2, k, a_stride, b0_stride, b1_stride, b2_stride,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, WEIGHTS: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, DERIVATIVE: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """C_i = epilogue(A B_i^T) for up to three weights, whose column blocks follow one another in one launch."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_0, tiles_1, tiles_n = column_blocks(n0, n1, n2, WEIGHTS, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        linear_tile(
            a, 0, 0, tile, tiles_m, tiles_0, tiles_1, tiles_n, 0, b0, b1, b2, bias0, bias1, bias2, c0, c1, c2, x, gate,
            m, n0, n1, n2, k, a_stride, b0_stride, b1_stride, b2_stride, A_TRANSPOSED, B_TRANSPOSED, WEIGHTS, BIAS,
            ACTIVATION, DERIVATIVE, GATED, 1, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
        )  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def gated_matmul_kernel(
    a, gate_weight, up_weight, c, gate, up, m, n, k, a_stride, gate_stride, up_stride,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Two accumulators per tile share A's loads; both projections are stored, and the activation is of the rounded."""
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row_block, column_block = swizzle(tile, tiles_m, tiles_n)
        row, column = row_block * BLOCK_M, column_block * BLOCK_N
        nothing, steps = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.cdiv(k, BLOCK_K)
        g, u, g_part, u_part = nothing, nothing, nothing, nothing
        for step in range(steps):
            at = step * BLOCK_K
            left = load_block(a, row, at, m, k, a_stride, BLOCK_M, BLOCK_K, TMA)
            right = load_block(gate_weight, column, at, n, k, gate_stride, BLOCK_N, BLOCK_K, TMA).T
            g, g_part = add_product(g, g_part, left, right, step, steps)
            right = load_block(up_weight, column, at, n, k, up_stride, BLOCK_N, BLOCK_K, TMA).T
            u, u_part = add_product(u, u_part, left, right, step, steps)
        g_rounded, u_rounded = g.to(gate.dtype.element_ty), u.to(up.dtype.element_ty)  # first: fewer registers live
        store_block(gate, g_rounded, row, column, m, n, n, BLOCK_M, BLOCK_N)
        store_block(up, u_rounded, row, column, m, n, n, BLOCK_M, BLOCK_N)
        value = activate(g_rounded.to(tl.float32), ACTIVATION) * u_rounded.to(tl.float32)
        store_block(c, value, row, column, m, n, n, BLOCK_M, BLOCK_N)


def blocks(tile: Tile) -> dict[str, int | bool]:
    return {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "TMA": tile.tma}


def three(values: Sequence) -> tuple:
    """Kernels take three weights; the missing ones repeat the first and are never touched."""
    return (*values, *[values[0]] * (MAXIMUM_WEIGHTS - len(values)))


def matmul(
    a: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    activation: str | None = None,
    a_transposed: bool = False,
    b_transposed: bool = False,
    tile: Tile | None = None,
    programs: int | None = None,
) -> list[Tensor]:
    """[act(A B_i^T + bias_i) for each weight], up to three weights in one launch.

    Math:     matmul_reference; forward is (a, w), dgrad (dy, w, b_transposed), wgrad (dy, x, both transposed)
    Shapes:   a (M, K), or (K, M) if a_transposed; weight i (N_i, K), or (K, N_i) if b_transposed; bias (N_i,), for
              all weights or none; results (M, N_i). Any M, N, K >= 1
    Numerics: bfloat16, float16 or float32 in, products exact, sums in float32, one rounding at the store
    Traffic:  matmul_cost per weight, A once per weight from L2 or memory; operands whose rows do not start at
              multiples of 16 bytes are copied to padded ones first where TMA loads them
    Order:    persistent programs walk tiles in groups of 8 row blocks; no communication, deterministic
    Source:   the persistent GEMM of the CUTLASS and Triton documentation
    """
    m, k = a.shape[::-1] if a_transposed else a.shape
    columns = [w.shape[1] if b_transposed else w.shape[0] for w in weights]
    tile = tile or select_tile(a.device, a.dtype, m, *columns)
    a_block = (tile.k, tile.m) if a_transposed else (tile.m, tile.k)
    b_block = (tile.k, tile.n) if b_transposed else (tile.n, tile.k)
    a, stored = padded(a), [padded(w) for w in weights]
    outputs = [a.new_empty(m, n) for n in columns]
    given = [bias for bias in biases or () if bias is not None]
    tiles = triton.cdiv(m, tile.m) * sum(triton.cdiv(n, tile.n) for n in columns)
    matmul_kernel[(persistent_programs(a.device, tiles, tile, programs),)](
        operand(a, a_block, tile), *three([operand(w, b_block, tile) for w in stored]),
        *three(given or outputs), *three(outputs), outputs[0], outputs[0],
        m, *three(columns), k, a.stride(0), *three([w.stride(0) for w in stored]),
        A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed, WEIGHTS=len(weights), BIAS=bool(given),
        ACTIVATION=activation or "", DERIVATIVE=False, GATED=False,
        **blocks(tile), **launch_options(tile.warps, tile.stages),
    )  # fmt: skip
    return outputs


def matmul_derivative(
    a: Tensor,
    b: Tensor,
    x: Tensor,
    activation: str | None,
    gate: Tensor | None = None,
    *,
    tile: Tile | None = None,
    programs: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dx, dgate or None, act) of da = A B: the activation's derivative and its rebuilt value in the dgrad's epilogue.

    Math:     matmul_derivative_reference, da in float32
    Shapes:   a (M, K); b (K, N); x, gate and the results (M, N), contiguous
    Numerics: as matmul; x and gate as stored, each result rounded once
    Traffic:  matmul_cost, and x (and gate) once; writes dx, act (and dgate)
    Order:    as matmul
    Source:   activation recomputation inside the GEMM that needs it; formulas in activation/reference.py
    """
    m, k = a.shape
    n = b.shape[1]
    tile = tile or select_tile(a.device, a.dtype, m, n, operands=3)
    a, b = padded(a), padded(b)
    dx, rebuilt = x.new_empty(m, n), x.new_empty(m, n)
    dgate = None if gate is None else x.new_empty(m, n)
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    matmul_kernel[(persistent_programs(a.device, tiles, tile, programs),)](
        operand(a, (tile.m, tile.k), tile), *three([operand(b, (tile.k, tile.n), tile)]), dx, dx, dx,
        dx, dx if dgate is None else dgate, rebuilt, x, x if gate is None else gate,
        m, n, n, n, k, a.stride(0), *three([b.stride(0)]),
        A_TRANSPOSED=False, B_TRANSPOSED=True, WEIGHTS=1, BIAS=False,
        ACTIVATION=activation or "", DERIVATIVE=True, GATED=gate is not None,
        **blocks(tile), **launch_options(tile.warps, tile.stages),
    )  # fmt: skip
    return dx, dgate, rebuilt


def gated_matmul(
    a: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    *,
    activation: str = "silu",
    tile: Tile | None = None,
    programs: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(act(A G^T) * A U^T, A G^T, A U^T) in one pass over A: SwiGLU with silu, GeGLU with gelu.

    Math:     gated_matmul_reference
    Shapes:   a (M, K); gate_weight and up_weight (N, K); results (M, N)
    Numerics: as matmul; the activation is of the rounded projections, as a backward will find them
    Traffic:  A and both weights read, three results written; two accumulators: half of the tile's columns at a time
    Order:    as matmul
    Source:   Shazeer 2020 (arXiv:2002.05202)
    """
    m, k = a.shape
    n = gate_weight.shape[0]
    tile = tile or select_tile(a.device, a.dtype, m, n, operands=3)
    if tile.n > 32:
        tile = tile._replace(n=tile.n // 2)
    a, gate_weight, up_weight = padded(a), padded(gate_weight), padded(up_weight)
    outputs = tuple(a.new_empty(m, n) for _ in range(3))
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    weight_block = (tile.n, tile.k)
    gated_matmul_kernel[(persistent_programs(a.device, tiles, tile, programs),)](
        operand(a, (tile.m, tile.k), tile), operand(gate_weight, weight_block, tile),
        operand(up_weight, weight_block, tile), *outputs,
        m, n, k, a.stride(0), gate_weight.stride(0), up_weight.stride(0),
        ACTIVATION=activation, **blocks(tile), **launch_options(tile.warps, tile.stages),
    )  # fmt: skip
    return outputs
