"""Workspaces of the fused kernels count epochs, grow, copy and report hangs, as a toy kernel that moves rows shows."""

import functools
import gc
import itertools
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from testing import assert_identical, on_every_rank

from tpformer.distributed import HangError, check_all, close, set_timeout
from tpformer.distributed import kernel_workspace as module
from tpformer.distributed.groups import REGISTRY, kernel_workspace, why_no_kernels
from tpformer.distributed.kernel_workspace import KernelWorkspace, wrap

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
protocol = pytest.importorskip("tpformer.kernels.protocol")

CPU = torch.device("cpu")


@triton.jit
def exchange_kernel(links, rank, x, out, n, PUSH: tl.constexpr, WORLD: tl.constexpr):
    """out[p] = rank p's x, for all p. PUSH: the kernel sends the rows; else copies do that were started before it."""
    me, limit = protocol.serve(links, rank, WORLD)
    for step in range(1, WORLD):
        if PUSH:
            peer = (me.rank + WORLD - step) % WORLD
            slot = protocol.slot_of(me, peer, tl.float32)
            for i in range(n):
                tl.store(slot + me.rank * n + i, tl.load(x + i))
            protocol.publish(protocol.flags_of(me, peer, me.rank), me.epoch)
    own = protocol.slot_of(me, me.rank, tl.float32)
    for i in range(n):
        tl.store(out + me.rank * n + i, tl.load(x + i))
    for step in range(1, WORLD):
        peer = (me.rank + step) % WORLD
        limit = protocol.wait(me, protocol.flags_of(me, me.rank, 0), peer, limit)
        for i in range(n):
            tl.store(out + peer * n + i, tl.load(own + peer * n + i))


def world_group(timeout: float = 20) -> dist.ProcessGroup:
    dist.get_rank()  # ValueError where there is no group; a pretended test has no asserts
    assert dist.group.WORLD is not None
    close(dist.group.WORLD)  # a fresh state for each test
    set_timeout(dist.group.WORLD, timeout)
    return dist.group.WORLD


def cuda() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def row(rank: int, index: int, n: int, device: torch.device) -> torch.Tensor:
    return 1000.0 * index + 10 * rank + torch.arange(n, dtype=torch.float32, device=device)


def exchange(workspace: KernelWorkspace, index: int, copies: bool, n: int = 3, nbytes: int = 0) -> torch.Tensor:
    """Run one operation. nbytes: ask for a larger slot than the rows need."""
    x = row(workspace.rank, index, n, workspace.device)
    out = x.new_full((workspace.world, n), float("nan"))
    channel = workspace.begin("exchange", max(nbytes, x.nbytes * workspace.world), 1)
    if copies:
        workspace.copy_gather(x)
    exchange_kernel[(1, 1)](channel.links, channel.rank, x, out, n, PUSH=not copies, WORLD=workspace.world)
    workspace.join()
    return out


def check_exchange(out: torch.Tensor, index: int) -> None:
    expected = torch.stack([row(rank, index, out.shape[1], out.device) for rank in range(out.shape[0])])
    assert_identical(out, expected, f"operation {index}")


def many_epochs(pool: str, start: int, copies: bool, delayed: bool) -> None:
    """Run 12 operations and two without a kernel. Slots grow in the 5th, flags after the 9th."""
    device = CPU if pool == "interpreted" else cuda()
    workspace = kernel_workspace(world_group(), "gather", device, epoch=start)
    # not on a shared device; here copies get through, because the kernel is small
    assert workspace.copies_allowed == (device == CPU)
    for index in range(12):
        if delayed and index % workspace.world == workspace.rank:
            time.sleep(0.02)
        out = exchange(workspace, index, copies, nbytes=(1 << 20) + 1 if index >= 4 else 0)
        if index == 8:
            workspace.begin("more flags", 0, 1025)
            workspace.end()
        check_all()
        check_exchange(out, index)
    assert workspace.begin("last", 0, 0).epoch.item() == workspace.epoch == wrap(start + 14)
    assert (workspace.capacity, workspace.writer_flags) == (1 << 21, 2048)


