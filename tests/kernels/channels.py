"""Channels for tests of communicating kernels: one process for each rank, or all ranks of a group in one process.

Belongs here: the memory behind a Channel, filled so that a slot that is read too early shows. No assertions, no
kernels.
"""

import torch
from torch import Tensor

from tpformer.distributed.shared_memory import SharedMemory
from tpformer.kernels.protocol import ERROR_WORDS, Channel

POISON = 0xFF  # a slot of these bytes holds NaNs in every floating-point type, and -1 in every signed integer type
LIMIT = 10**8  # polls: so many that a stuck test ends by the pool's timeout, which shows stacks
FLAG_BYTES = 4


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def region_bytes(world: int, capacity: int, writer_flags: int) -> int:
    """The bytes that `real_channel` needs of each rank's memory: two slots, then the flags of every writer."""
    return 2 * _aligned(capacity) + FLAG_BYTES * world * writer_flags


def real_channel(memory: SharedMemory, capacity: int, writer_flags: int, epoch: int = 0, limit: int = LIMIT) -> Channel:
    """Make this process's channel over `region_bytes` of shared memory, its slots poisoned; collective (one barrier).

    epoch: the last finished one, to which all flags are set; the first operation has epoch + 1.
    """
    capacity = _aligned(capacity)
    rank, world = memory.rank, memory.size
    memory.peer(rank, (2 * capacity,), torch.uint8).fill_(POISON)
    memory.peer(rank, (world * writer_flags,), torch.int32, 2 * capacity).fill_(epoch)
    memory.barrier()
    return Channel(
        rank=rank,
        served=1,
        world=world,
        data=memory.pointers.view(1, world).clone(),
        flags=memory.pointers.view(1, world) + 2 * capacity,
        epoch=torch.full((1,), epoch, dtype=torch.int32),
        error=torch.zeros(1, ERROR_WORDS.value, dtype=torch.int32),
        slots=(
            memory.peer(rank, (capacity,), torch.uint8),
            memory.peer(rank, (capacity,), torch.uint8, capacity),
        ),
        parity_stride=capacity,
        capacity=capacity,
        writer_flags=writer_flags,
        limit=limit,
        stopped=torch.zeros(1, 2, dtype=torch.int32),
        counters=torch.zeros(1, world * writer_flags, dtype=torch.int32),
    )


def virtual_channel(
    world: int, capacity: int, writer_flags: int, epoch: int = 0, limit: int = LIMIT, device: str = "cpu"
) -> Channel:
    """Make the channel of a whole group in one launch: poisoned slots (2, world, capacity), then flags, in one tensor.

    epoch: as in real_channel. On CUDA the error words are in pinned host memory.
    """
    capacity = _aligned(capacity)
    nbytes = 2 * world * capacity
    memory = torch.full((nbytes + FLAG_BYTES * world * world * writer_flags,), POISON, dtype=torch.uint8, device=device)
    slots = memory[:nbytes].view(2, world * capacity)
    flags = memory[nbytes:].view(torch.int32)
    flags.fill_(epoch)

    def addresses(first: Tensor, stride: int) -> Tensor:
        row = [first.data_ptr() + stride * rank for rank in range(world)]
        return torch.tensor([row] * world, dtype=torch.int64, device=device)

    error = torch.zeros(world, ERROR_WORDS.value, dtype=torch.int32, pin_memory=torch.device(device).type == "cuda")
    return Channel(
        rank=0,
        served=world,
        world=world,
        data=addresses(slots, capacity),
        flags=addresses(flags, FLAG_BYTES * world * writer_flags),
        epoch=torch.full((world,), epoch, dtype=torch.int32, device=device),
        error=error,
        slots=(slots[0], slots[1]),  # views of `memory`: they keep the flags alive, too
        parity_stride=world * capacity,
        capacity=capacity,
        writer_flags=writer_flags,
        limit=limit,
        stopped=torch.zeros(world, 2, dtype=torch.int32, device=device),
        counters=torch.zeros(world, world * writer_flags, dtype=torch.int32, device=device),
    )


def poison(channel: Channel, epoch: int) -> None:
    """Poison the served ranks' slots of an operation that has returned here, before the next one starts. Then nobody
    writes there: a peer's next write to this parity is at epoch + 2, and waits for this rank's flags of epoch + 1."""
    channel.slots[epoch % 2].fill_(POISON)
