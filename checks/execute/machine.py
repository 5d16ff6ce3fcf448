"""CTAs, and the warps of one that stand at the same instruction.

Belongs here: registers, barriers, branches, asynchronous copies, and what generated code (code.py) calls. Which CTA and
which warps come next is schedule.py's.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arithmetic import LANES
from .code import Code
from .log import Log
from .memory import Fault, GlobalMemory, SharedMemory

Array = NDArray
REGISTERS: dict[str, Any] = {"r": np.uint32, "d": np.uint64, "h": np.uint16}


class Launch(NamedTuple):
    """What all programs of a launch share."""

    name: str
    """The kernel's."""
    code: Code
    parameters: bytes
    warps: int
    shared: int
    """Bytes of shared memory."""
    grid: tuple[int, int, int]
    rank: int
    first_line: int
    """The number of the code's first instruction."""


class Copy(NamedTuple):
    """Asynchronous copies of some lanes."""

    target: Array
    source: Array
    data: Array | None
    """What was read when the copy began; None if it is read when the copy ends."""
    size: int
    live: Array
    """Where nothing is read and zeros are written, false."""
    rows: Array
    group: Array
    """How many groups the lane's warp had committed before."""
    line: int

    def of(self, lanes: Array) -> Copy:
        """The copies of some of the lanes."""
        data = None if self.data is None else self.data[lanes]
        return Copy(self.target[lanes], self.source[lanes], data, self.size, self.live[lanes], self.rows[lanes],
                    self.group[lanes], self.line)  # fmt: skip


class CTA:
    """One program: its registers, its shared memory and its warps' knowledge of others' clocks."""

    def __init__(
        self, launch: Launch, memory: GlobalMemory, log: Log, program: tuple[int, int, int], first: int, known: Array,
        lockstep: bool, generator: random.Random,
    ) -> None:  # fmt: skip
        """first: the number of its first warp. known: the clocks that the stream knows of. lockstep: its warps run
        together as long as they take the same branches."""
        name, code, parameters, warps, shared, grid, rank, first_line = launch
        self.code, self.memory, self.lockstep, self.generator = code, memory, lockstep, generator
        self.parameters = np.frombuffer(parameters, np.uint8)
        self.shared = SharedMemory(shared, warps, first)
        self.place = (rank, program[1], program[0])
        self.first_line, self.log = first_line, log
        self.numbers = first + np.arange(warps)
        self.known = np.tile(known, (warps, 1))
        self.known[np.arange(warps), self.numbers] += 1
        # a register that nothing has written holds anything
        garbage = np.random.default_rng(generator.getrandbits(32))
        self.registers: dict[str, Array] = {
            file: garbage.integers(0, np.iinfo(dtype).max, (code.counts[file], warps * LANES), dtype)
            for file, dtype in REGISTERS.items()
        }
        self.registers["p"] = np.zeros((code.counts["p"], warps * LANES), bool)
        names = ("ctaid", program), ("nctaid", grid), ("ntid", (warps * LANES, 1, 1)), ("tid", (0, 0, 0))
        self.special = {f"%{name}.{axis}": np.uint32(sizes[n]) for name, sizes in names for n, axis in enumerate("xyz")}
        self.counts = log.counts.setdefault((name, rank + program[1], program[0]), Counter())
        self.counts["in flight"] = code.in_flight
        self.chain = 0
        """Atomics of system scope that come one after another before this program goes on, its own and others'."""
        self.copies: list[Copy] = []
        self.groups = np.zeros(warps, np.int64)
        self.executed = 0
        self.whole = Warps(self, 0, warps)
        self.single = [Warps(self, i, i + 1) for i in range(warps)]
        self.active = [self.whole] if lockstep else self.single

    @property
    def done(self) -> bool:
        """Whether all warps have ended."""
        return all(warps.done for warps in self.active)

    def split(self) -> None:
        """Let each warp go its own way."""
        for warps in self.single:
            warps.segment = self.whole.segment
        self.active = self.single

    def meet(self) -> None:
        """All warps have come to a barrier: each knows what any knew, and goes on."""
        first = self.active[0]
        if any(warps.done for warps in self.active):
            waiting = next(warps for warps in self.active if not warps.done)
            raise Fault(f"{waiting.where(waiting.barrier, waiting.low)} is a barrier that ended warps do not reach")
        barrier = first.barrier
        for other in self.active:
            if other.barrier != barrier:
                first.report("warps meet at different barriers", barrier, first.low, int(self.numbers[other.low]),
                             other.barrier)  # fmt: skip
            other.barrier = -1
        self.counts["barriers"] += 1
        self.known[:] = self.known.max(0)
        self.known[np.arange(len(self.numbers)), self.numbers] += 1
        if self.lockstep and all(warps.segment == first.segment for warps in self.active):
            self.whole.segment = first.segment
            self.active = [self.whole]


