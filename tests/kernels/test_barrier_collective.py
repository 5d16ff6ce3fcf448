"""barrier's kernel lets no rank pass before the last one has come, publishes earlier writes, and times out."""

import time

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

pytest.importorskip("triton")

from channels import real_channel, region_bytes, virtual_channel
from collectives import BEFORE_WRAP, DELAY, PATIENCE, Collective, run_without_peer

from tpformer.distributed.shared_memory import SharedMemory
from tpformer.kernels.barrier.kernel import barrier, barrier_space
from tpformer.kernels.barrier.reference import barrier_bytes, barrier_cost, barrier_reference
from tpformer.kernels.protocol import bump

SLOT = 64  # bytes; the barrier leaves them to the test
ROUNDS = 6


def processes() -> list[tuple[float, float]]:
    """When this rank came to and left each round; what peers wrote before it came is there afterwards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = SharedMemory(region_bytes(world, SLOT, 1), dist.group.WORLD, timeout=PATIENCE)
    channel = real_channel(memory, SLOT, 1, epoch=BEFORE_WRAP)
    times = []
    for index in range(ROUNDS):
        time.sleep(DELAY if index % world == rank else 0)
        for peer in range(world):
            memory.peer(peer, (world,), torch.int32, index % 2 * SLOT)[rank] = index
        arrived = time.monotonic()
        bump(channel)
        barrier(channel)
        times.append((arrived, time.monotonic()))
        assert channel.slots[index % 2].view(torch.int32)[:world].tolist() == [index] * world
    assert not channel.error.any(), channel.error
    memory.barrier()
    return times


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_on_processes(interpreted: WorkerPool, world: int) -> None:
    times = torch.tensor(interpreted(world).run(processes), dtype=torch.float64)  # (world, ROUNDS, arrived and left)
    for index in range(ROUNDS):
        assert (times[:, index, 1] >= barrier_reference(times[:, index, 0])).all()


def run_on_virtual_ranks(device: str, rounds: int) -> None:
    for world in (1, 2, 3, 4, 8):
        channel = virtual_channel(world, *barrier_space(), epoch=BEFORE_WRAP, device=device)
        for _ in range(rounds):
            bump(channel)
            barrier(channel)
        if device == "cuda":
            torch.cuda.synchronize()
        assert not channel.error.any(), channel.error


def virtual_ranks() -> None:
    run_on_virtual_ranks("cpu", ROUNDS)


def test_on_virtual_ranks(interpreted: WorkerPool) -> None:
    interpreted(1).run(virtual_ranks)


def without_peer() -> list[int]:
    flags_only = Collective(
        launch=lambda x, channel: barrier(channel), reference=list, space=lambda nbytes, world: barrier_space()
    )
    return run_without_peer(flags_only)


def test_missing_peer_is_reported(interpreted: WorkerPool) -> None:
    assert interpreted(3).run(without_peer)[0] == [1, 2, 7, 8]


def test_cost() -> None:
    assert barrier_bytes(1) == 0 and barrier_bytes(8) == 28
    assert barrier_cost(8) == (0, 56)


@pytest.mark.gpu
def test_on_virtual_ranks_of_a_gpu() -> None:
    run_on_virtual_ranks("cuda", 100)
