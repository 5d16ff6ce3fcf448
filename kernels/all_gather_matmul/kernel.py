"""all_gather_matmul: the column-parallel GEMM that starts on its own rows while the other ranks' rows arrive."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..configurations import select_tile
from ..launch import Tile, is_interpreted, launch_options, operand, packed, packed_width, padded, persistent_programs
from ..matmul.kernel import blocks, three
from ..protocol import Channel, flags_of, order_tma_after_acquire, publish, reach, serve, slot_of, wait
from ..tile import column_blocks, linear_tile

PUSH_BLOCK = 4096  # elements that a pusher moves at a time
PUSHERS = 8  # programs that push the shard when no copy engine does; about 8 SMs saturate a link (a prediction)


@triton.jit
def push_rows(shard, data, flags, epoch, rank, peers, program, pushers, numel, parity_stride, writer_flags,
              KEEP: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One pusher's share of the shard into every other rank's slot, in reverse ring order so that each link carries
    one transfer at a time; KEEP: into the own slot first, so that all gathered rows stand in one place."""
    offsets = tl.arange(0, BLOCK)
    at = rank.to(tl.int64) * numel
    for step in range(0 if KEEP else 1, peers):
        peer = (rank + WORLD - step) % WORLD
        target = slot_of(data, peer, epoch, parity_stride, shard.dtype.element_ty) + at
        for first in range(program * BLOCK, numel, pushers * BLOCK):
            mask = first + offsets < numel
            tl.store(target + first + offsets, tl.load(shard + first + offsets, mask=mask), mask=mask)
        publish(flags_of(flags, peer, rank, writer_flags) + program, epoch)


@triton.jit(do_not_specialize=["rank", "limit", "writer_flags", "rows", "signals", "slot_rows"])
def all_gather_matmul_kernel(
    data, flags, epoch, error, stopped, rank, limit, parity_stride, writer_flags,
    shard, a, slot0, slot1, b0, b1, b2, bias0, bias1, bias2, c0, c1, c2, x, gate,
    rows, n0, n1, n2, k, a_stride, b0_stride, b1_stride, b2_stride, slot_rows, signals,
    PUSHERS: tl.constexpr, PUSH_BLOCK: tl.constexpr, KEEP: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    WEIGHTS: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, DERIVATIVE: tl.constexpr, GATED: tl.constexpr, WORLD: tl.constexpr, FENCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Bands: PUSHERS programs send the shard (none with a copy engine); the others walk the chunks, own chunk first."""
    virtual = tl.program_id(1)
    data, flags, epoch, report, rank, limit = serve(data, flags, epoch, error, stopped, rank, limit, WORLD)
    program = tl.program_id(0)
    v = virtual.to(tl.int64)
    if PUSHERS > 0:
        if program < PUSHERS:
            numel = rows * a_stride
            push_rows(shard + v * numel, data, flags, epoch, rank, reach(limit, WORLD), program,
                      PUSHERS, numel, parity_stride, writer_flags, KEEP, WORLD, PUSH_BLOCK)  # fmt: skip
    if program >= PUSHERS:
        program -= PUSHERS
        programs = tl.num_programs(0) - PUSHERS
        own_flags = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
        slot = slot0
        if (epoch & 1) == 1:
            slot = slot1
        tiles_m = tl.cdiv(rows, BLOCK_M)
        tiles_0, tiles_1, tiles_n = column_blocks(n0, n1, n2, WEIGHTS, BLOCK_N)
        tiles = tiles_m * tiles_n
        # Two tile loops, not one with the source chosen inside: K loops under an if/else double the shared memory.
        for tile in tl.range(program, tiles, programs):
            linear_tile(
                a, virtual * rows, rank, tile, tiles_m, tiles_0, tiles_1, tiles_n, v,
                b0, b1, b2, bias0, bias1, bias2, c0, c1, c2, x, gate, rows, n0, n1, n2, k,
                a_stride, b0_stride, b1_stride, b2_stride, False, B_TRANSPOSED, WEIGHTS, BIAS, ACTIVATION, DERIVATIVE,
                GATED, WORLD, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
            )  # fmt: skip
        for step in range(1, WORLD):
            chunk = (rank + step) % WORLD
            for signal in range(signals):
                limit = wait(own_flags + chunk * writer_flags + signal, epoch, report, chunk, limit)
            order_tma_after_acquire(epoch, FENCE)
            # the round of programs goes on where the last chunk's tiles ended
            for tile in tl.range((program + programs - (step * tiles) % programs) % programs, tiles, programs):
                linear_tile(
                    slot, virtual * slot_rows + chunk * rows, chunk, tile, tiles_m, tiles_0, tiles_1, tiles_n, v,
                    b0, b1, b2, bias0, bias1, bias2, c0, c1, c2, x, gate, rows, n0, n1, n2, k,
                    a_stride, b0_stride, b1_stride, b2_stride, False, B_TRANSPOSED, WEIGHTS, BIAS, ACTIVATION,
                    DERIVATIVE, GATED, WORLD, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
                )  # fmt: skip


@triton.jit
def copy_slot_kernel(slot0, slot1, out, epoch, numel, BLOCK: tl.constexpr):
    """out = the slot of this epoch's parity, which only the device knows when a CUDA graph is replayed."""
    virtual = tl.program_id(1)
    slot = slot0
    if (tl.load(epoch + virtual) & 1) == 1:
        slot = slot1
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(slot + at, mask=at < numel), mask=at < numel)


