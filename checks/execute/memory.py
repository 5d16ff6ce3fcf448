"""Memory, and the history of its accesses: who wrote and read each cell, and whether that happened before.

Belongs here: vector clocks and bounds. Every warp has a clock of its own, and knows of every other warp's clock. An
access is remembered as (warp, its clock). It happened before another one if the other one's warp knows that clock.
Barriers, a release that an acquire sees, and the order of launches in a stream hand knowledge on. By a fence, later
relaxed writes release what was known at it, and earlier relaxed reads acquire. There are no store buffers: a read that
is not ordered after its write is reported, and returns poison. Hence a race is found on every schedule that takes the
same branches, and shows in the results, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from .arithmetic import Array

CELL, SHARED_CELL = 2, 1  # bytes. To access less than a cell counts as an access of all of it
WIDEST = 16  # bytes that one lane accesses at most
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
        """The access of some of the lanes."""
        return self._replace(rows=self.rows[lanes], address=self.address[lanes])

    def report(self, kind: str, lane: int = 0, other: int = -1, other_line: int = 0) -> None:
        """Report what is wrong for a lane, and the warp and the instruction that it conflicts with."""
        self.cta.log.report(kind, self.line, self.cta.numbers[self.rows[lane]], other, other_line)

    def fault(self, what: str, lane: int = 0) -> Fault:
        """An error that names the instruction."""
        return Fault(f"{self.cta.log.describe(self.line, self.cta.numbers[self.rows[lane]])} {what}")


class Atomic(NamedTuple):
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
        """words: of 8 bytes, an even number, from address `begin` on. cells: a multiple of WIDEST. first: the number of
        the first of the `warps` that read here."""
        self.name, self.begin, self.first = name, begin, first
        self.units = {size: words.view(f"u{min(size, 8)}").reshape(-1, max(1, size // 8)) for size in (1, 2, 4, 8, 16)}
        """The memory as rows of 1, 2, 4, 8 or 16 bytes, by the bytes that a lane accesses."""
        self.cell = SHARED_CELL if name == "shared" else CELL
        self.writer, self.written, self.write_line = np.zeros((3, cells), np.int32)
        self.atomic_last = np.zeros(cells, bool)
        """Whether the last write was atomic."""
        self.read_at, self.read_line = np.zeros((2, warps, cells), np.int32)
        self.last_read = np.zeros(warps, np.int32)
        """Each warp's clock when it last read anything."""

    def set_regions(self, regions: list[tuple[int, int, int, str]]) -> None:
        """regions: (first address, end, number of a cell at address 0, which is a multiple of WIDEST, owner) of the
        memory that there is, sorted."""
        self.starts, self.ends, self.origins, self.owners = map(list, zip(*regions, strict=True))

    def locate(self, access: Access, what: str = "") -> Array:
        """The blocks of an access: cells that one lane accesses are one, and `blocks` gives what is known of them.
        what: under which name its bytes are counted, by the memory's owners.

        Fault for one outside of memory, and for a misaligned one."""
        address, size = access.address, access.size
        at = bisect_right(self.starts, int(address[0])) - 1
        if self.starts[at] <= np.minimum.reduce(address) and np.maximum.reduce(address) + size <= self.ends[at]:
            # all are in one region, as most are
            wrong, origin, regions = address & (size - 1), self.origins[at], {at: len(address)}
        else:
            each = np.searchsorted(self.starts, address, "right") - 1
            wrong = (address & (size - 1)) | (address + size > np.array(self.ends)[each])
            origin, regions = np.array(self.origins)[each], Counter(each.tolist())
        if np.count_nonzero(wrong):
            lane = int(np.argmax(wrong != 0))
            raise access.fault(f"is misaligned or outside of {self.name} memory: {size} at {address[lane]:#x}", lane)
        if what:
            for region, lanes in regions.items():
                access.cta.counts[f"{what}, {self.owners[region]}"] += size * lanes
        return (address + origin * self.cell) // max(size, self.cell)

    def blocks(self, array: Array, access: Access) -> Array:
        """What is known of the memory's cells, as rows of as many as one lane accesses."""
        return array.reshape(*array.shape[:-1], -1, max(1, access.size // self.cell))

    def place(self, access: Access) -> tuple[Array, Array]:
        """(rows of the memory's words, the numbers of those that are accessed)."""
        return self.units[access.size], (access.address - self.begin) // access.size

    def read(self, access: Access) -> Array:
        """The bytes (lanes, size); poison where the read races."""
        racy = self.note_read(access, self.locate(access, "read"))
        words, index = self.place(access)
        found = words[index].view(np.uint8)
        if racy is not None:
            found[np.repeat(racy, self.cell, 1)[:, : access.size]] = POISON
        return found

    def write(self, access: Access, data: Array) -> None:
        """Write bytes (lanes, size)."""
        self.note_write(access, self.locate(access, "written"))
        words, index = self.place(access)
        new = data.view(words.dtype)
        words[index] = new
        if np.count_nonzero(words[index] != new):
            access.report("race: lanes of one store write different values to one place")

    def unordered(self, access: Access, at: Array, what: str) -> Array | None:
        """The cells (lanes, n) of an access of these blocks that is not ordered after the last write; None if all are.
        The first is reported."""
        writer, written = (self.blocks(array, access)[at] for array in (self.writer, self.written))
        known = access.cta.known
        racy = known.take(writer + (access.rows * known.shape[1])[:, None]) < written
        if np.count_nonzero(racy) and what == "write":
            racy &= written != NOTHING
        if not np.count_nonzero(racy):
            return None
        lane, n = np.argwhere(racy)[0]
        kind = UNKNOWN.get(written[lane, n], "race: a {} of {} memory is not ordered after a write")
        line = self.blocks(self.write_line, access)[at[lane], n]
        access.report(kind.format(what, self.name), lane, writer[lane, n], line)
        return racy

    def note_read(self, access: Access, at: Array) -> Array | None:
        """Remember reads of blocks, and return which of their cells (lanes, n) race, if any."""
        racy = self.unordered(access, at, "read")
        own = access.cta.numbers[access.rows]
        clock, reader = access.cta.known[access.rows, own], own - self.first
        self.blocks(self.read_at, access)[reader, at] = clock[:, None]
        self.blocks(self.read_line, access)[reader, at] = access.line
        self.last_read[reader] = clock
        return racy

    def note_write(self, access: Access, at: Array) -> None:
        """Remember writes of blocks, and report those that race."""
        self.unordered(access, at, "write")
        known = access.cta.known[:, self.first : self.first + len(self.last_read)]
        readers = np.logical_or.reduce(self.last_read > known).nonzero()[0]  # of anything that some warp does not know
        if len(readers):
            late = self.blocks(self.read_at, access)[readers[:, None], at]  # (readers, lanes, n)
            late = late > known[access.rows][:, readers].T[:, :, None]
            if np.count_nonzero(late):
                number, lane, n = np.argwhere(late)[0]
                line = self.blocks(self.read_line, access)[readers[number], at[lane], n]
                kind = f"race: a write of {self.name} memory is not ordered after a read"
                access.report(kind, lane, self.first + readers[number], line)
        self.record(access, at, atomic=False)

    def record(self, access: Access, at: Array, atomic: bool) -> None:
        """Remember writes."""
        own = access.cta.numbers[access.rows]
        self.blocks(self.writer, access)[at] = own[:, None]
        self.blocks(self.written, access)[at] = access.cta.known[access.rows, own][:, None]
        self.blocks(self.write_line, access)[at] = access.line
        self.blocks(self.atomic_last, access)[at] = atomic


class GlobalMemory(Memory):
    """The storages that launches may reach, and what has been released at each address."""

    def __init__(self) -> None:
        super().__init__("global", HOST, FIRST_ADDRESS, WIDEST, 1)
        self.set_regions([(-1, 0, 0, "nobody")])
        self.storages: dict[int, tuple[int, int, torch.UntypedStorage]] = {}
        """The storages by their address: (end, number of a cell at address 0, storage)."""
        self.ranks: dict[int, int] = {}
        """The ranks by the address at which their memory begins; it ends where other memory begins."""
        self.cells = 0
        self.released: dict[int, list[tuple[set[str], tuple, Array, int]]] = {}
        """The releases that an acquire at an address sees: (scopes, place, clock, chain). scopes: the write's, and a
        fence's before it."""

    def add(self, *tensors: torch.Tensor, rank: int = 0) -> None:
        """Let kernels reach the tensors' storages. They are kept, so that no address comes to stand for another.

        rank: whose memory the tensors are."""
        news = False
        for tensor in tensors:
            news |= self.ranks.get(tensor.data_ptr()) != rank
            self.ranks[tensor.data_ptr()] = rank
            storage = tensor.untyped_storage()
            start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            if self.storages.get(start, (start,))[0] < end:
                origin = self.cells - start // CELL
                self.storages[start] = end, origin + -origin % WIDEST, storage
                self.cells += storage.nbytes() // CELL + WIDEST
                news = True
        if not news:
            return
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
        more = more[0], more[1] + -more[1] % WIDEST
        for name in ("writer", "written", "write_line", "atomic_last", "read_at", "read_line") * any(more):
            array = getattr(self, name)
            setattr(self, name, np.pad(array, [(0, size) for size in more[-array.ndim :]]))
        self.last_read = np.pad(self.last_read, (0, more[0]))

    def word(self, address: int, dtype: type) -> Array:
        """The one word at an address, which shows later writes."""
        size = np.dtype(dtype).itemsize
        return self.units[size][(address - self.begin) // size].view(dtype)

    def atomic(self, access: Access, operation: Atomic, values: list) -> Array:
        """An atomic access of one lane; returns what was there. It hands knowledge on as its order and scope say."""
        at, cta, row = self.locate(access), access.cta, access.rows[0]
        name, order, scope, dtype = operation
        word, releases = self.word(access.address[0], dtype), self.released.setdefault(int(access.address[0]), [])
        old, acquires = word[0], order in ("acquire", "acq_rel")
        for scopes, place, clock, chain in releases:
            for fence, learnt in {scope: cta.known}.items() if acquires else cta.observed.items():
                if reaches(scopes | {scope, fence}, place, cta.place):
                    known = learnt[row, : len(clock)]  # there were fewer warps at the time of an earlier launch
                    np.maximum(known, clock, out=known)
                    cta.chain = max(cta.chain, (chain + 1) * (not operation.is_posted))
        if not self.blocks(self.atomic_last, access)[at].all():
            self.note_read(access, at)
        if name == "ld":
            return old
        new = COMBINE[name](old, *values)
        if new != old:  # to write what was there would undo what another process writes meanwhile
            word[0] = new
        self.record(access, at, atomic=True)
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
        cells = (size // WIDEST + 1) * WIDEST
        super().__init__("shared", np.full(cells // 8, ~np.uint64(0)), 0, cells, warps, first)
        self.writer[:], self.written[:] = -1, NOTHING
        self.set_regions([(0, size, 0, "shared")])

    def begin_copy(self, access: Access) -> None:
        """The target of an asynchronous copy is poison until the copy ends."""
        at = self.locate(access)
        self.note_write(access, at)
        self.blocks(self.written, access)[at] = COPYING
        words, index = self.place(access)
        words[index] = ~words.dtype.type(0)

    def end_copy(self, access: Access, data: Array) -> None:
        """What a copy has brought is written by the warp that waits for it."""
        self.blocks(self.written, access)[self.locate(access)] = 0
        self.write(access, data)
