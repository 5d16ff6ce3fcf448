"""The fused GEMMs on virtual ranks of one GPU: a thousand epochs with every rank late at random, and CUDA graphs.

Late ranks have a launch and a stream each, and random delays, so that their kernels run at once and drift apart as on
real devices. A graph has all ranks in one launch. The same code also runs in the interpreter as far as one process can:
all ranks in one launch, one rank in its own launch, replays without a graph.
"""

import contextlib
import importlib
import random
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from pool import WorkerPool

pytest.importorskip("triton")

import gemms
import test_all_gather_matmul_kernel as gather
import test_matmul_all_reduce_kernel as reduce
import test_matmul_reduce_scatter_kernel as scatter
from channels import poison
from gemms import BEFORE_WRAP, FINISH, Gemm, Tensors, cast, channel_for, run_on_virtual_ranks, stacked

from tpformer.distributed.kernel_workspace import wrap
from tpformer.kernels.configurations import select_tile
from tpformer.kernels.launch import Tile, launch_options
from tpformer.kernels.protocol import Channel, bump

EPOCHS, REPLAYS = 1000, 100
BATCH = 25  # epochs in which nothing waits for all ranks, before the results are looked at
PROGRAMS = 11  # of a rank, with its pushers: so 8 ranks fit on 90 SMs
LIMIT = 2 * 10**7  # polls, about 20 s
PATIENCE = 160  # seconds of a run
LATE_SHAPE = (130, 200, 64)  # (rows per rank, N, K): several tiles each way; sums of K small whole numbers are exact
GRAPH_SHAPE = (200, 264, 136)
SMALL_SHAPE = (17, 36, 16)  # for the interpreter
DELAYS = (5_000, 400_000, 4_000_000)  # a delay is below one of these, in cycles: 2.5 us, 0.2 ms, 2 ms
HEAD_START = 20_000_000  # cycles that ranks wait at a batch's start, so that the host's launches do not pace them
KERNELS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


LATE = {
    "all_gather_matmul": gather.linear(1, programs=PROGRAMS),
    "matmul_reduce_scatter": scatter.gemm(1, loads=scatter.LOADS, programs=PROGRAMS),
    "matmul_all_reduce_one_shot": reduce.gemm(1, False, True, programs=PROGRAMS),
    "matmul_all_reduce_two_shot": reduce.gemm(1, False, False, programs=PROGRAMS),
}
GRAPHS = {
    "all_gather_matmul": gather.linear(2, "silu"),
    "all_gather_matmul_derivative": gather.derivative("gelu_tanh", gated=True),
    "matmul_reduce_scatter": scatter.gemm(2, FINISH),
    "matmul_all_reduce_one_shot": reduce.gemm(1, True, True),
    "matmul_all_reduce_two_shot": reduce.gemm(1, True, False),
}


def smallest_tile(device: str, dtype: torch.dtype, columns: int) -> Tile:
    return select_tile(torch.device(device), dtype, 1, columns)


def whole_numbers(gemm: Gemm, world: int, shape: tuple[int, int, int], seed: int, device: str) -> list[Tensors]:
    """New -1, 0 and 1 for each seed: partial sums stay below 257, so every order of summing gives the same bits."""
    generator = torch.Generator().manual_seed(seed)
    made = [gemm.make(rank, world, *shape) for rank in range(world)]
    draw = [{n: torch.randint(-1, 2, x.shape, generator=generator).double() for n, x in m.items()} for m in made]
    return cast(draw, torch.float64, device)


def flags_of(channel: Channel) -> torch.Tensor:
    """All flags of a virtual channel, which follow its slots in one allocation."""
    memory = torch.empty(0, dtype=torch.uint8, device=channel.slots[0].device)
    memory.set_(channel.slots[0].untyped_storage())
    return memory[2 * channel.world * channel.capacity :].view(torch.int32)


