"""all_reduce over peer addresses: one-shot for small inputs, two-shot for the others.

Letters, shares and bands: all_gather/kernel.py. n: elements of the input, or of a chunk, the part that one rank owns.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..all_gather.kernel import aligned, aligned_bytes, copy_share, cut
from ..launch import DTYPES, launch_options
from ..protocol import Channel, flags_of, publish, reach, serve, slot_of, wait
from ..reduce_scatter.kernel import BLOCK_BYTES, WARPS, sum_block, sum_share, wait_for_share

ONE_SHOT_BYTES = 256 * 1024  # for 5 to 8 ranks, and twice that for 3 and 4: see two_shot_pays


@triton.jit(do_not_specialize=["rank", "limit", "parity_stride", "writer_flags", "vectors", "shares"])
def one_shot_all_reduce_kernel(
    data, flags, epoch, error, stopped, rank, limit, parity_stride, writer_flags,
    x,  # (served, n)
    out,  # (served, n)
    vectors, shares,
    WORLD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bands: `shares` pushers, then as many reducers. n = vectors * VECTOR."""
    data, flags, epoch, report, rank, limit = serve(data, flags, epoch, error, stopped, rank, limit, WORLD)
    n = tl.cast(vectors, tl.int64) * VECTOR
    stride = aligned(n, x.dtype.element_ty)
    x += tl.program_id(1) * n
    out += tl.program_id(1) * n
    program = tl.program_id(0)
    if program < shares:
        for step in range(1, reach(limit, WORLD)):
            peer = (rank + WORLD - step) % WORLD
            slot = slot_of(data, peer, epoch, parity_stride, x.dtype.element_ty)
            copy_share(slot + rank * stride, x, n, program, shares, BLOCK)
            publish(flags_of(flags, peer, rank, writer_flags) + program, epoch)
    else:
        arrived = slot_of(data, rank, epoch, parity_stride, x.dtype.element_ty)
        share = program - shares
        wait_for_share(flags, epoch, report, rank, limit, writer_flags, share, WORLD)
        sum_share(out, x, arrived, stride, rank, n, share, shares, WORLD, BLOCK)


@triton.jit
def chunk_length(n, stride, owner):
    """Elements of the owner's chunk: all chunks are `stride` long, but the input may end inside of one or before it."""
    return tl.minimum(tl.maximum(n - owner * stride, 0), stride)


