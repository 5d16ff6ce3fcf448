"""Collectives equal plain arithmetic on both backends, reuse slots safely, and choose a backend that can serve."""

import contextlib
import itertools
import random
import re
import time
from collections.abc import Iterable
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from testing import assert_identical, assert_kernel_close, on_every_rank

from tpformer.distributed import all_gather, all_reduce, all_to_all, collectives, reduce_scatter, shared_memory
from tpformer.distributed.collectives import record_collectives
from tpformer.distributed.groups import REGISTRY, backend_of, close, note_call, unbroken, use_backend
from tpformer.distributed.workspace import Workspace

needs_shared = pytest.mark.skipif(not shared_memory.is_available(), reason="needs Linux with POSIX semaphores")
BACKENDS = ("gloo", "shared") if shared_memory.is_available() else ("gloo",)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
# numbers of elements that 2, 3 and 4 do not divide: above the threshold that the test sets, in every dtype, and above
# the library's own, in float32
TWO_SHOT_BYTES, FEW, MANY = 600, 301, 300_001


def make(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int = 0) -> torch.Tensor:
    """What `rank` contributes. Every rank can compute it, to know what to expect."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 1000).to(dtype)


def in_order_sum(inputs: list[torch.Tensor]) -> torch.Tensor:
    dtype = inputs[0].dtype
    total = inputs[0].to(torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype)
    for x in inputs[1:]:
        total = total + x.to(total.dtype)
    return total.to(dtype)


@on_every_rank(1, 2, 3)
def test_the_results_are_those_of_arithmetic() -> None:
    size = dist.get_world_size()
    shapes = [(size, 3), (4 * size, 2, 5), (size,), (0, 7)]
    for backend in BACKENDS:
        if size > 1:
            use_backend(dist.group.WORLD, backend, timeout=20)
        compare(backend, DTYPES, shapes)
        compare(backend, [torch.float32], [(MANY,)])
        with mock.patch.object(collectives, "TWO_SHOT_BYTES", TWO_SHOT_BYTES):
            compare(backend, DTYPES, [(FEW,)])


def compare(backend: str, dtypes: Iterable[torch.dtype], shapes: Iterable[tuple[int, ...]]) -> None:
    """All collectives of tensors of these dtypes and shapes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype, shape in itertools.product(dtypes, shapes):
        inputs = [make(shape, dtype, r) for r in range(size)]
        total, parts = in_order_sum(inputs), [x.tensor_split(size)[rank] for x in inputs]
        check(backend, all_gather(inputs[rank], dist.group.WORLD), torch.cat(inputs))
        check(backend, all_reduce(inputs[rank], dist.group.WORLD), total, inputs)
        check(backend, all_reduce(inputs[rank], dist.group.WORLD, "max"), torch.stack(inputs).amax(0))
        assert torch.equal(inputs[rank], make(shape, dtype, rank))  # not in place
        if shape[0] % size == 0:
            check(backend, reduce_scatter(inputs[rank], dist.group.WORLD), total.tensor_split(size)[rank], parts)
            check(backend, all_to_all(inputs[rank], dist.group.WORLD), torch.cat(parts))


