"""Memory, and the history of its accesses: who wrote and read each cell, and whether that happened before.

Belongs here: vector clocks and bounds. Every warp has a clock of its own, and knows of every other warp's clock. An
access is remembered as (warp, its clock). It happened before another one if the other one's warp knows that clock.
Barriers, a release that an acquire sees, and the order of launches in a stream hand knowledge on. There are no store
buffers: a read that is not ordered after its write is reported, and returns poison. Hence a race is found on every
schedule that takes the same branches, and shows in the results, too.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

CELL = 2  # bytes
FIRST_ADDRESS = 4096
ADDRESSES = 1 << 47
POISON = 0xFF
Array = NDArray


class Fault(RuntimeError):
    """What no execution can go on after: an access outside of memory, a hang."""


class Accessor(Protocol):
    """Warps of a CTA, as memory sees them."""

    known: Array
    """(warps of the CTA, all warps): the clocks that each knows of."""
    numbers: Array
    """The numbers of the CTA's warps among all."""
    place: tuple
    cta: Any

    def report(self, kind: str, line: int, row: int, other: int = -1, other_line: int = 0) -> None:
        """Report a conflict."""

    def where(self, line: int, row: int) -> str:
        """An instruction and the warp that executes it."""


class Host:
    """All of this process's memory as one array, whose elements need not exist."""

    def __init__(self, size: int) -> None:
        count = (ADDRESSES - FIRST_ADDRESS) // size
        self.__array_interface__ = {
            "data": (FIRST_ADDRESS, False), "shape": (count,), "typestr": f"<u{size}", "version": 3,
        }  # fmt: skip


HOST = {size: np.asarray(Host(size)) for size in (2, 4, 8)}


class History:
    """The last write of each cell, and each warp's last read of it. Warp 0 is the host: all know its clock."""

    def __init__(self, cells: int, warps: int, first: int = 0) -> None:
        """first: the number of the first of the `warps` that read here."""
        self.first = first
        self.writer = np.zeros(cells, np.int32)
        self.written = np.zeros(cells, np.int32)
        self.write_line = np.zeros(cells, np.int32)
        self.atomic = np.zeros(cells, bool)
        self.read = np.zeros((warps, cells), np.int32)
        self.read_line = np.zeros((warps, cells), np.int32)

    def grow(self, cells: int, warps: int) -> None:
        """Make room for more cells and warps."""
        have_warps, have_cells = self.read.shape
        if cells > have_cells or warps > have_warps:
            cells = have_cells if cells <= have_cells else max(cells, 2 * have_cells)
            larger = History(cells, max(warps, have_warps))
            for name in ("writer", "written", "write_line", "atomic"):
                getattr(larger, name)[:have_cells] = getattr(self, name)
            larger.read[:have_warps, :have_cells] = self.read
            larger.read_line[:have_warps, :have_cells] = self.read_line
            self.__dict__.update(larger.__dict__)

    def reads(self, w: Accessor, cells: Array, rows: Array, line: int, what: str) -> Array | None:
        """Record reads of cells (lanes, n) by warps `rows` (lanes,), and return which ones race; None if none does."""
        writer = self.writer[cells]
        racy = w.known[rows[:, None], writer] < self.written[cells]
        found = bool(racy.any())
        if found:
            at = np.argwhere(racy)[0]
            cell = cells[tuple(at)]
            w.report(f"race: a read of {what} memory is not ordered after the write", line, int(rows[at[0]]),
                     int(writer[tuple(at)]), int(self.write_line[cell]))  # fmt: skip
        own = w.numbers[rows]
        self.read[own[:, None] - self.first, cells] = w.known[rows, own][:, None]
        self.read_line[own[:, None] - self.first, cells] = line
        return racy if found else None

    def writes(self, w: Accessor, cells: Array, rows: Array, line: int, what: str) -> None:
        """Record writes of cells (lanes, n) by warps `rows` (lanes,), and report those that race."""
        writer = self.writer[cells]
        racy = w.known[rows[:, None], writer] < self.written[cells]
        if racy.any():
            at = tuple(np.argwhere(racy)[0])
            w.report(f"race: a write of {what} memory is not ordered after another write", line, int(rows[at[0]]),
                     int(writer[at]), int(self.write_line[cells[at]]))  # fmt: skip
        read = self.read[:, cells]  # (warps, lanes, n)
        late = read > w.known[rows, self.first : self.first + len(read)].T[:, :, None]
        if late.any():
            reader, lane, n = np.argwhere(late)[0]
            w.report(f"race: a write of {what} memory is not ordered after a read", line, int(rows[lane]),
                     self.first + int(reader), int(self.read_line[reader, cells[lane, n]]))  # fmt: skip
        self.record(w, cells, rows, line, atomic=False)

    def record(self, w: Accessor, cells: Array, rows: Array, line: int, atomic: bool) -> None:
        """Remember a write."""
        own = w.numbers[rows]
        self.writer[cells] = own[:, None]
        self.written[cells] = w.known[rows, own][:, None]
        self.write_line[cells] = line
        self.atomic[cells] = atomic