@pytest.mark.parametrize("pool, size, start, copies, delayed", [
    ("interpreted", 1, -3, True, False), ("interpreted", 2, 2**31 - 6, False, False),
    ("interpreted", 2, -3, True, True), ("interpreted", 3, 0, False, True), ("interpreted", 3, 2**31 - 6, True, False),
    *(pytest.param("one_gpu", size, 2**31 - 4, copies, False, marks=pytest.mark.gpu)
      for size, copies in itertools.product((2, 3), (False, True))),
])  # fmt: skip
def test_epochs_and_growth(request, pool: str, size: int, start: int, copies: bool, delayed: bool) -> None:
    """Epochs also wrap from positive to negative, or pass from negative to positive, and each rank is late in turn."""
    request.getfixturevalue(pool)(size).run(many_epochs, pool, start, copies, delayed)


@on_every_rank(2, pool="interpreted")
def test_a_gather_runs_under_an_unfinished_reduction() -> None:
    """Each kind has data, flags and epochs of its own."""
    group = world_group()
    gather, reduce = (kernel_workspace(group, kind, CPU) for kind in ("gather", "reduce"))
    assert kernel_workspace(group, "gather", CPU) is gather
    for index in range(4):
        x, out = row(gather.rank, index, 3, CPU), torch.zeros(gather.world, 3)
        channel = reduce.begin("outer", x.nbytes * gather.world, 1)
        for inner in range(index):
            check_exchange(exchange(gather, 10 * index + inner, copies=True), 10 * index + inner)
        exchange_kernel[(1, 1)](channel.links, channel.rank, x, out, 3, PUSH=True, WORLD=gather.world)
        reduce.end()
        check_exchange(out, index)
    assert (gather.epoch, reduce.epoch) == (6, 4)
    check_all()


