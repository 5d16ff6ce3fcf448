"""torch's symmetric memory for CUDA, over shared memory in its place: addresses, the flags of copies, and what it says
when it cannot serve. On a GPU, it itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import RankFailure, WorkerPool

from tpformer.distributed import groups, shared_memory, symmetric
from tpformer.distributed.groups import why_copied_flags
from tpformer.distributed.shared_memory import SharedMemory
from tpformer.distributed.symmetric import TorchSymmetricMemory

pytestmark = pytest.mark.skipif(not shared_memory.is_available(), reason="needs Linux with POSIX semaphores")


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class FakeHandle:
    """torch's handle over shared memory, as if each rank's tensor had another offset in its allocation."""

    def __init__(self, memory: SharedMemory, wrong: int) -> None:
        self.memory, self.wrong = memory, wrong
        self.buffer_ptrs = memory.pointers.tolist()

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
        return self.memory.peer(rank, shape, dtype, offset + self.wrong)


@contextlib.contextmanager
def torch_memory(wrong: int = 0, writer: symmetric.Writer | None = None) -> Iterator[TorchSymmetricMemory]:
    """torch's backend over shared memory. writer: torch's operation that writes a word."""
    nbytes, group = 8192, world()
    shared = SharedMemory(nbytes + 4096, group, timeout=10)
    own = shared.peer(shared.rank, (nbytes,), torch.uint8, 64 * shared.rank).fill_(1)
    replaced = mock.patch.multiple(
        symmetric, empty_symmetric=lambda *_: own, rendezvous=lambda *_: FakeHandle(shared, wrong),
        stream_writer=lambda: writer,
    )  # fmt: skip
    with replaced, mock.patch.multiple(torch.cuda, synchronize=mock.DEFAULT, device=mock.MagicMock()):
        yield TorchSymmetricMemory(nbytes, group, torch.device("cuda", 0), timeout=10)


def torch_backend_over_shared_memory(wrong: int) -> None:
    with torch_memory(wrong, write) as memory:
        nbytes, shared = 8192, memory._handle.memory
        assert memory.nbytes == nbytes and (memory.rank, memory.size) == (shared.rank, shared.size)
        assert memory.pointers.tolist() == [start + 64 * rank for rank, start in enumerate(shared.pointers.tolist())]
        for rank in range(memory.size):
            view = memory.peer(rank, (3,), torch.float32, 16 * memory.rank)
            assert view.data_ptr() == memory.pointers[rank].item() + 16 * memory.rank and view.tolist() == [0.0] * 3
            view.fill_(memory.rank + 1)
        memory.barrier()
        for rank in range(memory.size):
            assert memory.peer(memory.rank, (3,), torch.float32, 16 * rank).tolist() == [rank + 1.0] * 3
        with pytest.raises(ValueError, match="do not fit a region of 8192 bytes"):
            memory.peer(0, (1,), torch.uint8, nbytes)
        memory.close()


def write(words: torch.Tensor, index: int, value: int) -> None:
    """As torch's operation, which takes no other tensors and values."""
    assert words.dtype == torch.uint32 and words.dim() == 1 and words.is_contiguous() and 0 <= value < 2**32
    words[index] = value


def write_except_by_the_last(words: torch.Tensor, index: int, value: int) -> None:
    if index == dist.get_world_size() - 1:
        raise RuntimeError("CUDA driver error: operation not supported")
    write(words, index, value)


def write_nothing(words: torch.Tensor, index: int, value: int) -> None:
    pass


def write_elsewhere(words: torch.Tensor, index: int, value: int) -> None:
    write(words, (index + 1) % dist.get_world_size(), value)


def flags_of_copies(writer: symmetric.Writer | None) -> str | None:
    """Why they are copies. A flag comes in either way, and the words that were tried are zeros again."""
    written: list[int] = []

    def watched(words: torch.Tensor, index: int, value: int) -> object:
        written.append(value)
        return writer(words, index, value)  # type: ignore[misc]

    with torch_memory(writer=watched if writer else None) as memory:
        assert not memory.peer(memory.rank, (memory.nbytes,), torch.uint8).any()
        memory.barrier()
        tried, epoch = len(written), -7
        for rank in range(memory.size):
            memory.set_flag(rank, 64 + 4 * memory.rank, epoch, torch.tensor([epoch], dtype=torch.int32))
        memory.barrier()
        flags = memory.peer(memory.rank, (memory.size + 1,), torch.int32, 64)
        assert flags.tolist() == [epoch] * memory.size + [0]
        assert written[tried:] == ([] if memory.copied_flags else [2**32 - 7] * memory.size)
        return memory.copied_flags


