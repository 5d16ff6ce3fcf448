"""Symmetric memory has the right addresses, signals and bounded waits, leaves nothing behind, and says when it cannot
serve. Shared memory, and torch's for CUDA: over shared memory in its place, with the flags of copies, and on a GPU.
"""

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from testing import on_every_rank

from tpformer.distributed import backend_of, groups, shared_memory, symmetric
from tpformer.distributed.groups import kernel_workspace, why_copied_flags, why_no_kernels
from tpformer.distributed.shared_memory import SharedMemory
from tpformer.distributed.symmetric import DeviceFacts, TorchSymmetricMemory, why_not_peers, why_not_together

pytestmark = pytest.mark.skipif(not shared_memory.is_available(), reason="needs Linux with POSIX semaphores")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
FACTS = DeviceFacts(None, ("node", "boot"), 0, "uuid-0", "H100", (9, 0), False)


def every_rank_sees_every_region(memory: SharedMemory | TorchSymmetricMemory) -> None:
    """Zeros at first, then what its owner writes, and what each peer writes at a place of its own."""
    assert memory.pointers.dtype == torch.int64 and memory.pointers.shape == (memory.size,)
    assert not memory.peer(memory.rank, (memory.nbytes,), torch.uint8).any()
    memory.barrier()
    for dtype in DTYPES:
        memory.peer(memory.rank, (3, 5), dtype, 64).fill_(memory.rank + 1)
        for rank in range(memory.size):
            memory.peer(rank, (1,), dtype, 512 + 8 * memory.rank).fill_(memory.rank + 1)
        memory.barrier()
        for rank in range(memory.size):
            view = memory.peer(rank, (3, 5), dtype, 64)
            assert view.data_ptr() == memory.pointers[rank].item() + 64
            assert torch.equal(view.cpu(), torch.full((3, 5), rank + 1, dtype=dtype))
            if view.is_cpu:
                addressed = (ctypes.c_uint8 * (15 * dtype.itemsize)).from_address(memory.pointers[rank].item() + 64)
                assert list(addressed) == view.view(torch.uint8).flatten().tolist()
            assert memory.peer(memory.rank, (1,), dtype, 512 + 8 * rank).item() == rank + 1
        memory.barrier()


@on_every_rank(1, 2, 3)
def test_shared_memory_is_seen_by_all() -> None:
    memory = SharedMemory(1000, dist.group.WORLD, timeout=10)
    assert memory.nbytes == 4096
    every_rank_sees_every_region(memory)
    for words, place in {
        "4100 bytes at offset 0 do not fit a region of 4096 bytes": ((1025,), torch.float32, 0),
        "4 bytes at offset 4096 do not fit a region of 4096 bytes": ((1,), torch.float32, 4096),
        "byte offset 4 is not a multiple of 8, the size of torch.int64": ((1,), torch.int64, 4),
    }.items():
        with pytest.raises(ValueError, match=f"^{words}$"):
            memory.peer(0, *place)


@on_every_rank(3)
def test_a_signal_comes_after_what_was_written() -> None:
    """Each rank pushes to its right neighbour. Semaphores count, so rounds need no reset."""
    rounds = 4
    memory = SharedMemory(8 * rounds, dist.group.WORLD, timeout=10)
    right, left = (memory.rank + 1) % memory.size, (memory.rank - 1) % memory.size
    for index in range(rounds):
        memory.peer(right, (1,), torch.float64, 8 * index).fill_(float(100 * memory.rank + index))
        memory.signal(right)
    for _ in range(rounds):
        memory.wait(left)
    got = memory.peer(memory.rank, (rounds,), torch.float64).tolist()
    assert got == [100.0 * left + index for index in range(rounds)]


@on_every_rank(2)
def test_waiting_sleeps() -> None:
    """Rank 1 comes when it sees that rank 0 sleeps, which has tried some times before."""
    memory = SharedMemory(4096, dist.group.WORLD, timeout=10)
    sleeps = memory.peer(0, (1,), torch.int64)
    memory.barrier()
    tries, try_wait, sleep = [], memory._trywait, memory._timedwait
    memory._trywait = lambda semaphore: tries.append(semaphore) or try_wait(semaphore)
    memory._timedwait = lambda *arguments: sleeps.fill_(1) and sleep(*arguments)
    while memory.rank == 1 and not sleeps:
        time.sleep(1e-3)
    memory.barrier()
    assert memory.rank == 1 or len(tries) == shared_memory.SPINS


@on_every_rank(2)
def test_a_peer_that_does_not_come_is_named() -> None:
    """And the next operation does not wait again."""
    memory = SharedMemory(4096, dist.group.WORLD, timeout=0.5)
    memory.barrier()
    waited = r"rank 0 of 2 waited 0.5 s for rank 1 in all_gather \(wait 2 for that rank\)"
    if memory.rank == 0:
        with pytest.raises(TimeoutError, match=f"{waited}: look at rank 1's output"):
            memory.exchange("all_gather")
        with pytest.raises(RuntimeError, match=f"this group's shared memory is unusable: {waited}"):
            memory.exchange("all_gather")
    dist.barrier()


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:tpformer" in line for line in file)


