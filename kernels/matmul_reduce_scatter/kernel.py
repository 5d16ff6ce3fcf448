"""matmul_reduce_scatter: the row-parallel GEMM that sends each tile to the rank that owns its rows, once computed."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import Pair, Reduction, ReductionForm, three
from ..configurations import select_tile
from ..finish import NOTHING, Finish
from ..launch import DTYPES, Tile, is_interpreted, launch_options, operand, padded, persistent_programs, step_rows
from ..protocol import Channel, flags_of, publish, reach, serve, slot_of, wait
from ..tile import finish_tile, multiply_inputs, store_block, store_packed, sum_sources, swizzle


@triton.jit(do_not_specialize=["rank", "rows", "key"])
def matmul_reduce_scatter_kernel(
    links, rank, a0, a1, a2, b0, b1, b2, problem, rows, key: tl.int64, FORM: tl.constexpr
):  # fmt: skip
    """The first `producers` programs compute and push tiles, the others finish rows. producers = 0: all programs do
    first the one, then the other."""
    TILE: tl.constexpr = FORM.tile
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    WORLD: tl.constexpr = FORM.world
    PARTIAL: tl.constexpr = FORM.partial
    STEP: tl.constexpr = FORM.step
    ALIGNED: tl.constexpr = FORM.aligned
    B_TRANSPOSED: tl.constexpr = FORM.b_transposed
    virtual = tl.program_id(1)
    me, limit = serve(links, rank, WORLD)
    n = problem.n
    program, producers, finishers = tl.program_id(0), tl.num_programs(0), tl.num_programs(0)
    if FORM.producers > 0:
        producers = FORM.producers
        finishers -= FORM.producers
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles = tiles_m * tiles_n
    if FORM.producers == 0 or program < producers:
        for tile in tl.range(program, reach(limit, WORLD) * tiles, producers):
            owner = (me.rank + 1 + tile // tiles) % WORLD  # the own chunk comes last, because no other rank needs it
            row_block, column_block = swizzle(tile % tiles, tiles_m, tiles_n)
            result = multiply_inputs(
                problem.pairs, (a0, a1, a2), (b0, b1, b2), (virtual * WORLD + owner) * rows, virtual,
                row_block * BLOCK_M, column_block * BLOCK_N, rows, n, B_TRANSPOSED, TILE,
            )  # fmt: skip
            # Each tile is packed, so that stores are contiguous, unmasked and 16 bytes wide for any N.
            at = (me.rank.to(tl.int64) * tiles + row_block * tiles_n + column_block) * (BLOCK_M * BLOCK_N)
            store_packed(slot_of(me, owner, PARTIAL) + at, result, BLOCK_N, BLOCK_M, BLOCK_N)
            counter = me.counters + owner * tiles_m + row_block
            tl.debug_barrier()  # so that the count covers all warps' stores
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tiles_n - 1:
                tl.store(counter, 0)
                publish(flags_of(me, owner, me.rank) + row_block, me.epoch)
    if FORM.producers == 0 or program >= producers:
        if FORM.producers > 0:
            program -= producers
        own_flags = flags_of(me, me.rank, 0)
        out = problem.out + virtual.to(tl.int64) * rows * n
        for unit in tl.range(program, tl.cdiv(rows, STEP), finishers):
            row = unit * STEP
            row_block = row // BLOCK_M
            for source in range(WORLD):
                limit = wait(me, own_flags + source * me.writer_flags + row_block, source, limit)
            slot = slot_of(me, me.rank, PARTIAL) + (row % BLOCK_M) * BLOCK_N
            for column_block in range(tiles_n):
                at = (row_block * tiles_n + column_block).to(tl.int64) * (BLOCK_M * BLOCK_N)
                total = sum_sources(slot + at, tiles.to(tl.int64) * (BLOCK_M * BLOCK_N), WORLD, STEP, BLOCK_N)
                column = column_block * BLOCK_N
                total = finish_tile(total, problem.addends, key, virtual * rows, virtual, row, column, rows, n,
                               ALIGNED, STEP, BLOCK_N)  # fmt: skip
                store_block(out, total, row, column, rows, n, n, STEP, BLOCK_N)


def reduction_arguments(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], finish: Finish, out: Tensor, tile: Tile, b_transposed: bool
) -> tuple:
    """The arguments a0 to `problem` of a reducing kernel: padded inputs and weights, and their sizes."""
    a_block, b_block = (tile.m, tile.k), (tile.k, tile.n) if b_transposed else (tile.n, tile.k)
    each = zip(lefts, rights, strict=True)
    return (
        *three([operand(a, a_block, tile) for a in lefts]),
        *three([operand(b, b_block, tile) for b in rights]),
        Reduction(
            out.shape[1],
            three([Pair(a.shape[1], a.stride(0), b.stride(0)) for a, b in each]),
            finish.arguments(),
            out,
        ),
    )


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
    Numerics: products and sums in float32. Each rank's partial sum is rounded once to `partial`, by default the inputs'
              dtype; float32 doubles the bytes on the link. Partial sums are added in rank order in float32, and the
              finished value is rounded once, so every run has the same bits
    Traffic:  matmul_reduce_scatter_cost; this rank sends and receives (t - 1) / t * M * N * partial.itemsize bytes
    Order:    tiles of rank + 1's chunk come first, those of the own chunk last. A tile is stored into its owner's slot,
              and the program that completes a row block's tiles (counted in local memory) sets the block's flag at the
              owner. Programs that finish take a few whole rows at a time: they wait for every source's flag of the
              block, then add. All programs are resident, because one that waits may hold the SM that another tile
              needs; `spare` SMs stay free
    Source:   push-based GEMM + reduce-scatter (research: symmetric-memory recipes, Triton-distributed), own protocol
    Errors:   ValueError if the channel's slots or flags are too small (matmul_reduce_scatter_space), or for a norm in
              `finish`, which takes a pass of its own (docs/LOG.md, the first GPU)
    """
    served, world = channel.served, channel.world
    rows = len(inputs[0]) // (served * world)
    n = weights[0].shape[1] if b_transposed else len(weights[0]) // served
    partial = partial or inputs[0].dtype
    tile = tile or select_tile(inputs[0].device, inputs[0].dtype, rows, n, chunks=world)
    finish.require_no_norm("matmul_reduce_scatter")
    channel.require("matmul_reduce_scatter", *matmul_reduce_scatter_space(rows, n, world, partial, tile))
    out = inputs[0].new_empty(served * rows, n)
    tiles = world * triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n)
    step = step_rows(tile, out.element_size())
    programs = persistent_programs(out.device, tiles, tile, programs, served, spare=spare)
    producers = programs if is_interpreted() else 0
    finishers = min(producers, triton.cdiv(rows, step))
    lefts, rights = [padded(a) for a in inputs], [padded(b) for b in weights]
    matmul_reduce_scatter_kernel[(programs + finishers, served)](
        channel.links, channel.rank, *reduction_arguments(lefts, rights, finish, out, tile, b_transposed), rows,
        finish.key, ReductionForm(tile, b_transposed, world, DTYPES[partial], step, n % 4 == 0, producers),
        **launch_options(tile.warps, tile.stages, cooperative=True),
    )  # fmt: skip
    return out