def said(call: Callable[[], object], error: type[Exception] = HangError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


@on_every_rank(2, 3, pool="interpreted")
def test_rank_that_does_not_come_is_named() -> None:
    """Ranks wait for as many polls as the timeout has. Later operations raise the same. test_hang.py has the table."""
    group = world_group()
    absent, copies = (0, True) if group.size() == 2 else (1, False)
    workspace = kernel_workspace(group, "gather", CPU)
    own, peer = (f"rank {rank} (global rank {rank})" for rank in (workspace.rank, absent))
    check_all(step=7)
    exchange(workspace, 0, copies)
    dist.barrier()
    set_timeout(group, 0.2)  # of the polls that are to come
    if workspace.rank != absent:
        exchange(workspace, 1, copies)
        next_ones = (workspace.end, lambda: workspace.begin("next", 0, 0), check_all, workspace.end)
        (message,) = {said(each) for each in next_ones}
        for part in (
            f"{own} waited in vain for {peer} in exchange\n",
            "  step         7\n",
            "  epoch        seen 1, wanted 2\n",
            "gave up after 1200 polls (timeout 0.2 s)\n",
            f"  called at    {__file__}:{exchange.__code__.co_firstlineno + 4}\n",
        ):
            assert part in message, message
    dist.barrier()
    if workspace.rank == absent:  # it comes late: its peers have pushed, so it passes once, and then hears of them
        check_exchange(exchange(workspace, 1, copies), 1)
        message = said(lambda: exchange(workspace, 2, copies), RuntimeError)
        assert message.endswith(f"waited in vain for {own} in exchange") and message == said(check_all, RuntimeError)
    close(group)  # other tests use the world, too


@pytest.mark.parametrize("everybody", [False, True])
@on_every_rank(2, pool="interpreted")
def test_an_operation_that_does_not_end_is_the_last_one(everybody: bool) -> None:
    """Its kernel is never launched, as after an exception. Nobody gets what an older operation has left."""
    group = world_group()
    workspace, other = (kernel_workspace(group, kind, CPU) for kind in ("gather", "reduce"))
    exchange(other, 0, copies=False), exchange(workspace, 0, copies=False)
    dist.barrier()
    set_timeout(group, 0.2)
    parts = "rank 1 (global rank 1) began exchange at", Path(__file__).name, "and has not ended it"
    if everybody or workspace.rank == 1:
        workspace.begin("exchange", 24, 1)
        check_exchange(exchange(other, 1, copies=False), 1) if everybody else None
        later = (lambda: workspace.begin("next", 0, 0), lambda: exchange(other, 2, copies=False), check_all)
        (message,) = {said(each) for each in later}
        assert all(part in message for part in parts) or (everybody and workspace.rank == 0)
        dist.barrier()
    else:
        exchange(workspace, 1, copies=False)
        dist.barrier()
        message = said(check_all)
        assert "rank 0 (global rank 0) waited in vain for rank 1" in message and all(part in message for part in parts)
    close(group)


@pytest.mark.parametrize("name, shape, dtype, more", [
    ("other", (2, 3), torch.float32, ()), ("one", (3, 2), torch.float32, ()), ("one", (2, 3), torch.int32, ()),
    ("one", (2, 3), torch.float32, ("more",)),
])  # fmt: skip
@on_every_rank(2, pool="interpreted")
def test_ranks_that_begin_different_operations_are_told(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, more: tuple[str, ...]
) -> None:
    """The two have equally many bytes. The rank that came first hears it at the end of the step."""
    workspace = kernel_workspace(world_group(), "gather", CPU)
    exchange(workspace, 0, copies=False)
    calls = [("one", 24, 1, (2, 3), torch.float32), (name, 24, 1, shape, dtype, *more)]
    if workspace.rank == 0:
        workspace.begin(*calls[0])
        workspace.join()
    dist.barrier()
    late = workspace.rank == 1 and said(lambda: workspace.begin(*calls[1]), RuntimeError)
    dist.barrier()
    other = ", ".join([f"{name} of {shape} {str(dtype)[6:]}", *more])
    for message in (late or said(check_all, RuntimeError), said(check_all, RuntimeError)):
        assert f"rank 0: one of (2, 3) float32, rank 1: {other}; every" in message


@on_every_rank(2, pool="interpreted")
def test_flags_that_are_old_are_made_anew() -> None:
    """One that nobody has set for 2**31 epochs would be taken for a later one's."""
    workspace, memories = kernel_workspace(world_group(), "gather", CPU, epoch=2**31 - 4), []
    with mock.patch.object(module, "FLAG_AGE", 4):
        for index in range(9):
            check_exchange(exchange(workspace, index, copies=False), index)
            memories.append(workspace._memory)
            assert memories[-1].peer(workspace.rank, (2,), torch.int32)[1] == wrap(2**31 - 4 + index // 4 * 4)
    assert [memories.index(each) for each in memories] == [0] * 4 + [4] * 4 + [8]


@on_every_rank(2, pool="interpreted")
def test_capture_forbids_growth_and_copies_and_keeps_memory() -> None:
    """The capture is simulated here; test_graph_replays has a real one."""
    workspace = kernel_workspace(world_group(), "gather", CPU)
    exchange(workspace, 0, copies=False)
    assert workspace.copies_allowed and not workspace.captured
    first = workspace.begin("first", 0, 0)
    workspace.end()
    words = (
        "^large needs 2097152 bytes and 1 flags per writer, the gather workspace has 1048576 and 1024, and it cannot "
        "grow while a CUDA graph is captured: run the operation once outside of the capture, with its largest size$"
    )
    with mock.patch.object(KernelWorkspace, "_capturing", lambda self: True):
        assert not workspace.copies_allowed
        with pytest.raises(RuntimeError, match=words):
            workspace.begin("large", 1 << 21, 1)
        assert not workspace.captured and workspace.epoch == 2
        exchange(workspace, 1, copies=False)
    assert workspace.captured and not workspace.copies_allowed
    with pytest.raises(RuntimeError, match="let the kernel push"):
        workspace.copy_gather(torch.zeros(1))
    workspace._epoch += 2  # as two replays would
    first.slots[0].fill_(workspace.rank)
    check_exchange(exchange(workspace, 2, copies=False, nbytes=1 << 21), 2)
    assert workspace.epoch == workspace._epoch.item() == 6
    storage = first.slots[0].untyped_storage().data_ptr()
    assert [channel.slots[0].untyped_storage().data_ptr() for _, channel in workspace._kept] == [storage]
    exchange(workspace, 3, copies=False, nbytes=1 << 22)


@on_every_rank(2, pool="interpreted")
def test_a_workspace_lives_as_long_as_its_group() -> None:
    """Where ranks share no memory for their calls, it reports different operations when its own memory grows."""
    group = dist.new_group(list(range(dist.get_world_size())))
    workspace = kernel_workspace(group, "gather", CPU)
    exchange(workspace, 0, copies=True)
    assert group in REGISTRY.kernels
    workspace.state.calls = None  # as on several hosts
    words = "gather workspace: rank 0: right of 2097152 bytes and 1 flags at epoch 1, rank 1: left of 3145728"
    with pytest.raises(RuntimeError, match=words):
        workspace.begin("left" if workspace.rank else "right", (2 + workspace.rank) << 20, 1)
    reference, count = weakref.ref(workspace), len(REGISTRY.kernels)
    dist.destroy_process_group(group)
    del group, workspace
    gc.collect()
    assert reference() is None and len(REGISTRY.kernels) == count - 1


@on_every_rank(1, pool="interpreted")
def test_misuse_is_refused() -> None:
    group = world_group()
    with pytest.raises(ValueError, match="kind must be one of"):
        kernel_workspace(group, "scatter", CPU)
    with pytest.raises(ValueError, match="must be positive, not 0"):
        set_timeout(group, 0)
    workspace = kernel_workspace(group, "gather", CPU)
    channel = workspace.begin("first", 0, 0)
    for shard in (torch.zeros(4, 4).T[:2], torch.zeros(channel.capacity // 4 + 1)):
        with pytest.raises(ValueError, match="must be contiguous"):
            workspace.copy_gather(shard)
    limit = channel.limit
    workspace.end()
    set_timeout(group, 40)
    assert workspace.begin("second", 0, 0).limit == 2 * limit
    assert why_no_kernels(group, torch.device("meta")) == "there are no fused kernels for meta devices"


def test_a_limit_is_the_timeout_in_polls_as_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest measurement counts, and there is one series of them; Triton wants a multiple of 16."""
    times = iter([9.0, 0.012, 0.0081, 0.01, 0.02])  # the first one compiles
    monkeypatch.setattr(module, "seconds_of_polls", lambda device, polls: next(times))
    monkeypatch.setattr(module, "polls_per_second", functools.cache(module.polls_per_second.__wrapped__))
    polls = 600 * module.TIMED_POLLS / 0.0081
    for timeout, limit in ((600, int(polls) // 16 * 16), (1e-9, 16), (3600, 2**31 - 16)):
        workspace = SimpleNamespace(state=SimpleNamespace(timeout=timeout), device=torch.device("cuda", 0))
        assert KernelWorkspace.limit.fget(workspace) == limit  # type: ignore[attr-defined]


@pytest.mark.gpu
@on_every_rank(2, pool="one_gpu")
def test_graph_replays() -> None:
    """A graph has one operation, so parities alternate between replays, also after the memory has grown."""
    workspace = kernel_workspace(world_group(), "gather", cuda())
    exchange(workspace, 0, copies=False)
    x, graph = row(workspace.rank, 0, 3, workspace.device), torch.cuda.CUDAGraph()
    out = x.new_zeros(workspace.world, 3)
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="cannot grow while a CUDA graph is captured"):
            workspace.begin("large", 1 << 21, 1)
        channel = workspace.begin("captured", x.nbytes * workspace.world, 1)
        exchange_kernel[(1, 1)](channel.links, channel.rank, x, out, 3, PUSH=True, WORLD=workspace.world)
    assert workspace.captured and not workspace.copies_allowed
    for index in range(1, 41):
        x.copy_(row(workspace.rank, index, 3, workspace.device))
        graph.replay()
        check_exchange(out, index)
        if index == 20:
            check_exchange(exchange(workspace, 99, copies=False, nbytes=1 << 21), 99)
            assert workspace.epoch == 1 + 20 + 1
    check_all()


@pytest.mark.gpu
@on_every_rank(1, pool="one_gpu")
def test_a_wait_lasts_as_long_as_its_timeout() -> None:
    """One that ended early would call a slow peer dead. The bounds are wide, because a GPU's clocks change."""
    workspace = kernel_workspace(world_group(timeout=2), "gather", cuda())
    assert 1 < module.seconds_of_polls(workspace.device, workspace.begin("timed", 0, 0).limit) < 60
