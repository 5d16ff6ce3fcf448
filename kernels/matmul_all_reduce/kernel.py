"""matmul_all_reduce: the row-parallel GEMM without sequence parallelism; every rank ends with the same bits. And the
same of matrices in blocks of e4m3.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..all_gather_matmul.plan import machine_of
from ..arguments import ReductionForm
from ..configurations import select_narrow_tile, select_tile
from ..cost import POLL_SECONDS, RELEASE_SECONDS, Machine, is_one_shot, tile_seconds
from ..finish import NOTHING, Finish
from ..launch import Tile, is_interpreted, launch_options, persistent_programs, step_rows, triton_dtype
from ..matmul.reference import check_products
from ..matmul_reduce_scatter.kernel import multiply_blocks, reduction_arguments, unit_rows
from ..protocol import Channel, announce, flags_of, publish, reach, serve, slot_of, slots_of, wait
from ..quantize.format import VALUES, Blocks
from ..quantize.kernel import require_capability
from ..quantized_matmul.kernel import CAPABILITIES, NO_TILE
from ..quantized_matmul.reference import check_products as check_products_of_blocks
from ..replay import launch, replayed
from ..tile import finish_tile, load_packed, multiply_inputs, store_block, store_packed, sum_sources, swizzle

# How long it takes to add a piece of a band: from its loads, of all sources at once, to its stores. An estimate, as
# Machine.load_latency is.
PIECE_SECONDS = 1e-6
# Loads of a thread in flight while it adds numbers of 2 bytes: 64 KiB for 256 threads. Few programs add at the same
# time, so that each has more than its share of the memory's bandwidth. float32, whose tiles leave fewer registers, has
# half of them, as 72 bytes spilled on sm_100; a copy has those of a reduce-scatter.
LOADS = 16


@triton.jit
def tile_place(place, tiles_m, tiles_n, TILE: tl.constexpr):
    """(number in the packed chunk, first row, first column) of the tile whose turn comes as number `place`."""
    row_block, column_block = swizzle(place, tiles_m, tiles_n)
    return row_block * tiles_n + column_block, row_block * TILE.m, column_block * TILE.n


@triton.jit(do_not_specialize=["rank", "m", "adders", "copiers", "late", "key"])
def matmul_all_reduce_kernel(
    links, rank, a0, a1, a2, b0, b1, b2, problem, m, adders, copiers, late, key: tl.int64, FORM: tl.constexpr
):
    """Every program computes and pushes tiles, and in between adds units: some rows of a tile, from all ranks.
    Two-shot, it pushes the sums, too, and behind its tiles copies sums that have arrived to the result.

    One-shot: there is one chunk of all M rows, which every rank adds. Two-shot: rank r adds chunk r of WORLD. The tiles
    at one place of all chunks follow one another, so that their sums travel while other places are computed. The last
    `adders` programs add, the very last ones the last units; the first `copiers` copy, and all copy the sums of the
    last `late` units (Sharing). A unit's turn comes behind the tile of the turn after those in which all programs have
    computed its tiles, so that waits are short. A copy's turn comes one later, and behind all tiles: copies are made
    while the last tiles and sums travel.
    Programs never wait for one another in a circle, as each waits for what others do in earlier turns.
    producers > 0: the first programs only compute, the next ones only add, and the last ones only copy.
    """
    TILE: tl.constexpr = FORM.tile
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    WORLD: tl.constexpr = FORM.world
    PARTIAL: tl.constexpr = FORM.partial
    STEP: tl.constexpr = FORM.step
    BAND: tl.constexpr = FORM.band
    COPIED: tl.constexpr = FORM.copied
    ALIGNED: tl.constexpr = FORM.aligned
    B_TRANSPOSED: tl.constexpr = FORM.b_transposed
    BLOCKS: tl.constexpr = FORM.blocks
    ONE_SHOT: tl.constexpr = FORM.one_shot
    CHUNKS: tl.constexpr = 1 if FORM.one_shot else FORM.world
    END: tl.constexpr = FORM.world + 1 if FORM.one_shot else FORM.world  # as in announce: all that is pushed to
    PEERS: tl.constexpr = FORM.world - 1
    SECOND_HOP: tl.constexpr = FORM.world > 1 and not FORM.one_shot
    TURNS: tl.constexpr = 3 if SECOND_HOP else 2  # behind those of the tiles
    MERGED: tl.constexpr = FORM.producers == 0
    PRODUCERS: tl.constexpr = FORM.producers
    virtual = tl.program_id(1)
    me, limit = serve(links, rank, WORLD)
    program, programs = tl.program_id(0), tl.num_programs(0)
    n, out = problem.n, problem.out
    rows = m if ONE_SHOT else tl.cdiv(m, WORLD)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles = tiles_m * tiles_n
    bands = tl.cdiv(tl.minimum(rows, BLOCK_M), BAND)  # units of a tile
    units = tiles * bands
    others, early = units * PEERS, (units - late) * PEERS
    size = tiles.to(tl.int64) * (BLOCK_M * BLOCK_N)  # elements of a packed chunk
    own_flags, mine = flags_of(me, me.rank, 0), slot_of(me, me.rank, PARTIAL)
    rest = virtual.to(tl.int64) * m * n
    own_first = 0 if ONE_SHOT else me.rank * rows
    own_rows = tl.minimum(rows, m - own_first)
    computed = reach(limit, CHUNKS) * tiles
    # the first tile of this program, how many share the tiles, and which one it is of those that add and that copy
    first, stride, adder, copier = program, programs, program - (programs - adders), program
    if not MERGED:
        stride, adder, copier = PRODUCERS, program - PRODUCERS, program - PRODUCERS - adders
        first = program if program < PRODUCERS else CHUNKS * tiles + (TURNS - 1) * stride
    unit = tl.where((adder >= 0) & (adder < adders), (adder + units) % adders, units)
    copy = tl.where((copier >= 0) & (copier < copiers), copier, early + program)
    # What a unit needs would take registers from the GEMM if it were computed before this loop.
    for turn in tl.range(first, CHUNKS * tiles + TURNS * stride, stride, disable_licm=True):
        if turn < computed:
            owner = 0 if ONE_SHOT else (me.rank + 1 + turn % WORLD) % WORLD
            tile, row, column = tile_place(turn // CHUNKS, tiles_m, tiles_n, TILE)
            row_end = tl.minimum(rows, m - owner * rows)
            # the addresses are under way while the tile is computed
            slots = slots_of(me, END, PARTIAL) if ONE_SHOT else (slot_of(me, owner, PARTIAL),)
            flag = flags_of(me, owner, me.rank) + tile
            first_row = virtual * m + owner * rows
            if BLOCKS:
                result = multiply_blocks(
                    problem, (a0, a1, a2), (b0, b1, b2), first_row, tl.num_programs(1) * m, virtual,
                    row, column, row_end, TILE,
                )  # fmt: skip
            else:
                result = multiply_inputs(
                    problem.pairs, (a0, a1, a2), (b0, b1, b2), first_row, virtual,
                    row, column, row_end, n, B_TRANSPOSED, TILE,
                )  # fmt: skip
            rounded = result.to(PARTIAL)
            at = me.rank * size + tile.to(tl.int64) * (BLOCK_M * BLOCK_N)
            for peer in tl.static_range(WORLD // CHUNKS):
                store_packed(slots[peer] + at, rounded, BLOCK_N, BLOCK_M, BLOCK_N, row_end - row)
            if ONE_SHOT:
                announce(me, tile, END)
            else:
                publish(flag, me.epoch)
        begun = turn // stride * stride  # all tiles before this one have been computed in earlier turns
        while (unit < units) & ((unit // bands + 1) * CHUNKS <= begun):
            tile, row, column = tile_place(unit // bands, tiles_m, tiles_n, TILE)
            limit = wait(me, own_flags + tile, 0, limit, WORLD)
            begin = row + unit % bands * BAND
            end = tl.minimum(begin + BAND, own_rows)
            at = tile.to(tl.int64) * (BLOCK_M * BLOCK_N) - row * BLOCK_N
            slots = slots_of(me, END, PARTIAL)
            for piece in tl.range(begin, reach(limit, 1) * end, STEP):
                total = sum_sources(mine + at + piece * BLOCK_N, size, WORLD, STEP, BLOCK_N, end - piece)
                total = finish_tile(
                    total, problem.addends, key, virtual * m + own_first, virtual, piece, column, end, n,
                    ALIGNED, STEP, BLOCK_N,
                ).to(out.dtype.element_ty)  # fmt: skip
                target = out + rest + tl.cast(own_first, tl.int64) * n
                store_block(target, total, piece, column, end, n, n, STEP, BLOCK_N)
                if SECOND_HOP and reach(limit, WORLD) > 0:
                    for peer in tl.static_range(WORLD - 1):
                        sums = second_area(slots[peer], size, out, WORLD) + me.rank * size + at
                        store_packed(sums + piece * BLOCK_N, total, BLOCK_N, STEP, BLOCK_N, end - piece)
            if SECOND_HOP and reach(limit, WORLD) > 0:
                announce(me, tiles + unit, END)
            unit += adders
        if SECOND_HOP and turn >= computed:
            while (copy < others) & ((copy // PEERS // bands + 1) * CHUNKS + stride <= begun):
                owner, summed = (me.rank + 1 + copy % PEERS) % WORLD, copy // PEERS
                limit = wait(me, own_flags + tiles + summed, owner, limit)
                tile, row, column = tile_place(summed // bands, tiles_m, tiles_n, TILE)
                begin = row + summed % bands * BAND
                end = tl.minimum(begin + BAND, tl.minimum(rows, m - owner * rows))
                at = owner * size + tile.to(tl.int64) * (BLOCK_M * BLOCK_N) - row * BLOCK_N
                arrived = second_area(mine, size, out, WORLD) + at
                target = out + rest + (owner * rows).to(tl.int64) * n
                for piece in tl.range(begin, reach(limit, 1) * end, COPIED):
                    block = load_packed(arrived + piece * BLOCK_N, COPIED, BLOCK_N, end - piece)
                    store_block(target, block, piece, column, end, n, n, COPIED, BLOCK_N)
                copy += tl.where(copy < early, copiers, programs)


@triton.jit
def second_area(slot, size, out, WORLD: tl.constexpr):
    """Pointer, typed like the result, to where sums arrive: behind the partial sums of WORLD sources."""
    return tl.multiple_of((slot + WORLD * size).to(tl.pointer_type(out.dtype.element_ty)), 16)


def plan(m: int, n: int, world: int, partial: torch.dtype, one_shot: bool | None, tile: Tile) -> tuple[bool, int, int]:
    """(one-shot?, rows of a chunk, tiles of a chunk)."""
    if one_shot is None:
        one_shot = is_one_shot(m, n, partial.itemsize)
    rows = m if one_shot else triton.cdiv(m, world)
    return one_shot, rows, triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n)


def select_all_reduce_tile(
    device: torch.device, dtype: torch.dtype, m: int, n: int, world: int, one_shot: bool | None = None
) -> Tile:
    """The tile for results of (m, n): one-shot with a program for every SM, two-shot for chunks of m / world rows."""
    if one_shot is None:
        one_shot = is_one_shot(m, n, dtype.itemsize)
    if one_shot:
        return select_narrow_tile(device, dtype, m, n)
    return select_tile(device, dtype, triton.cdiv(m, world), n, chunks=world)


def added_rows(tile: Tile, itemsize: int, world: int) -> int:
    """How many rows of a tile a program adds at a time."""
    return unit_rows(tile, itemsize, world, 2 * LOADS // itemsize)


def added_seconds(rows: int, tile: Tile, itemsize: int, world: int) -> float:
    """Seconds in which a program adds so many rows of a tile."""
    return triton.cdiv(rows, added_rows(tile, itemsize, world)) * PIECE_SECONDS


def band_rows(rows: int, n: int, world: int, tile: Tile, itemsize: int, programs: int) -> int:
    """Rows of a unit, for chunks of (rows, n): those of a tile, or a half, a quarter and so on of them.

    The program with the most units shall take the least time: for each it waits once for all ranks and sets
    flags, adds the rows, and waits for a flag of each peer's.
    """
    tiles, present = triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n), min(rows, tile.m)
    flags = world * POLL_SECONDS + RELEASE_SECONDS

    def seconds(band: int) -> float:
        return triton.cdiv(tiles * triton.cdiv(present, band), programs) * (
            flags + added_seconds(min(band, present), tile, itemsize, world)
        )

    least, choices = step_rows(tile, itemsize), [tile.m]
    while choices[-1] > least:
        choices.append(choices[-1] // 2)
    return min(choices, key=seconds)


class Sharing(NamedTuple):
    """Which programs add, and which copy sums that have arrived."""

    adders: int
    """The last so many programs: those that have no tile in the last turn of tiles, if they can add all units in about
    the time of that tile, else all programs."""
    copiers: int
    """The first so many: those that add no late unit, but at least half of all programs. The others, whose sums are
    late, copy late sums alone."""
    late: int
    """Units with tiles of the last turn of tiles. They are added by the last programs, and all programs copy them."""


def share_sums(tiles: int, chunks: int, bands: int, programs: int, adding: float, multiplying: float) -> Sharing:
    """For chunks of so many tiles, each of `bands` units. adding, multiplying: seconds of a unit and of a tile."""
    turns, units = triton.cdiv(chunks * tiles, programs), tiles * bands
    idle, adders = turns * programs - chunks * tiles, programs
    if idle and triton.cdiv(units, idle) * adding - multiplying <= triton.cdiv(units, programs) * adding:
        adders = idle
    late = units - (turns - 1) * programs // chunks * bands
    return Sharing(adders, max(programs - min(late, adders), triton.cdiv(programs, 2)), late)


def share_in_bands(units: int, producers: int, chunks: int) -> Sharing:
    """The interpreter's: programs behind the producers, which only add or, if there is a second hop, only copy."""
    adders = min(producers, units)
    return Sharing(adders, adders if chunks > 1 else 0, 0)