@triton.jit(do_not_specialize=["rank", "limit", "writer_flags", "signals"])
def await_gathered_kernel(
    data, flags, epoch, error, stopped, rank, limit, parity_stride, writer_flags, shard, numel, signals,
    PUSHERS: tl.constexpr, PUSH_BLOCK: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Bands: PUSHERS programs send the shard (none with a copy engine), the last one waits for every other rank's."""
    virtual = tl.program_id(1)
    data, flags, epoch, report, rank, limit = serve(data, flags, epoch, error, stopped, rank, limit, WORLD)
    program = tl.program_id(0)
    if PUSHERS > 0:
        if program < PUSHERS:
            push_rows(shard + virtual.to(tl.int64) * numel, data, flags, epoch, rank, reach(limit, WORLD), program,
                      PUSHERS, numel, parity_stride, writer_flags, True, WORLD, PUSH_BLOCK)  # fmt: skip
    if program >= PUSHERS:
        own_flags = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
        for step in range(1, WORLD):
            chunk = (rank + step) % WORLD
            for signal in range(signals):
                limit = wait(own_flags + chunk * writer_flags + signal, epoch, report, chunk, limit)


def await_gathered(channel: Channel, shard: Tensor, push: bool) -> None:
    """A gather with no GEMM: when it has run, Channel.gathered and gathered_copy have the rows.

    push: PUSHERS programs send the shard (rows, K); otherwise the caller has begun KernelWorkspace.copy_gather.
    Communication: (t - 1) / t of the gathered bytes sent and received. Protocol and order as in all_gather_matmul.
    """
    whole = packed(shard)
    pushers = PUSHERS if push else 0
    await_gathered_kernel[(pushers + 1, channel.served)](
        *channel.arguments(), whole, whole.numel() // channel.served, PUSHERS if push else 1,
        PUSHERS=pushers, PUSH_BLOCK=PUSH_BLOCK, WORLD=channel.world, **launch_options(8, 1, cooperative=True),
    )  # fmt: skip


def all_gather_matmul_space(rows: int, k: int, world: int, itemsize: int) -> tuple[int, int]:
    """(bytes of a slot, flags per writer) that the channel must offer for shards of (rows, k)."""
    return world * rows * packed_width(k, itemsize) * itemsize, PUSHERS


def gathered_copy(channel: Channel, shard: Tensor) -> Tensor:
    """The gathered rows (world * rows, K) in memory of their own, after an all_gather_matmul with keep=True."""
    stride = packed_width(shard.shape[1], shard.element_size())
    out = shard.new_empty(channel.world * len(shard), stride)
    slots = [channel.slot(parity, stride, shard) for parity in (0, 1)]
    copy_slot_kernel[(triton.cdiv(out.numel(), PUSH_BLOCK), 1)](
        *slots, out, channel.epoch, out.numel(), PUSH_BLOCK, **launch_options(8, 1)
    )
    return out[:, : shard.shape[1]]


def launch(
    shard: Tensor, weights: Sequence[Tensor], channel: Channel, outputs: Sequence[Tensor], *,
    biases: Sequence[Tensor | None] | None, activation: str | None, b_transposed: bool, x: Tensor | None,
    gate: Tensor | None, push: bool, keep: bool, tile: Tile, programs: int | None, spare: int,
) -> None:  # fmt: skip
    """The one launch behind both functions below; tensors of the served ranks are stacked along dim 0."""
    served, world = channel.served, channel.world
    rows, k = len(shard) // served, shard.shape[1]
    columns = [(w.shape[1] if b_transposed else len(w) // served) for w in weights]
    whole = packed(shard)
    stride = whole.shape[1]
    channel.require("all_gather_matmul", *all_gather_matmul_space(rows, k, world, shard.element_size()))
    stored = [padded(w) for w in weights]
    slots = [channel.slot(parity, stride, shard) for parity in (0, 1)]
    a_block, b_block = (tile.m, tile.k), (tile.k, tile.n) if b_transposed else (tile.n, tile.k)
    given = [bias for bias in biases or () if bias is not None]
    pushers = PUSHERS if push and world > 1 else 0
    tiles = triton.cdiv(rows, tile.m) * sum(triton.cdiv(n, tile.n) for n in columns) * world
    computing = persistent_programs(shard.device, tiles, tile, programs, served, pushers, spare)
    all_gather_matmul_kernel[(pushers + computing, served)](
        *channel.arguments(),
        whole, operand(whole[:, :k], a_block, tile), *[operand(slot[:, :k], a_block, tile) for slot in slots],
        *three([operand(w, b_block, tile) for w in stored]), *three(given or outputs[:1]),
        *(three(outputs) if x is None else outputs), outputs[0] if x is None else x,
        gate if gate is not None else outputs[0],
        rows, *three(columns), k, stride, *three([w.stride(0) for w in stored]), len(slots[0]) // served,
        PUSHERS if push else 1,
        PUSHERS=pushers, PUSH_BLOCK=PUSH_BLOCK, KEEP=keep, B_TRANSPOSED=b_transposed, WEIGHTS=len(weights),
        BIAS=bool(given), ACTIVATION=activation or "", DERIVATIVE=x is not None, GATED=gate is not None, WORLD=world,
        FENCE=tile.tma and not is_interpreted(),
        **blocks(tile), **launch_options(tile.warps, tile.stages, cooperative=True),
    )  # fmt: skip


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
    """[act(gather(shard) W_i^T + bias_i) for each weight]: one gather, up to three weights.

    Math:     all_gather_matmul_reference, this rank's entry
    Shapes:   shard (M / t, K); weight i (N_i, K), or (K, N_i) if b_transposed; bias (N_i,), for all weights or none;
              results (M, N_i). With virtual ranks every tensor is the stack of theirs along dim 0
    Numerics: as matmul; every row has the bits that the same tile gives without a gather
    Traffic:  all_gather_matmul_cost; this rank sends and receives (t - 1) / t * M * K * itemsize bytes
    Order:    push: PUSHERS programs store the shard into the peers' slots and set one flag each; otherwise the caller
              has begun Workspace.copy_gather, which sets one flag per shard. A computing program does its tiles of the
              own chunk, then waits once for each chunk, in ring order from the own one, before its tiles of it.
              keep: the own rows are put into the own slot too, for Channel.gathered or gathered_copy.
              spare: SMs to leave free, for collectives of other groups (docs/kernels.md, rule 4)
    Source:   chunked all-gather GEMM of symmetric-memory recipes and quack (research: own chunk first, epochs, parity)
    Errors:   ValueError if the channel's slots or flags are too small (all_gather_matmul_space)
    """
    served, world = channel.served, channel.world
    m = len(shard) * world // served
    columns = [w.shape[1] if b_transposed else len(w) // served for w in weights]
    outputs = [shard.new_empty(served * m, n) for n in columns]
    tile = tile or select_tile(shard.device, shard.dtype, m // world, *columns, chunks=world)
    launch(
        shard, weights, channel, outputs, biases=biases, activation=activation, b_transposed=b_transposed, x=None,
        gate=None, push=push, keep=keep, tile=tile, programs=programs, spare=spare,
    )  # fmt: skip
    return outputs


def all_gather_matmul_derivative(
    shard: Tensor,
    weight: Tensor,
    channel: Channel,
    x: Tensor,
    activation: str | None,
    gate: Tensor | None = None,
    *,
    push: bool = True,
    keep: bool = False,
    tile: Tile | None = None,
    programs: int | None = None,
    spare: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dx, dgate or None, act) from da = gather(shard) W: a row-parallel linear's dgrad, derivative in the epilogue.

    Math:     all_gather_matmul_derivative_reference, this rank's entry
    Shapes:   shard (M / t, K); weight (K, N); x, gate and results (M, N), contiguous
    Numerics, order, errors: as all_gather_matmul; da is never rounded
    Traffic:  as all_gather_matmul, and x (and gate) in, dx, act (and dgate) out
    Source:   as all_gather_matmul; formulas in activation/reference.py
    """
    outputs = (x.new_empty(x.shape), x.new_empty(x.shape if gate is not None else (1, 1)), x.new_empty(x.shape))
    tile = tile or select_tile(
        shard.device, shard.dtype, len(shard) // channel.served, x.shape[1], chunks=channel.world, operands=3
    )
    launch(
        shard, [weight], channel, outputs, biases=None, activation=activation, b_transposed=True, x=x,
        gate=gate, push=push, keep=keep, tile=tile, programs=programs, spare=spare,
    )  # fmt: skip
    return outputs[0], None if gate is None else outputs[1], outputs[2]
