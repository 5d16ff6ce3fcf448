"""The worker pool returns results by rank, and recovers from each way in which a rank can fail."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import RankFailure, WorkerPool


def rank_and_sum(offset: int) -> tuple[int, int, int, float]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), total.item()


def fail(how: str) -> object:
    """What rank 1 does, for which the other one waits."""
    if dist.get_rank() == 0:
        return None if how == "sleep" else dist.barrier()
    if how == "raise":
        raise KeyError("the rank's own words")
    if how == "die":
        os.kill(os.getpid(), 9)
    if how == "sleep":
        time.sleep(30)
    return lambda: None


def test_results_are_in_rank_order(ranks: WorkerPool) -> None:
    for size in (1, 2, 3):
        total = sum(range(size)) + 10 * size
        wanted = [(rank, size, torch.get_num_threads(), total) for rank in range(size)]
        assert ranks(size).run(rank_and_sum, 10) == wanted


@pytest.mark.parametrize(("how", "options", "said"), [
    ("raise", {}, r"(?s)rank 1 of 2 raised.*in fail.*KeyError: \"the rank's own words\""),
    ("die", {}, "rank 1 of 2 died with exit code -9"),
    ("sleep", {"timeout": 2}, r"(?s)rank 1 of 2 did not return in 2 s.*in fail"),
    ("return a lambda", {}, "(?s)rank 1 of 2 raised.*pickle"),
])  # fmt: skip
def test_a_rank_that_fails_is_named_and_replaced(ranks: WorkerPool, how: str, options: dict, said: str) -> None:
    with pytest.raises(RankFailure, match=said):
        ranks(2).run(fail, how, **options)
    assert len(ranks(2).run(rank_and_sum, 0)) == 2


def test_workers_are_kept_and_one_killed_between_runs_is_replaced(ranks: WorkerPool) -> None:
    workers = ranks(2).run(os.getpid)
    assert ranks(2).run(os.getpid) == workers
    os.kill(workers[1], 9)
    ranks(2).processes[1].join(5)
    assert len(ranks(2).run(rank_and_sum, 0)) == 2


def test_a_pool_can_have_an_environment_of_its_own(ranks: WorkerPool, interpreted: WorkerPool) -> None:
    assert [pool(1).run(os.getenv, "TRITON_INTERPRET") for pool in (ranks, interpreted)] == [[None], ["1"]]
