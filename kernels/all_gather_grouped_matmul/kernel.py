"""all_gather_grouped_matmul: the GEMMs of a layer's experts, which start on the own tokens while the others' arrive.

Rows come by an index, which TMA cannot follow, so pointers load what arrived. These loads and the peers' stores both
go through the generic proxy, and no fence has to stand between the acquire and the loads.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..all_gather_matmul import plan
from ..all_gather_matmul.kernel import all_gather_matmul_space, gather_of, push_rows
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
from ..launch import Tile, launch_options, packed
from ..protocol import Channel, flags_of, reach, serve, wait
from ..replay import launch
from ..tile import add_product, store_activated
from .reference import check_operands, starts_of


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
    problem, source, source_row, tokens, weights, first_group, starts, blocks, y, groups, begin, end, distance,
    FORM: tl.constexpr,
):  # fmt: skip
    """Compute and store tiles begin, begin + distance, ... below `end` of y[r] = W_e source[source_row + tokens[r]],
    for the rows r that each group e has from one source. The caller must have waited for the source's rows.

    starts, blocks: as in count_blocks. first_group: how many matrices lie before this rank's.
    """
    TILE: tl.constexpr = FORM.tile
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    n, k = problem.n, problem.k
    tiles_n, steps, columns = tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K), aligned(k, y)
    a_stride, weight_stride = aligned(problem.a_stride, y), aligned(problem.weight_stride, y)
    for tile in range(begin, end, distance):
        group, row, row_end, column_block = find_tile(starts, blocks, tile, tiles_n, BLOCK_M, groups)
        column, matrix = column_block * BLOCK_N, first_group + group
        rows, inside = numbers(tokens, row, row_end, BLOCK_M) + source_row, row + tl.arange(0, BLOCK_M) < row_end
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
            push_rows(me, shard, reach(limit, WORLD), program, pushers, rows * problem.a_stride, GATHER)
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
        problem, shard, (virtual - me.rank) * rows, tokens, weights, first_group, own, blocks, y, groups, begin, tiles,
        distance, FORM,
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
        expert_tiles(
            problem, slot, virtual * problem.slot_rows, tokens, weights, first_group, arrived, blocks, y, groups, begin,
            reach(limit, 1) * tiles, distance, FORM,
        )  # fmt: skip
        before = (before + tiles) % distance


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
    y = shard.new_empty(len(tokens), n)
    tile = tile or select_grouped_tile(shard.device, shard.dtype, len(tokens) // served, groups * world, n)
    whole, (stored, weight_stride) = packed(shard), matrices(weights, transposed, tile)
    stride = whole.shape[1]
    slots = [channel.slot(parity, stride, shard) for parity in (0, 1)]
    blocks = len(tokens) // served // tile.m + groups * world  # of rows, at most
    machine, filled = plan.machine_of(shard.device), len(tokens) // served + groups * world * tile.m // 2  # in the mean
    seconds = gemm_seconds(filled, n, k, shard.element_size(), machine)
    work = plan.Work(rows * stride * shard.element_size(), world, blocks * triton.cdiv(n, tile.n), seconds)
    total, pushing = plan.plan_launch(work, shard.device, tile, push, programs, served, spare)
    launch(
        all_gather_grouped_matmul_kernel, (total, served),
        channel.links, channel.rank, whole, *slots, tokens.contiguous(), stored, starts_of(counts, served), y,
        Experts(n, k, stride, weight_stride, len(slots[0]) // served), rows, groups, *pushing,
        GroupedForm(tile, triton.next_power_of_2(groups), transposed),
        gather_of(channel, shard, pushing.pushers > 0, keep),
        **launch_options(tile.warps, pointer_stages(tile), cooperative=True),
    )  # fmt: skip
    return y
