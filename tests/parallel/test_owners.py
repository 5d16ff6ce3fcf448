"""Owners of matrices: every element goes to its owner once and back to all that hold it, the nearest copy is sent, and
the work is shared evenly. All of it is a pure function, so no rank runs."""

import math
import re
from collections import Counter

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tpformer.distributed.blocks import held_block
from tpformer.kernels.newton_schulz.reference import newton_schulz_cost
from tpformer.parallel.owners import Job, Laid, Part, assign, busiest, rounds

REPLICA, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


def laid(shape: tuple[int, ...], sizes: tuple[int, ...], *placements) -> Laid:
    return Laid(shape, tuple(range(math.prod(sizes))), sizes, placements)


def flops(rows: int, columns: int) -> float:
    return float(newton_schulz_cost(rows, columns, 2).flops)


def covered(parts) -> Counter:
    return Counter((row, column) for part in parts for row in part.rows for column in part.columns)


CASES = {
    "one axis": laid((12, 8), (4,), ROWS),
    "uneven": laid((40, 10), (3,), ROWS),
    "more ranks than rows": laid((3, 10), (4,), ROWS),
    "tp, then ZeRO on columns": laid((12, 8), (2, 3), COLUMNS, ROWS),
    "tp, then ZeRO on the same rows": laid((13, 8), (2, 3), _StridedShard(0, split_factor=3), ROWS),
    "replicas": laid((12, 8), (2, 2, 2), REPLICA, COLUMNS, ROWS),
    "key-value heads that ranks share": laid((12, 8), (2, 2), COLUMNS, REPLICA),
    "experts": laid((8, 6, 4), (2, 2), COLUMNS, ROWS),
    "experts on uneven rows": laid((5, 6, 4), (3,), Shard(2)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_element_is_sent_once_and_all_holders_get_theirs(case):
    stacked = 2 if len(case.shape) == 3 else 1
    jobs = assign([case, case], [stacked, stacked], flops)
    matrices = 2 * (case.shape[0] * stacked if len(case.shape) == 3 else 1)
    assert len(jobs) == matrices == len({job.matrix for job in jobs})
    blocks = case.blocks()
    for job in jobs:
        rows, columns = job.matrix.rows, job.matrix.columns
        assert covered(job.senders.values()) == covered([Part(range(rows), range(columns))])
        for rank, part in job.holders.items():
            block = blocks[rank]
            held = {row - job.matrix.first for row in block[-2]}
            assert set(part.rows) == held & set(range(rows)) and part.columns == block[-1]
            assert job.matrix.lead is None or job.matrix.lead in block[0]
    in_rounds = [job for together in rounds(jobs) for job in together]
    assert sorted(in_rounds, key=id) == sorted(jobs, key=id)
    assert all(len({job.owner for job in together}) == len(together) for together in rounds(jobs))


def test_strided_shards_cut_last():
    """FSDP2 on what tensor parallelism cut: rank (d, t) holds the d-th chunk of the t-th half."""
    placements = _StridedShard(0, split_factor=2), ROWS
    held = [held_block((12,), (3, 2), placements, (d, t))[0] for d in range(3) for t in range(2)]
    assert held == [range(0, 2), range(6, 8), range(2, 4), range(8, 10), range(4, 6), range(10, 12)]
    with pytest.raises(ValueError, match="by which they hold rows that are no block: cut it by tensor parallelism and"):
        held_block((12,), (3, 2), (_StridedShard(0, split_factor=4), ROWS), (0, 0))


def sent(jobs: list[Job], where: Laid) -> Counter:
    """Elements sent, by the outermost axis on which sender and receiver differ."""
    found: Counter = Counter()
    for source, target, elements in (send for job in jobs for send in job.sends()):
        axes = zip(where.coordinate(source), where.coordinate(target), strict=True)
        found[[a != b for a, b in axes].index(True)] += elements
    return found


@pytest.mark.parametrize(("sizes", "placements"), [((4,), (ROWS,)), ((2, 2), (COLUMNS, ROWS))])
def test_each_rank_sends_what_the_formula_says(sizes, placements):
    """2 (E / P) (P - 1) / P."""
    every = [laid((16, 8), sizes, *placements)] * 8
    jobs, e, p = assign(every, [1] * 8, flops), 8 * 16 * 8, 4
    by_rank = Counter[int]()
    for source, _, elements in (send for job in jobs for send in job.sends()):
        by_rank[source] += elements
    assert dict(by_rank) == {rank: 2 * e * (p - 1) // p**2 for rank in range(p)}


def test_replicas_send_results_to_one_another_and_nothing_else():
    """HSDP 2 x 2: E (R - 1) over replicas, 2 E (S - 1) / S inside of them. The lowest rank as the sender, as it once
    was, would send E / 2 more over replicas."""
    where = laid((16, 8), (2, 2), REPLICA, ROWS)
    elements = 8 * 16 * 8
    assert sent(assign([where] * 8, [1] * 8, flops), where) == {0: elements, 1: elements}


def test_a_rank_that_holds_whole_matrices_owns_them():
    where = laid((8, 6, 4), (4,), ROWS)
    jobs = assign([where], [2], flops)
    assert not [each for job in jobs for each in job.sends()]
    assert {len([job for job in jobs if job.owner == rank]) for rank in range(4)} == {4}
    two, dense = laid((2, 6, 4), (4,), ROWS), laid((8, 4), (4,), ROWS)
    loads = Counter(job.owner for job in assign([two, *[dense] * 4], [1] * 5, lambda rows, columns: 1.0))
    assert max(loads.values()) == 2, "what only two ranks hold makes them no busier than the others"


def test_the_work_is_shared():
    """224 matrices of a model of 8B on 64 ranks: the busiest owner has at most 1.1 times the mean."""
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)] * 32
    jobs = assign([laid(shape, (8, 8), REPLICA, ROWS) for shape in shapes], [1] * 224, flops)
    most, mean = busiest(jobs, 64, flops)
    assert most <= 1.1 * mean
    costs = [flops(job.matrix.rows, job.matrix.columns) for job in jobs]
    assert costs == sorted(costs, reverse=True), "so that the matrices of a round cost about as much"


def test_what_is_no_matrix_is_refused():
    for shape, stacked in (((6,), 1), ((7, 4), 2)):
        with pytest.raises(
            ValueError, match=re.escape(f"a parameter of {shape} is no {stacked} matrices of equal rows")
        ):
            assign([laid(shape, (2,), ROWS)], [stacked], flops)
