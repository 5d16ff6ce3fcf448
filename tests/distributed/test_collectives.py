"""Collectives equal plain arithmetic on both backends, reuse slots safely, and choose a backend that can serve."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import RankFailure, WorkerPool
from testing import assert_identical, assert_kernel_close

from tpformer.distributed import (
    all_gather,
    all_reduce,
    backend_of,
    close,
    groups,
    record_collectives,
    reduce_scatter,
    shared_memory,
    use_backend,
)
from tpformer.distributed.workspace import Collective, Workspace

needs_shared = pytest.mark.skipif(not shared_memory.is_available(), reason="needs Linux with POSIX semaphores")


def shared(size: int) -> Any:
    """A case with the shared backend."""
    return pytest.param("shared", size, marks=needs_shared)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
TWO_SHOT_NUMEL = 300_001  # above the two-shot threshold in every dtype, and not divisible by 2, 3 or 4


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


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


def against_arithmetic(backend: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1:
        use_backend(world(), backend, timeout=20)
    for dtype, shape in itertools.product(DTYPES, [(size, 3), (4 * size, 2, 5), (size,), (0, 7), (TWO_SHOT_NUMEL,)]):
        inputs = [make(shape, dtype, r) for r in range(size)]
        total, parts = in_order_sum(inputs), [x.tensor_split(size)[rank] for x in inputs]
        check(backend, all_gather(inputs[rank], world()), torch.cat(inputs))
        check(backend, all_reduce(inputs[rank], world()), total, inputs)
        check(backend, all_reduce(inputs[rank], world(), "max"), torch.stack(inputs).amax(0))
        assert torch.equal(inputs[rank], make(shape, dtype, rank))  # not in place
        if shape[0] % size == 0:
            check(backend, reduce_scatter(inputs[rank], world()), total.tensor_split(size)[rank], parts)


def check(backend: str, got: torch.Tensor, wanted: torch.Tensor, summands: list[torch.Tensor] | None = None) -> None:
    """Compare bits, but of sums by gloo: it rounds each partial sum to the dtype, as the baseline, in its own order."""
    what = f"{backend} {wanted.dtype} {tuple(wanted.shape)}"
    assert got.is_contiguous(), what
    if summands is None or backend == "shared" or not wanted.dtype.is_floating_point:
        assert_identical(got, wanted, what)
    else:
        oracle, baseline = (sum(terms[1:], start=terms[0]) for terms in ([x.double() for x in summands], summands))
        assert_kernel_close(got, oracle, baseline, what)


@pytest.mark.parametrize(("backend", "size"), [*(shared(n) for n in (1, 2, 3)), ("gloo", 3)])
def test_results_are_those_of_in_order_arithmetic_with_gloo_but_for_rounding(
    ranks: WorkerPool, backend: str, size: int
) -> None:
    ranks(size).run(against_arithmetic, backend)


def delay_reads(space: Workspace, delay: Callable[[], None]) -> None:
    """Delay each operation between its waits and its reads, where a peer could overwrite slots that are still read."""
    exchange = space.exchange

    def delayed(collective: Collective, nbytes: int) -> None:
        exchange(collective, nbytes)
        delay()

    space.exchange = delayed


def back_to_back(rounds: int, probability: float) -> None:
    """Each round has new data, and ranks are late at random, so a rank that overwrites a slot too early is caught."""
    use_backend(world(), "shared", timeout=20)
    rank, size = dist.get_rank(), dist.get_world_size()
    state, dice = groups.collective_state(world()), random.Random(rank)
    for space in (state.gather, state.reduce):
        delay_reads(space, lambda: time.sleep(dice.random() * 1e-3) if dice.random() < probability else None)
    base = torch.arange(3000.0 * size)
    for index in range(rounds):
        x = base + (index * size + rank)
        gathered = all_gather(x[:3000], world()).view(size, 3000)
        negative = all_gather(-x[:100], world()).view(size, 100)
        reduced = reduce_scatter(x, world())
        total = all_reduce(x[:300] * 2, world())
        for source in range(size):
            assert torch.equal(gathered[source], base[:3000] + (index * size + source)), (index, rank, source)
            assert torch.equal(negative[source], -gathered[source, :100]), (index, rank, source)
        wanted = base * size + sum(index * size + source for source in range(size))
        assert torch.equal(reduced, wanted.tensor_split(size)[rank]), (index, rank)
        assert torch.equal(total, wanted[:300] * 2), (index, rank)


@needs_shared
@pytest.mark.parametrize(("size", "rounds"), [(2, 500), (4, 200)])
def test_back_to_back_with_delays(ranks: WorkerPool, size: int, rounds: int) -> None:
    ranks(size).run(back_to_back, rounds, 0.1)


def slow_reader(slots: int) -> str:
    """Return whether this rank's results are intact though rank 0 reads late, with two slots or with one."""
    use_backend(world(), "shared", timeout=20)
    all_gather(torch.zeros(3), world())
    space = groups.collective_state(world()).gather
    if slots == 1:  # this is the mistake that the test must catch
        make_views = space._make_views
        space._make_views = lambda parity, *key: make_views(0, *key)
        space._slots.clear()
    if dist.get_rank() == 0:
        delay_reads(space, lambda: time.sleep(0.01))
    rounds = [all_gather(torch.full((3,), float(index)), world()).unique().tolist() for index in range(20)]
    return "intact" if rounds == [[float(index)] for index in range(20)] else "overwritten"


