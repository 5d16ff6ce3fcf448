"""Memory, and the history of its accesses: who wrote and read each cell, and whether that happened before.

Belongs here: vector clocks and bounds. Every warp has a clock of its own, and knows of every other warp's clock. An
access is remembered as (warp, its clock). It happened before another one if the other one's warp knows that clock.
Barriers, a release that an acquire sees, and the order of launches in a stream hand knowledge on. By a fence, later
relaxed writes release what was known at it, and earlier relaxed reads acquire. There are no store buffers: a read that
is not ordered after its write is reported, and returns poison. Hence a race is found on every schedule that takes the
same branches, and shows in the results, too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from .arithmetic import Array

CELL, SHARED_CELL = 2, 1  # bytes. To access less than a cell counts as an access of all of it
FIRST_ADDRESS, ADDRESSES = 4096, 1 << 47
POISON = 0xFF
NOTHING, COPYING = 2**31 - 1, 2**31 - 2  # clocks that no warp knows, of cells that
UNKNOWN = {NOTHING: "a {} of {} memory that nothing has written", COPYING: "race: a {} of {} memory during a copy"}

# all of this process's memory as one array, whose elements need not exist
HOST = np.asarray(SimpleNamespace(__array_interface__={
    "data": (FIRST_ADDRESS, False), "shape": ((ADDRESSES - FIRST_ADDRESS) // 8,), "typestr": "<u8", "version": 3,
}))  # fmt: skip

# what an atomic access leaves of what was there
COMBINE = {"exch": lambda old, new: new, "add": lambda old, more: old + more}


class Fault(RuntimeError):
    """What no execution can go on after: an access outside of memory, a hang."""


class Access(NamedTuple):
    """What some lanes of a CTA's warps access by one instruction."""

    cta: Any  # machine.CTA
    rows: Array
    """Each lane's warp."""
    address: Array
    size: int
    """Bytes of each lane."""
    line: int
    """The instruction's number (log.py)."""

    def of(self, lanes: Array) -> Access:
        """That of some of the lanes."""
        return self._replace(rows=self.rows[lanes], address=self.address[lanes])

    def report(self, kind: str, lane: int = 0, other: int = -1, other_line: int = 0) -> None:
        """Report what is wrong for a lane, and the warp and the instruction that it conflicts with."""
        self.cta.log.report(kind, self.line, self.cta.numbers[self.rows[lane]], other, other_line)

    def fault(self, what: str, lane: int = 0) -> Fault:
        """An error that names the instruction."""
        return Fault(f"{self.cta.log.describe(self.line, self.cta.numbers[self.rows[lane]])} {what}")


class Operation(NamedTuple):
    """What an atomic access does."""

    name: str
    """ld, or a key of COMBINE."""
    order: str
    scope: str
    dtype: type

    @property
    def is_posted(self) -> bool:
        """Whether nobody waits until it is done: it sets a flag behind a fence."""
        return self.order == "relaxed" and self.name == "exch"


