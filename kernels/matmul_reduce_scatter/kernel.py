"""matmul_reduce_scatter: the row-parallel GEMM that sends each tile to the rank that owns its rows, once computed; and
the same of matrices in blocks of e4m3, which are multiplied as quantized_matmul does.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import BlocksPair, Pair, Reduction, ReductionForm, three
from ..configurations import select_tile
from ..finish import NOTHING, Finish
from ..launch import Tile, is_interpreted, launch_options, operand, padded, persistent_programs, step_rows, triton_dtype
from ..matmul.reference import check_products
from ..protocol import Channel, barrier, flags_of, publish, reach, serve, slot_of, wait
from ..quantize.format import VALUES, Blocks
from ..quantize.kernel import require_capability
from ..quantized_matmul.kernel import BLOCK, CAPABILITIES, NO_TILE, add_scaled
from ..quantized_matmul.reference import check_products as check_products_of_blocks
from ..replay import launch, replayed
from ..tile import (
    GROUP_M,
    Operand,
    finish_tile,
    load_block,
    multiply_step,
    store_block,
    store_packed,
    sum_sources,
    swizzle,
)

# Loads of a thread in flight while it adds: 32 KiB for 256 threads. An H200's memory would be busy with 26 KiB of each
# SM if it answered after 0.8 us, which is an estimate.
LOADS = 8
# To wait for sources that are there takes as long as to add so much of a unit. It is a prediction, by the times in
# cost.py: a poll, and a unit's loads.
WAIT_UNITS = 0.6


@triton.jit
def select_pair(pairs, lefts, rights, pair, virtual, n, FORM: tl.constexpr):
    """(first operand from row 0 on, second operand, K) of a pair."""
    left, right, sizes = lefts[0], rights[0], pairs[0]
    if pairs[1] is not None:
        if pair == 1:
            left, right, sizes = lefts[1], rights[1], pairs[1]
        if pairs[2] is not None:
            if pair == 2:
                left, right, sizes = lefts[2], rights[2], pairs[2]
    b_row = tl.cast(virtual * (sizes.k if FORM.b_transposed else n), tl.int32)
    return Operand(left, 0, sizes.a_stride), Operand(right, b_row, sizes.b_stride), sizes.k


@triton.jit
def tile_of(tile, rank, tiles_m, tiles_n, WORLD: tl.constexpr):
    """(owner, row block of its rows, column block) of a tile. The owners of row blocks take turns, so that the links
    are busy from the first tiles to the last."""
    block, column_block = swizzle(tile, tiles_m * WORLD, tiles_n)
    return (rank + 1 + block % WORLD) % WORLD, block // WORLD, column_block


@triton.jit
def push_tile(me, result, owner, row_block, column_block, tiles_m, tiles_n, FORM: tl.constexpr):
    """Store a tile into its owner's slot. Whoever completes a row block sets its flag."""
    TILE: tl.constexpr = FORM.tile
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    # Each tile is packed, so that stores are contiguous, unmasked and 16 bytes wide for any N.
    at = (me.rank.to(tl.int64) * tiles_m * tiles_n + row_block * tiles_n + column_block) * (BLOCK_M * BLOCK_N)
    store_packed(slot_of(me, owner, FORM.partial) + at, result, BLOCK_N, BLOCK_M, BLOCK_N)
    counter = me.counters + owner * tiles_m + row_block
    barrier()  # so that the count covers all warps' stores
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tiles_n - 1:
        tl.store(counter, 0)
        publish(flags_of(me, owner, me.rank) + row_block, me.epoch)


