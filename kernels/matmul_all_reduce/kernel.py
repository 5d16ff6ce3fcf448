"""matmul_all_reduce: the row-parallel GEMM without sequence parallelism; every rank ends with the same bits."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import ReductionForm
from ..configurations import select_tile
from ..cost import ONE_SHOT_BYTES
from ..finish import NOTHING, Finish
from ..launch import DTYPES, Tile, is_interpreted, launch_options, padded, persistent_programs, step_rows
from ..matmul_reduce_scatter.kernel import reduction_arguments
from ..protocol import Channel, flags_of, publish, reach, serve, slot_of, wait
from ..tile import finish_tile, multiply_inputs, store_block, store_packed, sum_sources, swizzle


@triton.jit
def chunk_place(unit, tiles_n, FORM: tl.constexpr):
    """(tile, row and column in the chunk, offset in the packed chunk) of a reduction unit: a few rows of a tile."""
    TILE: tl.constexpr = FORM.tile
    UNITS: tl.constexpr = TILE.m // FORM.step
    tile = unit // UNITS
    row_block, column_block = tile // tiles_n, tile % tiles_n
    inner = (unit % UNITS) * FORM.step
    return (
        tile,
        row_block * TILE.m + inner,
        column_block * TILE.n,
        tile.to(tl.int64) * (TILE.m * TILE.n) + (inner * TILE.n),
    )


@triton.jit(do_not_specialize=["rank", "m", "key"])
def matmul_all_reduce_kernel(links, rank, a0, a1, a2, b0, b1, b2, problem, m, key: tl.int64, FORM: tl.constexpr):
    """Producers, the first programs, compute and push tiles. Reducers add them. Two-shot, reducers also push the sums,
    and finishers, the last programs, copy sums that arrive to the result.

    One-shot: there is one chunk of all M rows, which every rank reduces. Two-shot: rank r reduces chunk r of WORLD.
    producers = 0: every program does all of this, one after the other.
    """
    TILE: tl.constexpr = FORM.tile
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    WORLD: tl.constexpr = FORM.world
    PARTIAL: tl.constexpr = FORM.partial
    STEP: tl.constexpr = FORM.step
    UNITS: tl.constexpr = BLOCK_M // STEP
    ALIGNED: tl.constexpr = FORM.aligned
    B_TRANSPOSED: tl.constexpr = FORM.b_transposed
    ONE_SHOT: tl.constexpr = FORM.one_shot
    MERGED: tl.constexpr = FORM.producers == 0
    PRODUCERS: tl.constexpr = FORM.producers
    REDUCED: tl.constexpr = FORM.producers + FORM.reducers  # the first program that does not reduce
    virtual = tl.program_id(1)
    me, limit = serve(links, rank, WORLD)
    program, programs = tl.program_id(0), tl.num_programs(0)
    n, out = problem.n, problem.out
    rows = m if ONE_SHOT else tl.cdiv(m, WORLD)
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles = tiles_m * tiles_n
    size = tiles.to(tl.int64) * (BLOCK_M * BLOCK_N)  # elements of a packed chunk
    own_flags = flags_of(me, me.rank, 0)
    rest = virtual.to(tl.int64) * m * n
    if MERGED or program < PRODUCERS:
        chunks = reach(limit, 1 if ONE_SHOT else WORLD)
        for index in tl.range(program, chunks * tiles, programs if MERGED else PRODUCERS):
            owner = 0 if ONE_SHOT else (me.rank + 1 + index // tiles) % WORLD
            row_block, column_block = swizzle(index % tiles, tiles_m, tiles_n)
            tile = row_block * tiles_n + column_block
            result = multiply_inputs(
                problem.pairs, (a0, a1, a2), (b0, b1, b2), virtual * m + owner * rows, virtual,
                row_block * BLOCK_M, column_block * BLOCK_N, tl.minimum(rows, m - owner * rows), n, B_TRANSPOSED, TILE,
            )  # fmt: skip
            rounded = result.to(PARTIAL)
            at = me.rank * size + tile.to(tl.int64) * (BLOCK_M * BLOCK_N)
            for step in range(WORLD if ONE_SHOT else 1):
                peer = (me.rank + 1 + step) % WORLD if ONE_SHOT else owner
                store_packed(slot_of(me, peer, PARTIAL) + at, rounded, BLOCK_N, BLOCK_M, BLOCK_N)
                publish(flags_of(me, peer, me.rank) + tile, me.epoch)
    if MERGED or (program >= PRODUCERS and program < REDUCED):
        worker, workers = program, programs
        if not MERGED:
            worker, workers = program - PRODUCERS, REDUCED - PRODUCERS
        own_first = 0 if ONE_SHOT else me.rank * rows
        row_end = tl.minimum(rows, m - own_first)
        mine = slot_of(me, me.rank, PARTIAL)
        for unit in tl.range(worker, tiles * UNITS, workers):
            tile, row, column, at = chunk_place(unit, tiles_n, FORM)
            for source in range(WORLD):
                limit = wait(me, own_flags + source * me.writer_flags + tile, source, limit)
            total = sum_sources(mine + at, size, WORLD, STEP, BLOCK_N)
            total = finish_tile(
                total, problem.addends, key, virtual * m + own_first, virtual, row, column, row_end, n,
                ALIGNED, STEP, BLOCK_N,
            ).to(out.dtype.element_ty)  # fmt: skip
            store_block(out + rest + tl.cast(own_first, tl.int64) * n, total, row, column, row_end, n, n, STEP, BLOCK_N)
            if not ONE_SHOT:
                for step in range(1, reach(limit, WORLD)):
                    peer = (me.rank + step) % WORLD
                    results = second_area(slot_of(me, peer, PARTIAL), size, out, WORLD)
                    store_packed(results + me.rank * size + at, total, BLOCK_N, STEP, BLOCK_N)
                    publish(flags_of(me, peer, me.rank) + tiles + unit, me.epoch)
    if not ONE_SHOT:
        if MERGED or program >= REDUCED:
            worker, workers = program, programs
            if not MERGED:
                worker, workers = program - REDUCED, programs - REDUCED
            arrived = second_area(slot_of(me, me.rank, PARTIAL), size, out, WORLD)
            for index in tl.range(worker, (WORLD - 1) * tiles * UNITS, workers):
                owner = (me.rank + 1 + index // (tiles * UNITS)) % WORLD
                unit = index % (tiles * UNITS)
                limit = wait(me, own_flags + owner * me.writer_flags + tiles + unit, owner, limit)
                tile, row, column, at = chunk_place(unit, tiles_n, FORM)
                block = sum_sources(arrived + owner * size + at, size, 1, STEP, BLOCK_N)
                store_block(out + rest + (owner * rows).to(tl.int64) * n, block, row, column,
                            tl.minimum(rows, m - owner * rows), n, n, STEP, BLOCK_N)  # fmt: skip


@triton.jit
def second_area(slot, size, out, WORLD: tl.constexpr):
    """Pointer, typed like the result, to where sums arrive: behind the partial sums of WORLD sources."""
    return tl.multiple_of((slot + WORLD * size).to(tl.pointer_type(out.dtype.element_ty)), 16)


def plan(m: int, n: int, world: int, partial: torch.dtype, one_shot: bool | None, tile: Tile) -> tuple[bool, int, int]:
    """(one-shot?, rows of a chunk, tiles of a chunk)."""
    if one_shot is None:
        one_shot = m * n * partial.itemsize <= ONE_SHOT_BYTES
    rows = m if one_shot else triton.cdiv(m, world)
    return one_shot, rows, triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n)


def matmul_all_reduce_space(
    m: int, n: int, world: int, dtype: torch.dtype, partial: torch.dtype, tile: Tile, one_shot: bool | None = None
) -> tuple[int, int]:
    """(bytes of a slot, flags per writer) that the channel must offer for results of (m, n)."""
    one_shot, _, tiles = plan(m, n, world, partial, one_shot, tile)
    units = tile.m // step_rows(tile, dtype.itemsize)
    chunks = world * tiles * tile.m * tile.n
    return chunks * (partial.itemsize + (0 if one_shot else dtype.itemsize)), tiles * (1 if one_shot else 1 + units)


def matmul_all_reduce(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    channel: Channel,
    finish: Finish = NOTHING,
    *,
    b_transposed: bool = False,
    partial: torch.dtype | None = None,
    one_shot: bool | None = None,
    tile: Tile | None = None,
    programs: int | None = None,
    spare: int = 0,
) -> Tensor:
    """finish(sum over ranks of sum_i A_i B_i^T), all rows on all ranks, for up to three pairs (q, k, v's dgrad).

    Math:     matmul_all_reduce_reference
    Shapes:   input i (M, K_i); weight i (N, K_i), or (K_i, N) if b_transposed; finish's residual and the result (M, N).
              Any M >= 1. With virtual ranks every tensor is the stack of theirs along dim 0
    Numerics: as matmul_reduce_scatter; the result has the same bits on all ranks
    Traffic:  matmul_all_reduce_cost; this rank sends, in bytes of B = M * N * itemsize: one-shot (t - 1) B, two-shot
              2 (t - 1) / t B. one_shot None: one-shot up to ONE_SHOT_BYTES
    Order:    one-shot: a tile goes to every rank's slot, and every rank adds the sources in rank order. Two-shot: rank
              r adds chunk r of the rows and pushes the finished values to every rank. Each tile has a flag, and
              two-shot each reduction step of a tile, too. All programs are resident; `spare` SMs stay free
    Source:   one-shot and two-shot all-reduce of symmetric-memory recipes and Triton-distributed, own protocol
    Errors:   ValueError if the channel's slots or flags are too small (matmul_all_reduce_space), or for a norm in
              `finish`, which takes a pass of its own
    """
    served, world = channel.served, channel.world
    m = len(inputs[0]) // served
    n = weights[0].shape[1] if b_transposed else len(weights[0]) // served
    dtype = inputs[0].dtype
    partial = partial or dtype
    tile = tile or select_tile(inputs[0].device, dtype, m, n)
    one_shot, rows, tiles = plan(m, n, world, partial, one_shot, tile)
    finish.require_no_norm("matmul_all_reduce")
    channel.require("matmul_all_reduce", *matmul_all_reduce_space(m, n, world, dtype, partial, tile, one_shot))
    out = inputs[0].new_empty(served * m, n)
    step = step_rows(tile, out.element_size())
    work = tiles if one_shot else tiles * world
    programs = persistent_programs(out.device, work, tile, programs, served, spare=spare)
    producers = programs if is_interpreted() else 0
    reducers = min(producers, tiles * tile.m // step)
    finishers = 0 if one_shot or world == 1 else reducers
    form = ReductionForm(
        tile, b_transposed, world, DTYPES[partial], step, n % 4 == 0, producers, reducers, one_shot
    )  # fmt: skip
    lefts, rights = [padded(a) for a in inputs], [padded(b) for b in weights]
    matmul_all_reduce_kernel[(programs + reducers + finishers, served)](
        channel.links, channel.rank, *reduction_arguments(lefts, rights, finish, out, tile, b_transposed), m,
        finish.key, form, **launch_options(tile.warps, tile.stages, cooperative=True),
    )  # fmt: skip
    return out
