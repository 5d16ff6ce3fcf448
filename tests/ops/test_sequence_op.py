"""Moves of rows and columns between ranks have the right values, gradients and collectives; uneven rows are refused."""

import pytest
import torch
import torch.distributed as dist
from pool import RankFailure
from shards import join, make
from testing import assert_identical, assert_same

from tpformer import ops
from tpformer.distributed import record_collectives

TOKENS, N = 12, 3
NBYTES = TOKENS * N * 8


def tensor(seed: int) -> torch.Tensor:
    return make(seed, torch.float64, x=(TOKENS, N))["x"]


def on_rank(name: str):
    """Run the operation, then a product with a tensor whose rows differ, so that gradients differ too."""
    t, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    factor = tensor(100)
    if name in ("reduce", "reduce_all"):
        x = tensor(rank)
    else:
        x = tensor(0) if name == "scatter" else tensor(0).chunk(t)[rank].clone()
    x.requires_grad_()
    with record_collectives() as forward:
        if name.startswith("reduce"):
            y = ops.reduce_rows(x, group, sequence_parallel=name == "reduce")
        else:
            y = (ops.scatter_rows if name == "scatter" else ops.gather_rows)(x, group)
    with record_collectives() as backward:
        y.backward(factor.chunk(t)[rank] if name in ("reduce", "scatter") else factor)
    return y.detach(), x.grad, list(forward), list(backward)


@pytest.mark.parametrize("t", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["reduce", "reduce_all", "scatter", "gather"])
def test_values_gradients_and_communication(ranks, t, name):
    results = ranks(t).run(on_rank, name)
    reduce, whole = name.startswith("reduce"), tensor(100)
    y = join([r[0] for r in results], 0 if name in ("reduce", "scatter") else "equal")
    assert_same(y, sum(tensor(rank) for rank in range(t)) if reduce else tensor(0))
    # the loss is sum(y * factor), so every rank's summand of y, and every row of x, has the gradient `factor`
    assert torch.equal(join([r[1] for r in results], 0 if name == "gather" else "equal"), whole)
    expected = {
        "reduce": (["reduce_scatter"], ["all_gather"]),
        "reduce_all": (["all_reduce"], []),
        "scatter": ([], ["all_gather"]),
        "gather": (["all_gather"], []),
    }[name]
    for *_, forward, backward in results:
        if t == 1:
            assert forward == backward == []
        else:
            assert (forward, backward) == tuple([(call, NBYTES) for call in calls] for calls in expected)


def columns_on_rank(n: int):
    """Gather this rank's chunk of n columns; then take columns of the whole that overlap its neighbour's."""
    t, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    whole = make(0, torch.float64, x=(TOKENS, n))["x"]
    x = whole.chunk(t, 1)[rank].clone().requires_grad_()
    with record_collectives() as calls:
        gathered = ops.gather_columns(x, n, group)
        gathered.backward(whole + 1)
        other = whole.clone().requires_grad_()
        taken = ops.take_columns(other, slice(rank, rank + 2), group)
        taken.backward(taken.detach())
    return gathered.detach(), x.grad, taken.detach(), other.grad, list(calls)


@pytest.mark.parametrize(("t", "n"), [(2, 6), (3, 8)])
def test_columns_are_gathered_and_taken(ranks, t, n):
    whole = make(0, torch.float64, x=(TOKENS, n))["x"]
    uses = torch.zeros(n, dtype=torch.float64)
    for rank in range(t):
        uses[rank : rank + 2] += 1
    for rank, (gathered, dx, taken, dtaken, calls) in enumerate(ranks(t).run(columns_on_rank, n)):
        assert torch.equal(gathered, whole) and torch.equal(dx, (whole + 1).chunk(t, 1)[rank])
        assert torch.equal(taken, whole[:, rank : rank + 2])
        assert_identical(dtaken, whole * uses)
        padded = -(-n // t) * t
        assert calls == [("all_gather", TOKENS * padded * 8), ("all_reduce", TOKENS * n * 8)]


def test_without_a_group_they_are_the_identity():
    x = tensor(0)
    assert all(operation(x, None) is x for operation in (ops.reduce_rows, ops.scatter_rows, ops.gather_rows))
    assert ops.gather_columns(x, N, None) is x and torch.equal(ops.take_columns(x, slice(1, 3), None), x[:, 1:3])


def indivisible():
    ops.scatter_rows(torch.randn(7, 2), dist.group.WORLD)


def test_indivisible_tokens_are_refused(ranks):
    with pytest.raises(RankFailure, match="7 tokens cannot be split over 3 .*ranks: pad .* to a multiple of 3"):
        ranks(3).run(indivisible)