@triton.jit
def push_tiles(problem, lefts, rights, me, begin, end, programs, rows, virtual, FORM: tl.constexpr):
    """Compute tiles begin, begin + programs, ... below `end`, and push each.

    One loop has the steps of K of all pairs of all tiles, as in linear_tiles.
    """
    TILE: tl.constexpr = FORM.tile
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    n, pairs = problem.n, problem.pairs
    PAIRS: tl.constexpr = 1 if pairs[1] is None else 2 if pairs[2] is None else 3
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(pairs[0].k, TILE.k)
    if PAIRS > 1:
        steps += tl.cdiv(pairs[1].k, TILE.k)
    if PAIRS > 2:
        steps += tl.cdiv(pairs[2].k, TILE.k)
    tile, pair, step, length = begin - programs, PAIRS - 1, -1, 0  # step and length: of the pair
    left, right, k = select_pair(pairs, lefts, rights, 0, virtual, n, FORM)
    first, row, column = 0, 0, 0
    done, last = begin, steps - 1
    result, part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(tl.cdiv(end - begin, programs) * steps):
        # as in linear_tiles, what the next loads need stands before the product, and products have a count of their own
        step += 1
        if step == length:
            step, pair = 0, tl.where(pair == PAIRS - 1, 0, pair + 1)
            left, right, k = select_pair(pairs, lefts, rights, pair, virtual, n, FORM)
            length = tl.cdiv(k, TILE.k)
            if pair == 0:
                tile += programs
                owner, row_block, column_block = tile_of(tile, me.rank, tiles_m, tiles_n, FORM.world)
                first = (virtual * FORM.world + owner) * rows
                row, column = row_block * BLOCK_M, column_block * BLOCK_N
        a = Operand(left.source, first, left.stride)
        result, part = multiply_step(
            result, part, a, right, row, column, rows, n, k, step, False, FORM.b_transposed, TILE
        )
        if i == last:
            owner, row_block, column_block = tile_of(done, me.rank, tiles_m, tiles_n, FORM.world)
            push_tile(me, result, owner, row_block, column_block, tiles_m, tiles_n, FORM)
            result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            done, last = done + programs, last + steps