def plan_sums(
    sizes: tuple[int, int, int], chunks: int, world: int, tile: Tile, itemsize: int, band: int, programs: int,
    machine: Machine, served: int = 1,
) -> Sharing:  # fmt: skip
    """The sharing among so many programs of a rank, by the times in cost.py. sizes: rows and columns of a chunk, K."""
    rows, n, k = sizes
    present = min(rows, tile.m)
    adding = POLL_SECONDS + added_seconds(min(band, present), tile, itemsize, world) + RELEASE_SECONDS
    # as if each program had an SM of its own
    multiplying = tile_seconds(tile[:2], k, 1, machine, served * programs)
    tiles = triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n)
    return share_sums(tiles, chunks, triton.cdiv(present, band), programs, adding, multiplying)


def matmul_all_reduce_space(
    m: int, n: int, world: int, dtype: torch.dtype, partial: torch.dtype, tile: Tile, one_shot: bool | None = None
) -> tuple[int, int]:
    """(bytes of a slot, flags per writer) that the channel must offer for results of (m, n)."""
    one_shot, rows, tiles = plan(m, n, world, partial, one_shot, tile)
    units = triton.cdiv(min(rows, tile.m), step_rows(tile, dtype.itemsize))  # of a tile, at most
    chunks = world * tiles * tile.m * tile.n
    return chunks * (partial.itemsize + (0 if one_shot else dtype.itemsize)), tiles * (1 if one_shot else 1 + units)


