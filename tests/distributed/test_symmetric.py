"""Symmetric memory has the right addresses, signals and bounded waits, leaves nothing behind, and says when it cannot
serve."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import RankFailure, WorkerPool

from tpformer.distributed import backend_of, shared_memory
from tpformer.distributed.groups import kernel_workspace, why_no_kernels
from tpformer.distributed.shared_memory import SharedMemory
from tpformer.distributed.symmetric import DeviceFacts, why_not_peers, why_not_together

pytestmark = pytest.mark.skipif(not shared_memory.is_available(), reason="needs Linux with POSIX semaphores")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def every_rank_sees_every_region() -> None:
    memory = SharedMemory(1000, world(), timeout=10)
    assert memory.nbytes == 4096 and memory.pointers.dtype == torch.int64 and memory.pointers.shape == (memory.size,)
    for dtype in DTYPES:
        memory.peer(memory.rank, (3, 5), dtype, 64).fill_(memory.rank + 1)
        memory.barrier()
        for rank in range(memory.size):
            view = memory.peer(rank, (3, 5), dtype, 64)
            assert view.data_ptr() == memory.pointers[rank].item() + 64
            assert torch.equal(view, torch.full((3, 5), rank + 1, dtype=dtype))
            addressed = (ctypes.c_uint8 * (15 * dtype.itemsize)).from_address(memory.pointers[rank].item() + 64)
            assert list(addressed) == view.view(torch.uint8).flatten().tolist()
        memory.barrier()


def views_outside_of_the_region_are_refused() -> None:
    memory = SharedMemory(4096, world())
    for arguments, words in (
        (((1025,), torch.float32, 0), "4100 bytes at offset 0 do not fit a region of 4096 bytes"),
        (((1,), torch.float32, 4096), "4 bytes at offset 4096 do not fit a region of 4096 bytes"),
        (((1,), torch.int64, 4), "byte offset 4 is not a multiple of 8, the size of torch.int64"),
    ):
        with pytest.raises(ValueError, match=f"^{words}$"):
            memory.peer(0, *arguments)


def a_signal_comes_after_what_was_written() -> None:
    """Each rank pushes to its right neighbour. Semaphores count, so rounds need no reset."""
    rounds = 4
    memory = SharedMemory(8 * rounds, world(), timeout=10)
    right, left = (memory.rank + 1) % memory.size, (memory.rank - 1) % memory.size
    for index in range(rounds):
        memory.peer(right, (1,), torch.float64, 8 * index).fill_(float(100 * memory.rank + index))
        memory.signal(right)
    for _ in range(rounds):
        memory.wait(left)
    got = memory.peer(memory.rank, (rounds,), torch.float64).tolist()
    assert got == [100.0 * left + index for index in range(rounds)]


def waiting_sleeps() -> None:
    """Rank 1 comes when it sees that rank 0 sleeps, which has tried some times before."""
    memory = SharedMemory(4096, world(), timeout=10)
    sleeps = memory.peer(0, (1,), torch.int64)
    memory.barrier()
    tries, try_wait, sleep = [], memory._trywait, memory._timedwait
    memory._trywait = lambda semaphore: tries.append(semaphore) or try_wait(semaphore)
    memory._timedwait = lambda *arguments: sleeps.fill_(1) and sleep(*arguments)
    while memory.rank == 1 and not sleeps:
        time.sleep(1e-3)
    memory.barrier()
    assert memory.rank == 1 or len(tries) == shared_memory.SPINS


def killed_peer() -> None:
    memory = SharedMemory(4096, world(), timeout=0.5)
    memory.barrier()
    if memory.rank == 1:
        os.kill(os.getpid(), 9)
    for _ in range(2):  # the first wait names the peer; the next one does not wait again
        try:
            memory.exchange("all_gather")
        except TimeoutError as error:
            first = str(error)
        except RuntimeError as error:
            raise RuntimeError(f"{first} THEN {error}") from None


def test_killed_peer_is_named(ranks: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pool.GRACE", 5)
    message = (
        r"(?s)rank 0 of 2 waited 0.5 s for rank 1 in all_gather \(wait 2 for that rank\): look at rank 1's output"
        r".*THEN this group's shared memory is unusable: rank 0 of 2 waited.*rank 1 of 2 died with exit code -9"
    )
    with pytest.raises(RankFailure, match=message):
        ranks(2).run(killed_peer)


def named_files(temporary: str) -> set[str]:
    folders = [folder for folder in ("/dev/shm", temporary) if os.path.isdir(folder)]
    return {entry.path for folder in folders for entry in os.scandir(folder)}


def allocate_and_die(temporary: str, before: set[str]) -> set[str]:
    tempfile.tempdir = temporary  # a folder of its own: other processes use the common one
    memory = SharedMemory(1 << 20, world(), timeout=10)
    memory.barrier()
    after = named_files(temporary) - before
    dist.barrier()
    if memory.rank == 0:
        os.kill(os.getpid(), 9)
    raise RuntimeError(f"named files: {sorted(path for path in after if 'pool' not in path)}")


def barrier() -> None:
    dist.barrier()


def test_nothing_is_left_behind_by_a_killed_rank(ranks: WorkerPool, tmp_path: Path) -> None:
    ranks(2).run(barrier)
    with pytest.raises(RankFailure, match=r"named files: \[\]"):
        ranks(2).run(allocate_and_die, str(tmp_path), named_files(str(tmp_path)))


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:tpformer" in line for line in file)


def close_frees_descriptors_and_mappings() -> None:
    open_before, mapped_before = len(os.listdir("/proc/self/fd")), mappings()
    for _ in range(3):
        memory = SharedMemory(1 << 16, world(), timeout=10)
        view = memory.peer(0, (4,), torch.float32)
        memory.barrier()
        memory.close()
        with pytest.raises(RuntimeError, match="unusable: it was closed"):
            memory.barrier()
        assert view.tolist() == [0.0] * 4
        del view
    assert (len(os.listdir("/proc/self/fd")), mappings()) == (open_before, mapped_before)


def lack_of_memory_on_one_rank_is_an_error_on_all() -> None:
    refuse = mock.Mock(side_effect=OSError(28, "No space left on device"))
    reserve = refuse if dist.get_rank() == 1 else os.posix_fallocate
    words = r"cannot share 12288 bytes between 2 ranks \(rank 1: \[Errno 28\] No space left on device\)"
    with mock.patch.object(os, "posix_fallocate", reserve), pytest.raises(RuntimeError, match=words):
        SharedMemory(4096, world())


def without_semaphores_it_says_so_and_gloo_serves() -> None:
    group = dist.new_group(list(range(dist.get_world_size())))
    with mock.patch.object(shared_memory, "SEMAPHORES", None):
        with pytest.raises(RuntimeError, match="needs Linux with POSIX semaphores"):
            SharedMemory(4096, group)
        assert not shared_memory.is_available() and backend_of(group) == "gloo"


def plain_cpu_is_refused_without_importing_triton() -> None:
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
            del sys.modules[name]  # torch's compiler imports it too
        reason = why_no_kernels(world(), torch.device("cpu"))
        assert "triton" not in sys.modules
    assert reason is not None and "TRITON_INTERPRET=1" in reason
    with pytest.raises(RuntimeError, match="fused kernels cannot run for this group: on CPU"):
        kernel_workspace(world(), "gather", torch.device("cpu"))


@pytest.mark.parametrize(
    ("size", "question"),
    [
        *((size, every_rank_sees_every_region) for size in (1, 2, 3)),
        (1, views_outside_of_the_region_are_refused),
        (3, a_signal_comes_after_what_was_written),
        (2, waiting_sleeps),
        (2, close_frees_descriptors_and_mappings),
        (2, lack_of_memory_on_one_rank_is_an_error_on_all),
        (2, without_semaphores_it_says_so_and_gloo_serves),
        (1, plain_cpu_is_refused_without_importing_triton),
    ],
)
def test_on_every_rank(ranks: WorkerPool, size: int, question: Callable[[], None]) -> None:
    ranks(size).run(question)


FACTS = DeviceFacts(None, ("node", "boot"), 0, "uuid-0", "H100", (9, 0), False)


def facts(*changes: dict) -> list[DeviceFacts]:
    return [FACTS._replace(ordinal=rank, uuid=f"uuid-{rank}")._replace(**change) for rank, change in enumerate(changes)]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ([{}, {}, {}], None),
        ([{}, {"problem": "no torch"}], "rank 1: no torch"),
        ([{}, {"capability": (7, 5)}], "rank 1's device 1 (H100) has compute capability 7.5, the kernels need 8.0"),
        (
            [{}, {"host": ("other", "boot")}],
            "ranks 0 and 1 are not on one host (('node', 'boot') and ('other'",
        ),
        ([{}, {}, {"ordinal": 1, "uuid": "uuid-1"}], "ranks 1 and 2 use one device (index 1, H100)"),
        ([{"overlapping": True}, {"ordinal": 0, "uuid": "uuid-0", "overlapping": True}], None),
        ([{}, {"ordinal": 0}], "ranks 0 and 1 both call their device cuda:0, though they are two"),
    ],
)
def test_devices_that_cannot_share_memory(changes: list[dict], reason: str | None) -> None:
    answer = why_not_together(facts(*changes))
    assert answer == reason if reason is None else reason in str(answer)


def test_devices_without_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = facts({}, {}, {"ordinal": 0, "uuid": "uuid-0"}, {})
    reached: set[tuple[int, int]] = set()

    def reach(a: int, b: int) -> bool:
        reached.add((a, b))
        return b != 3

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reach)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert "cuda:0 (rank 0) cannot access the memory of cuda:3 (rank 3)" in str(why_not_peers(ranks, 0))
    assert reached == {(0, 1), (0, 3)}
    assert why_not_peers(ranks[:3], 1) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert "rank 0 sees 3 CUDA devices, rank 3 uses cuda:3" in str(why_not_peers(ranks, 0))
