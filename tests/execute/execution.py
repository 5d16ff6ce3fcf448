"""What the tests of the executor share: launchers that find a small GPU, and a group whose ranks have real channels.

Belongs here: set-up. The checks themselves are those of tests/kernels, on compiled code in place of the interpreter.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
# the repository is not installed as a whole
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/kernels")]

import gemms  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from channels import apart, virtual_channel  # noqa: E402

from checks.execute import schedule as scheduler  # noqa: E402
from checks.execute.schedule import PLAIN, Schedule  # noqa: E402
from checks.execute.session import Execution  # noqa: E402
from tpformer.kernels.all_gather_matmul import plan  # noqa: E402
from tpformer.kernels.all_gather_matmul.kernel import await_gathered, gathered_copy  # noqa: E402
from tpformer.kernels.configurations import TILES  # noqa: E402
from tpformer.kernels.launch import Tile  # noqa: E402
from tpformer.kernels.protocol import ERROR_WORDS, Channel, bump  # noqa: E402

TILE = Tile(16, 16, 16, 2, 2, False)
SCHEDULES = (PLAIN, Schedule(1, lockstep=False), Schedule(2, lockstep=False, priorities=True))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# name of a tile that ships for sm_80 -> (dtype, (rows, N, K)): two tiles or more in each direction, and more steps of K
# than stages; then those for few rows, with columns for the two SMs that there are
SHIPPED = {
    "ampere": (torch.bfloat16, (136, 144, 176)), "ampere_small": (torch.bfloat16, (64, 80, 264)),
    "exact": (torch.float32, (72, 40, 56)),
}  # fmt: skip
FEW = {
    "ampere_small": (torch.bfloat16, (40, 80, 264)), "ampere_narrow": (torch.bfloat16, (40, 40, 520)),
    "exact": (torch.float32, (40, 40, 56)),
}  # fmt: skip
# two programs of two warps are resident
DEVICE = SimpleNamespace(multi_processor_count=2, shared_memory_per_multiprocessor=4096)


@contextlib.contextmanager
def executing(
    schedule: Schedule = PLAIN, mutate: Callable[[str, str], str] | None = None, clean=True, tile: str | None = None
) -> Iterator[Execution]:  # fmt: skip
    """Within, launches are executed, on a GPU with few programs. clean: afterwards there must be no report. tile: the
    name of one. Every GEMM must have as many warps as it has; those of one dtype differ in that."""

    def checked(name: str, ptx: str) -> str:
        right = tile is None or "matmul" not in name or f".reqntid {32 * TILES[tile].warps}\n" in ptx
        assert right, f"{name} has another tile"
        return mutate(name, ptx) if mutate else ptx

    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: DEVICE),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (8, 0)),
        Execution(schedule, checked) as execution,
    ):
        yield execution
    assert not (clean and execution.log.reports), execution.log.reports


def group(world: int, capacity: int = 1 << 14, writer_flags: int = 16, limit: int = 10**8) -> list[Channel]:
    """Each rank's channel, as its own process has it."""
    return apart(virtual_channel(world, capacity, writer_flags, epoch=gemms.BEFORE_WRAP, limit=limit))


@triton.jit
def read_report_kernel(error, report):
    """What the host does while kernels run: it looks at a report's first word until it is set, then reads all."""
    while tl.atomic_add(error, 0, sem="acquire", scope="sys") == 0:
        pass
    for word in range(ERROR_WORDS):
        tl.store(report + word, tl.load(error + word))


WRITTEN = """.file 1 "{file}"
.visible .entry kernel(
{parameters}
)
.reqntid {threads}
{{
.reg .pred %p<9>;
.reg .b16 %rs<9>;
.reg .b32 %r<19>;
.reg .b64 %rd<19>;
.loc 1 {line} 0
{text}
}}
"""


def written(
    text: str, names: tuple[str, ...], warps: int = 2, file: str = "snippet.ptx", line: int = 7
) -> SimpleNamespace:  # fmt: skip
    """What a launch takes of Triton's compiled kernel, with PTX by hand and 512 bytes of shared memory. names: of
    arrays. Reports name the line of the file."""
    parameters = ",\n".join(f".param .u64 .ptr .global .align 1 {name}" for name in (*names, "scratch", "more"))
    ptx = WRITTEN.format(file=file, parameters=parameters, threads=32 * warps, line=line, text=text)
    signature, metadata = dict.fromkeys(names, "*i32"), SimpleNamespace(num_warps=warps, shared=512)
    return SimpleNamespace(asm={"ptx": ptx}, src=SimpleNamespace(signature=signature), metadata=metadata)


def small_tiles() -> AbstractContextManager:
    """Within, launchers that pick a tile pick TILE."""
    return mock.patch.dict(TILES, dict.fromkeys(TILES, TILE))


def gather_alone(x: gemms.Tensors, channel: Channel, tile: Tile) -> list[torch.Tensor]:
    await_gathered(channel, x["a"], push=True)
    return [gathered_copy(channel, x["a"])]


# a gather without a GEMM, and the copy of what it has gathered
GATHER_ALONE = gemms.Gemm(
    lambda rank, world, rows, n, k: gemms.shapes(a=(rows, k)), gather_alone,
    lambda xs: [[torch.cat([x["a"] for x in xs])]] * len(xs),
)  # fmt: skip


