"""all_gather_matmul: the column-parallel GEMM that starts on its own rows while the other ranks' rows arrive."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import Derivative, LinearForm, Linears, three
from ..cost import gemm_seconds
from ..launch import (
    ALIGNMENT,
    Tile,
    is_interpreted,
    launch_options,
    operand,
    packed,
    packed_width,
    padded,
    piece_columns,
)
from ..matmul.kernel import derivative_arguments, weight_arguments
from ..matmul.reference import check_derivative, check_linears
from ..operands import FLOATS, next_divisible, require
from ..pack.format import Packed
from ..protocol import Channel, flags_of, order_tma_after_acquire, publish, reach, serve, slot_of, wait
from ..replay import launch, replayed
from ..tile import column_blocks, linear_tiles
from . import plan

COPY_BLOCK, PUSHED = 4096, 2**31  # elements that a program of copy_slot_kernel copies; that are too many to push
TURNS, TURN_PIECES = tl.constexpr(plan.TURNS), tl.constexpr(plan.TURN_PIECES)


class Gather(NamedTuple):
    """What the compiler must know of a gather."""

    world: int
    push: bool
    """Whether programs send the shard. Otherwise copies do."""
    block: int
    """Elements that a pusher loads before it stores the first of them."""
    aligned: int
    """Every row is a multiple of so many elements long."""
    keep: bool
    """Whether the own shard goes into the own slot, too, so that the slot holds all gathered rows."""
    fence: bool = False
    """Whether TMA reads what arrived, which takes a fence."""


@triton.jit
def push_pieces(target, shard, begin, end, distance, BLOCK: tl.constexpr, numel):
    """Store those pieces of a shard of `numel` elements that begin at begin, begin + distance, ... below `end`."""
    offsets = tl.arange(0, BLOCK)
    for first in range(begin, end, distance):
        mask = first + offsets < numel
        tl.store(target + first + offsets, tl.load(shard + first + offsets, mask=mask), mask=mask)


@triton.jit
def push_rows(me, shard, peers, program, pushers, numel, GATHER: tl.constexpr):
    """Store one pusher's share of the shard, which has `numel` elements, into every other rank's slot, and at the end
    into the own one if it is kept. The ranks follow in reverse ring order, so that each link carries one transfer at a
    time. The last pusher to have stored its share for a rank sets the shard's flag there."""
    BLOCK: tl.constexpr = GATHER.block
    ALIGNED: tl.constexpr = GATHER.aligned
    WORLD: tl.constexpr = GATHER.world
    numel = numel // ALIGNED * ALIGNED  # the same. But now the compiler knows that no mask ends within 16 bytes
    shard += tl.program_id(1).to(tl.int64) * numel
    at = me.rank.to(tl.int64) * numel
    begin, distance = program * BLOCK, pushers * BLOCK
    # To count its share of a rank, a pusher waits until what it stored has arrived. If all did so at the same time, the
    # links would be idle. So they do it in turns, when they have pushed 0, 2 or 4 pieces to the next rank. Nothing
    # follows the last rank but the own copy, so there nobody puts it off.
    turn = begin + program % TURNS * TURN_PIECES * distance
    for step in range(1, peers + 1):
        peer = (me.rank + WORLD - step) % WORLD
        target = slot_of(me, peer, shard.dtype.element_ty) + at
        end = numel
        if step == WORLD:
            turn = begin
            if not GATHER.keep:
                end = begin
        turn = tl.minimum(turn, end)
        push_pieces(target, shard, begin, turn, distance, BLOCK, numel)
        if step > 1:
            last = (me.rank + WORLD + 1 - step) % WORLD
            counter = me.counters + last
            tl.debug_barrier()  # so that the count covers all warps' stores
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == pushers - 1:
                tl.store(counter, 0)
                publish(flags_of(me, last, me.rank), me.epoch)
        push_pieces(target, shard, turn, end, distance, BLOCK, numel)


@triton.jit
def walk(program, programs, pushers, joins, step, tiles):
    """(first tile, distance to the next one) of a program in the chunk that a rank takes as number `step`.

    Tiles go round, through the chunks: on to the program after the one that had the last chunk's last tile. The first
    programs, the pushers, come last in the round, in which they have a place from chunk number `joins` on.
    """
    computing = programs - pushers
    place = (program + computing) % programs
    if step < joins:
        first, distance = (place + computing - step * tiles % computing) % computing, computing
        if place >= computing:
            first = tiles
    else:
        before = (step - joins) * tiles
        if joins > 0:
            before += joins * tiles % computing
        first, distance = (place + programs - before % programs) % programs, programs
    return first, distance


