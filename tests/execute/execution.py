"""What the tests of the executor share: launchers that find a small GPU, and a group whose ranks have real channels.

Belongs here: set-up. The checks themselves are those of tests/kernels, on compiled code in place of the interpreter.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
# the repository is not installed as a whole
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/kernels")]

import gemms  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from channels import virtual_channel  # noqa: E402

from checks.execute import schedule as scheduler  # noqa: E402
from checks.execute.schedule import PLAIN, Schedule  # noqa: E402
from checks.execute.session import Execution  # noqa: E402
from tpformer.kernels.all_gather_matmul import plan  # noqa: E402
from tpformer.kernels.configurations import TILES  # noqa: E402
from tpformer.kernels.launch import Tile  # noqa: E402
from tpformer.kernels.protocol import ERROR_WORDS, Channel, bump  # noqa: E402

TILE = Tile(16, 16, 16, 2, 2, False)
SCHEDULES = (PLAIN, Schedule(1, lockstep=False), Schedule(2, lockstep=False, priorities=True))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# two programs of two warps are resident
DEVICE = SimpleNamespace(multi_processor_count=2, shared_memory_per_multiprocessor=4096)


@contextlib.contextmanager
def executing(
    schedule: Schedule = PLAIN, mutate: Callable[[str, str], str] | None = None, clean: bool = True
) -> Iterator[Execution]:
    """Within, launches are executed, on a GPU with few programs. clean: afterwards there must be no report."""
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: DEVICE),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (8, 0)),
        Execution(schedule, mutate) as execution,
    ):
        yield execution
    assert not (clean and execution.log.reports), execution.log.reports


def group(world: int, capacity: int = 1 << 14, writer_flags: int = 16, limit: int = 10**8) -> list[Channel]:
    """Each rank's channel, as its own process has it: a launch serves one rank."""
    whole = virtual_channel(world, capacity, writer_flags, epoch=gemms.BEFORE_WRAP, limit=limit)

    def own(rank: int) -> Channel:
        # copies: at one address of many, Triton would compile a kernel for the alignment of each rank's
        words = ("data", "flags", "epoch", "error", "stopped", "counters")
        slots = tuple(slot.view(world, -1)[rank] for slot in whole.slots)
        return replace(
            whole,
            rank=rank,
            served=1,
            slots=slots,
            **{name: getattr(whole, name)[rank : rank + 1].clone() for name in words},
        )

    return [own(rank) for rank in range(world)]


@triton.jit
def read_report_kernel(error, report):
    """What the host does while kernels run: it looks at a report's first word until it is set, then reads all."""
    while tl.atomic_add(error, 0, sem="acquire", scope="sys") == 0:
        pass
    for word in range(ERROR_WORDS):
        tl.store(report + word, tl.load(error + word))


def small_tiles() -> AbstractContextManager:
    """Within, launchers that pick a tile pick TILE."""
    return mock.patch.dict(TILES, dict.fromkeys(TILES, TILE))


def run_group(
    gemm: gemms.Gemm, execution: Execution, world: int, dtype: torch.dtype, shape: tuple[int, int, int],
    epochs: int = 3, tile: Tile | None = TILE, **room: int,
) -> None:  # fmt: skip
    """Queue an operation for each epoch on each rank's stream, run all, and compare. With three epochs the third writes
    into the slots of the first. tile: None for that which the launcher picks. room: options of `group`."""
    channels = group(world, **room)
    execution.memory.add(*channels[0].slots)
    inputs = [gemms.cast(gemms.make_inputs(gemm, index, world, shape, False), dtype) for index in range(epochs)]
    outputs: list[list] = [[] for _ in range(epochs)]
    for rank, channel in enumerate(channels):
        with execution.on(rank):
            for index in range(epochs):
                bump(channel)
                outputs[index].append(gemm.launch(inputs[index][rank], channel, tile))  # type: ignore[arg-type]
    execution.run()
    for index in range(epochs):
        for rank in range(world):
            gemms.compare(outputs[index][rank], gemm, inputs[index], rank, False, (world, shape, dtype, index, rank))
    assert not any(channel.error.any() or channel.counters.any() for channel in channels)


def join(work: plan.Work, pushers: int, programs: int, machine: object) -> plan.Push:
    """In place of plan_push, which has pushers of small shapes never join."""
    return plan.Push(pushers, programs % (work.world + 1) if programs > pushers else 0)


@contextlib.contextmanager
def small_machine(multiprocessors: int, patience: int) -> Iterator[None]:
    """Launchers find so many SMs, each with room for one program of the tests' tile, and up to two pushers of a gather,
    each with something to push, which join at another chunk on each machine. A hang is seen after so many polls in
    vain."""
    device = SimpleNamespace(multi_processor_count=multiprocessors, shared_memory_per_multiprocessor=2048)
    values = (
        (sys.modules[__name__], "DEVICE", device),
        (plan, "filling_pushers", lambda machine: 2),
        (plan, "IN_FLIGHT", 512),
        (plan, "plan_push", join),
        (scheduler, "PATIENCE", patience),
    )
    with contextlib.ExitStack() as stack:
        for module, name, value in values:
            stack.enter_context(mock.patch.object(module, name, value))
        yield