@triton.jit
def multiply_blocks(problem, lefts, rights, a_row, a_rows, virtual, m, n, m_end, TILE: tl.constexpr):
    """multiply_inputs of tile.py for pairs of matrices in blocks of e4m3, whose A has a_rows rows."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    rows, first, result = m + tl.arange(0, BLOCK_M), virtual * problem.n, tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.static_range(3):  # as in multiply_inputs
        if problem.pairs[i] is not None:
            k, steps = problem.pairs[i].k, problem.pairs[i].k // BLOCK
            of_rows = problem.pairs[i].a_exponents + a_row + rows
            of_weight = problem.pairs[i].b_exponents + (first + n) // BLOCK * steps
            for step in range(steps):
                at = step * BLOCK
                left = load_block(lefts[i], a_row + m, at, a_row + m_end, k, k, BLOCK_M, BLOCK, TILE.tma)
                right = load_block(rights[i], first + n, at, first + problem.n, k, k, BLOCK_N, BLOCK, TILE.tma)
                result = add_scaled(result, left, right, of_rows + step * a_rows, rows < m_end, of_weight + step)
    return result


@triton.jit
def push_products_of_blocks(problem, lefts, rights, me, begin, end, programs, rows, virtual, FORM: tl.constexpr):
    """push_tiles for matrices in blocks of e4m3. Each pair has a K loop for each tile."""
    TILE: tl.constexpr = FORM.tile
    tiles_m, tiles_n = tl.cdiv(rows, TILE.m), tl.cdiv(problem.n, TILE.n)
    every = tl.num_programs(1) * FORM.world * rows
    for tile in range(begin, end, programs):
        owner, row_block, column_block = tile_of(tile, me.rank, tiles_m, tiles_n, FORM.world)
        first = (virtual * FORM.world + owner) * rows
        row, column = row_block * TILE.m, column_block * TILE.n
        result = multiply_blocks(problem, lefts, rights, first, every, virtual, row, column, rows, TILE)
        push_tile(me, result, owner, row_block, column_block, tiles_m, tiles_n, FORM)


@triton.jit(do_not_specialize=["rank", "rows", "early_blocks", "early_runs", "late_runs", "key"])
def matmul_reduce_scatter_kernel(
    links, rank, a0, a1, a2, b0, b1, b2, problem, rows, early_blocks, early_runs, late_runs, key: tl.int64,
    FORM: tl.constexpr,
):  # fmt: skip
    """The first `producers` programs compute and push tiles, the others finish row blocks. producers = 0: all programs
    do first the one, then the other. early_blocks, early_runs, late_runs: as in Finishing."""
    TILE: tl.constexpr = FORM.tile
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    WORLD: tl.constexpr = FORM.world
    PARTIAL: tl.constexpr = FORM.partial
    STEP: tl.constexpr = FORM.step
    ALIGNED: tl.constexpr = FORM.aligned
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
        end = reach(limit, WORLD) * tiles
        if FORM.blocks:
            push_products_of_blocks(
                problem, (a0, a1, a2), (b0, b1, b2), me, program, end, producers, rows, virtual, FORM
            )
        else:
            push_tiles(problem, (a0, a1, a2), (b0, b1, b2), me, program, end, producers, rows, virtual, FORM)
    if FORM.producers == 0 or program >= producers:
        if FORM.producers > 0:
            program -= producers
        own_flags = flags_of(me, me.rank, 0)
        slot, source_stride = slot_of(me, me.rank, PARTIAL), tiles.to(tl.int64) * (BLOCK_M * BLOCK_N)
        out = problem.out + virtual.to(tl.int64) * rows * n
        early = early_blocks * early_runs
        for run in tl.range(program, early + (tiles_m - early_blocks) * late_runs, finishers):
            runs, row_block = early_runs, 0
            if run >= early:
                run -= early
                runs, row_block = late_runs, early_blocks
            row_block += run // runs
            limit = wait(me, own_flags + row_block, 0, limit, WORLD)
            first_row = row_block * BLOCK_M
            units = tl.cdiv(tl.minimum(rows - first_row, BLOCK_M), STEP) * tiles_n  # of STEP rows of a column block
            share = tl.cdiv(units, runs)
            first = run % runs * share
            for unit in range(first, reach(limit, 1) * tl.minimum(first + share, units)):
                row, column_block = unit // tiles_n * STEP, unit % tiles_n
                at = (row_block * tiles_n + column_block).to(tl.int64) * (BLOCK_M * BLOCK_N) + row * BLOCK_N
                total = sum_sources(slot + at, source_stride, WORLD, STEP, BLOCK_N)
                row, column = first_row + row, column_block * BLOCK_N
                total = finish_tile(total, problem.addends, key, virtual * rows, virtual, row, column, rows, n,
                               ALIGNED, STEP, BLOCK_N)  # fmt: skip
                store_block(out, total, row, column, rows, n, n, STEP, BLOCK_N)


def reduction_arguments(
    inputs: Sequence[Tensor] | Sequence[Blocks], weights: Sequence[Tensor] | Sequence[Blocks], finish: Finish,
    out: Tensor, tile: Tile, b_transposed: bool,
) -> tuple:  # fmt: skip
    """The arguments a0 to `problem` of a reducing kernel: inputs and weights as it takes them, and their sizes."""
    blocks = isinstance(inputs[0], Blocks)
    k = BLOCK.value if blocks else tile.k
    a_block, b_block = (tile.m, k), (k, tile.n) if b_transposed else (tile.n, k)
    pairs: list[Pair] | list[BlocksPair]
    if blocks:
        lefts, rights = ([each.values.contiguous() for each in blocks] for blocks in (inputs, weights))
        exponents = ([each.exponents.contiguous() for each in blocks] for blocks in (inputs, weights))
        pairs = [BlocksPair(a.shape[1], *both) for a, *both in zip(lefts, *exponents, strict=True)]
    else:
        lefts, rights = ([padded(each) for each in matrices] for matrices in (inputs, weights))
        pairs = [Pair(a.shape[1], a.stride(0), b.stride(0)) for a, b in zip(lefts, rights, strict=True)]
    return (
        *three([operand(a, a_block, tile) for a in lefts]),
        *three([operand(b, b_block, tile) for b in rights]),
        Reduction(out.shape[1], three(pairs), finish.arguments(), out),
    )


def unit_rows(tile: Tile, itemsize: int, world: int, loads: int | None = None) -> int:
    """How many rows of a column block a program adds at a time: each thread has about `loads` loads of ALIGNMENT bytes
    in flight, from all sources together; None: LOADS."""
    return min(tile.m, step_rows(tile, itemsize) * max(1, (loads or LOADS) // world))


class Finishing(NamedTuple):
    """How the sums of a rank's rows are shared out: each row block in runs of units, which one program adds."""

    early_blocks: int
    """The row blocks that all ranks have computed before the last tiles are under way. They are finished first."""
    early_runs: int
    """Runs of each early row block."""
    late_runs: int
    """Runs of each late row block."""


