"""Runs a collective's kernel for some epochs against its reference: on one process per rank, or on virtual ranks.

Belongs here: what the tests of the stand-alone collectives share. Workers import it, with the interpreter on.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from channels import poison, real_channel, region_bytes, virtual_channel
from torch import Tensor

from tpformer.distributed.shared_memory import SharedMemory
from tpformer.kernels.protocol import Channel, bump

BEFORE_WRAP = 2**31 - 4  # three more epochs are positive as int32, then they wrap
# Successive operations: elements of a chunk, and dtype. One element, few, several narrow blocks, several wide ones, the
# large ones in both parities. bfloat16 is for GPUs: its arithmetic is wrong in the interpreter.
CASES = (
    (1, torch.float32),
    (13, torch.float16),
    (5003, torch.float16),
    (4 * 4096, torch.float32),
    (4 * 4096, torch.float16),
    (5003, torch.float32),
    (1, torch.float16),
)
LARGEST = max(size * dtype.itemsize for size, dtype in CASES)
DELAY = 0.05  # seconds
PATIENCE = 30  # seconds that the shared memory's own barrier waits


class Collective(NamedTuple):
    launch: Callable[[Tensor, Channel], Tensor]
    reference: Callable[[list[Tensor]], list[Tensor]]
    space: Callable[[int, int], tuple[int, int]]
    """(bytes of one rank's input, world) -> (bytes of a slot, flags of a writer)."""
    chunks: Callable[[int], int] = lambda world: 1
    """world -> how many chunks the input has."""

    def channel_space(self, world: int, largest: int = LARGEST) -> tuple[int, int]:
        return self.space(self.chunks(world) * largest, world)


def make_inputs(collective: Collective, index: int, size: int, world: int, dtype: torch.dtype) -> list[Tensor]:
    """All ranks' inputs at the index-th operation, fresh numbers each time."""
    generator = torch.Generator().manual_seed(index)
    shape = (world, collective.chunks(world) * size, 1)
    if dtype.is_floating_point:
        return list(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
    return list(torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype))


def run_on_processes(collective: Collective, cases: Sequence[tuple[int, torch.dtype]] = CASES) -> None:
    """This process's part. Another rank each time is late before it starts, and before it poisons what it has read."""
    rank, world = dist.get_rank(), dist.get_world_size()
    space = collective.channel_space(world)
    memory = SharedMemory(region_bytes(world, *space), dist.group.WORLD, timeout=PATIENCE)
    channel = real_channel(memory, *space, epoch=BEFORE_WRAP)
    for index, (size, dtype) in enumerate(cases):
        inputs = make_inputs(collective, index, size, world, dtype)
        late = DELAY if index % world == rank and world > 1 else 0
        time.sleep(late)
        bump(channel)
        out = collective.launch(inputs[rank], channel)
        time.sleep(late)  # meanwhile the others push the next operation's data
        poison(channel, BEFORE_WRAP + 1 + index)
        assert torch.equal(out, collective.reference(inputs)[rank]), (rank, world, index, size, dtype)
    assert not channel.error.any(), channel.error


def run_on_virtual_ranks(
    collective: Collective,
    world: int,
    cases: Sequence[tuple[int, torch.dtype]] = CASES,
    device: str = "cpu",
    largest: int = LARGEST,
) -> None:
    """All ranks in one launch."""
    channel = virtual_channel(world, *collective.channel_space(world, largest), epoch=BEFORE_WRAP, device=device)
    for index, (size, dtype) in enumerate(cases):
        inputs = [x.to(device) for x in make_inputs(collective, index, size, world, dtype)]
        bump(channel)
        out = collective.launch(torch.cat(inputs), channel)
        poison(channel, BEFORE_WRAP + 1 + index)
        assert torch.equal(out, torch.cat(collective.reference(inputs))), (world, index, size, dtype)
    assert not channel.error.any(), channel.error


def run_on_gpu(collective: Collective, world: int) -> None:
    """100 operations in bfloat16, whose sums differ with their order."""
    sizes = (1, 13, 8 * 1021, 1 << 18)
    cases = [(sizes[index % 4], torch.bfloat16) for index in range(100)]
    run_on_virtual_ranks(collective, world, cases, "cuda", largest=2 * max(sizes))


def run_without_peer(collective: Collective) -> list[int]:
    """Rank 0's error words (expired, peer, epoch seen, epoch wanted): the last rank never comes, the others have set
    their flags before, however slow this machine is."""
    rank, world = dist.get_rank(), dist.get_world_size()
    space = collective.channel_space(world)
    memory = SharedMemory(region_bytes(world, *space), dist.group.WORLD, timeout=PATIENCE)
    channel = real_channel(memory, *space, epoch=7, limit=20)
    if rank < world - 1:
        at = 2 * channel.capacity + 4 * rank * channel.writer_flags
        memory.peer(0, (channel.writer_flags,), torch.int32, at).fill_(8)
    memory.barrier()
    if rank == 0:
        bump(channel)
        collective.launch(make_inputs(collective, 0, 5, world, torch.float32)[rank], channel)
    memory.barrier()
    return channel.error[0].tolist()
