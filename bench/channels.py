"""Channels whose ranks all live on one GPU: a whole group in one launch, or one rank whose peers have all arrived.

Belongs here: memory behind a Channel for benches. Tests have their own, with what they need to find mistakes.
"""

import torch
from torch import Tensor

from tpformer.kernels.protocol import ERROR_WORDS, Channel

AHEAD = 1 << 30  # epochs: a flag so far ahead never lets its reader wait
LIMIT = 10_000_000  # polls: several seconds
POISON = 0xFF  # NaNs
FLAG_BYTES = 4


def local_channel(
    world: int, capacity: int, writer_flags: int, device: torch.device, rank: int | None = None
) -> Channel:
    """rank None: a channel that serves all ranks of the group in one launch (virtual ranks).

    Otherwise it serves that rank alone, and its peers' flags are set AHEAD: no wait for a peer waits, while the
    rank's own flags are set by its own kernel as ever. Its peers have real slots and flags, each their own: what it
    pushes is written, to this GPU's memory instead of a link.
    """
    capacity = -(-capacity // 16) * 16
    first, served = (0, world) if rank is None else (rank, 1)
    nbytes, region = 2 * world * capacity, world * writer_flags
    memory = torch.full((nbytes + FLAG_BYTES * world * region,), POISON, dtype=torch.uint8, device=device)
    slots = memory[:nbytes].view(2, world, capacity)
    flags = memory[nbytes:].view(torch.int32).view(world, world, writer_flags)  # [owner, writer]
    flags.zero_()
    if rank is not None:
        flags[rank] = AHEAD
        flags[rank, rank] = 0

    def addresses(x: Tensor, stride: int) -> Tensor:
        row = [x.data_ptr() + stride * peer for peer in range(world)]
        return torch.tensor([row] * served, dtype=torch.int64, device=device)

    return Channel(
        rank=first,
        served=served,
        world=world,
        data=addresses(slots, capacity),
        flags=addresses(flags, FLAG_BYTES * region),
        epoch=torch.zeros(served, dtype=torch.int32, device=device),
        error=torch.zeros(served, ERROR_WORDS.value, dtype=torch.int32, pin_memory=device.type == "cuda"),
        slots=(slots[0, first : first + served].view(-1), slots[1, first : first + served].view(-1)),
        parity_stride=world * capacity,
        capacity=capacity,
        writer_flags=writer_flags,
        limit=LIMIT,
        stopped=torch.zeros(served, 2, dtype=torch.int32, device=device),
        counters=torch.zeros(served, region, dtype=torch.int32, device=device),
    )
