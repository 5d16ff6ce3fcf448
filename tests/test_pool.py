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


def raise_on(failing: int) -> None:
    if dist.get_rank() == failing:
        raise KeyError("the rank's own words")
    dist.barrier()


def die_on(failing: int) -> None:
    if dist.get_rank() == failing:
        os.kill(os.getpid(), 9)
    dist.barrier()


def sleep_on(sleeping: int) -> None:
    if dist.get_rank() == sleeping:
        time.sleep(30)


def return_a_lambda(_: int) -> object:
    return lambda: None


def test_results_are_in_rank_order(ranks: WorkerPool) -> None:
    for size in (1, 2, 3):
        total = sum(range(size)) + 10 * size
        wanted = [(rank, size, torch.get_num_threads(), total) for rank in range(size)]
        assert ranks(size).run(rank_and_sum, 10) == wanted


@pytest.mark.parametrize(("function", "options", "said"), [
    (raise_on, {}, r"(?s)rank 1 of 2 raised.*in raise_on.*KeyError: \"the rank's own words\""),
    (die_on, {}, "rank 1 of 2 died with exit code -9"),
    (sleep_on, {"timeout": 2}, r"(?s)rank 1 of 2 did not return in 2 s.*in sleep_on"),
    (return_a_lambda, {}, "(?s)rank 1 of 2 raised.*pickle"),
])  # fmt: skip
def test_a_rank_that_fails_is_named_and_replaced(ranks: WorkerPool, function, options: dict, said: str) -> None:
    with pytest.raises(RankFailure, match=said):
        ranks(2).run(function, 1, **options)
    assert len(ranks(2).run(rank_and_sum, 0)) == 2


def test_workers_are_kept_and_one_killed_between_runs_is_replaced(ranks: WorkerPool) -> None:
    workers = ranks(2).run(os.getpid)
    assert ranks(2).run(os.getpid) == workers
    os.kill(workers[1], 9)
    ranks(2).processes[1].join(5)
    assert len(ranks(2).run(rank_and_sum, 0)) == 2


def test_a_pool_can_have_an_environment_of_its_own(ranks: WorkerPool, interpreted: WorkerPool) -> None:
    assert [pool(1).run(os.getenv, "TRITON_INTERPRET") for pool in (ranks, interpreted)] == [[None], ["1"]]
