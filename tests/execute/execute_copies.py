"""Gathers whose shards copy engines send: the fused transport and KernelWorkspace.copy_gather as they are, in one
process with a kernel stream and a copy stream for each rank, executed in several orders.

Belongs here: stand-ins for a process group, its symmetric memory and torch.cuda's streams. `make execute` names this
file; `make test` does not collect it, because compiling takes minutes.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gemms
import pytest
import test_all_gather_matmul_kernel as gathers
import torch
from execution import GATHER_ALONE, PLAIN, SCHEDULES, Execution, Schedule, executing, small_tiles, written
from mutations import Edit, edited, move, replace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from checks.execute import schedule as scheduler
from checks.execute.memory import Fault
from tpformer.distributed import kernel_workspace
from tpformer.distributed.kernel_workspace import KernelState, KernelWorkspace
from tpformer.distributed.symmetric import TorchSymmetricMemory
from tpformer.ops.transports import fused
from tpformer.ops.transports.fused import Fused

WORLD, EPOCHS = 3, 3
ROWS, K, N = 10, 24, 17  # a shard is 480 bytes
KERNELS, COPIES = 0, 1  # streams
FILES = ("kernel_workspace.py", "fused.py", "execute_copies.py")  # reports name the first that a copy comes from


BEGIN = "mov.u32 %r1, %tid.x;\nld.param.b64 %rd1, [source];\nld.param.b64 %rd2, [target];\n"
# An engine has done all of a copy before it begins the stream's next one, so whoever sees the word knows of them all.
FLAG = """setp.eq.b32 %p1, %r1, 0;
ld.global.b32 %r2, [%rd1];
@%p1 atom.global.sys.release.exch.b32 %r3, [%rd2], %r2;
"""
PAYLOAD = """mov.u32 %r2, 0;
$L__BB0_1:
setp.lt.u32 %p1, %r1, {units};
mad.wide.u32 %rd3, %r1, 2, %rd1;
mad.wide.u32 %rd4, %r1, 2, %rd2;
@%p1 ld.global.b16 %rs1, [%rd3];
@%p1 st.global.b16 [%rd4], %rs1;
add.u32 %r1, %r1, 32;
add.u32 %r2, %r2, 32;
setp.lt.u32 %p2, %r2, {units};
@%p2 bra $L__BB0_1;
"""


def copy(execution: Execution, target: Tensor, source: Tensor, file: str, line: int) -> None:
    """Put a copy by an engine into the execution's current stream, as a kernel of one warp, so that it is interleaved
    and checked as programs are. Reports name the line of a file.

    A copy of 4 bytes sets a flag: it is one store, which releases what its stream did before. Others move two bytes at
    a time, and release nothing.
    """
    assert target.is_contiguous() and source.is_contiguous() and target.nbytes == source.nbytes
    assert source.nbytes % 2 == 0
    body = FLAG if source.nbytes == 4 else PAYLOAD.format(units=source.nbytes // 2)
    kernel = written(f"{BEGIN}{body}ret;", ("source", "target"), 1, file, line)
    execution.launch("copy", kernel, {"source": source, "target": target}, (1,))


class Memory:
    """One rank's view of symmetric memory, all of whose regions are in this process."""

    def __init__(self, whole: Tensor, copied_flags: str | None) -> None:
        self.whole, self.copied_flags = whole, copied_flags
        self.pointers = torch.tensor([region.data_ptr() for region in whole])
        self._words = [region.view(torch.uint32) for region in whole]

    set_flag = TorchSymmetricMemory.set_flag

    def _write(self, words: Tensor, index: int, value: int) -> None:
        """In place of torch's operation a store that releases, behind all that the stream has done."""
        words[index : index + 1].copy_(torch.tensor([value], dtype=torch.uint32))

    def peer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, byte_offset: int = 0) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.whole[rank, byte_offset : byte_offset + size].view(dtype).view(shape)

    def barrier(self) -> None:
        """All ranks are in this process."""


