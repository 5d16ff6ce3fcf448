"""all_gather_grouped_matmul: the GEMMs of a layer's experts, which start on the own tokens while the others' arrive.

The same kernel multiplies rows and matrices in blocks of e4m3, of which a shard is values, then exponents.

Rows come by an index, which TMA cannot follow, so pointers load what arrived. These loads and the peers' stores both
go through the generic proxy, and no fence has to stand between the acquire and the loads.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..all_gather_matmul import plan
from ..all_gather_matmul.kernel import all_gather_matmul_space, gather_of, push_rows
from ..all_gather_quantized_matmul.kernel import all_gather_quantized_matmul_space
from ..configurations import select_grouped_tile
from ..cost import gemm_seconds
from ..grouped_matmul.kernel import (
    GroupedForm,
    aligned,
    find_tile,
    load_matrix,
    load_rows,
    matrices,
    numbers,
    pointer_stages,
)
from ..launch import Tile, launch_options, operand, packed, triton_dtype
from ..protocol import Channel, flags_of, reach, serve, wait
from ..quantize.format import VALUES, Blocks
from ..quantize.kernel import require_capability
from ..quantized_grouped_matmul.kernel import multiply_group
from ..quantized_matmul.kernel import BLOCK, CAPABILITIES, NO_TILE
from ..replay import launch
from ..tile import add_product, store_activated
from .reference import check_blocks, check_operands, starts_of


class Experts(NamedTuple):
    """Sizes of the grouped GEMM, in elements."""

    n: Any
    k: Any
    a_stride: Any
    """Elements from one row of the shard, or of a slot, to the next."""
    weight_stride: Any
    """Elements from one row of a matrix to the next."""
    slot_rows: Any
    """Rows from one virtual rank's slot to the next one's."""
    exponents: Any = None
    """Those of the matrices in blocks of e4m3, or None. With them a shard is one row: all values, then exponents."""


@triton.jit
def count_blocks(starts, groups, FORM: tl.constexpr):
    """Of one source: each group's row blocks and those of the groups before it. starts: the source's row of starts_of,
    behind which lies the next one."""
    each = tl.arange(0, FORM.groups)
    begins = tl.load(starts + each, mask=each < groups, other=0)
    ends = tl.load(starts + groups + each, mask=each < groups, other=0)
    return tl.cumsum(tl.cdiv(ends - begins, FORM.tile.m))


@triton.jit
def take_turn(program, programs, pushers, joined, before, tiles):
    """(first tile, distance to the next one) of a program in a chunk, as all_gather_matmul's `walk`, but chunks have
    different numbers of tiles. before: the place in the round after the last chunk, from which the next one goes on.

    The pushers come last in the round, in which they have a place once they have joined.
    """
    computing = programs - pushers
    distance = tl.where(joined, programs, computing)
    place = (program + computing) % programs
    first = tl.where(place < distance, (place + distance - before) % distance, tiles)
    return first, distance


@triton.jit
def expert_tiles(
    problem, source, source_row, shard, rank, shard_rows, tokens, weights, first_group, starts, blocks, y, groups,
    begin, end, distance, FORM: tl.constexpr,
):  # fmt: skip
    """Compute and store tiles begin, begin + distance, ... below `end` of y[r] = W_e source[source_row + tokens[r]],
    for the rows r that each group e has from one source. The caller must have waited for the source's rows.

    In blocks the rows are those of shard number `shard` of the source, of which the first is the first token of `rank`.
    starts, blocks: as in count_blocks. first_group: how many matrices lie before this rank's.
    """
    TILE: tl.constexpr = FORM.tile
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    n, k = problem.n, problem.k
    tiles_n, steps, columns = tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K), aligned(k, y)
    a_stride, weight_stride = aligned(problem.a_stride, y), aligned(problem.weight_stride, y)
    if problem.exponents is not None:
        piece = source + tl.cast(shard, tl.int64) * problem.a_stride
        values = piece.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        exponents = piece.to(tl.pointer_type(tl.int8), bitcast=True) + tl.cast(shard_rows, tl.int64) * k
        source_row = -rank * shard_rows
    for tile in range(begin, end, distance):
        group, row, row_end, column_block = find_tile(starts, blocks, tile, tiles_n, BLOCK_M, groups)
        column, matrix = column_block * BLOCK_N, first_group + group
        rows, inside = numbers(tokens, row, row_end, BLOCK_M) + source_row, row + tl.arange(0, BLOCK_M) < row_end
        if problem.exponents is not None:
            result = multiply_group(
                values, exponents, shard_rows, None, rows, inside, weights, problem.exponents, tl.program_id(1), group,
                column, n, k, k // BLOCK, groups, FORM,
            )  # fmt: skip
        else:
            result, part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for step in range(steps):
                at = step * BLOCK_K
                left = load_rows(source, rows, inside, at, columns, a_stride, BLOCK_K)
                if FORM.transposed:
                    right = load_matrix(weights, matrix, at, column, k, n, weight_stride, BLOCK_K, BLOCK_N, TILE.tma)
                else:
                    right = load_matrix(
                        weights, matrix, column, at, n, columns, weight_stride, BLOCK_N, BLOCK_K, TILE.tma
                    ).T
                result, part = add_product(result, part, left, right, step, steps)
        store_activated(y, result, None, row, column, row_end, n, "", BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["rank", "rows", "groups", "pushers", "joins"])
def all_gather_grouped_matmul_kernel(
    links, rank, shard, slot0, slot1, tokens, weights, starts, y, problem, rows, groups, pushers, joins,
    FORM: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """The first programs, the pushers, send the shard (none with a copy engine). All programs walk the sources, this
    rank first; pushers take tiles from source number `joins` on. A program waits even where it has no tile: who reaches
    the next epoch but one must know that all ranks have read this one's slots."""
    WORLD: tl.constexpr = GATHER.world
    virtual = tl.program_id(1)
    me, limit = serve(links, rank, WORLD)
    program, programs = tl.program_id(0), tl.num_programs(0)
    if GATHER.push:
        if program < pushers:
            shard_rows = rows if problem.exponents is None else 1
            push_rows(me, shard, reach(limit, WORLD), program, pushers, shard_rows * problem.a_stride, GATHER)
    own_flags = flags_of(me, me.rank, 0)
    slot = slot0
    if (me.epoch & 1) == 1:
        slot = slot1
    tiles_n, first_group = tl.cdiv(problem.n, FORM.tile.n), virtual * groups
    starts += virtual * (WORLD + 1) * groups
    own = starts + me.rank * groups
    blocks = count_blocks(own, groups, FORM)
    tiles = tl.max(blocks) * tiles_n
    begin, distance = take_turn(program, programs, pushers, joins == 0, 0, tiles)
    expert_tiles(
        problem, shard, (virtual - me.rank) * rows, virtual, me.rank, rows, tokens, weights, first_group, own, blocks,
        y, groups, begin, tiles, distance, FORM,
    )  # fmt: skip
    before, second = tiles % distance, 1
    if program < pushers:  # these sources' tiles are the others'
        second = tl.maximum(joins, 1)
        for step in range(1, second):
            blocks = count_blocks(starts + (me.rank + step) % WORLD * groups, groups, FORM)
            before = (before + tl.max(blocks) * tiles_n) % distance
    for step in range(second, WORLD):
        source = (me.rank + step) % WORLD
        limit = wait(me, own_flags, source, limit)
        arrived = starts + source * groups
        blocks = count_blocks(arrived, groups, FORM)
        tiles = tl.max(blocks) * tiles_n
        begin, distance = take_turn(program, programs, pushers, joins <= step, before, tiles)
        first = virtual * problem.slot_rows
        expert_tiles(
            problem, slot, first, first + source, source, rows, tokens, weights, first_group, arrived, blocks, y,
            groups, begin, reach(limit, 1) * tiles, distance, FORM,
        )  # fmt: skip
        before = (before + tiles) % distance


