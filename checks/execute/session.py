"""Makes launchers execute their kernels here: what Triton compiles for sm_80 runs on tensors of the CPU.

Belongs here: all that reaches into Triton's runtime, and the launch: arguments are packed as its launcher packs them.
"""

import contextlib
import functools
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from checks.compile import compiler

from .code import Code
from .log import Log
from .machine import CTA, Launch
from .memory import GlobalMemory
from .ptx import parse
from .schedule import PLAIN, Schedule, Stream, run

CAPABILITY = 80
FORMATS = {
    "i1": "<b", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u1": "<B", "u8": "<B", "u16": "<H", "u32": "<I",
    "u64": "<Q", "fp32": "<f", "fp64": "<d",
}  # fmt: skip


class Driver(compiler.Driver):
    """A driver with which Triton compiles, and takes tensors of the CPU for the device's."""

    def get_active_torch_device(self) -> torch.device:
        """The device of the launchers' tensors."""
        return torch.device("cpu")


@functools.lru_cache(maxsize=256)
def code_of(ptx: str) -> Code:
    """The code of a kernel; sessions with other schedules use it again."""
    return Code(parse(ptx))


class Execution:
    """Launches inside `with Execution() as execution` run on the CPU; execution.log.reports then says what was wrong.

    By default each launch runs at once, as if the host waited for it. Launches inside `on(rank)` are put into that
    rank's stream, and `run` runs all streams side by side: a launch knows what its own stream's earlier ones did, and
    of other ranks only what it acquires. A grid's second axis counts virtual ranks, which are devices of their own to
    atomics of gpu scope. Fault for what no execution survives, Unsupported for PTX that the executor does not know.
    """

    def __init__(self, schedule: Schedule = PLAIN, mutate: Callable[[str, str], str] | None = None) -> None:
        """mutate: (kernel's name, PTX) -> the PTX that is executed in its place."""
        self.schedule, self.mutate = schedule, mutate
        self.memory, self.log = GlobalMemory(), Log()
        self.streams: dict[tuple[int, int], Stream] = {}
        self.rank: int | None = None
        self.stream = 0
        self.clock = np.zeros(1, np.int32)
        self.generator = random.Random(schedule.seed)
        self.executed = 0
        """Instructions of warps."""

    def __enter__(self) -> "Execution":
        import triton
        from triton.runtime.jit import JITFunction

        driver, launch = Driver(CAPABILITY), JITFunction.run
        functions: dict[int, JITFunction] = {}

        def execute_instead(function, *arguments, grid, warmup, **options):
            functions[id(function)] = function
            kernel = launch(function, *arguments, grid=grid, warmup=True, **options)
            binder = function.device_caches[driver][4]
            known = {"debug": function.debug, "instrumentation_mode": triton.knobs.compilation.instrumentation_mode}
            bound, _, _ = binder(*arguments, **known, **options)
            self.launch(function.__name__, kernel, bound, grid(bound) if callable(grid) else grid)
            return kernel

        def forget() -> None:
            for function in functions.values():
                function.device_caches.pop(driver, None)

        with contextlib.ExitStack() as stack:
            stack.callback(triton.runtime.driver.set_active, getattr(triton.runtime.driver, "_active", None))
            triton.runtime.driver.set_active(driver)
            stack.callback(setattr, JITFunction, "run", launch)
            JITFunction.run = execute_instead
            stack.callback(forget)
            self.undo = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.undo.close()

    @contextlib.contextmanager
    def on(self, rank: int, stream: int = 0) -> Iterator[None]:
        """Within, launches are put into one of a rank's streams, and begin when `run` is called."""
        before, (self.rank, self.stream) = (self.rank, self.stream), (rank, stream)
        try:
            yield
        finally:
            self.rank, self.stream = before

    def wait(self, other: int) -> None:
        """Let the current stream go on when all that is in another stream of its rank now has ended, and know of it."""
        reached: list[np.ndarray] = []

        def mark(stream: Stream) -> list[CTA]:
            reached.append(stream.known)
            return []

        def wait(stream: Stream) -> list[CTA] | None:
            if not reached:
                return None
            stream.known = np.maximum(stream.known, reached[0])
            return []

        assert self.rank is not None, "streams are those of a rank: call this within `on`"
        for number, event in ((other, mark), (self.stream, wait)):
            self.streams.setdefault((self.rank, number), Stream()).waiting.append(event)

    def share(self, *tensors: torch.Tensor) -> None:
        """Let kernels reach memory that they have the address of, and no argument for."""
        self.memory.add(*tensors)

    def run(self) -> None:
        """Run all launches of all streams to their end. The host waits for them: what follows knows of all."""
        cells, warps = self.memory.cells, len(self.log.warps)
        self.memory.history.grow(cells, warps)
        for stream in self.streams.values():
            stream.known = np.pad(self.clock, (0, warps - len(self.clock)))
        self.executed += run(list(self.streams.values()), self.schedule)
        for stream in self.streams.values():
            self.clock = np.maximum(np.pad(self.clock, (0, warps - len(self.clock))), stream.known)
        self.streams.clear()

    def launch(self, name: str, kernel: Any, bound: dict[str, Any], grid: tuple[int, ...]) -> None:
        """Put a launch into the current stream; without one, run it."""
        ptx = kernel.asm["ptx"]
        code = code_of(self.mutate(name, ptx) if self.mutate else ptx)
        parameters = self.pack(code, kernel.src.signature, bound)
        x, y, z = (*grid, 1, 1)[:3]
        sizes = (x, y, z)
        launch = Launch(code, parameters, kernel.metadata.num_warps, kernel.metadata.shared, sizes, self.rank or 0,
                        self.log.number_lines(code.kernel.instructions))  # fmt: skip
        programs = [(x, y, z) for z in range(sizes[2]) for y in range(sizes[1]) for x in range(sizes[0])]
        firsts = [
            self.log.number_warps(launch.rank, self.stream, y + sizes[1] * z, x, launch.warps) for x, y, z in programs
        ]

        def start(stream: Stream) -> list[CTA]:
            return [
                CTA(launch, self.memory, self.log, program, first, stream.known, self.schedule.lockstep, self.generator)
                for program, first in zip(programs, firsts, strict=True)
            ]

        self.streams.setdefault((launch.rank, self.stream), Stream()).waiting.append(start)
        if self.rank is None:
            self.run()

    def pack(self, code: Code, signature: dict[str, Any], bound: dict[str, Any]) -> bytes:
        """The block of parameters. Tensors among the arguments become memory that the kernel may reach."""
        flat: list[tuple[Any, str]] = []

        def walk(value: Any, kind: Any) -> None:
            if isinstance(kind, tuple | list):
                for member, of_member in zip(value, kind, strict=True):
                    walk(member, of_member)
            elif kind != "constexpr":
                flat.append((value, kind))

        for argument, kind in signature.items():
            walk(bound[argument], kind)
        places = list(code.kernel.parameters.values())
        block = bytearray(code.kernel.parameter_bytes)
        # the last two parameters are scratch memory, which no kernel here asks for
        if len(flat) + 2 != len(places):
            raise ValueError(f"a launch has {len(flat)} arguments for {len(places) - 2} parameters")
        for (value, kind), (offset, size) in zip(flat, places, strict=False):
            if kind.startswith("*"):
                self.memory.add(value)
                packed = struct.pack("<Q", value.data_ptr())
            else:
                packed = struct.pack(FORMATS[kind], value)
            if len(packed) > size:
                raise ValueError(f"an argument of type {kind} has {len(packed)} bytes, its parameter {size}")
            block[offset : offset + len(packed)] = packed
        return bytes(block)
