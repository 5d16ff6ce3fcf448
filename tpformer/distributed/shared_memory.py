"""Symmetric memory's backend `shared`, for CPU processes on one Linux machine.

Belongs here: whether a group can share memory, the mapping, peer addresses and views, signals and bounded waits. Slots
are in workspace.py, reductions in collectives.py. CUDA's backend, and the choice between the two, are in symmetric.py.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .sizes import PAGE, round_up

TIMEOUT_SECONDS = 600.0  # how long any operation waits for a peer unless the caller says otherwise
SEMAPHORE_BYTES = 64  # each has a cache line to itself; sem_t takes 32 bytes (glibc) or fewer
# A wait tries so often, for about 25 us, before it sleeps. On 2 cores that shortens a small operation of 2 ranks from
# 36 to 10 us, of 4 ranks from 62 to 56 us. With 400 tries 4 ranks take 109 us.
SPINS = 100
# Seconds. sem_timedwait follows the wall clock, which may jump, so a wait sleeps in pieces and counts monotonic time.
MAXIMUM_SLEEP = 1.0


class Timespec(ctypes.Structure):
    """C's struct timespec, which sem_timedwait takes."""

    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def load_semaphores() -> tuple[Any, Any, Any, Any] | None:
    """sem_init, sem_post, sem_trywait, sem_timedwait; None if the system lacks unnamed process-shared semaphores.

    They synchronise memory (POSIX 4.12), sleep in a futex and need no compiler. sem_timedwait can sleep, so it is
    called without the GIL (CDLL). The others take less time than a handover of the GIL and keep it (PyDLL).
    """
    if sys.platform != "linux":
        return None
    fast, blocking = ctypes.PyDLL(None), ctypes.CDLL(None)
    try:
        functions = fast.sem_init, fast.sem_post, fast.sem_trywait, blocking.sem_timedwait
    except AttributeError:
        return None
    fast.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    blocking.sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.POINTER(Timespec)]
    return functions


SEMAPHORES = load_semaphores()


def is_available() -> bool:
    """Whether this machine can run the `shared` backend (Linux with unnamed process-shared semaphores)."""
    return SEMAPHORES is not None


def host_key() -> tuple[str, ...]:
    """A key that is equal on two ranks if, and only if, they can map each other's memory.

    It holds the machine, its boot, the process namespace and the user.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return os.uname().nodename, boot, os.readlink("/proc/self/ns/pid"), str(os.getuid())


def torch_backend(group: dist.ProcessGroup, device_type: str) -> str:
    """The group's torch.distributed backend for that device: "gloo", "nccl", ..., or "none"."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return dict(pair if len(pair) == 2 else (device_type, pair[0]) for pair in pairs).get(device_type, "none")


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's small object, in rank order. No rank returns before all have called this."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def why_not_shared(group: dist.ProcessGroup) -> str | None:
    """Why the group's CPU tensors cannot go through shared memory, None if they can; the same on all ranks.

    Collective over the group if its CPU backend is gloo: one all-gather of a small object.
    """
    backend = torch_backend(group, "cpu")
    return why_not_one_host(group) if backend == "gloo" else f"the group's CPU backend is {backend}, not gloo"


def why_not_one_host(group: dist.ProcessGroup) -> str | None:
    """Why the group's ranks cannot map one another's memory, None if they can. Collective: as above."""
    keys = gather_objects(host_key() if is_available() else None, group)
    if None in keys:
        return f"rank {keys.index(None)} does not run Linux with POSIX semaphores"
    other = next((rank for rank, key in enumerate(keys) if key != keys[0]), None)
    if other is not None:
        return f"ranks 0 and {other} are not on one host: {keys[0]} and {keys[other]}"
    return None


