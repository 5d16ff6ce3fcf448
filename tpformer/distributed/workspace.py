"""Workspaces of CPU collectives: the shared memory through which one kind of collective of one group passes.

Belongs here: slots and their reuse, and growth. The arithmetic is in collectives.py, how ranks agree in calls.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .calls import Calls
from .shared_memory import SharedMemory
from .sizes import slot_bytes

CACHED_LAYOUTS = 512  # (shape, dtype) views kept per workspace; a training run has a few dozen


class Workspace:
    """Two slots for each rank, used in turn, in memory that grows to the next power of two.

    Two slots need no barrier. Operation k writes this rank's slot k % 2, signals all ranks, waits for all, and then
    reads all ranks' slots k % 2. A rank signals k + 1 only after it has finished k, reads included. So a rank that has
    passed the waits of k + 1 knows that all have finished reading k, and may write slot k % 2 again in operation k + 2.
    This needs every operation to wait for all ranks, and all ranks to run the same operations in the same order.

    Memory: 2 * ranks * slot bytes per machine; a slot is a power of two from 1 MiB that holds the operation's input.
    """

    def __init__(self, timeout: float, calls: Calls | None) -> None:
        self.timeout, self.calls = timeout, calls
        self.epoch = 0
        self.capacity = 0
        self.memory: SharedMemory | None = None
        self._call = 0
        self._slots: dict[tuple[int, int, torch.dtype, int], list[list[torch.Tensor]]] = {}

    def slots(self, group: dist.ProcessGroup, operation: str, x: torch.Tensor, parts: int) -> list[list[torch.Tensor]]:
        """Begin an operation on x: `slots[rank][part]`, flat views that split each rank's elements in parts.

        The parts are those of torch.tensor_split. Write to your own slot only, `exchange`, read, and `end`. An
        operation that does not come to its end, because of an exception, is the group's last one. Collective over
        `group` when the memory has to grow: the same call on all ranks.
        Raises RuntimeError if another rank has called another operation, or another thread is in one of the group's.
        """
        assert self.calls is not None
        self._call = self.calls.enter((operation, x.shape, x.dtype))
        nbytes = x.nbytes
        if nbytes > self.capacity or self.memory is None:
            self._grow(group, nbytes)
        self.epoch += 1
        key = (self.epoch & 1, x.numel(), x.dtype, parts)
        views = self._slots.get(key)
        return self._make_views(*key) if views is None else views

    def _make_views(self, parity: int, numel: int, dtype: torch.dtype, parts: int) -> list[list[torch.Tensor]]:
        assert self.memory is not None
        if len(self._slots) >= CACHED_LAYOUTS:
            self._slots.clear()
        offset = parity * self.capacity
        with torch.inference_mode(False):  # or the views could not be written outside of it
            slots = [self.memory.peer(rank, (numel,), dtype, offset) for rank in range(self.memory.size)]
            views = [list(slot.tensor_split(parts)) for slot in slots]
        self._slots[parity, numel, dtype, parts] = views
        return views

    def _grow(self, group: dist.ProcessGroup, nbytes: int) -> None:
        # No need to wait for peers first: the allocation is collective, and each rank drops only its own mapping.
        assert self.calls is not None
        self._slots.clear()
        self.capacity = slot_bytes(nbytes)
        self.calls.meet(self._call, self.timeout)
        self.memory = SharedMemory(2 * self.capacity, group, self.timeout)
        self.memory.look = self.calls.check

    def exchange(self, operation: str) -> None:
        """Publish this rank's slot and wait for all others.

        Raises RuntimeError if the ranks called different operations, shapes or dtypes, TimeoutError if one does not
        come.
        """
        assert self.memory is not None and self.calls is not None
        try:
            self.memory.exchange(operation)
        except TimeoutError as error:
            self.calls.fail(str(error))
            raise
        self.calls.compare(self._call)

    def end(self) -> None:
        """The operation has read what it needs."""
        assert self.calls is not None
        self.calls.leave()
