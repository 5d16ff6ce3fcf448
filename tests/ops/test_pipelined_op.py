"""The pipelined transport equals float64 plain torch, by the tests of the two linears. Its own tests: the order of
sums, few rows, sub-groups, late ranks, and that an error leaves nothing behind."""

import time
import weakref

import pytest
import test_column_linear_op as column
import test_row_linear_op as row
import torch
import torch.distributed as dist
from hypothesis import given, settings
from pool import RankFailure
from shards import OnTransport, make
from testing import assert_same

from tpformer import ops
from tpformer.distributed import record_collectives
from tpformer.distributed.chunked import all_reduce_chunks, gather_chunks, reduce_scatter_chunks, start_all_gather
from tpformer.distributed.collectives import combine


@pytest.mark.parametrize("t", [2, 3])
@pytest.mark.parametrize("linear", [column, row], ids=["column", "row"])
def test_equals_plain_torch(ranks, linear, t):
    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(linear.cases(t))
    def run(case):
        linear.check(OnTransport(ranks, "pipelined"), t, case, torch.float64)

    run()


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_low_precision_by_the_error_of_plain_torch(ranks, sequence_parallel):
    pipelined = OnTransport(ranks, "pipelined")
    for dtype in (torch.float32, torch.bfloat16):
        column.check(pipelined, 3, column.case(12, 33, (12,), sequence_parallel=sequence_parallel), dtype)
    normed = column.case(12, 33, (12, 6), "layernorm", True, sequence_parallel=sequence_parallel)
    column.check(pipelined, 3, normed, torch.float32)
    row.check(pipelined, 3, row.case(12, 60, 7, "silu", True, sp=sequence_parallel), torch.float32)


def few_rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(this rank's product, the sum of all ranks') of 0, 1, 3 and 7 rows."""
    found = []
    for tokens in (0, 1, 3, 7):
        x, weight = make(dist.get_rank(), torch.float64, x=(tokens, 3), weight=(5, 3)).values()
        how = {"group": dist.group.WORLD, "sequence_parallel": False, "transport": "pipelined"}
        with torch.no_grad():
            found.append((x @ weight.t(), ops.row_linear(x, weight, **how)))
    return found


def test_all_reduce_of_any_number_of_rows(ranks):
    for results in zip(*ranks(3).run(few_rows), strict=True):
        for _, y in results:
            assert_same(y, sum(product for product, _ in results), f"{len(y)} rows")


def scattered(rank: int) -> torch.Tensor:
    return make(rank, torch.bfloat16, x=(6, 40))["x"]


def sum_of_scattered():
    x = scattered(dist.get_rank())
    again = [
        reduce_scatter_chunks(lambda rows, out: out.copy_(x[rows]), (6, 40), x, dist.group.WORLD) for _ in range(2)
    ]
    assert torch.equal(*again)
    return again[0]


def test_scattered_sums_are_in_rank_order_and_rounded_once(ranks):
    whole = torch.cat(ranks(3).run(sum_of_scattered))
    parts = [scattered(rank) for rank in range(3)]
    assert torch.equal(whole, combine(parts, torch.add))
    assert not torch.equal(whole, parts[0] + parts[1] + parts[2])  # rounding twice would show


def arrivals():
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((2, 3), float(rank))
    output = torch.full((2 * size, 3), torch.nan)
    order = []
    for rows in gather_chunks(x, output, dist.group.WORLD):
        owner = rows.start // 2
        assert bool((output[rows] == owner).all())
        order.append(owner)
    assert torch.equal(output[:, 0], torch.arange(size).repeat_interleave(2).float())
    return order


def test_chunks_arrive_own_first_then_around_the_ring(ranks):
    assert ranks(4).run(arrivals) == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]


def many_with_late_ranks() -> None:
    """Gathers and reductions overlap while ranks are out of step: no message is taken for another's."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for step in range(12):
        if step % size == rank:
            time.sleep(0.003)
        x = torch.full((1, 4), 10.0 * step + rank)
        first = start_all_gather(x, group)
        output = x.new_empty(size, 4)
        gathered = [output[rows].clone() for rows in gather_chunks(x, output, group)]
        reduced = reduce_scatter_chunks(lambda rows, out, x=x: out.copy_(x), (size, 4), x, group)
        everywhere = all_reduce_chunks(lambda rows, out, x=x: out.copy_(x), (1, 4), x, group)
        expected = torch.stack([torch.full((4,), 10.0 * step + r) for r in range(size)])
        assert torch.equal(first(), expected) and torch.equal(output, expected)
        assert torch.equal(torch.cat(gathered), expected.roll(-rank, 0))
        assert torch.equal(reduced[0], expected.sum(0)) and torch.equal(everywhere, reduced)


def test_messages_of_operations_in_flight_do_not_mix(ranks):
    ranks(3).run(many_with_late_ranks)


def in_pairs(transport: str):
    """With groups {0, 2} and {1, 3} of a world of 4, a rank of the group is not that rank of the world."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2]
    values = make(dist.get_rank(), torch.float64, x=(2, 6), wide=(4, 6), narrow=(6, 4))
    x, wide, narrow = (value.requires_grad_() for value in values.values())
    with record_collectives() as calls:
        hidden = ops.column_linear(x, wide, group=group, transport=transport)
        y = ops.row_linear(hidden, narrow, activation="silu", group=group, transport=transport)
        y.square().sum().backward()
    return sorted(calls), [y.detach(), x.grad, wide.grad, narrow.grad]


def test_sub_groups(ranks):
    results = [ranks(4).run(in_pairs, transport) for transport in ("pipelined", "sequential")]
    for (calls, tensors), (expected_calls, expected) in zip(*results, strict=True):
        assert calls == expected_calls
        assert_same(tensors, expected)


def interrupted() -> None:
    group = dist.new_group(list(range(dist.get_world_size())))  # the error leaves a message on its way in this group
    x = torch.ones(2, 3)
    output = x.new_empty(2 * dist.get_world_size(), 3)
    references = [weakref.ref(output)]
    with pytest.raises(ZeroDivisionError):
        for _ in gather_chunks(x, output, group):
            raise ZeroDivisionError

    def fill(rows, out):
        references.append(weakref.ref(out))
        if len(references) == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        reduce_scatter_chunks(fill, (4, 3), x, group)
    del output
    assert len(references) == 3 and [reference() for reference in references] == [None] * 3


def test_an_error_leaves_nothing_behind(ranks):
    ranks(2).run(interrupted)


def test_indivisible_tokens_are_refused(ranks):
    with pytest.raises(RankFailure, match=r"ValueError: .*2 ranks.*5 rows.*pad"):
        OnTransport(ranks, "pipelined")(2).run(row.indivisible)