@triton.jit(do_not_specialize=["rank", "rows", "pushers", "joins"])
def all_gather_matmul_kernel(
    links, rank, shard, a, slot0, slot1, b0, b1, b2, problem, rows, pushers, joins,
    FORM: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """The first programs, the pushers, send the shard (none with a copy engine). All programs walk the chunks, the own
    one first; pushers take tiles from chunk number `joins` on."""
    TILE: tl.constexpr = FORM.tile
    WORLD: tl.constexpr = FORM.world
    virtual = tl.program_id(1)
    me, limit = serve(links, rank, WORLD)
    program, programs = tl.program_id(0), tl.num_programs(0)
    v = virtual.to(tl.int64)
    if GATHER.push:
        if program < pushers:
            push_rows(me, shard, reach(limit, WORLD), program, pushers, rows * problem.a_stride, GATHER)
    own_flags = flags_of(me, me.rank, 0)
    slot = slot0
    if (me.epoch & 1) == 1:
        slot = slot1
    _, _, tiles_n = column_blocks(problem.weights, TILE.n)
    tiles = tl.cdiv(rows, TILE.m) * tiles_n
    # There are two tile loops, because a K loop in each branch of an if/else would double the shared memory.
    start, distance = walk(program, programs, pushers, joins, 0, tiles)
    linear_tiles(problem, a, b0, b1, b2, virtual * rows, me.rank, start, tiles, distance, rows, v, FORM)
    second = 1
    if program < pushers:
        second = tl.maximum(joins, 1)
    for step in range(second, WORLD):
        chunk = (me.rank + step) % WORLD
        limit = wait(me, own_flags, chunk, limit)
        order_tma_after_acquire(me.epoch, GATHER.fence)
        first = virtual * problem.slot_rows + chunk * rows
        start, distance = walk(program, programs, pushers, joins, step, tiles)
        end = reach(limit, 1) * tiles
        linear_tiles(problem, slot, b0, b1, b2, first, chunk, start, end, distance, rows, v, FORM)


@triton.jit
def copy_slot_kernel(slot0, slot1, out, epoch, numel, BLOCK: tl.constexpr):
    """Copy the slot of this epoch's parity to out. When a CUDA graph is replayed, only the device knows the epoch."""
    virtual = tl.program_id(1)
    slot = slot0
    if (tl.load(epoch + virtual) & 1) == 1:
        slot = slot1
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(slot + at, mask=at < numel), mask=at < numel)


@triton.jit(do_not_specialize=["rank", "pushers"])
def await_gathered_kernel(links, rank, shard, numel, pushers, GATHER: tl.constexpr):
    """The pushers send the shard (none with a copy engine). The last program waits for every other rank's shard."""
    WORLD: tl.constexpr = GATHER.world
    me, limit = serve(links, rank, WORLD)
    program = tl.program_id(0)
    if GATHER.push:
        if program < pushers:
            push_rows(me, shard, reach(limit, WORLD), program, pushers, numel, GATHER)
    if program == pushers:
        own_flags = flags_of(me, me.rank, 0)
        for step in range(1, WORLD):
            chunk = (me.rank + step) % WORLD
            limit = wait(me, own_flags, chunk, limit)