@triton.jit(do_not_specialize=["rank", "limit", "parity_stride", "writer_flags", "vectors", "shares"])
def two_shot_all_reduce_kernel(
    data, flags, epoch, error, stopped, rank, limit, parity_stride, writer_flags,
    x,  # (served, n)
    out,  # (served, n)
    vectors, shares,
    WORLD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bands: `shares` pushers, `shares` reducers, then finishers. n = vectors * VECTOR.

    Slots hold t chunks of terms, then t chunks of sums; flags [0, shares) announce terms, [shares, 2 shares) sums.
    """
    data, flags, epoch, report, rank, limit = serve(data, flags, epoch, error, stopped, rank, limit, WORLD)
    n = tl.cast(vectors, tl.int64) * VECTOR
    stride = aligned((n + WORLD - 1) // WORLD, x.dtype.element_ty)
    x += tl.program_id(1) * n
    out += tl.program_id(1) * n
    program = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    if program < shares:
        for step in range(1, reach(limit, WORLD)):
            owner = (rank + WORLD - step) % WORLD
            slot = slot_of(data, owner, epoch, parity_stride, x.dtype.element_ty)
            copy_share(slot + rank * stride, x + owner * stride, chunk_length(n, stride, owner), program, shares, BLOCK)
            publish(flags_of(flags, owner, rank, writer_flags) + program, epoch)
    elif program < 2 * shares:
        share = program - shares
        arrived = slot_of(data, rank, epoch, parity_stride, x.dtype.element_ty)
        length = chunk_length(n, stride, rank)
        limit = wait_for_share(flags, epoch, report, rank, limit, writer_flags, share, WORLD)
        for block in range(share, (length + BLOCK - 1) // BLOCK, shares):
            first = tl.cast(block, tl.int64) * BLOCK
            mask = offsets < length - first
            total = sum_block(x + rank * stride, arrived, stride, rank, first + offsets, mask, WORLD, BLOCK)
            rounded = total.to(x.dtype.element_ty)  # once: every rank gets these bits
            tl.store(out + rank * stride + first + offsets, rounded, mask=mask)
            for step in range(1, reach(limit, WORLD)):
                slot = slot_of(data, (rank + WORLD - step) % WORLD, epoch, parity_stride, x.dtype.element_ty)
                tl.store(slot + (WORLD + rank) * stride + first + offsets, rounded, mask=mask)
        for step in range(1, reach(limit, WORLD)):
            publish(flags_of(flags, (rank + WORLD - step) % WORLD, rank, writer_flags) + program, epoch)
    else:
        arrived = slot_of(data, rank, epoch, parity_stride, x.dtype.element_ty)
        for unit in range(program - 2 * shares, (WORLD - 1) * shares, tl.num_programs(0) - 2 * shares):
            owner = (rank + 1 + unit // shares) % WORLD
            share = unit % shares
            flag = flags_of(flags, rank, owner, writer_flags) + shares + share
            limit = wait(flag, epoch, report, owner, limit)
            length = chunk_length(n, stride, owner)
            copy_share(out + owner * stride, arrived + (WORLD + owner) * stride, length, share, shares, BLOCK)


def two_shot_pays(nbytes: int, world: int) -> bool:
    """Whether two hops of little data beat one hop of much: from 256 KiB on for more than 4 ranks, 512 KiB for 3 or 4.

    Two ranks send the same bytes either way, so one hop is better. Source: the sizes by which vLLM's
    csrc/custom_all_reduce.cuh chooses on NVLink; about where (t - 1)(t - 2) / t nbytes, which one-shot sends more than
    two-shot, take a hop's 3 us at 400 GB/s. A prediction for these kernels.
    """
    return world > 2 and nbytes >= (ONE_SHOT_BYTES if world > 4 else 2 * ONE_SHOT_BYTES)


def all_reduce_space(nbytes: int, world: int, programs: int, two_shot: bool | None = None) -> tuple[int, int]:
    """(bytes of a slot, flags of a writer) that the channel must offer for inputs of nbytes."""
    if two_shot is None:
        two_shot = two_shot_pays(nbytes, world)
    if two_shot:  # owners' chunks are whole 16-byte vectors, so that the last ones may be short or empty
        return 2 * world * aligned_bytes(triton.cdiv(nbytes, world)), 2 * max(1, programs // 3)
    return world * aligned_bytes(nbytes), max(1, programs // 2)


def all_reduce(
    x: Tensor, channel: Channel, *, out: Tensor | None = None, programs: int, two_shot: bool | None = None
) -> Tensor:
    """The sum of x over all ranks, the same bits on every rank.

    Math:     out = sum_s x of rank s
    Shapes:   x of one shape on all ranks, any number of elements, bf16|fp16|fp32; out like x, contiguous, made if None,
              not overlapping x. Virtual ranks: stacked along dim 0.
              programs: of one rank, at least 2 (two-shot: 3), equal on all ranks. All of a launch must be resident.
              two_shot: None picks by two_shot_pays
    Numerics: terms travel as they are and are added from zero on in rank order in fp32, with one rounding: bitwise
              repeatable, equal on all ranks, and the bits of all_reduce_reference, one-shot or two-shot
    Traffic:  sends (t - 1) x.nbytes (one-shot) or about 2 (t - 1) / t x.nbytes (two-shot); memory see all_reduce_cost.
              16-byte accesses if x.nbytes is a multiple of 16 (and x and out so aligned), else one element at a time
    Protocol: the caller has begun the epoch (bump). One-shot: pusher j writes share j of x into slot[rank] of each peer
              and sets flag j there; reducer j waits for flag j of all ranks and adds. Two-shot: the same with the chunk
              that each peer owns; reducer j then writes its share of the sum to all ranks and sets its second flag
              there; finishers wait for every rank's second flags and copy the sums. Either way a rank waits for flags
              of all ranks, which set them after having read what they waited for, also if x is empty.
    Source:   one-shot and two-shot as in TensorRT-LLM's and vLLM's custom all-reduce; differs: pushes, epoch flags
    """
    nbytes = x.nbytes // channel.served
    if two_shot is None:
        two_shot = two_shot_pays(nbytes, channel.world)
    channel.require("all_reduce", *all_reduce_space(nbytes, channel.world, programs, two_shot))
    if x.dtype not in DTYPES:
        raise TypeError(f"all_reduce adds bfloat16, float16 and float32, not {x.dtype}")
    if out is None:
        out = x.new_empty(x.shape)
    n = x.numel() // channel.served
    bands, chunks = (3, channel.world) if two_shot else (2, 1)
    vector, block, shares = cut(n, x.element_size(), BLOCK_BYTES, programs // bands, chunks)
    kernel, grid = one_shot_all_reduce_kernel, 2 * shares
    if two_shot:
        kernel = two_shot_all_reduce_kernel
        grid += max(1, min(programs - 2 * shares, (channel.world - 1) * shares))
    kernel[(grid, channel.served)](
        *channel.arguments(), x.contiguous(), out, n // vector, shares,
        WORLD=channel.world, VECTOR=vector, BLOCK=block, **launch_options(WARPS, 1, cooperative=True),
    )  # fmt: skip
    return out