@on_every_rank(1, 2, 3)
def test_unequal_parts_go_to_each_rank() -> None:
    """Rank r has r + 2 s rows for rank s, so some have none, and the last rank sends nothing in the second round."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for last in (size, size - 1):
        counts = [[(source + 2 * to) * (source < last) for to in range(size)] for source in range(size)]
        inputs = [make((sum(of), 3), torch.bfloat16, source) for source, of in enumerate(counts)]
        wanted = torch.cat([x.split(of)[rank] for x, of in zip(inputs, counts, strict=True)])
        with record_collectives() as calls:
            found = all_to_all(inputs[rank], dist.group.WORLD, counts[rank], [of[rank] for of in counts])
        assert_identical(found, wanted)
        assert calls == ([("all_to_all", inputs[rank].nbytes)] if size > 1 else [])


def check(backend: str, got: torch.Tensor, wanted: torch.Tensor, summands: list[torch.Tensor] | None = None) -> None:
    """Compare bits, but of sums by gloo: it rounds each partial sum to the dtype, as the baseline, in its own order."""
    what = f"{backend} {wanted.dtype} {tuple(wanted.shape)}"
    assert got.is_contiguous(), what
    if summands is None or backend == "shared" or not wanted.dtype.is_floating_point:
        assert_identical(got, wanted, what)
    else:
        oracle, baseline = (sum(terms[1:], start=terms[0]) for terms in ([x.double() for x in summands], summands))
        assert_kernel_close(got, oracle, baseline, what)


@needs_shared
@on_every_rank(2)
def test_a_late_peer_is_waited_for_and_one_that_has_given_up_is_not() -> None:
    rank, group = dist.get_rank(), dist.new_group()
    x, parts = make((3, 2), torch.float32, rank), [1, 2]
    with mock.patch.object(collectives, "PATIENCE", timedelta(milliseconds=1)):
        time.sleep(0.05 * rank)
        came = all_to_all(x, group, parts, [parts[rank]] * 2)
        both = [make((3, 2), torch.float32, peer) for peer in range(2)]
        assert_identical(came, torch.cat([each.split(parts)[rank] for each in both]))
        dist.barrier()  # or the group may be left while the other rank's part is still on its way
        with pytest.raises(RuntimeError, match="a step was left by an exception on rank 1; the group cannot go on"):
            if rank == 0:
                all_to_all(x, group, parts, [1, 1])
            with contextlib.suppress(KeyboardInterrupt), unbroken(group, "a step"):
                raise KeyboardInterrupt
            note_call(group, ("next",))


@needs_shared
@on_every_rank(2, 4)
def test_back_to_back_with_delays() -> None:
    """Each round has new data, and ranks are late at random between their waits and their reads, so a rank that
    overwrites a slot that is still read is caught."""
    group = dist.group.WORLD
    use_backend(group, "shared", timeout=20)
    rank, size = dist.get_rank(), dist.get_world_size()
    dice, exchange = random.Random(rank), Workspace.exchange

    def delayed(space: Workspace, operation: str) -> None:
        exchange(space, operation)
        if dice.random() < 0.1:
            time.sleep(dice.random() * 1e-3)

    base = torch.arange(3000.0 * size)
    with mock.patch.object(Workspace, "exchange", delayed):
        for index in range(200):
            x = base + (index * size + rank)
            gathered = all_gather(x[:3000], group).view(size, 3000)
            negative = all_gather(-x[:100], group).view(size, 100)
            reduced = reduce_scatter(x, group)
            total = all_reduce(x[:300] * 2, group)
            sources = torch.arange(size)[:, None] + index * size
            wanted = base * size + sources.sum()
            of_rows = base[:3000] + sources, -(base[:100] + sources)
            expected = [*of_rows, wanted.tensor_split(size)[rank], wanted[:300] * 2]
            assert_identical([gathered, negative, reduced, total], expected, f"round {index}, rank {rank}")


@on_every_rank(3)
def test_scalars_and_views_are_taken_and_what_is_impossible_is_refused() -> None:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert all_reduce(torch.tensor(rank + 1.0), group).item() == size * (size + 1) / 2
    for call, x, options, words in (
        (all_gather, torch.tensor(1.0), [], "0-dimensional"),
        (all_reduce, torch.ones(1), ["mean"], "not 'mean'"),
        (reduce_scatter, torch.ones(10, 2), [], "over 3 ranks: dim 0 has 10 rows, which 3 does not divide; pad dim 0"),
        (all_to_all, torch.ones(10, 2), [], "all_to_all over 3 ranks: dim 0 has 10 rows"),
        (all_to_all, torch.ones(10, 2), [[3, 3, 3], [3, 3, 3]], r"10 rows over 3 ranks with sent=\[3, 3, 3\], "),
        (all_to_all, torch.ones(10, 2), [[3, 3, 4]], "received=None: give a number for each rank in both"),
        (all_to_all, torch.ones(10, 2), [[5, 5], [5, 5]], "give a number for each rank in both"),
    ):
        with pytest.raises(ValueError, match=words):
            call(x, group, *options)
    x = torch.arange(12.0, requires_grad=True).view(3, 4).t()  # not contiguous, and part of a graph
    got = all_gather(x, group)
    assert torch.equal(got, x.detach().repeat(size, 1)) and not got.requires_grad
    close(group)  # a workspace made in inference mode works outside
    with torch.inference_mode():
        all_gather(torch.ones(2), group)
    assert all_gather(x[0] * 2, group).sum() == 2 * size * x[0].sum()


@on_every_rank(1, 2)
def test_the_recorder_counts_full_tensors_and_nothing_on_one_rank() -> None:
    """Without a group the input itself comes back."""
    x, group = torch.ones(6, 2), dist.group.WORLD
    all_reduce(x, group)
    with record_collectives() as calls:
        all_gather(x, group), reduce_scatter(x, group), all_reduce(x, group)
        assert all_gather(x, None) is x and reduce_scatter(x, None) is x and all_reduce(x, None) is x
    all_reduce(x, group)
    several = [("all_gather", 96), ("reduce_scatter", 48), ("all_reduce", 48)]
    assert calls == (several if dist.get_world_size() == 2 else [])


@needs_shared
@on_every_rank(2)
def test_choice_of_backend() -> None:
    group, before = dist.new_group(list(range(dist.get_world_size()))), len(REGISTRY.collectives)
    assert backend_of(group) == "shared"
    use_backend(group, "gloo")
    assert backend_of(group) == "gloo"
    close(group)
    reason = (
        "the shared backend cannot serve this group: ranks 0 and 1 are not on one host: ('host 0',) and ('host 1',)"
    )
    with mock.patch.object(shared_memory, "host_key", lambda: (f"host {dist.get_rank()}",)):
        assert backend_of(group) == "gloo"
        with pytest.raises(RuntimeError, match=f'^{re.escape(reason)}; use backend="gloo"$'):
            use_backend(group, "shared")
    with pytest.raises(ValueError, match="not 'nccl'"):
        use_backend(group, "nccl")
    dist.destroy_process_group(group)
    del group
    assert len(REGISTRY.collectives) == before
