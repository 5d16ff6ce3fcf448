"""Makes launchers execute their kernels here: what Triton compiles for sm_80 runs on tensors of the CPU.

Belongs here: all that reaches into Triton's runtime, and the launch: arguments are packed as its launcher packs them.
"""

import functools
import random
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import numpy as np

from checks.compile import compiler
from checks.compile.ptx import bytes_in_flight

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


@functools.lru_cache(maxsize=256)
def code_of(ptx: str) -> Code:
    """The code of a kernel; sessions with other schedules use it again."""
    return Code(parse(ptx), bytes_in_flight(ptx))


def end_with_ptx(*arguments: Any) -> tuple[str, str] | None:
    """A hook of Triton's, called with (backend, stages, ...): it leaves out ptxas, whose code nobody executes here.
    Called with nothing, it gives what stands for it in the keys of Triton's caches."""
    if not arguments:
        return "PTX alone", "PTX alone"
    arguments[1]["cubin"] = lambda ptx, metadata: b""
    return None


class Execution(ExitStack):
    """Launches inside `with Execution() as execution` run on the CPU; execution.log.reports then says what was wrong.

    By default each launch runs at once, as if the host waited for it. Launches inside `on(rank)` are put into that
    rank's stream, and `run` runs all streams side by side: a launch knows what its own stream's earlier ones did, and
    of other ranks only what it acquires. A grid's second axis counts virtual ranks, which are devices of their own to
    atomics of gpu scope. Fault for what no execution survives, Unsupported for PTX that the executor does not know.
    """

    def __init__(self, schedule: Schedule = PLAIN, mutate: Callable[[str, str], str] | None = None) -> None:
        """mutate: (kernel's name, PTX) -> the PTX that is executed in its place."""
        super().__init__()
        self.schedule, self.mutate = schedule, mutate
        self.memory, self.log = GlobalMemory(), Log()
        self.streams: dict[tuple[int, int], Stream] = defaultdict(Stream)
        self.rank: int | None = None
        self.stream = 0
        self.clock = np.zeros(1, np.int32)
        self.generator = random.Random(schedule.seed)

    def __enter__(self) -> "Execution":
        from triton import knobs

        driver = compiler.Driver(CAPABILITY, "cpu")

        def execute_instead(function, compiles, arguments, grid, options):
            kernel = compiles()
            known = {"debug": function.debug, "instrumentation_mode": knobs.compilation.instrumentation_mode}
            bound, _, _ = function.device_caches[driver][4](*arguments, **known, **options)
            self.launch(function.__name__, kernel, bound, grid(bound) if callable(grid) else grid)
            return kernel

        self.enter_context(knobs.runtime.scope())
        knobs.runtime.add_stages_inspection_hook = end_with_ptx
        self.enter_context(compiler.intercepted(driver, execute_instead))
        return self

    def on(self, rank: int, stream: int = 0) -> AbstractContextManager:
        """Within, launches are put into one of a rank's streams, and begin when `run` is called."""
        return mock.patch.multiple(self, rank=rank, stream=stream)

    def wait(self, other: int) -> None:
        """Let the current stream go on when all that is in another stream of its rank now has ended, and know of it."""
        reached: list[np.ndarray] = []

        def event(stream: Stream) -> list[CTA] | None:
            if stream is awaited:
                reached.append(stream.known)
            if not reached:
                return None
            stream.known = np.maximum(stream.known, reached[0])
            return []

        assert self.rank is not None, "streams are those of a rank: call this within `on`"
        awaited = self.streams[self.rank, other]
        for stream in (awaited, self.streams[self.rank, self.stream]):
            stream.waiting.append(event)

    def run(self) -> None:
        """Run all launches of all streams to their end. The host waits for them: what follows knows of all."""
        warps = len(self.log.warps)
        self.memory.grow(warps)
        self.clock = np.pad(self.clock, (0, warps - len(self.clock)))
        for stream in self.streams.values():
            stream.known = self.clock
        run(list(self.streams.values()), self.schedule)
        self.clock = np.max([self.clock, *(stream.known for stream in self.streams.values())], 0)
        self.streams.clear()

    def launch(self, name: str, kernel: Any, bound: dict[str, Any], grid: tuple[int, ...]) -> None:
        """Put a launch into the current stream; without one, run it."""
        ptx, rank = kernel.asm["ptx"], self.rank or 0
        code = code_of(self.mutate(name, ptx) if self.mutate else ptx)
        parameters, sizes = self.pack(code, kernel.src.signature, bound), (*grid, 1, 1)[:3]
        launch = Launch(self, name, code, parameters, kernel.metadata, sizes, rank)
        programs = {(x, y, z): 0 for z in range(sizes[2]) for y in range(sizes[1]) for x in range(sizes[0])}
        for x, y, z in programs:
            place = f"program {x, y + sizes[1] * z} of rank {rank}" + f" in stream {self.stream}" * (self.stream > 0)
            warps = [f"warp {i} of {place}" for i in range(kernel.metadata.num_warps)]
            programs[x, y, z] = self.log.number(self.log.warps, (place, len(warps)), warps)

        def start(stream: Stream) -> list[CTA]:
            return [CTA(launch, *numbered, stream.known) for numbered in programs.items()]

        self.streams[rank, self.stream].waiting.append(start)
        if self.rank is None:
            self.run()

    def pack(self, code: Code, signature: dict[str, Any], bound: dict[str, Any]) -> np.ndarray:
        """The bytes of all parameters. Tensors among the arguments become memory that the kernel may reach."""
        flat = [pair for argument, kind in signature.items() for pair in flatten(bound[argument], kind)]
        places = list(code.kernel.parameters.values())
        block = bytearray(sum(places[-1]))
        # the last two parameters are scratch memory, which no kernel here asks for
        if len(flat) + 2 != len(places):
            raise ValueError(f"a launch has {len(flat)} arguments for {len(places) - 2} parameters")
        for (value, kind), (offset, size) in zip(flat, places, strict=False):
            if kind.startswith("*"):
                self.memory.add(value, rank=self.rank or 0)
                value, kind = value.data_ptr(), "u64"
            if struct.calcsize(FORMATS[kind]) > size:
                raise ValueError(f"an argument of type {kind} is larger than its parameter of {size} bytes")
            struct.pack_into(FORMATS[kind], block, offset, value)
        return np.frombuffer(block, np.uint8)


def flatten(value: Any, kind: Any) -> Iterator[tuple[Any, str]]:
    """(value, type) of an argument, or of each member of a tuple. What the code has as a constant is left out."""
    if isinstance(kind, tuple | list):
        for member, of_member in zip(value, kind, strict=True):
            yield from flatten(member, of_member)
    elif kind != "constexpr":
        yield value, kind
