"""matmul_reduce_scatter: the row-parallel GEMM whose tiles go to their owner as they are computed."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..configurations import select_tile
from ..finish import NOTHING, Finish
from ..launch import DTYPES, Tile, is_interpreted, launch_options, operand, padded, persistent_programs, step_rows
from ..matmul.kernel import blocks, three
from ..protocol import Channel, flags_of, publish, reach, serve, slot_of, wait
from ..tile import finish, multiply_inputs, store_block, store_packed, sum_sources, swizzle


@triton.jit(
    do_not_specialize=["rank", "limit", "writer_flags", "rows", "key_low", "key_high", "threshold", "producers"]
)
def matmul_reduce_scatter_kernel(
    data, flags, epoch, error, stopped, rank, limit, parity_stride, writer_flags, counters,
    a0, a1, a2, b0, b1, b2, out, bias, residual, start, key_low, key_high, threshold, scale,
    rows, n, k0, k1, k2, a0_stride, a1_stride, a2_stride, b0_stride, b1_stride, b2_stride, producers,
    INPUTS: tl.constexpr, B_TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    RESIDUAL: tl.constexpr, ALIGNED: tl.constexpr, MERGED: tl.constexpr,
    WORLD: tl.constexpr, PARTIAL: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Bands: `producers` programs compute and push tiles, the rest finish rows; MERGED: all do one, then the other."""
    virtual = tl.program_id(1)
    data, flags, epoch, report, rank, limit = serve(data, flags, epoch, error, stopped, rank, limit, WORLD)
    counters += virtual * WORLD * writer_flags
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles = tiles_m * tiles_n
    if MERGED or program < producers:
        for tile in tl.range(program, reach(limit, WORLD) * tiles, producers):
            owner = (rank + 1 + tile // tiles) % WORLD  # the own chunk last: nobody else waits for it
            row_block, column_block = swizzle(tile % tiles, tiles_m, tiles_n)
            result = multiply_inputs(
                a0, a1, a2, b0, b1, b2, k0, k1, k2, a0_stride, a1_stride, a2_stride, b0_stride, b1_stride, b2_stride,
                (virtual * WORLD + owner) * rows, virtual, row_block * BLOCK_M, column_block * BLOCK_N, rows, n,
                INPUTS, B_TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
            )  # fmt: skip
            # packed by tile: contiguous, unmasked, 16-byte stores whatever N is
            at = (rank.to(tl.int64) * tiles + row_block * tiles_n + column_block) * (BLOCK_M * BLOCK_N)
            store_packed(slot_of(data, owner, epoch, parity_stride, PARTIAL) + at, result, BLOCK_N, BLOCK_M, BLOCK_N)
            counter = counters + owner * tiles_m + row_block
            tl.debug_barrier()  # the count stands for all warps' stores
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tiles_n - 1:
                tl.store(counter, 0)
                publish(flags_of(flags, owner, rank, writer_flags) + row_block, epoch)
    if MERGED or program >= producers:
        finishers = producers
        if not MERGED:
            finishers = tl.num_programs(0) - producers
            program -= producers
        own_flags = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
        out += virtual.to(tl.int64) * rows * n
        for unit in tl.range(program, tl.cdiv(rows, ROWS), finishers):
            row = unit * ROWS
            row_block = row // BLOCK_M
            for source in range(WORLD):
                limit = wait(own_flags + source * writer_flags + row_block, epoch, report, source, limit)
            slot = slot_of(data, rank, epoch, parity_stride, PARTIAL) + (row % BLOCK_M) * BLOCK_N
            for column_block in range(tiles_n):
                at = (row_block * tiles_n + column_block).to(tl.int64) * (BLOCK_M * BLOCK_N)
                total = sum_sources(slot + at, tiles.to(tl.int64) * (BLOCK_M * BLOCK_N), WORLD, ROWS, BLOCK_N)
                total = finish(
                    total, bias + virtual * n, residual + virtual.to(tl.int64) * rows * n, start + virtual * rows,
                    key_low, key_high, threshold, scale, row, column_block * BLOCK_N, rows, n,
                    BIAS, DROPOUT, RESIDUAL, ALIGNED, ROWS, BLOCK_N,
                )  # fmt: skip
                store_block(out, total, row, column_block * BLOCK_N, rows, n, n, ROWS, BLOCK_N)


def matmul_reduce_scatter_space(rows: int, n: int, world: int, partial: torch.dtype, tile: Tile) -> tuple[int, int]:
    """(bytes of a slot, flags per writer) that the channel must offer for results of (rows, n) on each rank."""
    tiles_m = triton.cdiv(rows, tile.m)
    return world * tiles_m * triton.cdiv(n, tile.n) * tile.m * tile.n * partial.itemsize, tiles_m


def matmul_reduce_scatter(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    channel: Channel,
    finish: Finish = NOTHING,
    *,
    b_transposed: bool = False,
    partial: torch.dtype | None = None,
    tile: Tile | None = None,
    programs: int | None = None,
    spare: int = 0,
) -> Tensor:
    """This rank's rows of finish(sum over ranks of sum_i A_i B_i^T), for up to three pairs (q, k, v's dgrad).

    Math:     matmul_reduce_scatter_reference, this rank's entry
    Shapes:   input i (M, K_i); weight i (N, K_i), or (K_i, N) if b_transposed; finish's residual and the result
              (M / t, N). With virtual ranks every tensor is the stack of theirs along dim 0
    Numerics: products and sums in float32; each rank's partial is rounded once to `partial` (default the inputs' dtype,
              or float32 at twice the link bytes), the partials are added in rank order in float32, and the finished
              value is rounded once: the same bits in every run
    Traffic:  matmul_reduce_scatter_cost; this rank sends and receives (t - 1) / t * M * N * partial.itemsize bytes
    Order:    tiles of rank + 1's chunk first, the own chunk last; a tile is stored into its owner's slot, and the
              program that completes a row block's tiles (counted in local memory) sets the block's flag at the owner.
              The finishing band takes a few whole rows at a time: waits for every source's flag of their block, then
              adds. All programs are resident: one that waits may hold the SM that another tile needs; `spare` SMs stay
              free
    Source:   push-based GEMM + reduce-scatter (research: symmetric-memory recipes, Triton-distributed), own protocol
    Errors:   ValueError if the channel's slots or flags are too small (matmul_reduce_scatter_space), or for a norm in
              `finish`: it is a pass of its own (docs/LOG.md, the first GPU)
    """
    served, world = channel.served, channel.world
    rows = len(inputs[0]) // (served * world)
    n = weights[0].shape[1] if b_transposed else len(weights[0]) // served
    ks = [a.shape[1] for a in inputs]
    partial = partial or inputs[0].dtype
    tile = tile or select_tile(inputs[0].device, inputs[0].dtype, rows, n, chunks=world)
    finish.require_no_norm("matmul_reduce_scatter")
    channel.require("matmul_reduce_scatter", *matmul_reduce_scatter_space(rows, n, world, partial, tile))
    lefts, rights = [padded(a) for a in inputs], [padded(b) for b in weights]
    a_block, b_block = (tile.m, tile.k), (tile.k, tile.n) if b_transposed else (tile.n, tile.k)
    out = inputs[0].new_empty(served * rows, n)
    tiles = world * triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n)
    finish_rows = step_rows(tile, out.element_size())
    merged = not is_interpreted()
    producers = persistent_programs(out.device, tiles, tile, programs, served, spare=spare)
    finishers = 0 if merged else min(producers, triton.cdiv(rows, finish_rows))
    matmul_reduce_scatter_kernel[(producers + finishers, served)](
        *channel.arguments(), channel.counters,
        *three([operand(a, a_block, tile) for a in lefts]), *three([operand(b, b_block, tile) for b in rights]), out,
        *finish.arguments(out),
        rows, n, *three(ks), *three([a.stride(0) for a in lefts]), *three([b.stride(0) for b in rights]), producers,
        INPUTS=len(inputs), B_TRANSPOSED=b_transposed, **finish.flags(), ALIGNED=n % 4 == 0,
        MERGED=merged, WORLD=world, PARTIAL=DTYPES[partial], ROWS=finish_rows,
        **blocks(tile), **launch_options(tile.warps, tile.stages, cooperative=True),
    )  # fmt: skip
    return out