@on_every_rank(2)
def test_close_frees_descriptors_and_mappings() -> None:
    """Memory is a file without a name, so a rank that is killed leaves nothing behind either."""
    open_before, mapped_before = len(os.listdir("/proc/self/fd")), mappings()
    for _ in range(3):
        memory = SharedMemory(1 << 16, dist.group.WORLD, timeout=10)
        view = memory.peer(0, (4,), torch.float32)
        assert mappings() == mapped_before + 1
        memory.barrier()
        memory.close()
        with pytest.raises(RuntimeError, match="unusable: it was closed"):
            memory.barrier()
        assert view.tolist() == [0.0] * 4
        del view
    assert (len(os.listdir("/proc/self/fd")), mappings()) == (open_before, mapped_before)


def no_cuda() -> contextlib.AbstractContextManager:
    """Within, torch.cuda has no device to wait for or to choose."""
    return mock.patch.multiple(torch.cuda, synchronize=mock.DEFAULT, device=mock.MagicMock())


@on_every_rank(2)
def test_lack_of_memory_on_one_rank_is_an_error_on_all() -> None:
    """Of the host's, and of a device's. Without semaphores gloo serves."""
    reserve = mock.Mock(wraps=os.posix_fallocate)
    empty = mock.Mock(return_value=torch.empty(4096, dtype=torch.uint8))
    if dist.get_rank() == 1:
        reserve.side_effect = OSError(28, "No space left on device")
        empty.side_effect = RuntimeError("CUDA out of memory")
    words = r"cannot share 12288 bytes between 2 ranks \(rank 1: \[Errno 28\] No space left on device\)"
    with mock.patch.object(os, "posix_fallocate", reserve), pytest.raises(RuntimeError, match=words):
        SharedMemory(4096, dist.group.WORLD)
    words = r"on each of 2 ranks \(rank 1: CUDA out of memory\)"
    with mock.patch.object(symmetric, "empty_symmetric", empty), no_cuda(), pytest.raises(RuntimeError, match=words):
        TorchSymmetricMemory(4096, dist.group.WORLD, torch.device("cuda", 0))
    group = dist.new_group(list(range(dist.get_world_size())))  # which no backend serves yet
    with mock.patch.object(shared_memory, "SEMAPHORES", None):
        with pytest.raises(RuntimeError, match="needs Linux with POSIX semaphores"):
            SharedMemory(4096, group)
        assert not shared_memory.is_available() and backend_of(group) == "gloo"


@on_every_rank(1)
def test_plain_cpu_is_refused_without_importing_triton() -> None:
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
            del sys.modules[name]  # torch's compiler imports it too
        reason = why_no_kernels(dist.group.WORLD, torch.device("cpu"))
        assert "triton" not in sys.modules
    assert reason is not None and "TRITON_INTERPRET=1" in reason
    with pytest.raises(RuntimeError, match="fused kernels cannot run for this group: on CPU"):
        kernel_workspace(dist.group.WORLD, "gather", torch.device("cpu"))


@contextlib.contextmanager
def torch_memory(wrong: int = 0, writer: symmetric.Writer | None = None) -> Iterator[TorchSymmetricMemory]:
    """torch's backend over shared memory, as if each rank's tensor had another offset in its allocation. writer:
    torch's operation that writes a word."""
    nbytes, group = 8192, dist.group.WORLD
    shared = SharedMemory(nbytes + 4096, group, timeout=10)
    own = shared.peer(shared.rank, (nbytes,), torch.uint8, 64 * shared.rank).fill_(1)
    handle = SimpleNamespace(memory=shared, buffer_ptrs=shared.pointers.tolist())
    handle.get_buffer = lambda rank, shape, dtype, offset: shared.peer(rank, shape, dtype, offset + wrong)
    replaced = {"empty_symmetric": lambda *_: own, "rendezvous": lambda *_: handle, "stream_writer": lambda: writer}
    with mock.patch.multiple(symmetric, **replaced), no_cuda():
        yield TorchSymmetricMemory(nbytes, group, torch.device("cuda", 0), timeout=10)


@on_every_rank(3)
def test_torch_s_memory_is_seen_by_all() -> None:
    with torch_memory(writer=write) as memory:
        starts, shared = memory._handle.memory.pointers.tolist(), memory._handle.memory
        assert (memory.nbytes, memory.rank, memory.size) == (8192, shared.rank, shared.size)
        assert memory.pointers.tolist() == [start + 64 * rank for rank, start in enumerate(starts)]
        every_rank_sees_every_region(memory)
        with pytest.raises(ValueError, match="do not fit a region of 8192 bytes"):
            memory.peer(0, (1,), torch.uint8, memory.nbytes)
        memory.close()
    with pytest.raises(RuntimeError, match="its symmetric memory has changed"), torch_memory(64):
        pass


