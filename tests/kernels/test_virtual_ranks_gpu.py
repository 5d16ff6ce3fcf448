"""The fused GEMMs on virtual ranks of one GPU: a thousand epochs with every rank late at random, CUDA graphs, and GSan,
Triton's race sanitizer for global memory.

Late ranks have a launch and a stream each, and random delays, so that their kernels run at once and drift apart as on
real devices. The same code also runs in the interpreter as far as one process can.

GSan sees a program read what another wrote without a release and an acquire between. It takes an SM for a thread, so
all ranks are in one launch of fewer programs than SMs. It does not look inside a program, and on one GPU it cannot see
a scope that is too narrow (the compile check can). A race ends the CUDA context, so each run is a process: this file.
"""

import contextlib
import importlib
import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import gemms
import pytest
import test_all_gather_matmul_kernel as gather
import test_matmul_all_reduce_kernel as reduce
import test_matmul_reduce_scatter_kernel as scatter
import torch
import triton
import triton.language as tl
from channels import apart, poison, virtual_channel
from gemms import BEFORE_WRAP, FINISH, Gemm, Tensors, cast, channel_for, run_on_virtual_ranks, stacked
from pool import WorkerPool
from testing import assert_identical

from tpformer.distributed.kernel_workspace import wrap
from tpformer.kernels.configurations import select_tile
from tpformer.kernels.launch import Tile, launch_options
from tpformer.kernels.protocol import Channel, bump

EPOCHS, REPLAYS = 1000, 100
BATCH = 25  # epochs in which nothing waits for all ranks, before the results are looked at
PROGRAMS = 11  # of a rank, with its pushers: so 8 ranks fit on 90 SMs
LIMIT = 2 * 10**7  # polls, about 20 s
PATIENCE = 170  # seconds of a run; instrumented kernels are large and slow
LATE_SHAPE = (130, 200, 64)  # (rows per rank, N, K): several tiles each way; sums of K small whole numbers are exact
GRAPH_SHAPE = (200, 264, 136)
DELAYS = (5_000, 400_000, 4_000_000)  # a delay is below one of these, in cycles: 2.5 us, 0.2 ms, 2 ms
HEAD_START = 20_000_000  # cycles that ranks wait at a batch's start, so that the host's launches do not pace them
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


def run_late(name: str, world: int, shape, dtype, device: str, epochs: int, together: bool) -> None:
    """together: all ranks are in one launch, which a CPU can run."""
    gemm, chance = LATE[name], random.Random(world)
    channel = channel_for(world, shape[2], dtype, device, 1 << 20, 256, limit=LIMIT)
    tile = select_tile(torch.device(device), dtype, 1, shape[1])
    parts = [Late(gemm, part, tile) for part in ([channel] if together else apart(channel))]
    if not together:
        made = gemm.make(0, world, *shape)
        zeros = {n: torch.zeros_like(x, dtype=dtype, device=device) for n, x in made.items()}
        settle(channel, parts, zeros, BEFORE_WRAP)
    for first in range(0, epochs, BATCH):
        count = min(BATCH, epochs - first)
        exact = [whole_numbers(gemm, world, shape, first + index, device) for index in range(count)]
        given = [cast(inputs, dtype, device) for inputs in exact]
        given = [[stacked(inputs)] for inputs in given] if together else given
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
            results = [part.results.pop(0) for part in parts]
            if together:
                results = [[y.chunk(world)[rank] for y in results[0]] for rank in range(world)]
            expected = [[y.to(dtype) for y in outputs] for outputs in gemm.reference(exact[index])]
            assert_identical(results, expected, f"{name} {world} {first + index}")
    for part in parts:
        assert not part.channel.counters.any() and not part.channel.stopped.any()
        assert bool((part.channel.epoch == wrap(BEFORE_WRAP + epochs)).all())