@pytest.mark.parametrize(
    "writer, reason",
    [
        (write, None),
        (None, "rank 0: it does not exist"),
        (write_except_by_the_last, "rank 2: CUDA driver error: operation not supported"),
        (write_nothing, "rank 0: the words of ranks 0 to 2 came as [0, 0, 0]"),
        (write_elsewhere, "rank 0: the words of ranks 0 to 2 came as [3, 1, 2]"),
    ],
)
def test_flags_are_written_by_the_stream_or_else_copied(
    ranks: WorkerPool, writer: symmetric.Writer | None, reason: str | None
) -> None:
    """All ranks do the same. It is tried on the peers' addresses."""
    wanted = reason and f"torch {torch.__version__}'s stream_write_value32 cannot set them: {reason}"
    assert ranks(3).run(flags_of_copies, writer) == [wanted] * 3


def test_torch_has_the_operation_that_writes_flags() -> None:
    writer = symmetric.stream_writer()
    assert writer is not None and "offset" in str(writer.__doc__) and "val" in str(writer.__doc__)


def why_copied() -> tuple[list[str | None], int]:
    """What is asked of the group is kept; memory is allocated once."""
    group, allocated = dist.new_group(list(range(dist.get_world_size()))), []

    def allocate(nbytes: int, *_: object) -> SimpleNamespace:
        allocated.append(nbytes)
        return SimpleNamespace(copied_flags="why")

    with mock.patch.object(groups, "allocate", allocate), mock.patch.object(torch.cuda, "current_device", lambda: 0):
        devices = [torch.device(name) for name in ("cpu", "cuda:0", "cuda", "cuda:0")]
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            assert why_copied_flags(group, devices[1]) is None and not allocated
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
            return [why_copied_flags(group, device) for device in devices], len(allocated)


def test_why_flags_are_copied_is_asked_once(ranks: WorkerPool) -> None:
    assert ranks(2).run(why_copied) == [([None, "why", "why", "why"], 1)] * 2


def test_torch_backend_counts_offsets_and_notices_another_meaning_of_them(ranks: WorkerPool) -> None:
    ranks(3).run(torch_backend_over_shared_memory, 0)
    with pytest.raises(RankFailure, match="its symmetric memory has changed"):
        ranks(2).run(torch_backend_over_shared_memory, 64)


def lack_of_device_memory_on_one_rank_is_an_error_on_all() -> None:
    empty = mock.Mock(return_value=torch.empty(4096, dtype=torch.uint8))
    if dist.get_rank() == 1:
        empty.side_effect = RuntimeError("CUDA out of memory")
    with (
        mock.patch.object(symmetric, "empty_symmetric", empty),
        mock.patch.multiple(torch.cuda, synchronize=mock.DEFAULT, device=mock.MagicMock()),
        pytest.raises(RuntimeError, match=r"on each of 2 ranks \(rank 1: CUDA out of memory\)"),
    ):
        TorchSymmetricMemory(4096, world(), torch.device("cuda", 0))


def test_lack_of_device_memory_on_one_rank_is_an_error_on_all(ranks: WorkerPool) -> None:
    ranks(2).run(lack_of_device_memory_on_one_rank_is_an_error_on_all)


def one_device(nbytes: int) -> None:
    torch.cuda.set_device(0)
    assert symmetric.why_not_symmetric(world(), torch.device("cuda", 0)) is None
    for _ in range(2):
        memory = TorchSymmetricMemory(nbytes, world(), torch.device("cuda", 0), timeout=30)
        for rank in range(memory.size):
            view = memory.peer(rank, (4,), torch.float32, 16 * memory.rank)
            assert view.data_ptr() == memory.pointers[rank].item() + 16 * memory.rank and not view.any()
        memory.barrier()
        for rank in range(memory.size):
            memory.peer(rank, (4,), torch.float32, 16 * memory.rank).fill_(memory.rank + 1)
        memory.barrier()
        got = memory.peer(memory.rank, (memory.size, 4), torch.float32)
        assert got[:, 0].tolist() == [rank + 1.0 for rank in range(memory.size)]
        del view, got
        memory.barrier()
        memory.close()


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [4096, 3 << 20])
def test_torch_backend_with_ranks_on_one_device(one_gpu: WorkerPool, nbytes: int) -> None:
    one_gpu(2).run(one_device, nbytes)
    one_gpu(3).run(one_device, nbytes)