def launch_all_reduce(
    operation: str, inputs: Sequence[Tensor] | Sequence[Blocks], weights: Sequence[Tensor] | Sequence[Blocks],
    sizes: tuple[int, int, int], dtype: torch.dtype, channel: Channel, finish: Finish, tile: Tile, *,
    one_shot: bool | None, b_transposed: bool = False, partial: torch.dtype | None, programs: int | None, spare: int,
) -> Tensor:  # fmt: skip
    """The launch of both functions below. sizes: rows and columns of a rank's result, which has this dtype, and K."""
    (m, n, k), served, world, partial = sizes, channel.served, channel.world, partial or dtype
    like, itemsize = (inputs[0].values, 1) if isinstance(inputs[0], Blocks) else (inputs[0], 2)
    one_shot, rows, tiles = plan(m, n, world, partial, one_shot, tile)
    finish.check_of_tiles(operation, like, (served * m, n), served)
    space = matmul_all_reduce_space(m, n, world, dtype, partial, tile, one_shot)
    channel.require(operation, *space, "matmul_all_reduce_space")
    out = like.new_empty((served * m, n), dtype=dtype)
    chunks = 1 if one_shot else world
    # ranks may differ in `spare`, but not in what a unit is
    every = persistent_programs(out.device, chunks * tiles, tile, programs, served, itemsize=itemsize)
    band = band_rows(rows, n, world, tile, dtype.itemsize, every)
    programs = persistent_programs(out.device, chunks * tiles, tile, programs, served, spare, itemsize)
    machine = machine_of(out.device, itemsize)
    sharing = plan_sums((rows, n, k), chunks, world, tile, dtype.itemsize, band, programs, machine, served)
    producers = programs if is_interpreted() else 0
    if producers:
        sharing = share_in_bands(tiles * triton.cdiv(min(rows, tile.m), band), producers, chunks)
        programs += sharing.adders + sharing.copiers
    added, copied = min(band, added_rows(tile, dtype.itemsize, world)), min(band, unit_rows(tile, dtype.itemsize, 1))
    kind, aligned = triton_dtype(partial), n % 4 == 0
    form = ReductionForm(
        tile, b_transposed, world, kind, added, aligned, producers, one_shot, band, copied, itemsize == 1
    )  # fmt: skip
    launch(
        matmul_all_reduce_kernel, (programs, served),
        channel.links, channel.rank, *reduction_arguments(inputs, weights, finish, out, tile, b_transposed), m,
        *sharing, finish.key, form, **launch_options(tile.warps, tile.stages, cooperative=True),
    )  # fmt: skip
    return out