@pytest.mark.gpu
@on_every_rank(2, 3, pool="one_gpu")
def test_torch_s_memory_of_ranks_on_one_device() -> None:
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    assert symmetric.why_not_symmetric(dist.group.WORLD, device) is None
    for nbytes in (4096, 3 << 20):
        for _ in range(2):
            memory = TorchSymmetricMemory(nbytes, dist.group.WORLD, device, timeout=30)
            every_rank_sees_every_region(memory)
            memory.close()


def write(words: torch.Tensor, index: int, value: int) -> None:
    """As torch's operation, which takes no other tensors and values."""
    assert words.dtype == torch.uint32 and words.dim() == 1 and words.is_contiguous() and 0 <= value < 2**32
    words[index] = value


def write_except_by_the_last(words: torch.Tensor, index: int, value: int) -> None:
    if index == dist.get_world_size() - 1:
        raise RuntimeError("CUDA driver error: operation not supported")
    write(words, index, value)


@on_every_rank(3)
def test_flags_are_written_by_the_stream_or_else_copied() -> None:
    """All ranks do the same. It is tried on the peers' addresses. A flag comes in either way, and the words that were
    tried are zeros again."""
    given = symmetric.stream_writer()
    assert given is not None and "offset" in str(given.__doc__) and "val" in str(given.__doc__), "torch has it"
    for writer, reason in (
        (write, None),
        (None, "rank 0: it does not exist"),
        (write_except_by_the_last, "rank 2: CUDA driver error: operation not supported"),
        (lambda *_: None, "rank 0: the words of ranks 0 to 2 came as [0, 0, 0]"),
        (lambda words, to, x: write(words, (to + 1) % 3, x), "rank 0: the words of ranks 0 to 2 came as [3, 1, 2]"),
    ):
        watched = mock.Mock(side_effect=writer) if writer else None
        with torch_memory(writer=watched) as memory:
            assert not memory.peer(memory.rank, (memory.nbytes,), torch.uint8).any()
            memory.barrier()
            if watched:
                watched.reset_mock()
            epoch = -7
            for rank in range(memory.size):
                memory.set_flag(rank, 64 + 4 * memory.rank, epoch, torch.tensor([epoch], dtype=torch.int32))
            memory.barrier()
            flags = memory.peer(memory.rank, (memory.size + 1,), torch.int32, 64)
            assert flags.tolist() == [epoch] * memory.size + [0]
            written = [call.args[2] for call in watched.mock_calls] if watched else []
            assert written == ([] if memory.copied_flags else [2**32 - 7] * memory.size)
            wanted = reason and f"torch {torch.__version__}'s stream_write_value32 cannot set them: {reason}"
            assert memory.copied_flags == wanted


@on_every_rank(2)
def test_why_flags_are_copied_is_asked_once() -> None:
    """What is asked of the group is kept; memory is allocated once."""
    group = dist.new_group(list(range(dist.get_world_size())))
    allocate = mock.Mock(return_value=SimpleNamespace(copied_flags="why"))
    with mock.patch.object(groups, "allocate", allocate), mock.patch.object(torch.cuda, "current_device", lambda: 0):
        devices = [torch.device(name) for name in ("cpu", "cuda:0", "cuda", "cuda:0")]
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            assert why_copied_flags(group, devices[1]) is None and not allocate.called
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
            assert [why_copied_flags(group, device) for device in devices] == [None, "why", "why", "why"]
    allocate.assert_called_once()


def facts(*changes: dict) -> list[DeviceFacts]:
    return [FACTS._replace(ordinal=rank, uuid=f"uuid-{rank}")._replace(**change) for rank, change in enumerate(changes)]


@pytest.mark.parametrize("changes, reason", [
    ([{}, {}, {}], "None"),
    ([{}, {"problem": "no torch"}], "rank 1: no torch"),
    ([{}, {"capability": (7, 5)}], "rank 1's device 1 (H100) has compute capability 7.5, the kernels need 8.0"),
    ([{}, {"host": ("other", "boot")}], "ranks 0 and 1 are not on one host (('node', 'boot') and ('other'"),
    ([{}, {}, {"ordinal": 1, "uuid": "uuid-1"}], "ranks 1 and 2 use one device (index 1, H100)"),
    ([{"overlapping": True}, {"ordinal": 0, "uuid": "uuid-0", "overlapping": True}], "None"),
    ([{}, {"ordinal": 0}], "ranks 0 and 1 both call their device cuda:0, though they are two"),
])  # fmt: skip
def test_devices_that_cannot_share_memory(changes: list[dict], reason: str) -> None:
    assert str(why_not_together(facts(*changes))).startswith(reason)


def test_devices_without_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = facts({}, {}, {"ordinal": 0, "uuid": "uuid-0"}, {})
    reach = mock.Mock(side_effect=lambda a, b: b != 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reach)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert "cuda:0 (rank 0) cannot access the memory of cuda:3 (rank 3)" in str(why_not_peers(ranks, 0))
    assert {call.args for call in reach.mock_calls} == {(0, 1), (0, 3)}
    assert why_not_peers(ranks[:3], 1) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert "rank 0 sees 3 CUDA devices, rank 3 uses cuda:3" in str(why_not_peers(ranks, 0))
