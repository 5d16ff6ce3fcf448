"""Channels for tests of communicating kernels: one process for each rank, or all ranks of a group in one process.

Belongs here: the memory behind a Channel, filled so that a slot that is read too early shows. No assertions, no
kernels.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from tpformer.distributed.shared_memory import SharedMemory
from tpformer.kernels.protocol import ERROR_WORDS, Channel

POISON = 0xFF  # a slot of these bytes holds NaNs in every floating-point type, and -1 in every signed integer type
LIMIT = 10**8  # polls: so many that a stuck test ends by the pool's timeout, which shows stacks
FLAG_BYTES = 4


def channel_of(data: Tensor, flags: Tensor, slots, rank: int, writer_flags: int, epoch: int, limit: int) -> Channel:
    """A channel that serves the ranks from `rank` on, as many as `data` has rows. On CUDA the error words are in pinned
    host memory."""
    served, world = data.shape

    def words(*size: int, **options: Any) -> Tensor:
        return torch.zeros(*size, dtype=torch.int32, **options)

    return Channel(
        rank=rank, served=served, world=world, data=data, flags=flags, slots=slots, writer_flags=writer_flags,
        limit=limit, parity_stride=len(slots[0]), capacity=len(slots[0]) // served,
        epoch=words(served, device=data.device).fill_(epoch), stopped=words(served, 2, device=data.device),
        counters=words(served, world * writer_flags, device=data.device),
        error=words(served, ERROR_WORDS.value, pin_memory=data.is_cuda),
    )  # fmt: skip


def real_channel(
    capacity: int, writer_flags: int, epoch: int, timeout: float, limit: int = LIMIT, extra: int = 0
) -> tuple[SharedMemory, Channel]:
    """Make this process's channel: two poisoned slots, then the flags of every writer; collective.

    capacity: bytes, a multiple of 16. epoch: the last finished one, to which all flags are set; the first operation has
    epoch + 1. timeout: seconds that the memory's own barrier waits. extra: zeroed bytes behind the flags.
    """
    nbytes = 2 * capacity + FLAG_BYTES * dist.get_world_size() * writer_flags
    memory = SharedMemory(nbytes + extra, dist.group.WORLD, timeout=timeout)
    rank, world = memory.rank, memory.size
    slots = memory.peer(rank, (2, capacity), torch.uint8).fill_(POISON)
    memory.peer(rank, (world * writer_flags,), torch.int32, 2 * capacity).fill_(epoch)
    memory.barrier()
    addresses = memory.pointers.view(1, world).clone()
    areas = addresses, addresses + 2 * capacity, (slots[0], slots[1])
    return memory, channel_of(*areas, rank, writer_flags, epoch, limit)


def virtual_channel(
    world: int, capacity: int, writer_flags: int, epoch: int = 0, limit: int = LIMIT, device: str = "cpu"
) -> Channel:
    """Make the channel of a whole group in one launch: poisoned slots (2, world, capacity), then flags, in one tensor.
    capacity, epoch: as in real_channel."""
    nbytes, own_flags = 2 * world * capacity, FLAG_BYTES * world * writer_flags
    memory = torch.full((nbytes + world * own_flags,), POISON, dtype=torch.uint8, device=device)
    slots = memory[:nbytes].view(2, world * capacity)
    flags = memory[nbytes:].view(torch.int32).fill_(epoch)

    def addresses(first: Tensor, stride: int) -> Tensor:
        row = [first.data_ptr() + stride * rank for rank in range(world)]
        return torch.tensor([row] * world, dtype=torch.int64, device=device)

    # the slots are views of `memory`: they keep the flags alive, too
    areas = addresses(slots, capacity), addresses(flags, own_flags), (slots[0], slots[1])
    return channel_of(*areas, 0, writer_flags, epoch, limit)


def apart(channel: Channel) -> list[Channel]:
    """A channel for each rank of a virtual one, as its own process has it: a launch serves one rank. They share the
    slots and flags. The rest are separate allocations, equally aligned, so that all ranks run one compiled kernel."""

    def own(name: str, rank: int) -> Tensor:
        words = getattr(channel, name)[rank : rank + 1]
        return torch.empty_like(words, pin_memory=words.is_pinned()).copy_(words)

    parts = []
    for rank in range(channel.world):
        words = {name: own(name, rank) for name in ("data", "flags", "epoch", "error", "stopped", "counters")}
        slots = tuple(slot.view(channel.world, -1)[rank] for slot in channel.slots)
        parts.append(replace(channel, rank=rank, served=1, slots=slots, **words))
    return parts


def poison(channel: Channel, epoch: int) -> None:
    """Poison the served ranks' slots of an operation that has returned here, before the next one starts. Then nobody
    writes there: a peer's next write to this parity is at epoch + 2, and waits for this rank's flags of epoch + 1."""
    channel.slots[epoch % 2].fill_(POISON)