class GlobalMemory:
    """The storages that launches may reach, their history, and what has been released at each address."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[int, int, torch.UntypedStorage]] = {}
        self.starts = self.ends = self.offsets = np.zeros(0, np.int64)
        self.ranks: dict[int, int] = {}
        """By the address where a rank's memory begins; it ends where other memory begins."""
        self.bounds = self.owner = np.zeros(0, np.int64)
        self.cells = 0
        self.history = History(1, 1)
        self.released: dict[int, list[tuple[str, tuple, Array, int]]] = {}
        """By address: (scope, place, clock, chain) of releases that an acquire there sees."""

    def add(self, *tensors: torch.Tensor, rank: int) -> None:
        """Let kernels reach the tensors' storages. They are kept, so that no address comes to stand for another.

        rank: whose memory the tensors are."""
        for tensor in tensors:
            self.ranks[tensor.data_ptr()] = rank
            storage = tensor.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            if size and self.storages.get(start, (0, 0, None))[1] < size:
                self.storages[start] = (self.cells, size, storage)
                self.cells += size // CELL + 1
        order = sorted(self.storages)
        self.starts = np.array(order, np.int64)
        self.ends = np.array([start + self.storages[start][1] for start in order], np.int64)
        self.offsets = np.array([self.storages[start][0] for start in order], np.int64)
        self.bounds = np.array(sorted(self.ranks), np.int64)
        self.owner = np.array([self.ranks[start] for start in sorted(self.ranks)])

    def owners(self, address: Array) -> Array:
        """The ranks whose memory lies at addresses."""
        return self.owner[np.searchsorted(self.bounds, address, "right") - 1]

    def locate(self, w: Accessor, address: Array, size: int, rows: Array, line: int) -> Array:
        """The cells (lanes, n) of accesses. Fault for one outside of every storage, and for a misaligned one."""
        if (address % size).any():
            lane = int(np.argmax(address % size))
            raise Fault(f"{w.where(line, int(rows[lane]))} is misaligned: {address[lane]:#x} for {size} bytes")
        at = np.searchsorted(self.starts, address, "right") - 1
        outside = (at < 0) | (address + size > self.ends[at])
        if outside.any():
            lane = int(np.argmax(outside))
            raise Fault(f"{w.where(line, int(rows[lane]))}: {size} bytes at {address[lane]:#x} are outside of memory")
        first = self.offsets[at] + (address - self.starts[at]) // CELL
        return first[:, None] + np.arange(size // CELL)

    def read(self, w: Accessor, address: Array, size: int, rows: Array, line: int) -> Array:
        """The bytes (lanes, size) at addresses; poison where the read races."""
        racy = self.history.reads(w, self.locate(w, address, size, rows, line), rows, line, "global")
        unit = min(size, 8)
        found = HOST[unit][((address - FIRST_ADDRESS) // unit)[:, None] + np.arange(size // unit)].view(np.uint8)
        if racy is not None:
            found[np.repeat(racy, CELL, 1)] = POISON
        return found

    def write(self, w: Accessor, address: Array, data: Array, rows: Array, line: int) -> None:
        """Write bytes (lanes, size)."""
        size = data.shape[1]
        self.history.writes(w, self.locate(w, address, size, rows, line), rows, line, "global")
        unit = min(size, 8)
        where = ((address - FIRST_ADDRESS) // unit)[:, None] + np.arange(size // unit)
        HOST[unit][where] = data.view(f"u{unit}")

    def atomic(
        self,
        w: Accessor,
        operation: str,
        order: str,
        scope: str,
        dtype: type,
        address: int,
        values: list,
        row: int,
        line: int,
    ) -> Array:
        """One atomic access by one thread; returns what was there. It hands knowledge on as its order and scope say."""
        size, rows = np.dtype(dtype).itemsize, np.array([row])
        cells = self.locate(w, np.array([address]), size, rows, line)
        index = (address - FIRST_ADDRESS) // size
        old = HOST[size][index : index + 1].view(dtype)[0]
        releases = self.released.setdefault(address, [])
        if order in ("acquire", "acq_rel"):
            for released_scope, place, clock, chain in releases:
                if reaches(released_scope, place, scope, w.place):
                    w.cta.chain = max(w.cta.chain, chain + 1)
                    known = w.known[row, : len(clock)]  # there were fewer warps at the time of an earlier launch
                    np.maximum(known, clock, out=known)
        if not self.history.atomic[cells].all():
            self.history.reads(w, cells, rows, line, "global")
        if operation == "ld":
            return old
        if operation == "st":
            releases.clear()
        HOST[size][index] = np.array(combine(operation, old, values), dtype).view(f"u{size}")
        self.history.record(w, cells, rows, line, atomic=True)
        if order in ("release", "acq_rel"):
            releases.append((scope, w.place, w.known[row].copy(), w.cta.chain))
            w.known[row, w.numbers[row]] += 1
        return old


def reaches(released: str, place: tuple, scope: str, own: tuple) -> bool:
    """Whether a release of one scope and an acquire of another, by CTAs (rank, column, program), are in both scopes."""
    if released == scope == "sys":
        return True
    return place == own if "cta" in (released, scope) else place[:2] == own[:2]


def combine(operation: str, old: Array, values: list) -> Array:
    """What an atomic leaves."""
    if operation == "cas":
        return values[1] if old == values[0] else old
    (value,) = values
    return {
        "st": value, "exch": value, "add": old + value, "min": min(old, value), "max": max(old, value),
        "and": old & value, "or": old | value,
    }[operation]  # fmt: skip


class SharedMemory:
    """The shared memory of one CTA. What nothing has written is poison."""

    def __init__(self, size: int, warps: int, first: int) -> None:
        self.bytes = np.full(size, POISON, np.uint8)
        self.history = History(size // CELL + 1, warps, first)
        self.pending = np.zeros(size // CELL + 1, bool)
        """Cells whose asynchronous copy has begun and has not been waited for."""
        self.defined = np.zeros(size // CELL + 1, bool)

    def locate(self, w: Accessor, address: Array, size: int, rows: Array, line: int) -> tuple[Array, Array]:
        """The cells (lanes, n) and the bytes (lanes, size) of accesses. Fault for one outside, or misaligned."""
        if size % CELL:
            raise Fault(f"{w.where(line, int(rows[0]))}: the executor has no accesses of {size} bytes to shared memory")
        if int(address.max()) + size > len(self.bytes) or (address % size).any():
            raise Fault(
                f"{w.where(line, int(rows[0]))} is outside of {len(self.bytes)} bytes of shared memory, or misaligned"
            )
        return address[:, None] // CELL + np.arange(size // CELL), address[:, None] + np.arange(size)

    def read(self, w: Accessor, address: Array, size: int, rows: Array, line: int) -> Array:
        """The bytes (lanes, size) at addresses; poison where the read races."""
        cells, where = self.locate(w, address, size, rows, line)
        if self.pending[cells].any():
            w.report("race: a read of shared memory before wait_group, where a copy is under way", line, int(rows[0]))
        elif not self.defined[cells].all():
            w.report("a read of shared memory that nothing has written", line, int(rows[0]))
        racy = self.history.reads(w, cells, rows, line, "shared")
        found = self.bytes[where]
        if racy is not None:
            found[np.repeat(racy, CELL, 1)] = POISON
        return found

    def write(self, w: Accessor, address: Array, data: Array, rows: Array, line: int) -> None:
        """Write bytes (lanes, size)."""
        cells, where = self.locate(w, address, data.shape[1], rows, line)
        if self.pending[cells].any():
            w.report("race: a write of shared memory over a copy that is under way", line, int(rows[0]))
        self.history.writes(w, cells, rows, line, "shared")
        self.bytes[where] = data
        self.defined[cells] = True
        if not np.array_equal(self.bytes[where], data):
            w.report("race: lanes of one store write different values to one place", line, int(rows[0]))

    def begin_copy(self, w: Accessor, address: Array, size: int, rows: Array, line: int) -> None:
        """The target of an asynchronous copy is poison until the copy ends."""
        self.write(w, address, np.full((len(address), size), POISON, np.uint8), rows, line)
        self.pending[self.locate(w, address, size, rows, line)[0]] = True

    def end_copy(self, w: Accessor, address: Array, data: Array, rows: Array, line: int) -> None:
        """What a copy has brought is written by the warp that waits for it."""
        self.pending[self.locate(w, address, data.shape[1], rows, line)[0]] = False
        self.write(w, address, data, rows, line)
