"""Collectives equal plain arithmetic on both backends, reuse slots safely, and choose a backend that can serve."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pool import RankFailure, WorkerPool

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
        total = in_order_sum(inputs)
        check(backend, all_gather(inputs[rank], world()), torch.cat(inputs), exact=True)
        check(backend, all_reduce(inputs[rank], world()), total)
        check(backend, all_reduce(inputs[rank], world(), "max"), torch.stack(inputs).amax(0), exact=True)
        assert torch.equal(inputs[rank], make(shape, dtype, rank))  # not in place
        if shape[0] % size == 0:
            check(backend, reduce_scatter(inputs[rank], world()), total.tensor_split(size)[rank])


def check(backend: str, got: torch.Tensor, wanted: torch.Tensor, exact: bool = False) -> None:
    assert got.dtype == wanted.dtype and got.shape == wanted.shape and got.is_contiguous()
    if exact or backend == "shared" or not wanted.dtype.is_floating_point:
        assert torch.equal(got, wanted), (backend, wanted.dtype, wanted.shape)
    else:  # gloo rounds each partial sum to the dtype, in an order of its own
        bound = 2 * dist.get_world_size() * torch.finfo(wanted.dtype).eps * 4000
        assert (got.double() - wanted.double()).abs().max().item() <= bound if got.numel() else True


@needs_shared
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shared_equals_in_order_arithmetic(ranks: WorkerPool, size: int) -> None:
    ranks(size).run(against_arithmetic, "shared")


@pytest.mark.parametrize("size", [2, 3])
def test_gloo_equals_arithmetic_within_rounding(ranks: WorkerPool, size: int) -> None:
    ranks(size).run(against_arithmetic, "gloo")


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
@pytest.mark.parametrize(("size", "rounds"), [(2, 2000), (3, 600), (4, 400)])
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


def growth() -> list[int]:
    use_backend(world(), "shared", timeout=20)
    rank, size = dist.get_rank(), dist.get_world_size()
    capacities = []
    for numel in (10, 1 << 18, (1 << 18) + 1, 1 << 20, 7):
        got = all_gather(torch.full((numel,), float(rank)), world())
        assert torch.equal(got, torch.arange(float(size)).repeat_interleave(numel))
        capacities.append(groups.collective_state(world()).gather.capacity)
    return capacities


@needs_shared
def test_workspace_grows_to_powers_of_two(ranks: WorkerPool) -> None:
    assert ranks(3).run(growth) == [[1 << 20, 1 << 20, 1 << 21, 1 << 22, 1 << 22]] * 3


def indivisible(shape: tuple[int, ...]) -> None:
    reduce_scatter(torch.ones(shape), world())


def test_indivisible_reduce_scatter_has_numbers_and_remedy(ranks: WorkerPool) -> None:
    with pytest.raises(RankFailure, match="over 3 ranks: dim 0 has 10 rows, which 3 does not divide; pad dim 0"):
        ranks(3).run(indivisible, (10, 2))


def scalars_and_views() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    assert all_reduce(torch.tensor(rank + 1.0), world()).item() == size * (size + 1) / 2
    with pytest.raises(ValueError, match="0-dimensional"):
        all_gather(torch.tensor(1.0), world())
    with pytest.raises(ValueError, match="not 'mean'"):
        all_reduce(torch.ones(1), world(), "mean")
    x = torch.arange(12.0, requires_grad=True).view(3, 4).t()  # not contiguous, and part of a graph
    got = all_gather(x, world())
    assert torch.equal(got, x.detach().repeat(size, 1)) and not got.requires_grad


@pytest.mark.parametrize("size", [2, 3])
def test_scalars_and_noncontiguous_inputs(ranks: WorkerPool, size: int) -> None:
    ranks(size).run(scalars_and_views)


def first_use_in_inference_mode() -> None:
    close(world())
    with torch.inference_mode():
        all_gather(torch.ones(2), world())
    x = torch.ones(2, requires_grad=True)
    assert all_gather(x * 2, world()).sum() == 4 * dist.get_world_size()


def test_workspace_made_in_inference_mode_works_outside(ranks: WorkerPool) -> None:
    ranks(2).run(first_use_in_inference_mode)


def different_shapes() -> None:
    use_backend(world(), "shared", timeout=5)
    all_gather(torch.ones(4 + dist.get_rank()), world())


@needs_shared
def test_disagreeing_ranks_are_told(ranks: WorkerPool) -> None:
    message = "different collectives: rank 0: all_gather of 16 bytes, rank 1: all_gather of 20 bytes"
    with pytest.raises(RankFailure, match=message):
        ranks(2).run(different_shapes)


def recorded() -> list[tuple[str, int]]:
    x = torch.ones(6, 2)
    all_reduce(x, world())
    with record_collectives() as calls:
        all_gather(x, world()), reduce_scatter(x, world()), all_reduce(x, world())
        all_gather(x, None), reduce_scatter(x, None), all_reduce(x, None)
    all_reduce(x, world())
    return calls


def test_recorder_counts_full_tensors(ranks: WorkerPool) -> None:
    assert ranks(1).run(recorded) == [[]]
    assert ranks(2).run(recorded) == [[("all_gather", 96), ("reduce_scatter", 48), ("all_reduce", 48)]] * 2


def test_without_a_group_the_input_itself_comes_back() -> None:
    x = torch.ones(3)
    assert all_gather(x, None) is x and reduce_scatter(x, None) is x and all_reduce(x, None) is x


def choices() -> list[str]:
    seen = []
    group = dist.new_group(list(range(dist.get_world_size())))
    seen.append(backend_of(group))
    use_backend(group, "gloo")
    seen.append(backend_of(group))
    close(group)
    original = shared_memory.host_key
    shared_memory.host_key = lambda: (f"host {dist.get_rank()}",)
    try:
        seen.append(backend_of(group))
        use_backend(group, "shared")
    except RuntimeError as error:
        seen.append(str(error))
    finally:
        shared_memory.host_key = original
    with pytest.raises(ValueError, match="not 'nccl'"):
        use_backend(group, "nccl")
    dist.destroy_process_group(group)
    del group
    return [*seen, str(len(groups.REGISTRY.collectives))]


@needs_shared
def test_choice_of_backend(ranks: WorkerPool) -> None:
    before = ranks(2).run(registered)[0]
    reason = (
        "the shared backend cannot serve this group: ranks 0 and 1 are not on one host: ('host 0',) and ('host 1',); "
        'use backend="gloo"'
    )
    assert ranks(2).run(choices) == [["shared", "gloo", "gloo", reason, str(before)]] * 2


def registered() -> int:
    return len(groups.REGISTRY.collectives)


def two_groups() -> float:
    """Sum over a tensor-parallel pair, then over a data-parallel pair: together over all four ranks."""
    rank = dist.get_rank()
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tensor_parallel, data_parallel = pairs[rank // 2], pairs[2 + rank % 2]
    x = torch.tensor([float(10**rank)])
    return all_reduce(all_reduce(x, tensor_parallel), data_parallel).item()


def test_groups_are_independent(ranks: WorkerPool) -> None:
    assert ranks(4).run(two_groups) == [1111.0] * 4
