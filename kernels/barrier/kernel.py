"""barrier: flags only; letters and bands as in all_gather/kernel.py."""

import triton
import triton.language as tl

from ..launch import launch_options
from ..protocol import Channel, flags_of, publish, serve, wait


@triton.jit(do_not_specialize=["rank", "limit", "parity_stride", "writer_flags"])
def barrier_kernel(data, flags, epoch, error, stopped, rank, limit, parity_stride, writer_flags, WORLD: tl.constexpr):
    """Bands: one program that publishes, one that waits, so that a serial interpreter can serve virtual ranks."""
    data, flags, epoch, report, rank, limit = serve(data, flags, epoch, error, stopped, rank, limit, WORLD)
    for step in range(1, WORLD):
        peer = (rank + step) % WORLD
        if tl.program_id(0) == 0:
            if limit > 0:
                publish(flags_of(flags, peer, rank, writer_flags), epoch)
        else:
            limit = wait(flags_of(flags, rank, peer, writer_flags), epoch, report, peer, limit)


def barrier_space() -> tuple[int, int]:
    """(bytes of a slot, flags of a writer) that the channel must offer."""
    return 0, 1


def barrier(channel: Channel) -> None:
    """Work queued after it on any rank starts after all work queued before it on every rank.

    Math:     none; barrier_reference gives the times
    Shapes:   none. Virtual ranks: the served ranks wait for one another
    Numerics: none
    Traffic:  sends t - 1 flags of 4 bytes, and no payload
    Protocol: the caller has begun the epoch (bump). Rank r sets its first flag at every peer and waits for every
              peer's. The release covers earlier kernels of the stream, the acquire later ones: also their stores to
              peers, so it separates phases of kernels that set no flags themselves.
    Source:   the all-to-all flag barrier of torch's symmetric memory; differs: epochs, so nothing is reset
    """
    channel.require("barrier", *barrier_space())
    barrier_kernel[(2, channel.served)](
        *channel.arguments(), WORLD=channel.world, **launch_options(1, 1, cooperative=True)
    )