def launch_gather(
    shard: Tensor, weights: Tensor | Blocks, sizes: tuple[int, int, int, int], channel: Channel,
    counts: Tensor, tokens: Tensor, dtype: torch.dtype, tile: Tile | None, *,
    transposed: bool, push: bool, keep: bool, programs: int | None, spare: int,
) -> Tensor:  # fmt: skip
    """The launch of both functions below. sizes: rows of a rank, its experts, N and K. dtype: of the result."""
    (rows, groups, n, k), served, world = sizes, channel.served, channel.world
    kind, itemsize = (VALUES, 1) if isinstance(weights, Blocks) else (dtype, 2)
    y = shard.new_empty((len(tokens), n), dtype=dtype)
    tile = tile or select_grouped_tile(shard.device, kind, len(tokens) // served, groups * world, n)
    if isinstance(weights, Blocks):
        flat = weights.values.contiguous()
        stored, weight_stride = operand(flat, (tile.n, BLOCK.value), tile), flat.shape[1]
        exponents = weights.exponents.contiguous()
    else:
        (stored, weight_stride), exponents = matrices(weights, transposed, tile), None
    whole = packed(shard)
    stride = whole.shape[1]
    slots = [channel.slot(parity, stride, shard) for parity in (0, 1)]
    blocks = len(tokens) // served // tile.m + groups * world  # of rows, at most
    machine = plan.machine_of(shard.device, itemsize)
    filled = len(tokens) // served + groups * world * tile.m // 2  # in the mean
    seconds = gemm_seconds(filled, n, k, dtype.itemsize, machine, 1 if itemsize == 1 else None)
    work = plan.Work(whole.nbytes // served, world, blocks * triton.cdiv(n, tile.n), seconds, itemsize)
    total, pushing = plan.plan_launch(work, shard.device, tile, push, programs, served, spare)
    launch(
        all_gather_grouped_matmul_kernel, (total, served),
        channel.links, channel.rank, whole, *slots, tokens.contiguous(), stored, starts_of(counts, served), y,
        Experts(n, k, stride, weight_stride, len(slots[0]) // served, exponents), rows, groups, *pushing,
        GroupedForm(tile, triton.next_power_of_2(groups), transposed),
        gather_of(channel, shard, pushing.pushers > 0, keep),
        **launch_options(tile.warps, pointer_stages(tile), cooperative=True),
    )  # fmt: skip
    return y


def all_gather_grouped_matmul(
    shard: Tensor,
    weights: Tensor,
    channel: Channel,
    counts: Tensor,
    tokens: Tensor,
    *,
    transposed: bool = False,
    push: bool = True,
    keep: bool = False,
    tile: Tile | None = None,
    programs: int | None = None,
    spare: int = 0,
) -> Tensor:
    """y (R, N) with y[r] = W_e gather(shard)[tokens[r]] for each row r of expert e, or W_e^T ... if transposed.

    Math:     all_gather_grouped_matmul_reference, this rank's entry
    Shapes:   shard (T / t, K), at least one row; weights (E, N, K), or (E, K, N) if transposed; counts (t, E) int32:
              the rows of each expert from each rank's tokens, of which any may be 0; tokens (R,) int32: the token of
              each row, sorted by expert, then by token. R may be 0. With virtual ranks every tensor is the stack of
              theirs along dim 0
    Numerics: as grouped_matmul; every row has the bits that the same tile gives without a gather
    Traffic:  all_gather_grouped_matmul_cost; this rank sends and receives (t - 1) / t * T * K * itemsize bytes
    Order:    as all_gather_matmul: pushers or copies set one flag per shard, and programs wait once for each other rank
              in ring order. A tile has rows of one expert from one rank, read by pointers from the shard or the slot.
              How many tiles a rank's rows have only the device knows, so a program counts them when it comes to them,
              and goes on in the round where the last rank's tiles ended. A rank without a row pushes and waits, too.
              push, keep, programs, spare: as all_gather_matmul
    Source:   as all_gather_matmul and grouped_matmul
    Errors:   ValueError if the channel's slots or flags are too small (all_gather_matmul_space), or a matrix is empty

    No plan of a call is kept (replay.py): R differs from call to call.
    """
    served, world = channel.served, channel.world
    check_operands(channel.epoch, shard, weights, counts, tokens, transposed, served, world)
    k = shard.shape[1]
    rows, groups, n = len(shard) // served, len(weights) // served, weights.shape[2 if transposed else 1]
    if 0 in (rows, groups, n, k):
        raise ValueError(f"all_gather_grouped_matmul takes no empty {tuple(shard.shape)} or {tuple(weights.shape)}")
    space = all_gather_matmul_space(rows, k, world, shard.element_size())
    channel.require("all_gather_grouped_matmul", *space, "all_gather_matmul_space")
    return launch_gather(
        shard, weights, (rows, groups, n, k), channel, counts, tokens, shard.dtype, tile,
        transposed=transposed, push=push, keep=keep, programs=programs, spare=spare,
    )  # fmt: skip


OPERATION = "all_gather_quantized_grouped_matmul"


def all_gather_quantized_grouped_matmul(
    shard: Tensor,
    weights: Blocks,
    channel: Channel,
    counts: Tensor,
    tokens: Tensor,
    *,
    transposed: bool = False,
    dtype: torch.dtype,
    push: bool = True,
    keep: bool = False,
    tile: Tile | None = None,
    programs: int | None = None,
    spare: int = 0,
) -> Tensor:
    """all_gather_grouped_matmul of the numbers that blocks of e4m3 stand for, with y (R, N) in this dtype.

    Math:     all_gather_quantized_grouped_matmul_reference, this rank's entry
    Shapes:   shard (1, shard_bytes) uint8, what packed_shard of all_gather_quantized_matmul makes of this rank's rows
              (T / t, K); weights: all experts' matrices in blocks, as of quantized_grouped_matmul; counts and tokens as
              of all_gather_grouped_matmul. N and K multiples of 128. With virtual ranks every tensor is the stack of
              theirs along dim 0
    Numerics: as the kernel of quantized_matmul; every row has the bits that the same tile gives without a gather
    Traffic:  all_gather_quantized_grouped_matmul_cost; this rank sends and receives (t - 1) shards, as
              all_gather_quantized_matmul
    Order:    as all_gather_grouped_matmul. A shard's values and exponents are read from one piece, which one flag
              covers
    Source:   as all_gather_grouped_matmul and quantized_grouped_matmul
    Errors:   as all_gather_quantized_matmul
    """
    served, world = channel.served, channel.world
    given = shard, weights, counts, tokens, transposed, dtype, served, world
    rows, groups, n, k = check_blocks(OPERATION, channel.epoch, *given)
    triton_dtype(dtype)  # an error for what kernels do not take
    require_capability(weights.values, *CAPABILITIES, NO_TILE)
    channel.require(OPERATION, *all_gather_quantized_matmul_space(rows, k, world))
    return launch_gather(
        shard, weights, (rows, groups, n, k), channel, counts, tokens, dtype, tile,
        transposed=transposed, push=push, keep=keep, programs=programs, spare=spare,
    )  # fmt: skip
