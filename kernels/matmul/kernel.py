"""matmul and matmul_derivative: persistent GEMMs with their epilogues, one rank, no communication."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..configurations import select_tile
from ..launch import Tile, launch_options, operand, padded, persistent_programs
from ..tile import column_blocks, linear_tile

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