class CudaStream:
    """The stream of the executor that stands for one of torch.cuda."""

    def __init__(self, execution: Execution, number: int) -> None:
        self.execution, self.number = execution, number

    def wait_stream(self, other: "CudaStream") -> None:
        assert self.execution.rank is not None
        with self.execution.on(self.execution.rank, self.number):
            self.execution.wait(other.number)

    def current(self) -> contextlib.AbstractContextManager:
        assert self.execution.rank is not None
        return self.execution.on(self.execution.rank, self.number)


class Engines(TorchDispatchMode):
    """Puts copies to and from symmetric memory into the current stream; all else runs at once."""

    def __init__(self, execution: Execution, symmetric: Tensor) -> None:
        super().__init__()
        self.execution, self.symmetric = execution, symmetric.untyped_storage().data_ptr()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        copies = function is torch.ops.aten.copy_.default
        if not copies or self.symmetric not in [x.untyped_storage().data_ptr() for x in args[:2]]:
            return function(*args, **(kwargs or {}))
        frames = ((Path(frame.filename).name, frame.lineno) for frame in traceback.extract_stack()[-2::-1])
        copy(self.execution, args[0], args[1], *next(frame for frame in frames if frame[0] in FILES))
        return args[0]


@contextlib.contextmanager
def transports(execution: Execution, copied_flags: str | None) -> Iterator[list[Fused]]:
    """Each rank's fused transport, by copy engines for gathers of any size. Within, torch's streams and copies are the
    execution's. copied_flags: as in SymmetricMemory."""
    streams = [CudaStream(execution, number) for number in (KERNELS, COPIES)]
    groups = [mock.Mock(**{"rank.return_value": rank, "size.return_value": WORLD}) for rank in range(WORLD)]
    whole = torch.full((WORLD, 1 << 14), 0xFF, dtype=torch.uint8)
    execution.memory.add(whole)
    cpu = torch.device("cpu")
    with contextlib.ExitStack() as stack:
        for place, replacements in (
            (kernel_workspace, {"allocate": lambda *arguments: Memory(whole, copied_flags),
                                "slot_bytes": lambda nbytes: 1 << 12, "WRITER_FLAGS_MINIMUM": 8,
                                "gather_objects": lambda value, group: [value] * WORLD}),
            (torch.cuda, {"stream": CudaStream.current, "current_stream": lambda device: streams[KERNELS]}),
            (fused, {"send_by_copies": lambda *_: True,
                     "kernel_workspace": lambda group, kind, device: workspaces[group.rank()]}),
            (torch.distributed, {"get_world_size": lambda: WORLD}),
        ):  # fmt: skip
            stack.enter_context(mock.patch.multiple(place, **replacements))
        state = KernelState(tuple(range(WORLD)), 600.0)
        workspaces = [KernelWorkspace(group, state, "gather", cpu, gemms.BEFORE_WRAP) for group in groups]  # type: ignore
        for workspace in workspaces:
            workspace._copy_stream = streams[COPIES]  # type: ignore
        stack.enter_context(small_tiles())
        stack.enter_context(Engines(execution, whole))
        yield [Fused(group) for group in groups]  # type: ignore


def linear(transport: Fused, x: dict[str, Tensor]) -> list[Tensor | None]:
    return list(transport.gather_matmul(x["a"], [x["w0"]], [x["bias0"]]))


def derivative(transport: Fused, x: dict[str, Tensor]) -> list[Tensor | None]:
    return list(transport.gather_matmul_derivative(x["a"], x["w"], x["x"], None, "gelu", keep=True))


def without_gemm(transport: Fused, x: dict[str, Tensor]) -> list[Tensor | None]:
    rows = transport.start_gather(x["a"])()
    return [torch.empty_like(rows).copy_(rows)]  # before the next operation but one overwrites them


def gathered_too(gemm: gemms.Gemm) -> gemms.Gemm:
    """The GEMM, with the gathered rows behind its results."""

    def reference(xs: list[dict[str, Tensor]]) -> list[list[Tensor | None]]:
        return [[*results, torch.cat([x["a"] for x in xs])] for results in gemm.reference(xs)]

    return gemm._replace(reference=reference)


