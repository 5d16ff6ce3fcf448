"""all_gather over peer addresses, and the pieces that the other stand-alone collectives share with it.

Letters: t ranks (WORLD), n elements of a shard, S shares that it is cut into. A share is every S-th block of BLOCK
elements; one program moves it and one flag announces it, so that a reader waits for what it reads and no more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch_options
from ..protocol import Channel, flags_of, publish, reach, serve, slot_of, wait

ALIGNMENT = tl.constexpr(16)  # bytes: of the chunks inside a slot, and of the widest load or store
COPY_BLOCK_BYTES = 16384  # four 16-byte vectors in flight per thread of WARPS
NARROW_BLOCK = 1024  # elements, for chunks that end inside of a 16-byte vector: 4096 single loads spilled
WARPS = 8
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def aligned(n, dtype: tl.constexpr):
    """n rounded up to whole 16-byte vectors: the distance between chunks of n elements in a slot."""
    VECTOR: tl.constexpr = ALIGNMENT // (dtype.primitive_bitwidth // 8)
    return (n + VECTOR - 1) // VECTOR * VECTOR


@triton.jit
def copy_share(target, source, n, share, shares, BLOCK: tl.constexpr):
    """target[:n] = source[:n], for one share of the blocks; n is int64, as a scalar it costs nothing."""
    offsets = tl.arange(0, BLOCK)
    for block in range(share, (n + BLOCK - 1) // BLOCK, shares):
        first = tl.cast(block, tl.int64) * BLOCK
        mask = offsets < n - first
        tl.store(target + first + offsets, tl.load(source + first + offsets, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["rank", "limit", "parity_stride", "writer_flags", "vectors", "shares"])
def all_gather_kernel(
    data, flags, epoch, error, stopped, rank, limit, parity_stride, writer_flags,
    x,  # (served, n)
    out,  # (served, t, n)
    vectors, shares,
    WORLD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bands: `shares` pushers, then finishers. VECTOR divides n, so that the compiler sees it: n = vectors * VECTOR."""
    data, flags, epoch, report, rank, limit = serve(data, flags, epoch, error, stopped, rank, limit, WORLD)
    n = tl.cast(vectors, tl.int64) * VECTOR
    stride = aligned(n, x.dtype.element_ty)
    x += tl.program_id(1) * n
    out += tl.program_id(1) * WORLD * n
    program = tl.program_id(0)
    if program < shares:
        for step in range(1, reach(limit, WORLD)):  # reverse ring order: every link carries one transfer at a time
            peer = (rank + WORLD - step) % WORLD
            slot = slot_of(data, peer, epoch, parity_stride, x.dtype.element_ty)
            copy_share(slot + rank * stride, x, n, program, shares, BLOCK)
            publish(flags_of(flags, peer, rank, writer_flags) + program, epoch)
    else:
        arrived = slot_of(data, rank, epoch, parity_stride, x.dtype.element_ty)
        for unit in range(program - shares, WORLD * shares, tl.num_programs(0) - shares):
            source = (rank + unit // shares) % WORLD  # the own shard first, then in the order of arrival
            share = unit % shares
            if source == rank:
                copy_share(out + source * n, x, n, share, shares, BLOCK)
            else:
                limit = wait(flags_of(flags, rank, source, writer_flags) + share, epoch, report, source, limit)
                copy_share(out + source * n, arrived + source * stride, n, share, shares, BLOCK)


def aligned_bytes(nbytes: int) -> int:
    return triton.cdiv(nbytes, ALIGNMENT.value) * ALIGNMENT.value


def cut(n: int, itemsize: int, block_bytes: int, programs: int, chunks: int = 1) -> tuple[int, int, int]:
    """(VECTOR, BLOCK, S) for n elements in so many chunks; equal on all ranks, as it decides what a flag announces."""
    vector = ALIGNMENT.value // itemsize
    wide = n % vector == 0
    block = block_bytes // itemsize if wide else NARROW_BLOCK
    return vector if wide else 1, block, max(1, min(programs, triton.cdiv(triton.cdiv(n, chunks), block)))


def all_gather_space(nbytes: int, world: int, programs: int) -> tuple[int, int]:
    """(bytes of a slot, flags of a writer) that the channel must offer for shards of nbytes."""
    return world * aligned_bytes(nbytes), max(1, programs // 2)


def all_gather(x: Tensor, channel: Channel, *, out: Tensor | None = None, programs: int) -> Tensor:
    """Every rank's x along dim 0, in rank order.

    Math:     out[s] = x of rank s
    Shapes:   x (m, ...), of one shape on all ranks, any dtype of 1, 2, 4 or 8 bytes; out (t m, ...), contiguous and
              16-byte aligned, made if None. Virtual ranks: x (served m, ...), out (served t m, ...).
              programs: of one rank, at least 2, equal on all ranks; half of them push. All of a launch must be resident
    Numerics: a copy, bit by bit
    Traffic:  sends (t - 1) x.nbytes; memory see all_gather_cost. 16-byte accesses if x.nbytes is a multiple of 16, else
              one element at a time
    Protocol: the caller has begun the epoch (bump). Pusher j writes share j of x into slot[rank] of each peer and sets
              flag j there; a finisher waits for flag j of rank s, then copies share j of slot[s] to out. Together the
              finishers wait for all flags of all ranks, also if x is empty, as parity needs.
    Source:   the push all-gather with epoch flags of quack and Triton-distributed; differs: one flag per share
    """
    channel.require("all_gather", *all_gather_space(x.nbytes // channel.served, channel.world, programs))
    if out is None:
        out = x.new_empty(channel.world * x.shape[0], *x.shape[1:])
    x = x.contiguous()
    if x.data_ptr() % ALIGNMENT.value:
        x = x.clone()
    n, itemsize = x.numel() // channel.served, x.element_size()
    if n * itemsize % ALIGNMENT.value == 0:
        n, itemsize = n * itemsize // 8, 8
    words = INTEGERS[itemsize]
    vector, block, shares = cut(n, itemsize, COPY_BLOCK_BYTES, programs // 2)
    finishers = max(1, min(programs - shares, channel.world * shares))
    all_gather_kernel[(shares + finishers, channel.served)](
        *channel.arguments(), x.view(-1).view(words), out.view(-1).view(words), n // vector, shares,
        WORLD=channel.world, VECTOR=vector, BLOCK=block, **launch_options(WARPS, 1, cooperative=True),
    )  # fmt: skip
    return out
