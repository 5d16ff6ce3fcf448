"""The pipelined transport: chunks come in order, sums are rounded once, any number of rows and any group are served,
late ranks mix nothing up, an error leaves nothing behind. test_linears_op.py compares it with plain torch."""

import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shards import leaves, make, mine
from testing import assert_same, on_every_rank

from tpformer import ops
from tpformer.distributed import chunked, record_collectives
from tpformer.distributed.chunked import all_reduce_chunks, gather_chunks, reduce_scatter_chunks, start_all_gather
from tpformer.distributed.collectives import combine
from tpformer.ops.transports.pipelined import Pipelined
from tpformer.ops.transports.sequential import Sequential


@on_every_rank(3)
def test_all_reduce_of_any_number_of_rows() -> None:
    group = dist.group.WORLD
    for tokens in (0, 1, 3, 7):
        by_rank = [make(rank, torch.float64, x=(tokens, 3), weight=(5, 3)).values() for rank in range(3)]
        products = [x @ weight.t() for x, weight in by_rank]
        with torch.no_grad():
            y = ops.row_linear(*by_rank[dist.get_rank()], transport=Pipelined(group, sequence_parallel=False))
        assert_same(y, sum(products), f"{tokens} rows")


@on_every_rank(3)
def test_scattered_sums_are_in_rank_order_and_rounded_once() -> None:
    parts, group = [make(rank, torch.bfloat16, x=(6, 40))["x"] for rank in range(3)], dist.group.WORLD
    x = parts[dist.get_rank()]
    for _ in range(2):
        rows = reduce_scatter_chunks(lambda rows, out: out.copy_(x[rows]), (6, 40), x, group)
        assert torch.equal(rows, mine(combine(parts, torch.add), 0))
        assert not torch.equal(rows, mine(parts[0] + parts[1] + parts[2], 0))  # rounding twice would show


@on_every_rank(3)
def test_messages_of_operations_in_flight_do_not_mix() -> None:
    """Gathers and reductions overlap while ranks are out of step: no message is taken for another's. Chunks of a gather
    arrive own first, then around the ring."""
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


@on_every_rank(3)
def test_ranks_meet_once_in_a_call() -> None:
    """Behind the first part of a reduction, which is made while others come, and before all parts of a gather."""
    order: list[str] = []
    x, group = torch.ones(3, 2), dist.group.WORLD
    meets = mock.patch.object(chunked, "_meet", side_effect=lambda *_: order.append("meet"))
    sends = mock.patch.object(chunked, "_exchange", side_effect=lambda *_: order.append("send") or [mock.Mock()])
    with meets, sends:
        reduce_scatter_chunks(lambda rows, out: order.append("fill"), (3, 2), x, group)
        assert order == ["fill", "meet", "send", "fill", "send", "fill"]
        order.clear()
        list(gather_chunks(x, torch.ones(9, 2), group))
        assert order == ["meet", "send", "send"]


@on_every_rank(4)
def test_sub_groups() -> None:
    """With groups {0, 2} and {1, 3} of a world of 4, a rank of the group is not that rank of the world."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2]
    found = []
    for transport in (Pipelined(group), Sequential(group)):
        x, wide, narrow = leaves(make(dist.get_rank(), torch.float64, x=(2, 6), wide=(4, 6), narrow=(6, 4))).values()
        with record_collectives() as calls:
            hidden = ops.column_linear(x, wide, transport=transport)
            y = ops.row_linear(hidden, narrow, activation="silu", transport=transport)
            y.square().sum().backward()
        found.append([sorted(calls), y, x.grad, wide.grad, narrow.grad])
    assert_same(*found)


@on_every_rank(2)
def test_an_error_leaves_nothing_behind() -> None:
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
