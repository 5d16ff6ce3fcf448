"""matmul and matmul_derivative: persistent GEMMs with their epilogues, one rank, no communication."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..arguments import Derivative, LinearForm, Linears, Weight, three
from ..configurations import select_local_tile, select_tile
from ..launch import Tile, launch_options, operand, padded, persistent_programs, piece_columns
from ..pack.format import Packed
from ..pack.kernel import kept_source
from ..replay import launch, replayed
from ..tile import column_blocks, linear_tiles
from .reference import check_derivative, check_linears


@triton.jit(do_not_specialize=["m"])
def matmul_kernel(a, b0, b1, b2, problem, m, FORM: tl.constexpr):
    """C_i = epilogue(A B_i^T) for up to three weights, whose column blocks follow one another in one launch."""
    TILE: tl.constexpr = FORM.tile
    _, _, tiles_n = column_blocks(problem.weights, TILE.n)
    tiles = tl.cdiv(m, TILE.m) * tiles_n
    linear_tiles(problem, a, b0, b1, b2, 0, 0, tl.program_id(0), tiles, tl.num_programs(0), m, 0, FORM)


def weight_arguments(
    stored: Sequence[Tensor],
    columns: Sequence[int],
    biases: Sequence[Tensor | None] | None,
    outputs: Sequence[Tensor | None],
) -> tuple:
    """The Weight of each stored weight; missing ones are empty. ValueError if some have a bias and others none."""
    if biases and len({bias is None for bias in biases}) > 1:
        raise ValueError("some of a launch's weights have no bias: give zeros, or none to all")
    each = zip(stored, columns, biases or [None] * len(stored), outputs, strict=True)
    flat = ((w, n, None if bias is None else bias.contiguous(), out) for w, n, bias, out in each)
    return three([Weight(n, w.stride(0), bias, out) for w, n, bias, out in flat], Weight())


def derivative_arguments(
    x: Tensor | Packed, gate: Tensor | Packed | None, dx: Tensor, dgate: Tensor | None, rebuilt: Tensor
) -> Derivative:
    """The Derivative of tensors, or of what is packed."""
    return Derivative(kept_source(x), None if gate is None else kept_source(gate), dx, dgate, rebuilt)


@replayed
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
    """[act(A B_i^T + bias_i) for each weight i], for up to three weights in one launch.

    Math:     matmul_reference; forward is (a, w), dgrad (dy, w, b_transposed), wgrad (dy, x, both transposed)
    Shapes:   a (M, K), or (K, M) if a_transposed; weight i (N_i, K), or (K, N_i) if b_transposed; bias (N_i,), for
              all weights or none; results (M, N_i). Any M, N, K >= 1
    Numerics: bfloat16, float16 or float32 in, products exact, sums in float32, one rounding at the store
    Traffic:  matmul_cost per weight, A once per weight from L2 or memory. An operand that TMA loads is first copied to
              padded rows if its rows do not start at multiples of 16 bytes
    Order:    persistent programs walk tiles in groups of 8 row blocks; no communication, deterministic
    Source:   the persistent GEMM of the CUTLASS and Triton documentation
    """
    check_linears("matmul", a, a, a.shape[0 if a_transposed else -1], weights, biases, activation, b_transposed)
    m, k = a.shape[::-1] if a_transposed else a.shape
    columns = [w.shape[1] if b_transposed else w.shape[0] for w in weights]
    tile = tile or select_local_tile(a.device, a.dtype, m, *columns)
    a_block = (tile.k, tile.m) if a_transposed else (tile.m, tile.k)
    b_block = (tile.k, tile.n) if b_transposed else (tile.n, tile.k)
    a, stored = padded(a), [padded(w) for w in weights]
    outputs = [a.new_empty(m, n) for n in columns]
    tiles = triton.cdiv(m, tile.m) * sum(triton.cdiv(n, tile.n) for n in columns)
    launch(
        matmul_kernel, (persistent_programs(a.device, tiles, tile, programs),),
        operand(a, a_block, tile), *three([operand(w, b_block, tile) for w in stored]),
        Linears(k, a.stride(0), weight_arguments(stored, columns, biases, outputs), Derivative()),
        m, LinearForm(tile, activation or "", a_transposed, b_transposed),
        **launch_options(tile.warps, tile.stages),
    )  # fmt: skip
    return outputs


@replayed
def matmul_derivative(
    a: Tensor,
    b: Tensor,
    x: Tensor | Packed,
    activation: str | None,
    gate: Tensor | Packed | None = None,
    *,
    tile: Tile | None = None,
    programs: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dx, dgate or None, act) of da = A B: the epilogue applies the activation's derivative and rebuilds its value.

    Math:     matmul_derivative_reference; da stays in float32
    Shapes:   a (M, K); b (K, N); x, gate and the results (M, N), contiguous; x and gate may be packed, and are unpacked
              in registers
    Numerics: as matmul; each result is rounded once
    Traffic:  matmul_cost; reads x (and gate) once, writes dx, act (and dgate)
    Order:    as matmul
    Source:   activation recomputation inside the GEMM that needs it; formulas in activation/reference.py
    """
    check_derivative("matmul_derivative", a, a, b, x, gate, a.shape[0], activation)
    m, k = a.shape
    n = b.shape[1]
    tile = tile or select_tile(a.device, a.dtype, m, n, operands=3)
    a, b = padded(a), padded(b)
    dx, rebuilt = a.new_empty(m, n), a.new_empty(m, n)
    dgate = None if gate is None else a.new_empty(m, n)
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    derivative = derivative_arguments(x, gate, dx, dgate, rebuilt)
    launch(
        matmul_kernel, (persistent_programs(a.device, tiles, tile, programs),),
        operand(a, (tile.m, tile.k), tile), *three([operand(b, (tile.k, tile.n), tile)]),
        Linears(k, a.stride(0), weight_arguments([b], [n], None, [None]), derivative),
        m, LinearForm(tile, activation or "", b_transposed=True, piece=piece_columns(n)),
        **launch_options(tile.warps, tile.stages),
    )  # fmt: skip
    return dx, dgate, rebuilt