OPERATIONS: dict[str, tuple[Callable, gemms.Gemm]] = {
    "linear": (linear, gathers.linear(1)),
    "derivative": (derivative, gathered_too(gathers.derivative("gelu", False))),
    "without a GEMM": (without_gemm, GATHER_ALONE),
}


def run(name: str, execution: Execution, copied_flags: str | None = None) -> list[tuple]:
    """Queue an operation on each rank for each epoch, run all, and return what `gemms.compare` takes. The shards of all
    epochs are in one buffer of each rank, which is filled anew in the stream."""
    call, gemm = OPERATIONS[name]
    inputs = [gemms.cast(gemms.make_inputs(gemm, i, WORLD, (ROWS, N, K), False), torch.bfloat16) for i in range(EPOCHS)]
    results = []
    with transports(execution, copied_flags) as ranks:
        for rank, transport in enumerate(ranks):
            buffer = torch.empty(ROWS, K, dtype=torch.bfloat16)
            with execution.on(rank):
                for index in range(EPOCHS):
                    copy(execution, buffer, inputs[index][rank]["a"], "reuse.py", 1)
                    found = call(transport, inputs[index][rank] | {"a": buffer})
                    results.append((found, gemm, inputs[index], rank, False, (name, index, rank)))
        execution.run()
    return results


def is_copy(cta: Any) -> bool:
    return "source" in cta.code.kernel.parameters


# which programs go first, as long as any of them can go on: copies at once, late ones, and those of rank 0 late
FIRST = (is_copy, lambda cta: not is_copy(cta), lambda cta: not (is_copy(cta) and cta.place[0] == 0))
EXTREME = [(PLAIN, first) for first in FIRST]
ORDERS = [*((schedule, lambda cta: True) for schedule in SCHEDULES), *EXTREME]


@contextlib.contextmanager
def executing_in(order: tuple[Schedule, Callable[[Any], bool]], clean: bool = True) -> Iterator[Execution]:
    """`executing`, with a schedule of the programs that go first."""
    (schedule, first), usual = order, scheduler.choose

    def choose(ready, *rest):
        return usual([cta for cta in ready if first(cta)] or ready, *rest)

    with mock.patch.object(scheduler, "choose", choose), executing(schedule, clean=clean) as execution:
        yield execution


@pytest.mark.parametrize("name, copied_flags", [*((name, None) for name in OPERATIONS), ("linear", "no operation")])
def test_gathers_by_copies(name: str, copied_flags: str | None) -> None:
    for order in ORDERS if (name, copied_flags) == ("linear", None) else EXTREME:
        with executing_in(order) as execution:
            for result in run(name, execution, copied_flags):
                gemms.compare(*result)


WAIT = "self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))"
JOIN = "torch.cuda.current_stream(self.device).wait_stream(self._copy_stream)"


@pytest.mark.parametrize("method, edit, side", [
    pytest.param("_send", move("target.copy_(", "set_flag(peer"), "tile.py", id="the flag before the payload"),
    pytest.param("copy_gather", replace(WAIT, "pass"), "reuse.py", id="copies that do not wait"),
    pytest.param("join", replace(JOIN, "pass"), "reuse.py", id="a shard that is filled before it is sent"),
])  # fmt: skip
def test_copies_in_a_wrong_order_are_found(method: str, edit: Edit, side: str) -> None:
    """In each order of events, as a race with a line of this file. Flags that are never right end in a hang."""
    with (
        mock.patch.object(KernelWorkspace, method, edited(getattr(KernelWorkspace, method), edit)),
        mock.patch.object(scheduler, "PATIENCE", 200),
    ):
        for order in ORDERS:
            with executing_in(order, clean=False) as execution, contextlib.suppress(Fault):
                run("linear", execution)
            reports = [report for report in execution.log.reports if "race: " in report]
            assert any(f"{side}:" in report and "kernel_workspace.py:" in report for report in reports), (
                order,
                reports,
            )