def run_late_at_once(name: str, world: int) -> None:
    """Launches are ordinary: a cooperative one may wait until no other runs, and these must run at once."""

    def ordinary(warps: int, stages: int, cooperative: bool = False) -> dict:
        return launch_options(warps, stages)

    with contextlib.ExitStack() as stack:
        for kernel in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
            stack.enter_context(mock.patch(f"tpformer.kernels.{kernel}.kernel.launch_options", ordinary))
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
    tile = select_tile(torch.device("cuda"), torch.bfloat16, 1, GRAPH_SHAPE[1])
    run_on_virtual_ranks(
        GRAPHS[name], world, tile, torch.bfloat16, [GRAPH_SHAPE], "cuda", 1 << 24, 256, repeat=1 + REPLAYS, graph=True
    )


@gemms.in_interpreter(1)
def test_the_same_operations_in_the_interpreter() -> None:
    for name in LATE:
        run_late(name, 2, (1, 4, 4), torch.float32, "cpu", 1, together=True)
    with mock.patch(f"{__name__}.BATCH", 2):
        run_late("matmul_reduce_scatter", 1, (17, 36, 16), torch.float32, "cpu", 3, together=False)


TESTS = Path(__file__).parent.parent
SANITIZED_SHAPE = (66, 136, 64)  # rows per rank, N, K: two tiles each way
RACE, CLEAN = "race detected", "no race"


@triton.jit
def relaxed_wait(me, flag, first, limit, PEERS: tl.constexpr = 1):
    """protocol.wait without its acquire."""
    for step in range(PEERS):
        each = flag + (first + step) % me.world * me.writer_flags
        seen = tl.atomic_add(each, 0, sem="relaxed", scope="sys")
        polls = 0
        while (seen - me.epoch < 0) & (polls < limit):
            seen = tl.atomic_add(each, 0, sem="relaxed", scope="sys")
            polls += 1
    return limit


NO_GSAN = importlib.util.find_spec("triton.experimental.gsan") is None


def run_sanitized(name: str, world: int, planted: bool) -> None:
    """Run one operation in each parity, each with a workspace of its own. In one workspace, polls of a flag that was
    once released would fill a buffer that GSan needs for real releases."""
    from triton.experimental import gsan

    if planted:
        kernel = name.removesuffix("_one_shot").removesuffix("_two_shot")
        importlib.import_module(f"tpformer.kernels.{kernel}.kernel").wait = relaxed_wait
    triton.knobs.compilation.instrumentation_mode = "gsan"
    gemm, kept = LATE[name], []
    with torch.cuda.use_mem_pool(gsan.create_mem_pool()):
        for epoch in (0, 1):
            channel = virtual_channel(world, 1 << 20, 256, epoch=epoch, limit=10**6, device="cuda")
            exact = whole_numbers(gemm, world, SANITIZED_SHAPE, epoch, "cuda")
            inputs = stacked(cast(exact, torch.bfloat16, "cuda"))
            bump(channel)
            tile = select_tile(torch.device("cuda"), torch.bfloat16, 1, SANITIZED_SHAPE[1])
            outputs = gemm.launch(inputs, channel, tile)
            torch.cuda.synchronize()
            assert not channel.error.any(), channel.error
            expected = [[y.bfloat16() for y in rank] for rank in gemm.reference(exact)]
            assert_identical([[y.chunk(world)[rank] for y in outputs] for rank in range(world)], expected, f"{epoch}")
            kept.append((channel, inputs, outputs))
    print(CLEAN)


@pytest.mark.gpu
@pytest.mark.skipif(NO_GSAN, reason=f"triton {triton.__version__} has no GSan, which came with 3.8")
@pytest.mark.parametrize("planted", [False, True], ids=["as shipped", "planted race"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", LATE)
def test_races(name: str, world: int, planted: bool) -> None:
    paths = [str(TESTS.parent), str(TESTS), str(TESTS / "kernels")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths + [p for p in sys.path if p])}
    command = [sys.executable, __file__, name, str(world), str(int(planted))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert (CLEAN in result.stdout, RACE in result.stderr) == (not planted, planted), result.stderr[-4000:]


if __name__ == "__main__":
    run_sanitized(sys.argv[1], int(sys.argv[2]), bool(int(sys.argv[3])))
