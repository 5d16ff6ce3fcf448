"""CTAs, and the warps of one that stand at the same instruction.

Belongs here: registers, barriers, branches, asynchronous copies, and what generated code (code.py) calls. Which CTA and
which warps come next is schedule.py's.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from checks.compile.statements import Instruction

from .arithmetic import LANES, Array
from .code import VIEWS, Code
from .memory import Access, Atomic, Fault, Memory, SharedMemory

Lanes = Array | slice  # what selects the lanes that take part
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ENDED = np.iinfo(np.int64).max


class Launch(NamedTuple):
    """What all programs of a launch share."""

    session: Any  # session.Execution
    name: str  # the kernel's
    code: Code
    parameters: Array  # their bytes
    metadata: Any  # Triton's
    grid: tuple[int, ...]
    rank: int


class Copy(NamedTuple):
    """Asynchronous copies of some lanes."""

    target: Access
    source: Access
    left: Array
    """Whether the lane's source is yet to be read. It is not where zeros are written."""
    group: Array
    """How many groups the lane's warp had committed before; ENDED when the copy has ended."""
    data: Array
    """The bytes (lanes, size) that it brings."""

    def fetch(self, lanes: Array) -> None:
        """Read what some lanes copy."""
        now = lanes & self.left
        if now.any():
            self.data[now] = self.target.cta.memory.read(self.source.of(now))
        self.left[now] = False


class CTA:
    """One program: its registers, its shared memory and its warps' knowledge of others' clocks."""

    def __init__(self, launch: Launch, program: tuple[int, int, int], first: int, known: Array) -> None:
        """first: the number of its first warp. known: the clocks that the stream knows of."""
        self.launch, self.code, self.log, warps = launch, launch.code, launch.session.log, launch.metadata.num_warps
        self.memory, self.shared = launch.session.memory, SharedMemory(launch.metadata.shared, warps, first)
        self.place = (launch.rank, program[1], program[0])
        self.first_line = self.log.number(self.log.lines, self.code, self.code.kernel.instructions)
        self.numbers = first + np.arange(warps)
        self.known = np.tile(known, (warps, 1))
        self.fenced, self.observed = ({scope: np.zeros_like(self.known) for scope in ("gpu", "sys")} for _ in range(2))
        """What each warp knew at its last fence of a scope, which its relaxed writes hand on; and what it will know
        after one, as its relaxed reads saw it released."""
        # a register that nothing has written holds anything
        garbage = np.random.default_rng(launch.session.generator.getrandbits(32))
        self.registers = {}
        for file, count in self.code.counts.items():
            most = 2 if file == "p" else np.iinfo(VIEWS[file]).max
            self.registers[file] = garbage.integers(0, most, (count, warps * LANES), VIEWS[file])
        places = {"ctaid": program, "nctaid": launch.grid}
        self.special = {f"%{name}.{'xyz'[n]}": np.uint32(place[n]) for name, place in places.items() for n in range(3)}
        self.counts = self.log.counts.setdefault((launch.name, launch.rank + program[1], program[0]), Counter())
        self.counts.update({"flops": 0, "chain": 0})
        self.counts["in flight"] = launch.code.in_flight
        self.chain = 0
        """Atomics and fences of system scope that come one after another before this program goes on, its own and
        others'."""
        self.copies: list[Copy] = []
        self.groups = np.zeros(warps, np.int64)
        self.whole = Warps(self, 0, warps)
        self.active = [self.whole] if launch.session.schedule.lockstep else self.single
        self.tick(slice(None))

    @functools.cached_property
    def single(self) -> list[Warps]:
        """Each warp by itself."""
        return [Warps(self, i, i + 1) for i in range(len(self.numbers))]

    @property
    def done(self) -> bool:
        """Whether all warps have ended."""
        return not [warps for warps in self.active if not warps.done]

    @property
    def gathered(self) -> bool:
        """Whether all warps that have not ended wait at a barrier."""
        return not [warps for warps in self.active if not warps.done and warps.barrier < 0]

    def tick(self, warps: slice) -> None:
        """What warps do from now on, nobody knows of."""
        self.known[np.arange(len(self.numbers))[warps], self.numbers[warps]] += 1

    def meet(self) -> None:
        """All warps have come to a barrier: each knows what any knew, and goes on."""
        first = min(self.active, key=lambda warps: warps.done)
        here = first.barrier, self.numbers[first.low]
        for other in self.active:
            if other.done:
                raise Fault(f"{self.log.describe(*here)} is a barrier that ended warps do not reach")
            if other.barrier != here[0]:
                self.log.report("different barriers meet", *here, self.numbers[other.low], other.barrier)
            other.barrier = -1
        self.counts["barriers"] += 1
        self.known[:] = self.known.max(0)
        self.tick(slice(None))
        if self.launch.session.schedule.lockstep and all(warps.segment == first.segment for warps in self.active):
            self.whole.segment = first.segment
            self.active = [self.whole]