class Memory:
    """Words, the last write of each of their cells, and each warp's last read of it. Warp 0 is the host: all know its
    clock."""

    def __init__(self, name: str, words: Array, begin: int, cells: int, warps: int, first: int = 0) -> None:
        """words: of 8 bytes, from address `begin` on. first: the number of the first of the `warps` that read here."""
        self.name, self.words, self.begin, self.first = name, words, begin, first
        self.cell = SHARED_CELL if name == "shared" else CELL
        self.writer, self.written, self.write_line = np.zeros((3, cells), np.int32)
        self.atomic_last = np.zeros(cells, bool)
        """Whether the last write was atomic."""
        self.read_at, self.read_line = np.zeros((2, warps, cells), np.int32)

    def set_regions(self, regions: list[tuple[int, int, int, str]]) -> None:
        """regions: (first address, end, number of a cell at address 0, owner) of the memory that there is, sorted."""
        self.starts, self.ends, self.origins, self.owners = (np.array(column) for column in zip(*regions, strict=True))

    def locate(self, access: Access, what: str = "") -> Array:
        """The cells (lanes, n) of an access. what: under which name its bytes are counted, by the memory's owners.

        Fault for one outside of memory, and for a misaligned one."""
        address, size = access.address, access.size
        at = np.searchsorted(self.starts, address, "right") - 1
        wrong = (address % size != 0) | (address + size > self.ends[at])
        if wrong.any():
            lane = int(np.argmax(wrong))
            raise access.fault(f"is misaligned or outside of {self.name} memory: {size} at {address[lane]:#x}", lane)
        if what:
            lanes = np.bincount(at)
            for region in np.flatnonzero(lanes):
                access.cta.counts[f"{what}, {self.owners[region]}"] += size * int(lanes[region])
        return (self.origins[at] + address // self.cell)[:, None] + np.arange(max(1, size // self.cell))

    def place(self, access: Access) -> tuple[Array, Array]:
        """(words, the indices (lanes, n) of those that are accessed)."""
        unit = min(access.size, 8)
        index = ((access.address - self.begin) // unit)[:, None] + np.arange(access.size // unit)
        return self.words.view(f"u{unit}"), index

    def read(self, access: Access) -> Array:
        """The bytes (lanes, size); poison where the read races."""
        racy = self.note_read(access, self.locate(access, "read"))
        words, index = self.place(access)
        found = words[index].view(np.uint8)
        if racy.any():
            found[np.repeat(racy, self.cell, 1)[:, : access.size]] = POISON
        return found

    def write(self, access: Access, data: Array) -> None:
        """Write bytes (lanes, size)."""
        self.note_write(access, self.locate(access, "written"))
        words, index = self.place(access)
        new = data.view(words.dtype)
        words[index] = new
        if not np.array_equal(words[index], new):
            access.report("race: lanes of one store write different values to one place")

    def unordered(self, access: Access, cells: Array, what: str) -> Array:
        """Where an access of cells (lanes, n) is not ordered after the last write. The first is reported."""
        writer, written = self.writer[cells], self.written[cells]
        racy = access.cta.known[access.rows[:, None], writer] < written
        if racy.any() and what == "write":
            racy &= written != NOTHING
        if racy.any():
            lane, n = np.argwhere(racy)[0]
            kind = UNKNOWN.get(written[lane, n], "race: a {} of {} memory is not ordered after a write")
            line = self.write_line[cells[lane, n]]
            access.report(kind.format(what, self.name), lane, writer[lane, n], line)
        return racy

    def note_read(self, access: Access, cells: Array) -> Array:
        """Remember reads of cells (lanes, n), and return which ones race."""
        racy = self.unordered(access, cells, "read")
        own = access.cta.numbers[access.rows]
        at = own[:, None] - self.first, cells
        self.read_at[at] = access.cta.known[access.rows, own][:, None]
        self.read_line[at] = access.line
        return racy

    def note_write(self, access: Access, cells: Array) -> None:
        """Remember writes of cells (lanes, n), and report those that race."""
        self.unordered(access, cells, "write")
        read = self.read_at[:, cells]  # (warps, lanes, n)
        late = read > access.cta.known[access.rows, self.first : self.first + len(read)].T[:, :, None]
        if late.any():
            reader, lane, n = np.argwhere(late)[0]
            line = self.read_line[reader, cells[lane, n]]
            kind = f"race: a write of {self.name} memory is not ordered after a read"
            access.report(kind, lane, self.first + reader, line)
        self.record(access, cells, atomic=False)

    def record(self, access: Access, cells: Array, atomic: bool) -> None:
        """Remember writes."""
        own = access.cta.numbers[access.rows]
        self.writer[cells] = own[:, None]
        self.written[cells] = access.cta.known[access.rows, own][:, None]
        self.write_line[cells] = access.line
        self.atomic_last[cells] = atomic


class GlobalMemory(Memory):
    """The storages that launches may reach, and what has been released at each address."""

    def __init__(self) -> None:
        super().__init__("global", HOST, FIRST_ADDRESS, 1, 1)
        self.storages: dict[int, tuple[int, int, torch.UntypedStorage]] = {}
        """By address: the end, the number of a cell at address 0."""
        self.ranks: dict[int, int] = {}
        """By the address where a rank's memory begins; it ends where other memory begins."""
        self.cells = 0
        self.released: dict[int, list[tuple[set[str], tuple, Array, int]]] = {}
        """By address: (scopes, place, clock, chain) of releases that an acquire there sees. scopes: the write's, and a
        fence's before it."""

    def add(self, *tensors: torch.Tensor, rank: int = 0) -> None:
        """Let kernels reach the tensors' storages. They are kept, so that no address comes to stand for another.

        rank: whose memory the tensors are."""
        for tensor in tensors:
            self.ranks[tensor.data_ptr()] = rank
            storage = tensor.untyped_storage()
            start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            if self.storages.get(start, (start,))[0] < end:
                self.storages[start] = end, self.cells - start // CELL, storage
                self.cells += storage.nbytes() // CELL + 1
        regions, end, origin = [(-1, 0, 0, "nobody")], 0, 0
        for start in sorted({*self.ranks, *self.storages}):
            end, origin, _ = self.storages.get(start, (end, origin, None))
            rank = self.ranks.get(start, rank)
            regions.append((start, end, origin, f"rank {rank}"))
        self.set_regions(regions)

    def grow(self, warps: int) -> None:
        """Make room for all storages and more warps."""
        have_warps, have_cells = self.read_at.shape
        more = max(0, warps - have_warps), max(self.cells - have_cells, have_cells) * (self.cells > have_cells)
        for name in ("writer", "written", "write_line", "atomic_last", "read_at", "read_line") * any(more):
            array = getattr(self, name)
            setattr(self, name, np.pad(array, [(0, size) for size in more[-array.ndim :]]))

    def word(self, address: int, dtype: type) -> Array:
        """The one word at an address, which shows later writes."""
        index = (address - self.begin) // np.dtype(dtype).itemsize
        return self.words.view(dtype)[index : index + 1]

    def atomic(self, access: Access, operation: Operation, values: list) -> Array:
        """An atomic access of one lane; returns what was there. It hands knowledge on as its order and scope say."""
        cells, cta, row = self.locate(access), access.cta, access.rows[0]
        name, order, scope, dtype = operation
        word, releases = self.word(access.address[0], dtype), self.released.setdefault(int(access.address[0]), [])
        old, acquires = word[0], order in ("acquire", "acq_rel")
        for scopes, place, clock, chain in releases:
            for fence, learnt in {scope: cta.known}.items() if acquires else cta.observed.items():
                if reaches(scopes | {scope, fence}, place, cta.place):
                    known = learnt[row, : len(clock)]  # there were fewer warps at the time of an earlier launch
                    np.maximum(known, clock, out=known)
                    cta.chain = max(cta.chain, (chain + 1) * (not operation.is_posted))
        if not self.atomic_last[cells].all():
            self.note_read(access, cells)
        if name == "ld":
            return old
        new = COMBINE[name](old, *values)
        if new != old:  # to write what was there would undo what another process writes meanwhile
            word[0] = new
        self.record(access, cells, atomic=True)
        orders = order in ("release", "acq_rel")
        for fence, learnt in {scope: cta.known}.items() if orders else cta.fenced.items():
            if learnt[row].any():
                releases.append(({scope, fence}, cta.place, learnt[row].copy(), cta.chain))
        cta.known[row, cta.numbers[row]] += orders
        return old


def reaches(scopes: set[str], place: tuple, own: tuple) -> bool:
    """Whether two CTAs (rank, column, program) are in all of the scopes of a release and an acquire."""
    return scopes == {"sys"} or (place == own if "cta" in scopes else place[:2] == own[:2])


class SharedMemory(Memory):
    """The shared memory of one CTA. What nothing has written is poison."""

    def __init__(self, size: int, warps: int, first: int) -> None:
        words = np.full(-(-size // 8), ~np.uint64(0))
        super().__init__("shared", words, 0, size // SHARED_CELL + 1, warps, first)
        self.writer[:], self.written[:] = -1, NOTHING
        self.set_regions([(0, size, 0, "shared")])

    def begin_copy(self, access: Access) -> None:
        """The target of an asynchronous copy is poison until the copy ends."""
        cells = self.locate(access)
        self.note_write(access, cells)
        self.written[cells] = COPYING
        words, index = self.place(access)
        words[index] = ~words.dtype.type(0)

    def end_copy(self, access: Access, data: Array) -> None:
        """What a copy has brought is written by the warp that waits for it."""
        self.written[self.locate(access)] = 0
        self.write(access, data)