@needs_shared
def test_slots_survive_a_slow_reader_only_because_there_are_two(ranks: WorkerPool) -> None:
    assert ranks(2).run(slow_reader, 2) == ["intact", "intact"]
    assert ranks(2).run(slow_reader, 1)[0] == "overwritten"


def workspaces_grow_to_powers_of_two() -> None:
    use_backend(world(), "shared", timeout=20)
    rank, size = dist.get_rank(), dist.get_world_size()
    capacities = []
    for numel in (10, 1 << 18, (1 << 18) + 1, 1 << 20, 7):
        got = all_gather(torch.full((numel,), float(rank)), world())
        assert torch.equal(got, torch.arange(float(size)).repeat_interleave(numel))
        capacities.append(groups.collective_state(world()).gather.capacity)
    assert capacities == [1 << 20, 1 << 20, 1 << 21, 1 << 22, 1 << 22]


def scalars_and_views_are_taken_and_what_is_impossible_is_refused() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    assert all_reduce(torch.tensor(rank + 1.0), world()).item() == size * (size + 1) / 2
    with pytest.raises(ValueError, match="0-dimensional"):
        all_gather(torch.tensor(1.0), world())
    with pytest.raises(ValueError, match="not 'mean'"):
        all_reduce(torch.ones(1), world(), "mean")
    with pytest.raises(ValueError, match="over 3 ranks: dim 0 has 10 rows, which 3 does not divide; pad dim 0"):
        reduce_scatter(torch.ones(10, 2), world())
    x = torch.arange(12.0, requires_grad=True).view(3, 4).t()  # not contiguous, and part of a graph
    got = all_gather(x, world())
    assert torch.equal(got, x.detach().repeat(size, 1)) and not got.requires_grad


def a_workspace_made_in_inference_mode_works_outside() -> None:
    close(world())
    with torch.inference_mode():
        all_gather(torch.ones(2), world())
    x = torch.ones(2, requires_grad=True)
    assert all_gather(x * 2, world()).sum() == 4 * dist.get_world_size()


def the_recorder_counts_full_tensors_and_nothing_on_one_rank() -> None:
    x = torch.ones(6, 2)
    all_reduce(x, world())
    with record_collectives() as calls:
        all_gather(x, world()), reduce_scatter(x, world()), all_reduce(x, world())
        all_gather(x, None), reduce_scatter(x, None), all_reduce(x, None)
    all_reduce(x, world())
    several = [("all_gather", 96), ("reduce_scatter", 48), ("all_reduce", 48)]
    assert calls == (several if dist.get_world_size() == 2 else [])


def groups_are_independent() -> None:
    """Sum over a tensor-parallel pair, then over a data-parallel pair: together over all four ranks."""
    rank = dist.get_rank()
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3])]
    x = torch.tensor([float(10**rank)])
    assert all_reduce(all_reduce(x, pairs[rank // 2]), pairs[2 + rank % 2]).item() == 1111


@pytest.mark.parametrize(
    ("size", "question"),
    [
        pytest.param(3, workspaces_grow_to_powers_of_two, marks=needs_shared),
        (3, scalars_and_views_are_taken_and_what_is_impossible_is_refused),
        (2, a_workspace_made_in_inference_mode_works_outside),
        (1, the_recorder_counts_full_tensors_and_nothing_on_one_rank),
        (2, the_recorder_counts_full_tensors_and_nothing_on_one_rank),
        (4, groups_are_independent),
    ],
)
def test_on_every_rank(ranks: WorkerPool, size: int, question: Callable[[], None]) -> None:
    ranks(size).run(question)


def different_shapes() -> None:
    use_backend(world(), "shared", timeout=5)
    all_gather(torch.ones(4 + dist.get_rank()), world())


@needs_shared
def test_disagreeing_ranks_are_told(ranks: WorkerPool) -> None:
    message = "different collectives: rank 0: all_gather of 16 bytes, rank 1: all_gather of 20 bytes"
    with pytest.raises(RankFailure, match=message):
        ranks(2).run(different_shapes)


def test_without_a_group_the_input_itself_comes_back() -> None:
    x = torch.ones(3)
    assert all_gather(x, None) is x and reduce_scatter(x, None) is x and all_reduce(x, None) is x


@needs_shared
def test_choice_of_backend(ranks: WorkerPool) -> None:
    ranks(2).run(choose)


def choose() -> None:
    group, before = dist.new_group(list(range(dist.get_world_size()))), len(groups.REGISTRY.collectives)
    assert backend_of(group) == "shared"
    use_backend(group, "gloo")
    assert backend_of(group) == "gloo"
    close(group)
    reason = (
        "the shared backend cannot serve this group: ranks 0 and 1 are not on one host: ('host 0',) and ('host 1',); "
        'use backend="gloo"'
    )
    with mock.patch.object(shared_memory, "host_key", lambda: (f"host {dist.get_rank()}",)):
        assert backend_of(group) == "gloo"
        with pytest.raises(RuntimeError, match=f"^{re.escape(reason)}$"):
            use_backend(group, "shared")
    with pytest.raises(ValueError, match="not 'nccl'"):
        use_backend(group, "nccl")
    dist.destroy_process_group(group)
    del group
    assert len(groups.REGISTRY.collectives) == before