def apart(channel: Channel) -> list[Channel]:
    """A channel for each rank of a virtual one. They share only the slots and flags. The rest are separate allocations,
    equally aligned, so that all ranks run one compiled kernel."""

    def own(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return torch.empty_like(tensor[rank : rank + 1], pin_memory=tensor.is_pinned()).copy_(tensor[rank : rank + 1])

    names = ("data", "flags", "epoch", "error", "stopped", "counters")
    return [
        replace(
            channel,
            rank=rank,
            served=1,
            slots=tuple(slot[rank * channel.capacity : (rank + 1) * channel.capacity] for slot in channel.slots),
            **{name: own(getattr(channel, name), rank) for name in names},
        )
        for rank in range(channel.world)
    ]


class Late:
    """A part of a virtual channel with its stream (on a CPU none), and the results of a batch."""

    def __init__(self, gemm: Gemm, channel: Channel, tile: Tile) -> None:
        self.gemm, self.channel, self.tile = gemm, channel, tile
        self.stream = torch.cuda.Stream() if channel.data.is_cuda else None
        self.results: list = []

    def operate(self, inputs: Tensors, epoch: int, delays: tuple[int, int]) -> None:
        """Run one operation, late before its kernel and before it poisons what it has read. delays: cycles of a GPU's
        clock."""
        with torch.cuda.stream(self.stream):  # None: no change
            self.sleep(delays[0])
            bump(self.channel)
            self.results.append(self.gemm.launch(inputs, self.channel, self.tile))
            self.sleep(delays[1])
            poison(self.channel, epoch)

    def sleep(self, cycles: int) -> None:
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(cycles)


@contextlib.contextmanager
def concurrent_launches() -> Iterator[None]:
    """Within, launches are ordinary: a cooperative one may wait until no other runs, and these must run at once."""

    def ordinary(warps: int, stages: int, cooperative: bool = False) -> dict:
        return launch_options(warps, stages)

    with contextlib.ExitStack() as stack:
        for name in KERNELS:
            module = importlib.import_module(f"tpformer.kernels.{name}.kernel")
            stack.enter_context(mock.patch.object(module, "launch_options", ordinary))
        yield


def settle(channel: Channel, parts: list[Late], zeros: Tensors, epoch: int) -> None:
    """Let each part run a batch alone, with its peers' flags set, then begin anew with this epoch finished. This loads
    kernels and reserves memory, which could later wait for kernels of other ranks that wait for this one."""
    flags_of(channel).fill_(wrap(epoch + BATCH))
    wait_for_all(channel)
    for part in parts:
        for index in range(BATCH):
            part.operate(zeros, epoch + 1 + index, (1, 1))
        wait_for_all(channel)
        part.results.clear()
        part.channel.epoch.fill_(epoch)
    for parity in (0, 1):
        poison(channel, parity)
    flags_of(channel).fill_(epoch)


def wait_for_all(channel: Channel) -> None:
    if channel.data.is_cuda:
        torch.cuda.synchronize()


def run_late(
    name: str, world: int, shape: tuple[int, int, int], dtype: torch.dtype, device: str, epochs: int, together: bool
) -> None:
    """together: all ranks are in one launch, which a CPU can run."""
    gemm, chance = LATE[name], random.Random(world)
    channel = channel_for(world, shape[2], dtype, device, 1 << 20, 256, limit=LIMIT)
    tile = smallest_tile(device, dtype, shape[1])
    parts = [Late(gemm, part, tile) for part in ([channel] if together else apart(channel))]
    if not together:
        zeros = {
            name: torch.zeros_like(x, dtype=dtype, device=device) for name, x in gemm.make(0, world, *shape).items()
        }
        settle(channel, parts, zeros, BEFORE_WRAP)
    for first in range(0, epochs, BATCH):
        count = min(BATCH, epochs - first)
        exact = [whole_numbers(gemm, world, shape, first + index, device) for index in range(count)]
        given = [cast(inputs, dtype, device) for inputs in exact]
        if together:
            given = [[stacked(inputs)] for inputs in given]
        wait_for_all(channel)
        for part in parts:
            part.sleep(HEAD_START)
        for index in range(count):
            for number in chance.sample(range(len(parts)), len(parts)):
                delays = tuple(chance.randrange(1, chance.choice(DELAYS)) for _ in range(2))
                parts[number].operate(given[index][number], BEFORE_WRAP + 1 + first + index, delays)
        wait_for_all(channel)
        for part in parts:
            assert not part.channel.error.any(), (name, world, first, part.channel.rank, part.channel.error)
        for index in range(count):
            results = [part.results[index] for part in parts]
            if together:
                results = [[y.chunk(world)[rank] for y in results[0]] for rank in range(world)]
            for rank, (outputs, wide) in enumerate(zip(results, gemm.reference(exact[index]), strict=True)):
                for y, expected in zip(outputs, wide, strict=True):
                    assert torch.equal(y, expected.to(dtype)), (name, world, first + index, rank)
        for part in parts:
            part.results.clear()
    for part in parts:
        assert not part.channel.counters.any() and not part.channel.stopped.any()
        assert bool((part.channel.epoch == wrap(BEFORE_WRAP + epochs)).all())


def run_late_at_once(name: str, world: int) -> None:
    with concurrent_launches():
        run_late(name, world, LATE_SHAPE, torch.bfloat16, "cuda", EPOCHS, together=False)


@pytest.fixture(scope="module")
def queues() -> Iterator[WorkerPool]:
    """A process whose streams have hardware queues of their own. With fewer queues than streams, kernels of two ranks
    could stand in one, the first waiting for the second for ever."""
    with WorkerPool({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}) as pool:
        yield pool


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", LATE)
def test_a_thousand_epochs_with_late_ranks(queues, name: str, world: int) -> None:
    queues(1).run(run_late_at_once, name, world, timeout=PATIENCE)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_hundred_graph_replays(name: str, world: int) -> None:
    tile = smallest_tile("cuda", torch.bfloat16, GRAPH_SHAPE[1])
    run_on_virtual_ranks(
        GRAPHS[name], world, tile, torch.bfloat16, [GRAPH_SHAPE], "cuda", 1 << 24, 256, repeat=1 + REPLAYS, graph=True
    )


def the_same_operations() -> None:
    for name in LATE:
        run_late(name, 2, (1, 4, 4), torch.float32, "cpu", 1, together=True)
    with mock.patch(f"{__name__}.BATCH", 2):
        run_late("matmul_reduce_scatter", 1, SMALL_SHAPE, torch.float32, "cpu", 3, together=False)


test_the_same_operations_in_the_interpreter = gemms.in_interpreter(the_same_operations, 1)