def run_group(
    gemm: gemms.Gemm, execution: Execution, world: int, dtype: torch.dtype, shape: tuple[int, int, int],
    epochs: int = 3, tile: Tile | None = TILE, **room: int,
) -> None:  # fmt: skip
    """Queue an operation for each epoch on each rank's stream, run all, and compare; copies must be exact. With three
    epochs the third writes into the slots of the first. tile: None for that which the launcher picks. room: options of
    `group`."""
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
        for rank, found in enumerate(outputs[index]):
            gemms.compare(found, gemm, inputs[index], rank, gemm is GATHER_ALONE, (world, shape, dtype, index, rank))
    assert not any(channel.error.any() or channel.counters.any() for channel in channels)


EPOCHS = 3  # the third writes into the slots of the first
FEW_POLLS = 3  # of a wait that is to expire: it may do so while others, slower ones, go on


class Try(NamedTuple):
    """One way to execute an operation of a group."""

    schedule: Schedule
    multiprocessors: int  # SMs, each with room for one program
    present: slice = slice(None)  # the ranks that run. If some are absent, waits of the others expire
    gone: bool = False  # whether the absent ranks began before the others, pushed what they had, and gave up
    polls: int = FEW_POLLS  # after how many a wait expires if ranks are absent

    @property
    def expires(self) -> bool:
        """Whether ranks are absent."""
        return self.present != slice(None)


LAST, FIRST = slice(-1, None), slice(-1)  # the last rank; all but the last
FREE = [Schedule(seed, lockstep=False) for seed in range(5)]
TRIES = (
    Try(FREE[1], 4), Try(FREE[1], 4, LAST), Try(FREE[1], 4, FIRST), Try(PLAIN, 2),
    Try(Schedule(2, lockstep=False, priorities=True), 6), Try(FREE[3], 3), Try(FREE[2], 1, LAST),
    Try(FREE[2], 1, FIRST), Try(FREE[4], 8), Try(Schedule(5, lockstep=False, priorities=True), 3),
    Try(FREE[1], 4, FIRST, gone=True), Try(FREE[2], 1, FIRST, gone=True),
)  # fmt: skip


def communicate(
    run: Execution, way: Try, gemm: gemms.Gemm, world: int, shape: tuple[int, int, int], tile: Tile = TILE, **room: int
) -> None:  # fmt: skip
    """An operation on each rank that is present, for each epoch. room: options of `group`."""
    if way.expires:
        xs = gemms.cast(gemms.make_inputs(gemm, 0, world, shape, False), torch.bfloat16)
        expire(run, lambda channel: gemm.launch(xs[channel.rank], channel, tile), world, way, **room)
    else:
        run_group(gemm, run, world, torch.bfloat16, shape, EPOCHS, tile, **room)


def expire(run: Execution, launch: Callable[[Channel], object], world: int, way: Try, **room: int) -> None:
    """Launch an operation on the ranks that are present, for each epoch. In the first their waits expire, and they
    report that; then they wait no more. The first absent rank reads the first one's report in place of the host. The
    absent ranks come when it is too late, and change no report."""
    channels, report = group(world, limit=way.polls, **room), torch.zeros(ERROR_WORDS.value, dtype=torch.int32)
    running = channels[way.present]
    present = [channel.rank for channel in running]
    absent = [channel for channel in channels if channel.rank not in present]
    run.memory.add(*channels[0].slots)

    def operate(channel: Channel, epochs: int = 1) -> None:
        with run.on(channel.rank):
            for _ in range(epochs):
                bump(channel)
                launch(channel)

    if way.gone:
        operate(absent[0])
        run.run()
    with run.on(absent[0].rank):
        read_report_kernel[(1,)](running[0].error, report, num_warps=1)
    for channel in running:
        operate(channel, EPOCHS)
    run.run()
    reports = [channel.error[0].tolist() for channel in running]
    # a rank that has pushed all that the first epoch takes is missed in the second
    missed = [[gemms.BEFORE_WRAP + epoch, gemms.BEFORE_WRAP + epoch + 1] for epoch in (0, int(way.gone))]
    for channel, (expired, peer, *epochs) in zip(running, reports, strict=True):
        slow = {*present} - {channel.rank} if way.schedule.impatient or way.polls == FEW_POLLS else set()
        named = expired == 1 and peer in slow | {each.rank for each in absent} and epochs in missed
        assert named, f"the report of rank {channel.rank} is {channel.error.tolist()}, {way}"
        assert channel.stopped.all() and not channel.counters.any(), "a rank has not stopped"
    assert report.tolist() == reports[0], f"the report that is read is {report.tolist()}"
    for channel in absent:
        operate(channel)
    run.run()
    assert reports == [channel.error[0].tolist() for channel in running], "a report has changed"


def join(work: plan.Work, pushers: int, programs: int, machine: object) -> plan.Push:
    """In place of plan_push, which has pushers of small shapes never join."""
    return plan.Push(pushers, programs % (work.world + 1) if programs > pushers else 0)


@contextlib.contextmanager
def trying(way: Try, mutate: Callable[[str, str], str] | None = None) -> Iterator[Execution]:
    """`executing`, in which launchers find so many SMs, each with room for one program of the tests' tile, and up to
    two pushers of a gather, each with something to push, which join at another chunk on each machine. A hang is seen
    after as many polls in vain as waits may take to expire."""
    device = SimpleNamespace(multi_processor_count=way.multiprocessors, shared_memory_per_multiprocessor=2048)
    with (
        mock.patch.object(sys.modules[__name__], "DEVICE", device),
        mock.patch.multiple(plan, filling_pushers=lambda machine: 2, IN_FLIGHT=512, plan_push=join),
        mock.patch.object(scheduler, "PATIENCE", 5000 if way.expires else 100),
        executing(way.schedule, mutate) as run,
    ):
        yield run