def gather_of(channel: Channel, shard: Tensor, push: bool, keep: bool, fence: bool = False) -> Gather:
    """The Gather of a launch for such a shard. ValueError for one to push whose elements int32 does not count."""
    elements = len(shard) // channel.served * packed_width(shard.shape[1], shard.element_size())
    if push and elements >= PUSHED:
        raise ValueError(
            f"programs push shards of less than {PUSHED} elements, not {elements}: use smaller microbatches"
        )
    block, aligned = (nbytes // shard.element_size() for nbytes in (plan.IN_FLIGHT, ALIGNMENT))
    return Gather(channel.world, push, block, aligned, keep, fence)


def check_shard(channel: Channel, shard: Tensor) -> None:
    """ValueError unless the shard is a matrix of numbers, or of the bytes of blocks, on the channel's device."""
    rows, dtypes = next_divisible(shard.shape[0], channel.served), (*FLOATS, torch.uint8)
    require("a gather", channel.epoch, ("the shard", shard, (rows, shard.shape[-1]), dtypes))


@replayed
def await_gathered(channel: Channel, shard: Tensor, push: bool) -> None:
    """A gather with no GEMM. After it Channel.gathered and gathered_copy return the rows.

    push: programs send the shard (rows, K), as many as fill the links; otherwise the caller has begun
    KernelWorkspace.copy_gather. Communication: (t - 1) / t of the gathered bytes sent and received. Protocol, order and
    errors as in all_gather_matmul.
    """
    check_shard(channel, shard)
    rows, k = len(shard) // channel.served, shard.shape[1]
    space = all_gather_matmul_space(rows, k, channel.world, shard.element_size())
    channel.require("await_gathered", *space, "all_gather_matmul_space")
    whole = packed(shard)
    pushers = plan.pushers_of(whole.nbytes // channel.served, plan.machine_of(shard.device)) if push else 0
    launch(
        await_gathered_kernel, (pushers + 1, channel.served),
        channel.links, channel.rank, whole, whole.numel() // channel.served, pushers,
        gather_of(channel, shard, push, keep=True), **launch_options(8, 1, cooperative=True),
    )  # fmt: skip


def all_gather_matmul_space(rows: int, k: int, world: int, itemsize: int) -> tuple[int, int]:
    """(bytes of a slot, flags per writer) that the channel must offer for shards of (rows, k)."""
    return world * rows * packed_width(k, itemsize) * itemsize, 1


@replayed
def gathered_copy(channel: Channel, shard: Tensor) -> Tensor:
    """The gathered rows (world * rows, K) in memory of their own, after an all_gather_matmul with keep=True."""
    check_shard(channel, shard)
    stride = packed_width(shard.shape[1], shard.element_size())
    out = shard.new_empty(channel.world * len(shard), stride)
    slots = [channel.slot(parity, stride, shard) for parity in (0, 1)]
    launch(
        copy_slot_kernel, (triton.cdiv(out.numel(), COPY_BLOCK), 1),
        *slots, out, channel.epoch, out.numel(), COPY_BLOCK, **launch_options(8, 1),
    )  # fmt: skip
    return out[:, : shard.shape[1]]


def launch_gather(
    shard: Tensor, weights: Sequence[Tensor], channel: Channel, biases: Sequence[Tensor | None] | None,
    outputs: Sequence[Tensor | None], derivative: Derivative, form: LinearForm, *,
    push: bool, keep: bool, programs: int | None, spare: int,
) -> None:  # fmt: skip
    """The launch of both functions below. Tensors of the served ranks are stacked along dim 0."""
    served, world, tile = channel.served, channel.world, form.tile
    rows, k = len(shard) // served, shard.shape[1]
    columns = [(w.shape[1] if form.b_transposed else len(w) // served) for w in weights]
    whole = packed(shard)
    stride = whole.shape[1]
    channel.require("all_gather_matmul", *all_gather_matmul_space(rows, k, world, shard.element_size()))
    stored = [padded(w) for w in weights]
    slots = [channel.slot(parity, stride, shard) for parity in (0, 1)]
    a_block, b_block = (tile.m, tile.k), (tile.k, tile.n) if form.b_transposed else (tile.n, tile.k)
    work = plan.Work(
        rows * stride * shard.element_size(), world,
        triton.cdiv(rows, tile.m) * sum(triton.cdiv(n, tile.n) for n in columns) * world,
        gemm_seconds(world * rows, sum(columns), k, shard.element_size(), plan.machine_of(shard.device)),
    )  # fmt: skip
    total, pushing = plan.plan_launch(work, shard.device, tile, push, programs, served, spare)
    problem = Linears(
        k, stride, weight_arguments(stored, columns, biases, outputs), derivative, len(slots[0]) // served
    )  # fmt: skip
    launch(
        all_gather_matmul_kernel, (total, served),
        channel.links, channel.rank,
        whole, operand(whole[:, :k], a_block, tile), *[operand(slot[:, :k], a_block, tile) for slot in slots],
        *three([operand(w, b_block, tile) for w in stored]), problem, rows, *pushing, form,
        gather_of(channel, shard, pushing.pushers > 0, keep, fence=tile.tma and not is_interpreted()),
        **launch_options(tile.warps, tile.stages, cooperative=True),
    )  # fmt: skip


@replayed
def all_gather_matmul(
    shard: Tensor,
    weights: Sequence[Tensor],
    channel: Channel,
    biases: Sequence[Tensor | None] | None = None,
    *,
    activation: str | None = None,
    b_transposed: bool = False,
    push: bool = True,
    keep: bool = False,
    tile: Tile | None = None,
    programs: int | None = None,
    spare: int = 0,
) -> list[Tensor]:
    """[act(gather(shard) W_i^T + bias_i) for each weight i]: one gather for up to three weights.

    Math:     all_gather_matmul_reference, this rank's entry
    Shapes:   shard (M / t, K); weight i (N_i, K), or (K, N_i) if b_transposed; bias (N_i,), for all weights or none;
              results (M, N_i). With virtual ranks every tensor is the stack of theirs along dim 0
    Numerics: as matmul; every row has the bits that the same tile gives without a gather
    Traffic:  all_gather_matmul_cost; this rank sends and receives (t - 1) / t * M * K * itemsize bytes
    Order:    push: the first programs, as many as fill the links (plan.py), store the shard into the peers' slots, and
              the last of them to be done with a peer (counted in local memory) sets the flag there; otherwise the
              caller has begun KernelWorkspace.copy_gather. Either sets one flag per shard. The other programs do their
              tiles of the own chunk. Then, for each other chunk in ring order, a program waits once and does its tiles
              of the chunk. Pushers come to the chunks that begin after they have pushed.
              keep: the own rows are put into the own slot too, for Channel.gathered or gathered_copy.
              programs: of each rank, with its pushers; by default all that are resident.
              spare: SMs to leave free, for collectives of other groups (docs/kernels.md, rule 4)
    Source:   chunked all-gather GEMM of symmetric-memory recipes and quack (research: own chunk first, epochs, parity)
    Errors:   ValueError if the channel's slots or flags are too small (all_gather_matmul_space)
    """
    served, world = channel.served, channel.world
    k = shard.shape[-1]
    check_linears("all_gather_matmul", channel.epoch, shard, k, weights, biases, activation, b_transposed, served)
    m = len(shard) * world // served
    columns = [w.shape[1] if b_transposed else len(w) // served for w in weights]
    outputs = [shard.new_empty(served * m, n) for n in columns]
    tile = tile or plan.select_gather_tile(
        shard.device, shard.dtype, len(shard) // served, columns, shard.shape[1], world
    )
    launch_gather(
        shard, weights, channel, biases, outputs, Derivative(),
        LinearForm(tile, activation or "", b_transposed=b_transposed, world=world),
        push=push, keep=keep, programs=programs, spare=spare,
    )  # fmt: skip
    return outputs


@replayed
def all_gather_matmul_derivative(
    shard: Tensor,
    weight: Tensor,
    channel: Channel,
    x: Tensor | Packed,
    activation: str | None,
    gate: Tensor | Packed | None = None,
    *,
    push: bool = True,
    keep: bool = False,
    tile: Tile | None = None,
    programs: int | None = None,
    spare: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dx, dgate or None, act) of da = gather(shard) W, a row-parallel linear's dgrad: as matmul_derivative.

    Math:     all_gather_matmul_derivative_reference, this rank's entry
    Shapes:   shard (M / t, K); weight (K, N); x, gate and results (M, N), contiguous; x and gate may be packed
    Numerics, order, errors: as all_gather_matmul; da is never rounded
    Traffic:  as all_gather_matmul; besides, it reads x (and gate), and writes dx, act (and dgate)
    Source:   as all_gather_matmul; formulas in activation/reference.py
    """
    count = len(shard) * channel.world
    check_derivative(
        "all_gather_matmul_derivative", channel.epoch, shard, weight, x, gate, count, activation, channel.served
    )  # fmt: skip
    dx, rebuilt = shard.new_empty(x.shape), shard.new_empty(x.shape)
    dgate = None if gate is None else shard.new_empty(x.shape)
    rows, k = len(shard) // channel.served, shard.shape[1]
    tile = tile or plan.select_gather_tile(shard.device, shard.dtype, rows, x.shape[1:], k, channel.world, operands=3)
    launch_gather(
        shard, [weight], channel, None, [None], derivative_arguments(x, gate, dx, dgate, rebuilt),
        LinearForm(
            tile, activation or "", b_transposed=True, world=channel.world, piece=piece_columns(x.shape[1])
        ),
        push=push, keep=keep, programs=programs, spare=spare,
    )  # fmt: skip
    return dx, dgate, rebuilt
