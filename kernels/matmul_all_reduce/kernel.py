"""matmul_all_reduce: the row-parallel GEMM without sequence parallelism; every rank ends with the same bits."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..configurations import select_tile
from ..cost import ONE_SHOT_BYTES
from ..finish import NOTHING, Finish
from ..launch import DTYPES, Tile, is_interpreted, launch_options, operand, padded, persistent_programs, step_rows
from ..matmul.kernel import blocks, three
from ..protocol import Channel, flags_of, publish, reach, serve, slot_of, wait
from ..tile import finish, multiply_inputs, store_block, store_packed, sum_sources, swizzle


@triton.jit
def chunk_place(unit, tiles_m, tiles_n, UNITS: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr):  # fmt: skip
    """(tile, row and column in the chunk, offset in the packed chunk) of a reduction unit: UNITS of them per tile."""
    tile = unit // UNITS
    row_block, column_block = tile // tiles_n, tile % tiles_n
    inner = (unit % UNITS) * STEP
    return (
        tile,
        row_block * BLOCK_M + inner,
        column_block * BLOCK_N,
        tile.to(tl.int64) * (BLOCK_M * BLOCK_N) + (inner * BLOCK_N),
    )


@triton.jit(do_not_specialize=["rank", "limit", "writer_flags", "rows", "m", "key_low", "key_high", "threshold",
                               "producers", "reducers"])  # fmt: skip
def matmul_all_reduce_kernel(
    data, flags, epoch, error, stopped, rank, limit, parity_stride, writer_flags,
    a0, a1, a2, b0, b1, b2, out, bias, residual, start, key_low, key_high, threshold, scale,
    m, rows, n, k0, k1, k2, a0_stride, a1_stride, a2_stride, b0_stride, b1_stride, b2_stride, producers, reducers,
    INPUTS: tl.constexpr, B_TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    RESIDUAL: tl.constexpr, ALIGNED: tl.constexpr, ONE_SHOT: tl.constexpr, MERGED: tl.constexpr, WORLD: tl.constexpr,
    PARTIAL: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Bands: producers compute and push, reducers add and (two-shot) push the sum, finishers (two-shot) copy it out.

    One-shot: one chunk of all M rows, which everybody reduces. Two-shot: chunk r, `rows` rows, is rank r's.
    """
    virtual = tl.program_id(1)
    data, flags, epoch, report, rank, limit = serve(data, flags, epoch, error, stopped, rank, limit, WORLD)
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles = tiles_m * tiles_n
    UNITS: tl.constexpr = BLOCK_M // STEP
    size = tiles.to(tl.int64) * (BLOCK_M * BLOCK_N)  # elements of a packed chunk
    own_flags = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    rest = virtual.to(tl.int64) * m * n
    if MERGED or program < producers:
        chunks = reach(limit, 1 if ONE_SHOT else WORLD)
        for index in tl.range(program, chunks * tiles, producers):
            owner = 0 if ONE_SHOT else (rank + 1 + index // tiles) % WORLD
            row_block, column_block = swizzle(index % tiles, tiles_m, tiles_n)
            tile = row_block * tiles_n + column_block
            result = multiply_inputs(
                a0, a1, a2, b0, b1, b2, k0, k1, k2, a0_stride, a1_stride, a2_stride, b0_stride, b1_stride, b2_stride,
                virtual * m + owner * rows, virtual, row_block * BLOCK_M, column_block * BLOCK_N,
                tl.minimum(rows, m - owner * rows), n,
                INPUTS, B_TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
            )  # fmt: skip
            rounded = result.to(PARTIAL)
            at = rank * size + tile.to(tl.int64) * (BLOCK_M * BLOCK_N)
            for step in range(WORLD if ONE_SHOT else 1):
                peer = (rank + 1 + step) % WORLD if ONE_SHOT else owner
                store_packed(
                    slot_of(data, peer, epoch, parity_stride, PARTIAL) + at, rounded, BLOCK_N, BLOCK_M, BLOCK_N
                )
                publish(flags_of(flags, peer, rank, writer_flags) + tile, epoch)
    if MERGED or (program >= producers and program < producers + reducers):
        worker, workers = program, programs
        if not MERGED:
            worker, workers = program - producers, reducers
        own_first = 0 if ONE_SHOT else rank * rows
        row_end = tl.minimum(rows, m - own_first)
        mine = slot_of(data, rank, epoch, parity_stride, PARTIAL)
        for unit in tl.range(worker, tiles * UNITS, workers):
            tile, row, column, at = chunk_place(unit, tiles_m, tiles_n, UNITS, STEP, BLOCK_M, BLOCK_N)
            for source in range(WORLD):
                limit = wait(own_flags + source * writer_flags + tile, epoch, report, source, limit)
            total = sum_sources(mine + at, size, WORLD, STEP, BLOCK_N)
            first = rest + tl.cast(own_first, tl.int64) * n
            total = finish(
                total, bias + virtual * n, residual + first, start + virtual * m + own_first, key_low, key_high,
                threshold, scale, row, column, row_end, n, BIAS, DROPOUT, RESIDUAL, ALIGNED, STEP, BLOCK_N,
            ).to(out.dtype.element_ty)  # fmt: skip
            store_block(out + first, total, row, column, row_end, n, n, STEP, BLOCK_N)
            if not ONE_SHOT:
                for step in range(1, reach(limit, WORLD)):
                    peer = (rank + step) % WORLD
                    results = second_area(slot_of(data, peer, epoch, parity_stride, PARTIAL), size, out, WORLD)
                    store_packed(results + rank * size + at, total, BLOCK_N, STEP, BLOCK_N)
                    publish(flags_of(flags, peer, rank, writer_flags) + tiles + unit, epoch)
    if not ONE_SHOT:
        if MERGED or program >= producers + reducers:
            worker, workers = program, programs
            if not MERGED:
                worker, workers = program - producers - reducers, programs - producers - reducers
            arrived = second_area(slot_of(data, rank, epoch, parity_stride, PARTIAL), size, out, WORLD)
            for index in tl.range(worker, (WORLD - 1) * tiles * UNITS, workers):
                owner = (rank + 1 + index // (tiles * UNITS)) % WORLD
                unit = index % (tiles * UNITS)
                limit = wait(own_flags + owner * writer_flags + tiles + unit, epoch, report, owner, limit)
                tile, row, column, at = chunk_place(unit, tiles_m, tiles_n, UNITS, STEP, BLOCK_M, BLOCK_N)
                block = sum_sources(arrived + owner * size + at, size, 1, STEP, BLOCK_N)
                store_block(out + rest + (owner * rows).to(tl.int64) * n, block, row, column,
                            tl.minimum(rows, m - owner * rows), n, n, STEP, BLOCK_N)  # fmt: skip


@triton.jit
def second_area(slot, size, out, WORLD: tl.constexpr):
    """Where sums arrive, typed like the result: behind the partials of WORLD sources."""
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
    Order:    one-shot: a tile goes to everybody's slot, everybody adds the sources in rank order. Two-shot: chunk r of
              the rows is added by rank r, which pushes the finished values to everybody; every rank waits for all of
              both. One flag per tile, then one per reduction step of a tile. All programs are resident; `spare` SMs
              stay free
    Source:   one-shot and two-shot all-reduce of symmetric-memory recipes and Triton-distributed, own protocol
    Errors:   ValueError if the channel's slots or flags are too small (matmul_all_reduce_space), or for a norm in
              `finish`, which is a pass of its own
    """
    served, world = channel.served, channel.world
    m = len(inputs[0]) // served
    n = weights[0].shape[1] if b_transposed else len(weights[0]) // served
    ks = [a.shape[1] for a in inputs]
    dtype = inputs[0].dtype
    partial = partial or dtype
    tile = tile or select_tile(inputs[0].device, dtype, m, n)
    one_shot, rows, tiles = plan(m, n, world, partial, one_shot, tile)
    finish.require_no_norm("matmul_all_reduce")
    channel.require("matmul_all_reduce", *matmul_all_reduce_space(m, n, world, dtype, partial, tile, one_shot))
    lefts, rights = [padded(a) for a in inputs], [padded(b) for b in weights]
    a_block, b_block = (tile.m, tile.k), (tile.k, tile.n) if b_transposed else (tile.n, tile.k)
    out = inputs[0].new_empty(served * m, n)
    step = step_rows(tile, out.element_size())
    merged = not is_interpreted()
    work = tiles if one_shot else tiles * world
    producers = persistent_programs(out.device, work, tile, programs, served, spare=spare)
    reducers = 0 if merged else min(producers, tiles * tile.m // step)
    finishers = 0 if merged or one_shot or world == 1 else reducers
    matmul_all_reduce_kernel[(producers + reducers + finishers, served)](
        *channel.arguments(),
        *three([operand(a, a_block, tile) for a in lefts]), *three([operand(b, b_block, tile) for b in rights]), out,
        *finish.arguments(out),
        m, rows, n, *three(ks), *three([a.stride(0) for a in lefts]), *three([b.stride(0) for b in rights]),
        producers, reducers,
        INPUTS=len(inputs), B_TRANSPOSED=b_transposed, **finish.flags(), ALIGNED=n % 4 == 0, ONE_SHOT=one_shot,
        MERGED=merged, WORLD=world, PARTIAL=DTYPES[partial], STEP=step,
        **blocks(tile), **launch_options(tile.warps, tile.stages, cooperative=True),
    )  # fmt: skip
    return out