def runs_of_block(blocks: int, units: int, finishers: int) -> int:
    """In how many runs each of some row blocks is shared out: so that the program with the most to do has the least, of
    units to add and of waits, one for each run."""
    choices = {max(1, min(units, rounds * finishers // max(1, blocks))) for rounds in (1, 2, 3, 4)}

    def work(runs: int) -> float:
        return triton.cdiv(blocks * runs, finishers) * (triton.cdiv(units, runs) + WAIT_UNITS)

    return min(sorted(choices), key=work)


def plan_finishing(rows: int, n: int, tile: Tile, step: int, world: int, finishers: int) -> Finishing:
    """The plan of so many programs. Tiles are computed in groups of GROUP_M row blocks, of all owners in turn, so the
    blocks of the last group come late."""
    blocks, units = triton.cdiv(rows, tile.m), triton.cdiv(min(rows, tile.m), step) * triton.cdiv(n, tile.n)
    late = min(blocks, triton.cdiv(GROUP_M.value, world))
    runs = (runs_of_block(each, units, finishers) for each in (blocks - late, late))
    return Finishing(blocks - late, *runs)


def matmul_reduce_scatter_space(rows: int, n: int, world: int, partial: torch.dtype, tile: Tile) -> tuple[int, int]:
    """(bytes of a slot, flags per writer) that the channel must offer for results of (rows, n) on each rank."""
    tiles_m = triton.cdiv(rows, tile.m)
    return world * tiles_m * triton.cdiv(n, tile.n) * tile.m * tile.n * partial.itemsize, tiles_m


def launch_scatter(
    operation: str, inputs: Sequence[Tensor] | Sequence[Blocks], weights: Sequence[Tensor] | Sequence[Blocks],
    sizes: tuple[int, int], dtype: torch.dtype, channel: Channel, finish: Finish, tile: Tile, *,
    b_transposed: bool = False, partial: torch.dtype | None, programs: int | None, spare: int,
) -> Tensor:  # fmt: skip
    """The launch of both functions below. sizes: rows and columns of each rank's result, which has this dtype."""
    (rows, n), served, world, partial = sizes, channel.served, channel.world, partial or dtype
    like, blocks = (inputs[0].values, True) if isinstance(inputs[0], Blocks) else (inputs[0], False)
    finish.check_of_tiles(operation, like, (served * rows, n), served)
    space = matmul_reduce_scatter_space(rows, n, world, partial, tile)
    channel.require(operation, *space, "matmul_reduce_scatter_space")
    out = like.new_empty((served * rows, n), dtype=dtype)
    tiles = world * triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n)
    step = unit_rows(tile, out.element_size(), world)
    programs = persistent_programs(out.device, tiles, tile, programs, served, spare, 1 if blocks else 2)
    producers = programs if is_interpreted() else 0
    launch(
        matmul_reduce_scatter_kernel, (programs + producers, served),
        channel.links, channel.rank, *reduction_arguments(inputs, weights, finish, out, tile, b_transposed), rows,
        *plan_finishing(rows, n, tile, step, world, programs), finish.key,
        ReductionForm(tile, b_transposed, world, triton_dtype(partial), step, n % 4 == 0, producers, blocks=blocks),
        **launch_options(tile.warps, tile.stages, cooperative=True),
    )  # fmt: skip
    return out


@replayed
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
    Order:    the row blocks of all chunks take turns, that of rank + 1's chunk first and the own one last. A tile is
              stored into its owner's slot, and the program that completes a row block's tiles (counted in local memory)
              sets the block's flag at the owner. Then a row block is finished by several programs: each waits once for
              the flags of all sources, and adds a run of units, which are a few rows of a column block (unit_rows).
              Row blocks that came early are finished while the last tiles travel. All programs are resident, because
              one that waits may hold the SM that another tile needs; `spare` SMs stay free
    Source:   push-based GEMM + reduce-scatter (research: symmetric-memory recipes, Triton-distributed), own protocol
    Errors:   ValueError if the channel's slots or flags are too small (matmul_reduce_scatter_space), or for a norm in
              `finish`, which takes a pass of its own (docs/LOG.md, the first GPU)
    """
    served, world = channel.served, channel.world
    rows = len(inputs[0]) // (served * world)
    n = weights[0].shape[1] if b_transposed else len(weights[0]) // served
    tile = tile or select_tile(inputs[0].device, inputs[0].dtype, rows, n, chunks=world)
    check_products("matmul_reduce_scatter", channel.epoch, inputs, weights, b_transposed, served, world)
    return launch_scatter(
        "matmul_reduce_scatter", inputs, weights, (rows, n), inputs[0].dtype, channel, finish, tile,
        b_transposed=b_transposed, partial=partial, programs=programs, spare=spare,
    )  # fmt: skip


@replayed
def quantized_matmul_reduce_scatter(
    inputs: Sequence[Blocks],
    weights: Sequence[Blocks],
    channel: Channel,
    finish: Finish = NOTHING,
    *,
    dtype: torch.dtype,
    partial: torch.dtype | None = None,
    tile: Tile | None = None,
    programs: int | None = None,
    spare: int = 0,
) -> Tensor:
    """matmul_reduce_scatter of the numbers that blocks of e4m3 stand for, with results in this dtype.

    Math:     quantized_matmul_reduce_scatter_reference, this rank's entry
    Shapes:   input i blocks of rows (M, K_i); weight i blocks of (N, K_i), or the transposed copy of one (K_i, N);
              K_i and N multiples of 128; dtype bfloat16, float16 or float32; else as matmul_reduce_scatter
    Numerics: products as the kernel of quantized_matmul; sums as matmul_reduce_scatter, with `partial` by default dtype
    Traffic:  quantized_matmul_reduce_scatter_cost; partial sums are sent as there, in 16 bits as those of 16 bits
    Order:    as there; each pair has a K loop for each tile
    Source:   as there and as quantized_matmul
    Errors:   as there, and ValueError on a GPU for which no tile ships
    """
    served, world, values = channel.served, channel.world, inputs[0].values
    check_products_of_blocks("quantized_matmul_reduce_scatter", channel.epoch, inputs, weights, dtype, served, world)
    require_capability(values, *CAPABILITIES, NO_TILE)
    rows, n = len(values) // (served * world), len(weights[0].values) // served
    tile = tile or select_tile(values.device, VALUES, rows, n, chunks=world)
    return launch_scatter(
        "quantized_matmul_reduce_scatter", inputs, weights, (rows, n), dtype, channel, finish, tile,
        partial=partial, programs=programs, spare=spare,
    )  # fmt: skip
