"""Symmetric memory: one region per rank of a group, which every rank of the group can address.

Belongs here: what both backends offer, the choice between them, and the backend `torch` (CUDA devices of one host).
Private names of torch's symmetric memory are in this file only. The backend `shared` is in shared_memory.py.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from .shared_memory import (
    TIMEOUT_SECONDS,
    SharedMemory,
    gather_objects,
    host_key,
    torch_backend,
    view_bytes,
    why_not_shared,
)
from .sizes import PAGE, round_up

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's variable: several ranks may share one device
PRIVATE_MODULE = "torch.distributed._symmetric_memory"
CAPABILITY = (8, 0)  # the kernels need it for system-scope release and acquire on flags, and for their tile sizes


Writer = Callable[[torch.Tensor, int, int], object]
"""(words, index, value): what stream_writer finds."""


class SymmetricMemory(Protocol):
    """What a workspace needs of either backend. Construction is collective over the group; the memory starts as zeros.

    rank and size are the group's, nbytes is that of one region, pointers (int64 CPU tensor of shape (size,)) holds
    the address of each rank's region in this process.
    """

    rank: int
    size: int
    nbytes: int
    timeout: float
    pointers: torch.Tensor
    copied_flags: str | None
    """Why `set_flag` is a copy behind copies, which are in order for the stream alone; None if its order holds for all
    who see the flag."""

    def peer(self, rank: int, shape: Sequence[int], dtype: torch.dtype, byte_offset: int = 0) -> torch.Tensor:
        """A contiguous view of rank's region. A copy into it is how a copy engine sends."""

    def set_flag(self, rank: int, byte_offset: int, value: int, source: torch.Tensor) -> None:
        """Store an int32 into rank's region when the current stream has come so far.

        Whoever sees it sees what the stream has copied before. source: of one element, which has the value until then.
        """

    def barrier(self) -> None:
        """No rank returns before every rank has called this, with all its earlier work on the memory finished."""

    def close(self) -> None:
        """Drop this process's mapping. Not collective."""


def allocate(
    nbytes: int, group: dist.ProcessGroup, device: torch.device, timeout: float = TIMEOUT_SECONDS
) -> SymmetricMemory:
    """`nbytes` of zeros per rank, by the backend that serves the device; collective over the group.

    Raises RuntimeError on every rank if one of them cannot. Ask `why_not_symmetric` first.
    """
    if device.type == "cuda":
        return TorchSymmetricMemory(nbytes, group, device, timeout)
    return SharedMemory(nbytes, group, timeout)