class Warps:
    """Warps low to high - 1 of a CTA, at one segment. Its methods are what generated code calls."""

    def __init__(self, cta: CTA, low: int, high: int) -> None:
        self.cta, self.low, self.high = cta, low, high
        self.known, self.numbers, self.place, self.special = cta.known, cta.numbers, cta.place, cta.special
        self.global_memory, self.shared_memory = cta.memory, cta.shared
        lanes = slice(low * LANES, high * LANES)
        self.threads = np.arange(low * LANES, high * LANES, dtype=np.uint32)
        self.rows = np.repeat(np.arange(low, high), LANES)
        files = {name: [register[lanes] for register in cta.registers[name]] for name in ("r", "d", "h", "p")}
        views = [[x.view(dtype) for x in files[file]] for file, dtype in (
            ("r", np.uint32), ("r", np.int32), ("r", np.float32), ("d", np.uint64), ("d", np.int64), ("d", np.float64),
            ("h", np.uint16), ("h", np.int16), ("h", np.float16), ("p", np.bool_),
        )]  # fmt: skip
        self.views = tuple(views)
        self.segment = 0
        self.barrier = -1
        """The line of the barrier at which it waits, or -1."""
        self.polled: tuple | None = None
        """(line, address, type, value) if the last segment ended with an atomic that only read."""
        self.last_poll: tuple | None = None
        """The one before, if no store came after it: warps that read the same again are spinning."""
        self.parked: tuple | None = None
        """(address, type, value) while warps spin; the scheduler lets them go on once the value is another."""
        self.done = False

    def where(self, line: int, row: int) -> str:
        """An instruction and the warp that executes it."""
        return self.cta.log.describe(line, int(self.numbers[row]))

    def report(self, kind: str, line: int, row: int, other: int = -1, other_line: int = 0) -> None:
        """Report what is wrong with an instruction, and the warp and the instruction that it conflicts with."""
        self.cta.log.report(kind, line, int(self.numbers[row]), other, other_line)

    def parameter(self, offset: Any, dtype: type) -> Array:
        """The parameter at an offset, which lanes may choose."""
        offset = np.broadcast_to(offset, self.rows.shape).astype(np.int64)
        return self.cta.parameters[offset[:, None] + np.arange(np.dtype(dtype).itemsize)].view(dtype)[:, 0]

    def lanes(self, mask: Array | None) -> Array | slice:
        """What selects the lanes that take part."""
        return slice(None) if mask is None else np.flatnonzero(mask)

    def spread(self, value: Any, lanes: Array | slice) -> Array:
        """An operand as integers, one for each lane that takes part."""
        return np.broadcast_to(value, self.rows.shape)[lanes].astype(np.int64)

    def load(self, memory: Any, address: Any, size: int, targets: tuple, mask: Array | None, line: int) -> None:
        """Read a vector of values into registers."""
        lanes = self.lanes(mask)
        if len(rows := self.rows[lanes]):
            place = self.spread(address, lanes)
            self.count("read", memory, place, size * len(targets))
            found = memory.read(self, place, size * len(targets), rows, line + self.cta.first_line).view(f"u{size}")
            for number, target in enumerate(targets):
                target[lanes] = found[:, number]

    def store(self, memory: Any, address: Any, size: int, values: tuple, mask: Array | None, line: int) -> None:
        """Write a vector of values."""
        lanes = self.lanes(mask)
        if memory is self.global_memory:
            self.last_poll = None
        if len(rows := self.rows[lanes]):
            columns = [np.broadcast_to(value, self.rows.shape)[lanes] for value in values]
            data = np.ascontiguousarray(np.stack(columns, 1).astype(f"u{size}")).view(np.uint8)
            place = self.spread(address, lanes)
            self.count("written", memory, place, data.shape[1])
            memory.write(self, place, data, rows, line + self.cta.first_line)

    def count(self, what: str, memory: Any, address: Array, size: int) -> None:
        """Count bytes of shared memory, or of global memory by the rank that owns it."""
        if memory is self.shared_memory:
            self.cta.counts[f"{what}, shared"] += size * len(address)
        else:
            for owner, lanes in zip(*np.unique(memory.owners(address), return_counts=True), strict=True):
                self.cta.counts[f"{what}, rank {owner}"] += size * int(lanes)

    def load_matrix(self, address: Any, targets: tuple, transposed: bool, line: int) -> None:
        """ldmatrix: lanes 8 i to 8 i + 7 of a warp give the rows of matrix i, and each lane gets two elements of it."""
        warps = self.high - self.low
        for number, target in enumerate(targets):
            lanes = np.arange(warps * LANES).reshape(warps, LANES)[:, 8 * number : 8 * number + 8].reshape(-1)
            place = self.spread(address, lanes)
            self.count("read", self.shared_memory, place, 16)
            found = self.shared_memory.read(self, place, 16, self.rows[lanes], line + self.cta.first_line)
            found = found.view(np.uint16).reshape(warps, 8, 8)
            if transposed:
                found = np.ascontiguousarray(found.transpose(0, 2, 1))
            target[...] = found.view(np.uint32).reshape(-1)

    def copy_async(self, target: Any, source: Any, size: int, live: Any, mask: Array | None, line: int) -> None:
        """cp.async. Its source is read now or when it ends, as a coin says."""
        lanes = self.lanes(mask)
        if not len(rows := self.rows[lanes]):
            return
        count, line = self.spread(live, lanes), line + self.cta.first_line
        if ((count != 0) & (count != size)).any():
            raise Fault(f"{self.where(line, int(rows[0]))} copies a part of {size} bytes, which the executor does not")
        copy = Copy(self.spread(target, lanes), self.spread(source, lanes), None, size, count > 0, rows,
                    self.cta.groups[rows], line)  # fmt: skip
        self.cta.shared.begin_copy(self, copy.target, size, rows, line)
        data = self.fetch(copy) if self.cta.generator.random() < 0.5 else None
        self.cta.copies.append(copy._replace(data=data))

    def fetch(self, copy: Copy) -> Array:
        """The bytes that a copy brings."""
        data = np.zeros((len(copy.rows), copy.size), np.uint8)
        self.count("written", self.shared_memory, copy.target, copy.size)
        if copy.live.any():
            self.count("read", self.global_memory, copy.source[copy.live], copy.size)
            data[copy.live] = self.cta.memory.read(
                self, copy.source[copy.live], copy.size, copy.rows[copy.live], copy.line
            )
        return data

    def commit_copies(self) -> None:
        """cp.async.commit_group."""
        self.cta.groups[self.low : self.high] += 1

    def wait_copies(self, left: int) -> None:
        """cp.async.wait_group: end all of these warps' copies but those of the last `left` groups."""
        kept = []
        for copy in self.cta.copies:
            own = (copy.rows >= self.low) & (copy.rows < self.high)
            ripe = own & (copy.group < self.cta.groups[copy.rows] - left)
            if ripe.any():
                ended = copy.of(ripe)
                data = self.fetch(ended) if ended.data is None else ended.data
                self.cta.shared.end_copy(self, ended.target, data, ended.rows, ended.line)
            if not ripe.all():
                kept.append(copy.of(~ripe))
        self.cta.copies = kept

    def atomic(
        self, operation: str, order: str, scope: str, dtype: type, address: Any, values: list, target: Array | None,
        mask: Array | None, line: int,
    ) -> None:  # fmt: skip
        """atom, red, and loads and stores with an order: one lane after another."""
        self.polled = None
        chosen = np.arange(len(self.rows))[self.lanes(mask)]
        for lane in chosen:
            place = int(np.broadcast_to(address, self.rows.shape)[lane])
            given = [np.broadcast_to(value, self.rows.shape)[lane] for value in values]
            if scope == "sys" and not (operation == "ld" and self.last_poll and self.last_poll[1] == place):
                self.cta.counts[order] += 1  # polls after the first one count as one: when nothing is late, one is all
                self.cta.chain += 1
            old = self.cta.memory.atomic(self, operation, order, scope, dtype, place, given, int(self.rows[lane]),
                                         line + self.cta.first_line)  # fmt: skip
            self.cta.counts["chain"] = max(self.cta.counts["chain"], self.cta.chain)
            if target is not None:
                target[lane] = old
            if operation == "ld":
                self.polled = (line, place, dtype, old)

    def step(self) -> None:
        """Execute one segment."""
        cta = self.cta
        segment = cta.code.segments[self.segment]
        last = segment.last
        segment.run(self)
        cta.executed += segment.count * (self.high - self.low)
        cta.counts["flops"] += segment.flops * (self.high - self.low)
        self.segment += 1
        if last.opcode.startswith("bra"):
            self.branch(last, segment.line + cta.first_line)
        elif last.opcode == "ret":
            self.done = True
        elif last.opcode == "bar.sync" or (last.opcode == "bar.warp.sync" and len(cta.numbers) == 1):
            self.barrier = segment.line + cta.first_line
        if self.segment == len(cta.code.segments):
            self.done = True

    def branch(self, last: Any, line: int) -> None:
        """Take a branch. Warps that disagree part; lanes of one warp must agree."""
        taken = np.ones(1, bool)
        if last.predicate:
            taken = self.views[9][self.cta.code.index[last.predicate][1]] ^ last.negated
        if taken.all():
            self.segment = self.cta.code.labels[last.operands[0]]
        elif taken.any():
            rows = taken.reshape(-1, LANES)
            if (rows.any(1) != rows.all(1)).any():
                raise Fault(
                    f"{self.where(line, self.low)}: lanes of one warp disagree, which the executor has no code for"
                )
            self.cta.split()
            for number, warps in enumerate(self.cta.single):
                warps.segment = self.cta.code.labels[last.operands[0]] if rows[number, 0] else self.segment
