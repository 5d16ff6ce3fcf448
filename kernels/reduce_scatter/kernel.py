"""reduce_scatter over peer addresses, and the summation that all_reduce shares with it.

Letters, shares and bands: all_gather/kernel.py. n: elements of a chunk, the part of the input that one rank owns.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..all_gather.kernel import aligned, aligned_bytes, copy_share, cut
from ..launch import DTYPES, launch_options
from ..protocol import Channel, flags_of, publish, reach, serve, slot_of, wait

BLOCK_BYTES = 8192  # half of a copy's: a thread adds 16 elements in float32 while it holds t vectors of them
WARPS = 8


@triton.jit
def wait_for_share(flags, epoch, report, rank, limit, writer_flags, share, WORLD: tl.constexpr):
    """Wait until a share of every other rank's chunk has arrived here; the limit for later waits."""
    for step in range(1, WORLD):
        source = (rank + step) % WORLD
        limit = wait(flags_of(flags, rank, source, writer_flags) + share, epoch, report, source, limit)
    return limit


@triton.jit
def sum_block(own, arrived, stride, rank, at, mask, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Elements `at` of all ranks' chunks, summed in rank order in float32; the own chunk is read in place.

    A static loop, with no wait in it: all its loads can be in flight together.
    """
    total = tl.zeros((BLOCK,), tl.float32)
    for source in tl.static_range(WORLD):
        chunk = tl.where(source == rank, own, arrived + source * stride)
        total += tl.load(chunk + at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def sum_share(out, own, arrived, stride, rank, n, share, shares, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """out[:n] = the sum over all ranks, for one share of the blocks."""
    offsets = tl.arange(0, BLOCK)
    for block in range(share, (n + BLOCK - 1) // BLOCK, shares):
        first = tl.cast(block, tl.int64) * BLOCK
        mask = offsets < n - first
        total = sum_block(own, arrived, stride, rank, first + offsets, mask, WORLD, BLOCK)
        tl.store(out + first + offsets, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rank", "limit", "parity_stride", "writer_flags", "vectors", "shares"])
def reduce_scatter_kernel(
    data, flags, epoch, error, stopped, rank, limit, parity_stride, writer_flags,
    x,  # (served, t, n)
    out,  # (served, n)
    vectors, shares,
    WORLD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bands: `shares` pushers, then as many reducers. n = vectors * VECTOR."""
    data, flags, epoch, report, rank, limit = serve(data, flags, epoch, error, stopped, rank, limit, WORLD)
    n = tl.cast(vectors, tl.int64) * VECTOR
    stride = aligned(n, x.dtype.element_ty)
    x += tl.program_id(1) * WORLD * n
    out += tl.program_id(1) * n
    program = tl.program_id(0)
    if program < shares:
        for step in range(1, reach(limit, WORLD)):
            owner = (rank + WORLD - step) % WORLD
            slot = slot_of(data, owner, epoch, parity_stride, x.dtype.element_ty)
            copy_share(slot + rank * stride, x + owner * n, n, program, shares, BLOCK)
            publish(flags_of(flags, owner, rank, writer_flags) + program, epoch)
    else:
        arrived = slot_of(data, rank, epoch, parity_stride, x.dtype.element_ty)
        share = program - shares
        wait_for_share(flags, epoch, report, rank, limit, writer_flags, share, WORLD)
        sum_share(out, x + rank * n, arrived, stride, rank, n, share, shares, WORLD, BLOCK)


def reduce_scatter_space(nbytes: int, world: int, programs: int) -> tuple[int, int]:
    """(bytes of a slot, flags of a writer) that the channel must offer for inputs of nbytes."""
    return world * aligned_bytes(nbytes // world), max(1, programs // 2)


def reduce_scatter(x: Tensor, channel: Channel, *, out: Tensor | None = None, programs: int) -> Tensor:
    """The sum over all ranks of this rank's chunk of x.

    Math:     out = sum_s x[r m / t : (r + 1) m / t] of rank s, on rank r
    Shapes:   x (m, ...), of one shape on all ranks, t divides m, bf16|fp16|fp32; out (m / t, ...), contiguous, made if
              None, not overlapping x. Virtual ranks: x (served m, ...), out (served m / t, ...).
              programs: of one rank, at least 2, equal on all ranks; half of them push. All of a launch must be resident
    Numerics: terms travel as they are and are added from zero on in rank order in fp32, with one rounding at the
              store: bitwise repeatable, and the bits of reduce_scatter_reference
    Traffic:  sends (t - 1) / t x.nbytes; memory see reduce_scatter_cost. 16-byte accesses if a chunk's bytes are a
              multiple of 16 (and x and out so aligned), else one element at a time
    Protocol: the caller has begun the epoch (bump). Pusher j writes share j of chunk s into slot[rank] of each peer s
              and sets flag j there; reducer j waits for flag j of all ranks, then adds share j, its own term in place.
              Together the reducers wait for all flags of all ranks, also if x is empty, as parity needs.
    Source:   scatter to the owner and add in fixed order, as in Triton-distributed's and TensorRT-LLM's push forms
    """
    space = reduce_scatter_space(x.nbytes // channel.served, channel.world, programs)
    channel.require("reduce_scatter", *space)
    if x.dtype not in DTYPES:
        raise TypeError(f"reduce_scatter adds bfloat16, float16 and float32, not {x.dtype}")
    if out is None:
        out = x.new_empty(x.shape[0] // channel.world, *x.shape[1:])
    n = out.numel() // channel.served
    vector, block, shares = cut(n, x.element_size(), BLOCK_BYTES, programs // 2)
    reduce_scatter_kernel[(2 * shares, channel.served)](
        *channel.arguments(), x.contiguous(), out, n // vector, shares,
        WORLD=channel.world, VECTOR=vector, BLOCK=block, **launch_options(WARPS, 1, cooperative=True),
    )  # fmt: skip
    return out