@replayed
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
              2 (t - 1) / t B, in tiles that have all columns, but no rows that do not exist. one_shot None: as
              cost.is_one_shot
    Order:    one-shot: a tile goes to every rank's slot, and every rank adds the sources in rank order. Two-shot: rank
              r adds chunk r of the rows and pushes the finished values to every rank. Each tile has a flag at the rank
              that adds it. Two-shot, each unit of band_rows has one at every rank, too, and all of them are set behind
              one fence. Programs without a tile of the last turn add, if its time is enough for that, else all
              (plan_sums). All programs are resident; `spare` SMs stay free
    Source:   one-shot and two-shot all-reduce of symmetric-memory recipes and Triton-distributed, own protocol
    Errors:   as matmul_reduce_scatter, with the sizes of matmul_all_reduce_space
    """
    served, world = channel.served, channel.world
    m, dtype = len(inputs[0]) // served, inputs[0].dtype
    n, k = weights[0].shape[1] if b_transposed else len(weights[0]) // served, sum(a.shape[1] for a in inputs)
    tile = tile or select_all_reduce_tile(inputs[0].device, dtype, m, n, world, one_shot)
    check_products("matmul_all_reduce", channel.epoch, inputs, weights, b_transposed, served)
    return launch_all_reduce(
        "matmul_all_reduce", inputs, weights, (m, n, k), dtype, channel, finish, tile, one_shot=one_shot,
        b_transposed=b_transposed, partial=partial, programs=programs, spare=spare,
    )  # fmt: skip


@replayed
def quantized_matmul_all_reduce(
    inputs: Sequence[Blocks],
    weights: Sequence[Blocks],
    channel: Channel,
    finish: Finish = NOTHING,
    *,
    dtype: torch.dtype,
    partial: torch.dtype | None = None,
    one_shot: bool | None = None,
    tile: Tile | None = None,
    programs: int | None = None,
    spare: int = 0,
) -> Tensor:
    """matmul_all_reduce of the numbers that blocks of e4m3 stand for, with results in this dtype.

    Math:     quantized_matmul_all_reduce_reference
    Shapes:   input i blocks of rows (M, K_i); weight i blocks of (N, K_i), or the transposed copy of one (K_i, N);
              K_i and N multiples of 128; dtype bfloat16, float16 or float32; else as matmul_all_reduce
    Numerics: products as the kernel of quantized_matmul; sums as matmul_all_reduce, with `partial` by default dtype
    Traffic:  quantized_matmul_all_reduce_cost; sums are sent as there
    Order, source: as there and as quantized_matmul
    Errors:   as there, and ValueError on a GPU for which no tile ships
    """
    served, world, values = channel.served, channel.world, inputs[0].values
    check_products_of_blocks("quantized_matmul_all_reduce", channel.epoch, inputs, weights, dtype, served)
    require_capability(values, *CAPABILITIES, NO_TILE)
    m, n, k = len(values) // served, len(weights[0].values) // served, sum(a.values.shape[1] for a in inputs)
    if one_shot is None:
        one_shot = is_one_shot(m, n, (partial or dtype).itemsize)
    tile = tile or select_all_reduce_tile(values.device, VALUES, m, n, world, one_shot)
    return launch_all_reduce(
        "quantized_matmul_all_reduce", inputs, weights, (m, n, k), dtype, channel, finish, tile, one_shot=one_shot,
        partial=partial, programs=programs, spare=spare,
    )  # fmt: skip
