"""Workspaces of CPU collectives: the shared memory through which one kind of collective of one group passes.

Belongs here: slots and their reuse, growth, and the check that ranks agree. The arithmetic is in collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.distributed as dist

from .shared_memory import SharedMemory
from .sizes import PAGE, slot_bytes

HEADER = PAGE  # bytes at the start of each region; it holds one agreement word per parity
CACHED_LAYOUTS = 512  # (shape, dtype) views kept per workspace; a training run has a few dozen


class Collective(IntEnum):
    """What an exchange belongs to; two bits of the word by which ranks check that they agree."""

    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE_SUM = 2
    ALL_REDUCE_MAX = 3

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.name.lower()


class Workspace:
    """Two slots for each rank, used in turn, in memory that grows to the next power of two.

    Two slots need no barrier. Operation k writes this rank's slot k % 2, signals all ranks, waits for all, and then
    reads all ranks' slots k % 2. A rank signals k + 1 only after it has finished k, reads included. So a rank that has
    passed the waits of k + 1 knows that all have finished reading k, and may write slot k % 2 again in operation k + 2.
    This needs every operation to wait for all ranks, and all ranks to run the same operations in the same order.

    Memory: 2 * ranks * slot bytes per machine; a slot is a power of two from 1 MiB that holds the operation's input.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.epoch = 0
        self.capacity = 0
        self.memory: SharedMemory | None = None
        self._slots: dict[tuple[int, int, torch.dtype, int], list[list[torch.Tensor]]] = {}

    def slots(self, group: dist.ProcessGroup, numel: int, dtype: torch.dtype, parts: int) -> list[list[torch.Tensor]]:
        """Begin an operation: `slots[rank][part]`, flat views that split each rank's `numel` elements in parts.

        The parts are those of torch.tensor_split. Write to your own slot only. Collective over `group` when the
        memory has to grow: the same call on all ranks.
        """
        nbytes = numel * dtype.itemsize
        if nbytes > self.capacity or self.memory is None:
            self._grow(group, nbytes)
        self.epoch += 1
        key = (self.epoch & 1, numel, dtype, parts)
        views = self._slots.get(key)
        return self._make_views(*key) if views is None else views

    def _make_views(self, parity: int, numel: int, dtype: torch.dtype, parts: int) -> list[list[torch.Tensor]]:
        assert self.memory is not None
        if len(self._slots) >= CACHED_LAYOUTS:
            self._slots.clear()
        offset = HEADER + parity * self.capacity
        with torch.inference_mode(False):  # or the views could not be written outside of it
            slots = [self.memory.peer(rank, (numel,), dtype, offset) for rank in range(self.memory.size)]
            views = [list(slot.tensor_split(parts)) for slot in slots]
        self._slots[parity, numel, dtype, parts] = views
        return views

    def _grow(self, group: dist.ProcessGroup, nbytes: int) -> None:
        # No need to wait for peers first: the allocation is collective, and each rank drops only its own mapping.
        self._slots.clear()
        self.capacity = slot_bytes(nbytes)
        self.memory = SharedMemory(HEADER + 2 * self.capacity, group, self.timeout)
        words = memoryview(self.memory.buffer).cast("q")
        starts = [self.memory.region_offset(rank) // 8 for rank in range(self.memory.size)]
        self._words, self._starts = words, starts

    def exchange(self, collective: Collective, nbytes: int) -> None:
        """Publish this rank's slot and wait for all others; nbytes: of each rank's input.

        Raises RuntimeError if the ranks called different operations or sizes, TimeoutError if one does not come.
        """
        assert self.memory is not None
        parity, word = self.epoch & 1, nbytes << 2 | collective
        words, starts = self._words, self._starts
        words[starts[self.memory.rank] + parity] = word
        self.memory.exchange(collective.label)
        for start in starts:
            if words[start + parity] != word:
                self._disagree([words[start + parity] for start in starts])

    def _disagree(self, seen: Sequence[int]) -> None:
        calls = [f"rank {rank}: {Collective(word & 3).label} of {word >> 2} bytes" for rank, word in enumerate(seen)]
        reason = "the ranks called different collectives: " + ", ".join(calls)
        assert self.memory is not None
        self.memory.fail(reason)
        raise RuntimeError(f"{reason}; every rank must call the same ones, in the same order, with equal shapes")
