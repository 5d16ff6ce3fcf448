"""What all-reduce algorithms send, by their formulas and as counted; what they add up; how long that takes."""

from datetime import timedelta
from unittest import mock

import lost_ranks
import pytest
import torch
import torch.distributed as dist
from testing import assert_identical, assert_same, on_every_rank
from turns import in_turns

from tpformer.distributed import record_collectives
from tpformer.lessons.algorithms import ALGORITHMS, HIERARCHICAL, Link, Traffic, all_reduce_seconds, hierarchical
from tpformer.lessons.reductions import RUNNABLE, RUNS, Members, reduce_by

FAST, SLOW = Link(2e-6, 300e9), Link(12e-6, 40e9)
NAMES = (*ALGORITHMS, HIERARCHICAL)


def test_values_of_the_textbook_and_seconds():
    values = {name: cost(4, 4).values for name, cost in ALGORITHMS.items()}  # 4 ranks with 4 values each
    assert values == dict.fromkeys(ALGORITHMS, 24) | {"all_pairs": 48, "butterfly": 32}
    for name in NAMES:
        assert all_reduce_seconds(name, 1e9, 1, 1, FAST, SLOW) == 0
        assert all_reduce_seconds(name, 1e9, 1, 4, FAST, SLOW) > all_reduce_seconds(name, 1e9, 4, 1, FAST, SLOW)
    ring = all_reduce_seconds("ring", 1e9, 4, 1, FAST, SLOW)
    assert ring == pytest.approx(6 * 2e-6 + 1.5e9 / 300e9)
    across = all_reduce_seconds("ring", 1e9, 4, 4, FAST, SLOW)
    assert across == pytest.approx(30 * (12e-6 / 4 + 2e-6 * 3 / 4) + 2 * 15 / 16 * 1e9 / 160e9)
    both = all_reduce_seconds("hierarchical", 1e9, 4, 4, FAST, SLOW)
    assert both == pytest.approx(ring + 6 * 12e-6 + 1.5 * 0.25e9 / 40e9)
    small = {name: all_reduce_seconds(name, 1e3, 8, 8, FAST, SLOW) for name in NAMES}
    assert min(small, key=small.__getitem__) in ("butterfly", "tree"), "latency decides"


def numbers(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def run_all(n: int, dtype: torch.dtype) -> dict:
    """By algorithm and nodes: the result, the bytes of each message, and the clock: steps that wait for one another."""
    group, found, exchange, clock = dist.group.WORLD, {}, Members.exchange, 0

    def counted(members, sends, receives):
        """Each message brings its sender's clock, which is behind this step's own messages."""
        nonlocal clock
        exchange(members, sends, receives)
        now = torch.tensor([clock])
        came = [(peer, torch.zeros(1, dtype=torch.int64)) for peer, x in receives if x.numel()]
        with record_collectives():
            exchange(members, [(peer, now) for peer, x in sends if x.numel()], came)
        if came or sends:
            clock = 1 + max([clock, *(int(each) for _, each in came)])

    sizes = [inside for inside in range(1, group.size() + 1) if group.size() % inside == 0]
    for name, inside in [*((name, 1) for name in RUNS), *(("hierarchical", inside) for inside in sizes)]:
        x, clock = numbers(group.rank(), n, dtype), 0
        with record_collectives() as plain:
            assert reduce_by(name, x, group, inside=inside) is x
        again = numbers(group.rank(), n, dtype)
        with mock.patch.object(Members, "exchange", counted):
            reduce_by(name, again, group, inside=inside)
        assert torch.equal(x, again), "the same bits every time"
        found[name, inside] = x, [nbytes for _, nbytes in plain], clock
    return found


@pytest.mark.parametrize("size", [1, 2, 4, 6, *in_turns([3, 7])])
def test_algorithms_send_what_their_formulas_say(ranks, size):
    """And all ranks end with the same bits, which are one process's sum but for rounding."""
    n = 168 * 8  # what each of these numbers of ranks divides
    by_rank = ranks(size).run(run_all, n, torch.float64)
    whole = sum(numbers(rank, n, torch.float64) for rank in range(size))
    for name, inside in by_rank[0]:
        results, messages, clocks = zip(*(found[name, inside] for found in by_rank), strict=True)
        assert_identical(list(results), [results[0]] * size, name)
        assert_same(results[0], whole, name)
        cost = hierarchical(inside, size // inside, n) if name == "hierarchical" else ALGORITHMS[name](size, n)
        sent = [sum(each) / 8 for each in messages]
        counted = Traffic(max(clocks), sum(map(len, messages)), sum(sent), max(sent))
        assert counted == pytest.approx(cost), (name, inside)


@on_every_rank(5)
def test_any_sizes() -> None:
    """Values that the ranks do not share evenly, fewer than ranks, none, a matrix, integers."""
    group = dist.group.WORLD
    for name in RUNS:
        for shape in ((13,), (2,), (0,), (3, 5), ()):
            x = torch.full(shape, group.rank() + 1)
            assert torch.equal(reduce_by(name, x, group), torch.full(shape, 15)), (name, shape)
    for name, x, inside, words in (
        ("round", torch.ones(2), 1, "there is no all-reduce 'round': choose one of driver"),
        ("ring", torch.ones(4, 4).t()[:2], 1, r"strides \(1, 4\): copy it first"),
        ("hierarchical", torch.ones(2), 2, "5 ranks are not whole nodes of 2: choose a divisor of 5"),
    ):
        with pytest.raises(ValueError, match=words):
            reduce_by(name, x, group, inside=inside)


def reduce_beside_a_dead_rank(name: str) -> None:
    """Rank 2 dies before the all-reduce."""
    if dist.group.WORLD.rank() == 2:
        lost_ranks.die()
    reduce_by(name, torch.ones(1 << 16), dist.group.WORLD)


def test_a_dead_rank_is_named(commands, tmp_path):
    """By the ranks that wait for it, and at once: no timeout has to pass. What others say follows from that."""
    heard = lost_ranks.heard(commands, tmp_path, reduce_beside_a_dead_rank, 5, RUNNABLE)
    for name, said in heard.items():
        wanted = f"the {name} all-reduce failed on rank"
        assert len(said) == 4 and any(wanted in each and ": rank 2 has died" in each for each in said), said


@on_every_rank(3)
def test_a_rank_that_does_not_come_is_named() -> None:
    """One of those that wait for it is told."""
    group, own, said = dist.new_group(timeout=timedelta(seconds=0.5)), "", [""] * 3
    try:
        if group.rank() != 1:
            reduce_by("all_pairs", torch.ones(100), group)
    except RuntimeError as error:
        own = str(error)
    dist.all_gather_object(said, own)
    assert any("rank 1 has died, or did not answer in time" in said[rank] for rank in (0, 2)), said