class SharedMemory:
    """`nbytes` bytes for each rank of a CPU process group on one machine, mapped by all of them.

    Construction is collective over `group`: a broadcast and an all-gather of small objects. The memory starts as zeros.
    It is an anonymous file (memfd) that peers open through /proc. It has no name, so nothing is left behind however a
    rank ends, and the size of /dev/shm does not bound it. It costs `nbytes * ranks` bytes, reserved here.

    Attributes: rank, size (ranks), nbytes, timeout (seconds), pointers (int64 CPU tensor of shape (size,): the
    address of each rank's region in this process, 4096-byte aligned), copied_flags (None, see SymmetricMemory).
    Raises RuntimeError on every rank if one of them cannot reserve or map the memory.
    """

    def __init__(self, nbytes: int, group: dist.ProcessGroup, timeout: float = TIMEOUT_SECONDS) -> None:
        if SEMAPHORES is None:
            raise RuntimeError("shared symmetric memory needs Linux with POSIX semaphores: use the gloo backend here")
        self._initialize, self._post, self._trywait, self._timedwait = SEMAPHORES
        self.rank, self.size, self.timeout = group.rank(), group.size(), timeout
        self.copied_flags: str | None = None
        self.nbytes = round_up(nbytes, PAGE)
        self._header = round_up(self.size * self.size * SEMAPHORE_BYTES, PAGE)
        self.buffer = self._map(group)
        with torch.inference_mode(False):  # views made in inference mode could not be written outside of it
            self._bytes = torch.frombuffer(self.buffer, dtype=torch.uint8)
        base = self._bytes.data_ptr()
        addresses = [base + self.region_offset(rank) for rank in range(self.size)]
        self.pointers = torch.tensor(addresses, dtype=torch.int64, device="cpu")
        # One semaphore for each (receiver, sender), so that a fast peer's signal is not taken for a slow one's.
        self._outgoing = [ctypes.c_void_p(base + self._semaphore(peer, self.rank)) for peer in range(self.size)]
        self._incoming = [ctypes.c_void_p(base + self._semaphore(self.rank, peer)) for peer in range(self.size)]
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._waits = [0] * self.size
        self._failure: str | None = None
        self.look: Callable[[], None] = lambda: None
        """What a wait calls each MAXIMUM_SLEEP. It raises if there is no use in waiting on."""

    def _semaphore(self, receiver: int, sender: int) -> int:
        return (receiver * self.size + sender) * SEMAPHORE_BYTES

    def _map(self, group: dist.ProcessGroup) -> mmap.mmap:
        """Rank 0 creates the file and its semaphores, the others open it, and each reserves its own region."""
        total = self._header + self.nbytes * self.size
        first = dist.get_global_rank(group, 0)
        shared: list[Any] = [None]
        memory = descriptor = error = None
        if self.rank == 0:
            try:
                descriptor = os.memfd_create("tpformer")
                os.ftruncate(descriptor, total)
                memory = mmap.mmap(descriptor, total)
                self._initialize_semaphores(memory)
                shared = [f"/proc/{os.getpid()}/fd/{descriptor}"]
            except OSError as exception:
                shared = [exception]
        dist.broadcast_object_list(shared, src=first, group=group)
        try:
            if isinstance(shared[0], OSError):
                raise shared[0]
            if self.rank != 0:
                descriptor = os.open(shared[0], os.O_RDWR)
                memory = mmap.mmap(descriptor, total)
            assert descriptor is not None
            # If memory is short, this raises. Without it the first write would end the process by a SIGBUS.
            os.posix_fallocate(descriptor, self._header + self.rank * self.nbytes, self.nbytes)
        except OSError as exception:
            error = f"rank {self.rank}: {exception}"
        errors = gather_objects(error, group)  # all have mapped the file now: the descriptor can be closed
        if descriptor is not None:
            os.close(descriptor)
        if any(errors):
            raise RuntimeError(
                f"cannot share {total} bytes between {self.size} ranks ({'; '.join(filter(None, errors))}): "
                "free memory, use smaller microbatches, or use the gloo backend"
            )
        assert memory is not None
        return memory

    def _initialize_semaphores(self, memory: mmap.mmap) -> None:
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for index in range(self.size * self.size):
            self._initialize(base + index * SEMAPHORE_BYTES, 1, 0)

    def region_offset(self, rank: int) -> int:
        """The offset of rank's region in `buffer`, in bytes."""
        return self._header + rank * self.nbytes

    def peer(self, rank: int, shape: Sequence[int], dtype: torch.dtype, byte_offset: int = 0) -> torch.Tensor:
        """A contiguous view of `rank`'s region from `byte_offset` on; no communication.

        It stays valid after `close()`. Raises ValueError if it does not fit or is not aligned to the dtype.
        """
        nbytes = view_bytes(shape, dtype, byte_offset, self.nbytes)
        start = self.region_offset(rank) + byte_offset
        return self._bytes[start : start + nbytes].view(dtype).view(shape)

    def set_flag(self, rank: int, byte_offset: int, value: int, source: torch.Tensor) -> None:
        """SymmetricMemory.set_flag: a store, which x86 keeps behind earlier ones."""
        self.peer(rank, (1,), torch.int32, byte_offset).fill_(value)

    def signal(self, dst_rank: int) -> None:
        """Let one `wait` of dst_rank for this rank pass; after it, dst_rank sees all that this rank wrote before."""
        self._check()
        self._post(self._outgoing[dst_rank])

    def wait(self, src_rank: int, operation: str = "wait") -> None:
        """Consume one signal of src_rank, sleeping until it comes.

        Raises TimeoutError after `timeout` seconds. After that every wait raises RuntimeError: the memory is unusable,
        because a late signal would be taken for a later operation's.
        """
        self._check()
        self._wait(src_rank, operation)

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"this group's shared memory is unusable: {self._failure}")

    def _wait(self, src_rank: int, operation: str) -> None:
        semaphore = self._incoming[src_rank]
        for _ in range(SPINS):
            if self._trywait(semaphore) == 0:
                break
        else:
            self._sleep(src_rank, operation)
        self._waits[src_rank] += 1

    def _sleep(self, src_rank: int, operation: str) -> None:
        deadline = time.monotonic() + self.timeout
        while (left := deadline - time.monotonic()) > 0:
            until = time.time() + min(left, MAXIMUM_SLEEP)
            if self._timedwait(self._incoming[src_rank], Timespec(int(until), int(until % 1 * 1e9))) == 0:
                return  # otherwise: this piece of time is over, or a signal handler ran
            self.look()
        self._failure = (
            f"rank {self.rank} of {self.size} waited {self.timeout} s for rank {src_rank} in {operation} "
            f"(wait {self._waits[src_rank] + 1} for that rank)"
        )
        raise TimeoutError(
            f"{self._failure}: look at rank {src_rank}'s output; it died, hangs, or called its collectives in another "
            "order. If it was only slow, give the backend a longer timeout"
        )

    def exchange(self, operation: str = "barrier") -> None:
        """Signal every other rank, then wait for every other rank. All earlier writes are then visible to all."""
        self._check()
        for peer in self._peers:
            self._post(self._outgoing[peer])
        for peer in self._peers:
            self._wait(peer, operation)

    def barrier(self) -> None:
        """No rank returns before every rank of the group has called this."""
        self.exchange("barrier")

    def close(self) -> None:
        """Drop the mapping; its memory is freed when the last view of it is gone in the last rank. Not collective."""
        self._failure = "it was closed"
        del self._outgoing, self._incoming, self._bytes, self.buffer


def view_bytes(shape: Sequence[int], dtype: torch.dtype, byte_offset: int, region: int) -> int:
    """The bytes of a view of that shape and dtype.

    Raises ValueError if it does not fit a region of `region` bytes from byte_offset on, or is not aligned to the dtype.
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if byte_offset < 0 or byte_offset + nbytes > region:
        raise ValueError(f"{nbytes} bytes at offset {byte_offset} do not fit a region of {region} bytes")
    if byte_offset % dtype.itemsize:
        raise ValueError(f"byte offset {byte_offset} is not a multiple of {dtype.itemsize}, the size of {dtype}")
    return nbytes