class RowsByNumber(dict[int, Array]):
    """The rows of a two-dimensional array by number; each is made when it is first asked for."""

    def __init__(self, array: Array) -> None:
        super().__init__()
        self.array = array

    def __missing__(self, number: int) -> Array:
        self[number] = row = self.array[number]
        return row


class Warps:
    """Warps low to high - 1 of a CTA, at one segment. Its methods are what generated code calls."""

    def __init__(self, cta: CTA, low: int, high: int) -> None:
        self.cta, self.low, self.high = cta, low, high
        self.global_memory, self.shared_memory = cta.memory, cta.shared
        lanes = slice(low * LANES, high * LANES)
        self.special = cta.special | {"%tid.x": np.arange(low * LANES, high * LANES, dtype=np.uint32)}
        self.rows = np.repeat(np.arange(low, high), LANES)
        self.views = [RowsByNumber(cta.registers[view[0]][:, lanes].view(dtype)) for view, dtype in VIEWS.items()]
        self.segment = 0
        self.first_line = cta.first_line
        """The number of the segment's first instruction."""
        self.barrier = -1
        """The line of the barrier at which it waits, or -1."""
        self.poll: tuple | None = None
        """(line, addresses, type, values) of the last atomic that only read, if no store came after it."""
        self.spins = False
        """Whether the last segment read the same again."""
        self.done = False

    @property
    def can_run(self) -> bool:
        """Whether they have not ended, wait at no barrier, and do not poll a word that is as it was."""
        if self.done or self.barrier >= 0 or not self.spins or self.poll is None:
            return not self.done and self.barrier < 0
        _, places, dtype, values = self.poll
        return any(self.cta.memory.word(place, dtype)[0] != value for place, value in zip(places, values, strict=True))

    def parameter(self, offset: Any, dtype: type) -> Array:
        """The parameter at an offset, which lanes may choose."""
        size = np.dtype(dtype).itemsize
        if not np.ndim(offset):
            return self.cta.launch.parameters[int(offset) : int(offset) + size].view(dtype)
        where = offset.astype(np.int64)[:, None] + np.arange(size)
        return self.cta.launch.parameters[where].view(dtype)[:, 0]

    def spread(self, value: Any, lanes: Lanes) -> Array:
        """An operand, one for each lane that takes part."""
        return value[lanes] if np.ndim(value) else np.full(len(self.rows), value)[lanes]

    def access(self, address: Any, size: int, lanes: Lanes, line: int) -> Access:
        """What lanes access by an instruction."""
        place = self.spread(address, lanes).astype(np.int64)
        return Access(self.cta, self.rows[lanes], place, size, line + self.first_line)

    def load(self, memory: Memory, address: Any, size: int, targets: tuple, lanes: Lanes, line: int) -> None:
        """Read a vector of values into registers."""
        if len(self.rows[lanes]):
            found = memory.read(self.access(address, size * len(targets), lanes, line)).view(UNSIGNED[size])
            for number, target in enumerate(targets):
                target[lanes] = found[:, number]

    def store(self, memory: Memory, address: Any, size: int, values: tuple, lanes: Lanes, line: int) -> None:
        """Write a vector of values."""
        if memory is self.global_memory:
            self.poll = None
        if number := len(self.rows[lanes]):
            data = np.empty((number, len(values)), UNSIGNED[size])
            for column, value in enumerate(values):
                data[:, column] = value[lanes] if np.ndim(value) else value
            memory.write(self.access(address, size * len(values), lanes, line), data.view(np.uint8))

    def load_matrix(self, address: Any, targets: tuple, transposed: bool, line: int) -> None:
        """ldmatrix: lanes 8 i to 8 i + 7 of a warp give the rows of matrix i, and each lane gets two elements of it."""
        lanes = np.arange(len(self.rows)).reshape(-1, LANES)[:, : 8 * len(targets)].reshape(-1)
        read = self.shared_memory.read(self.access(address, 16, lanes, line))
        for number, target in enumerate(targets):
            found = read.view(np.uint16).reshape(-1, len(targets), 8, 8)[:, number]
            found = np.ascontiguousarray(found.transpose(0, 2, 1) if transposed else found)
            target[...] = found.view(np.uint32).reshape(-1)

    def copy_async(self, target: Any, source: Any, size: int, live: Any, lanes: Lanes, line: int) -> None:
        """cp.async. Its source is read now or when it ends, as a coin says."""
        if not len(self.rows[lanes]):
            return
        to, count = self.access(target, size, lanes, line), self.spread(live, lanes)
        if ((count != 0) & (count != size)).any():
            raise to.fault(f"copies a part of {size} bytes, which the executor does not")
        source, data = self.access(source, size, lanes, line), np.zeros((len(to.rows), size), np.uint8)
        copy = Copy(to, source, count > 0, self.cta.groups[to.rows], data)
        self.shared_memory.begin_copy(to)
        if self.cta.launch.session.generator.random() < 0.5:
            copy.fetch(count > 0)
        self.cta.copies.append(copy)

    def commit_copies(self) -> None:
        """cp.async.commit_group."""
        self.cta.groups[self.low : self.high] += 1

    def wait_copies(self, left: int) -> None:
        """cp.async.wait_group: end all of these warps' copies but those of the last `left` groups."""
        for copy in self.cta.copies:
            rows = copy.target.rows
            ripe = (rows >= self.low) & (rows < self.high) & (copy.group < self.cta.groups[rows] - left)
            if ripe.any():
                copy.fetch(ripe)
                self.shared_memory.end_copy(copy.target.of(ripe), copy.data[ripe])
                copy.group[ripe] = ENDED
        self.cta.copies = [copy for copy in self.cta.copies if (copy.group < ENDED).any()]

    def atomic(self, operation: Atomic, address: Any, values: list, target: Array, lanes: Lanes, line: int) -> None:
        """atom, and loads with an order: one lane after another."""
        before, size, places = self.poll, np.dtype(operation.dtype).itemsize, self.spread(address, lanes).tolist()
        reads = operation.name == "ld" or operation.name == "add" and not np.any(values[0])
        if places and operation.scope == "sys" and not (reads and before and before[1] == places):
            # polls after the first one count as one, and all lanes do: when nothing is late, one is all
            self.cta.counts[operation.order] += 1
            self.cta.chain += not operation.is_posted
        for lane in np.arange(len(self.rows))[lanes]:
            access, given = self.access(address, size, np.array([lane]), line), [self.spread(v, lane) for v in values]
            target[lane] = self.cta.memory.atomic(access, operation, given)
        if places and reads:
            self.poll = (line + self.first_line, places, operation.dtype, target[lanes].tolist())
            self.spins = self.poll == before

    def fence(self, scope: str) -> None:
        """Relaxed reads before it acquire, and relaxed writes after it release what these warps know now."""
        warps = slice(self.low, self.high)
        known = self.cta.known[warps]
        np.maximum(known, self.cta.observed[scope][warps], out=known)
        self.cta.fenced[scope][warps] = known
        self.cta.tick(warps)
        if scope == "sys" and self.low == 0:  # all warps of a program come to a fence, and wait for it at the same time
            self.cta.counts["fence"] += 1
            self.cta.chain += 1

    def step(self) -> None:
        """Execute one segment."""
        cta, self.spins = self.cta, False
        run, lines, flops, last = cta.code.segments[self.segment]
        self.first_line = cta.first_line + lines.start
        run(self)
        cta.log.executed += len(lines) * (self.high - self.low)
        if flops:
            cta.counts["flops"] += flops * (self.high - self.low)
        if cta.chain > cta.counts["chain"]:
            cta.counts["chain"] = cta.chain
        self.segment += 1
        if last.opcode in ("bra", "bra.uni"):
            self.branch(last, len(lines) - 1)
        elif last.opcode == "bar.sync":
            self.barrier = lines[-1] + cta.first_line
        self.done = last.opcode == "ret" or self.segment == len(cta.code.segments)

    def branch(self, last: Instruction, line: int) -> None:
        """Take a branch. Warps that disagree part; lanes of one warp must agree."""
        target, taken = self.cta.code.labels[last.rest], np.ones(1, bool)
        if last.predicate:
            taken = self.views[-1][self.cta.code.index[last.predicate][1]] ^ last.negated
        lanes = np.count_nonzero(taken)
        if lanes == len(taken):
            self.segment = target
        elif lanes:
            rows = taken.reshape(-1, LANES)
            if (rows.any(1) != rows.all(1)).any():
                where = self.access(0, 1, slice(None), line)
                raise where.fault("is where lanes of one warp disagree, which the executor has no code for")
            self.cta.active = self.cta.single
            for number, warps in enumerate(self.cta.single):
                warps.segment = target if rows[number, 0] else self.segment