class TorchSymmetricMemory:
    """`nbytes` bytes of device memory for each rank of a group on one host, through torch's symmetric memory.

    Every rank maps every region (CUDA virtual memory), so kernels store to peers over NVLink and plain copies to a
    peer's view run on the copy engine. It costs `nbytes`, rounded up to 2 MiB, on each device. It has SharedMemory's
    interface without the signals: here kernels read flags themselves, and set them, but for those of copies.
    Raises RuntimeError on every rank if one of them cannot allocate.
    """

    def __init__(
        self, nbytes: int, group: dist.ProcessGroup, device: torch.device, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        self.rank, self.size, self.timeout = group.rank(), group.size(), timeout
        self.nbytes, self.device = round_up(nbytes, PAGE), device
        self._group = weakref.ref(group)  # the group's registry entry owns this object, so a reference would be a cycle
        with torch.cuda.device(device), torch.inference_mode(False):
            own = self._allocate()
            self._handle = rendezvous(own, group)
            offsets = gather_objects(own.data_ptr() - self._handle.buffer_ptrs[self.rank], group)
            starts = [base + offset for base, offset in zip(self._handle.buffer_ptrs, offsets, strict=True)]
            self._regions = [self._view(rank, offset) for rank, offset in enumerate(offsets)]
        self._regions[self.rank] = own
        self._words = [region.view(torch.uint32) for region in self._regions]
        self.pointers = torch.tensor(starts, dtype=torch.int64, device="cpu")
        for region, start in zip(self._regions, starts, strict=True):
            if region.data_ptr() != start:
                raise RuntimeError(
                    f"torch {torch.__version__} places a peer's view at {region.data_ptr():#x}, its address table says "
                    f"{start:#x}: its symmetric memory has changed, use a torch release that tpformer was tested with"
                )
        self._write = stream_writer()
        self.copied_flags = self._why_copied_flags()
        self.barrier()

    def _allocate(self) -> torch.Tensor:
        """This rank's region, zeroed. If one rank fails, all raise, so that none waits for it."""
        own = error = None
        try:
            own = empty_symmetric(self.nbytes, self.device).zero_()
            torch.cuda.synchronize(self.device)
        except RuntimeError as exception:
            error = f"rank {self.rank}: {exception}"
        group = self._group()
        assert group is not None
        errors = [text for text in gather_objects(error, group) if text is not None]
        if errors:
            raise RuntimeError(
                f"cannot allocate {self.nbytes} bytes of symmetric memory on each of {self.size} ranks "
                f"({'; '.join(errors)}): free device memory, or use smaller microbatches"
            )
        assert own is not None
        return own

    def _view(self, rank: int, offset: int) -> torch.Tensor:
        return self._handle.get_buffer(rank, (self.nbytes,), torch.uint8, offset)

    def peer(self, rank: int, shape: Sequence[int], dtype: torch.dtype, byte_offset: int = 0) -> torch.Tensor:
        """A contiguous view of `rank`'s region from `byte_offset` on, on this rank's device; no communication.

        Valid until `close()`. Raises ValueError if it does not fit or is not aligned to the dtype.
        """
        nbytes = view_bytes(shape, dtype, byte_offset, self.nbytes)
        return self._regions[rank][byte_offset : byte_offset + nbytes].view(dtype).view(shape)

    def _why_copied_flags(self) -> str | None:
        """Why flags have to be copies; None once a stream of every rank has written a word to each peer."""
        group, problem = self._group(), None
        assert group is not None
        try:
            if self._write is None:
                raise RuntimeError("it does not exist")
            for words in self._words:
                self._write(words, self.rank, self.rank + 1)
        except RuntimeError as error:
            problem = str(error)
        torch.cuda.synchronize(self.device)
        problems = gather_objects(problem, group)
        came = self._words[self.rank][: self.size].view(torch.int32)
        if problems == [None] * self.size:
            wrong = came.tolist() != [rank + 1 for rank in range(self.size)]
            problem = f"the words of ranks 0 to {self.size - 1} came as {came.tolist()}" if wrong else None
            problems = gather_objects(problem, group)
        came.zero_()
        found = next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None), None)
        return None if found is None else f"torch {torch.__version__}'s stream_write_value32 cannot set them: {found}"

    def set_flag(self, rank: int, byte_offset: int, value: int, source: torch.Tensor) -> None:
        """SymmetricMemory.set_flag: a write by the stream, behind a fence of the system; else a copy of source."""
        if self.copied_flags is None:
            assert self._write is not None
            self._write(self._words[rank], byte_offset // 4, value % 2**32)
        else:
            self.peer(rank, (1,), torch.int32, byte_offset).copy_(source, non_blocking=True)

    def barrier(self) -> None:
        """Finish this device's work, then meet all ranks on the host. Not for use under capture."""
        torch.cuda.synchronize(self.device)
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of this symmetric memory is gone")
        gather_objects(None, group)

    def close(self) -> None:
        """Drop the mappings; the memory is freed when the last rank has dropped it. Not collective."""
        self._regions.clear()
        self._words.clear()
        self._handle = None


def empty_symmetric(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised bytes that `rendezvous` accepts.

    They come from torch's allocator itself, if it can be reached (in 2.11 and 2.13 it can). `symm_mem.empty` takes them
    from a memory pool, which would keep a workspace's old memory after the workspace has grown.
    """
    backend = importlib.import_module(PRIVATE_MODULE)
    allocator = getattr(getattr(backend, "_SymmetricMemory", None), "empty_strided_p2p", None)
    if allocator is not None:
        return allocator((nbytes,), (1,), torch.uint8, device)
    return backend.empty(nbytes, dtype=torch.uint8, device=device)


def stream_writer() -> Writer | None:
    """torch's operation (words, index, value): the current stream stores a 32-bit word of a flat uint32 tensor.

    A fence of the whole system comes first (CUDA's cuStreamWriteValue32), so whoever sees the word sees all that the
    stream has done. None if torch has no such operation; 2.11 and 2.13 have it.
    """
    backend = importlib.import_module(PRIVATE_MODULE)
    return getattr(getattr(backend, "_SymmetricMemory", None), "stream_write_value32", None)


def rendezvous(own: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """torch's handle on all ranks' regions. Its buffer_ptrs and get_buffer count from each allocation's start."""
    return importlib.import_module(PRIVATE_MODULE).rendezvous(own, group)


class DeviceFacts(NamedTuple):
    """What a rank says of itself before CUDA symmetric memory is tried."""

    problem: str | None
    host: tuple[str, ...]
    ordinal: int
    uuid: str
    name: str
    capability: tuple[int, int]
    overlapping: bool


def why_not_symmetric(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why `allocate` cannot serve the group on this device, None if it can. All ranks get the same answer.

    Collective over the group: one (CPU) or two (CUDA) all-gathers of small objects. groups.why_no_kernels keeps the
    answer.
    """
    if device.type == "cpu":
        return why_not_shared(group)
    if device.type != "cuda":
        return f"symmetric memory exists for CPU and CUDA devices, not for {device.type}"
    if torch_backend(group, "cuda") == "fake":
        return "the group's backend is fake: it has no peers"
    facts = [DeviceFacts(*values) for values in gather_objects(device_facts(device), group)]
    reason = why_not_together(facts)
    if reason is not None:
        return reason
    reasons = gather_objects(why_not_peers(facts, group.rank()), group)
    return next((text for text in reasons if text is not None), None)


def device_facts(device: torch.device) -> tuple:
    """DeviceFacts of this rank, as a plain tuple that travels between ranks."""
    problem = None
    if sys.platform != "linux":
        return (f"its platform is {sys.platform}, not Linux", (), 0, "", "", (0, 0), False)
    if importlib.util.find_spec(PRIVATE_MODULE) is None:
        problem = f"torch {torch.__version__} has no {PRIVATE_MODULE}: install torch 2.13 or later"
    properties = torch.cuda.get_device_properties(device)
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    capability = (properties.major, properties.minor)
    overlapping = os.environ.get(OVERLAPPING) == "1"
    return problem, host_key(), ordinal, str(properties.uuid), properties.name, capability, overlapping


def why_not_together(facts: Sequence[DeviceFacts]) -> str | None:
    """Why these ranks cannot share memory, so far as their facts tell every rank; None if nothing speaks against it."""
    for rank, fact in enumerate(facts):
        if fact.problem is not None:
            return f"rank {rank}: {fact.problem}"
        if fact.capability < CAPABILITY:
            return (
                f"rank {rank}'s device {fact.ordinal} ({fact.name}) has compute capability {fact.capability[0]}."
                f"{fact.capability[1]}, the kernels need {CAPABILITY[0]}.{CAPABILITY[1]}: use another transport"
            )
        if fact.host != facts[0].host:
            return (
                f"ranks 0 and {rank} are not on one host ({facts[0].host} and {fact.host}): keep a tensor-parallel "
                "group within one node"
            )
    for rank, fact in enumerate(facts):
        first = next(other for other, seen in enumerate(facts) if seen.ordinal == fact.ordinal)
        if first == rank or (fact.overlapping and facts[first].overlapping):
            continue
        if facts[first].uuid == fact.uuid:
            return (
                f"ranks {first} and {rank} use one device (index {fact.ordinal}, {fact.name}): give each rank its own "
                f"by torch.cuda.set_device(LOCAL_RANK), or set {OVERLAPPING}=1 to test several ranks on one device"
            )
        return (
            f"ranks {first} and {rank} both call their device cuda:{fact.ordinal}, though they are two: let every rank "
            "see all devices (no CUDA_VISIBLE_DEVICES per rank) and choose by torch.cuda.set_device(LOCAL_RANK)"
        )
    return None


def why_not_peers(facts: Sequence[DeviceFacts], rank: int) -> str | None:
    """Why this rank's device cannot reach a peer's memory, which only this rank can find out; None if it can."""
    mine, visible = facts[rank], torch.cuda.device_count()
    for peer, fact in enumerate(facts):
        if fact.uuid == mine.uuid:
            continue
        if fact.ordinal >= visible:
            return (
                f"rank {rank} sees {visible} CUDA devices, rank {peer} uses cuda:{fact.ordinal}: let every rank see "
                "all devices (no CUDA_VISIBLE_DEVICES per rank)"
            )
        if not torch.cuda.can_device_access_peer(mine.ordinal, fact.ordinal):
            return (
                f"cuda:{mine.ordinal} (rank {rank}) cannot access the memory of cuda:{fact.ordinal} (rank {peer}): "
                "peer access needs NVLink or one PCIe root, see `nvidia-smi topo -p2p r`; use another transport"
            )
    return None
