"""Embedding over a sharded vocabulary equals F.embedding: rows and the table's gradient, even or uneven slices."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shards import join, make

from tpformer import ops
from tpformer.distributed import record_collectives

TOKENS, ROWS, N = 12, 22, 5


def data():
    values = make(0, torch.float64, weight=(ROWS, N), dy=(TOKENS, N))
    # repeated ids, the first and last row, and both sides of every slice border
    return values["weight"], torch.tensor([0, 21, 7, 8, 7, 10, 11, 15, 16, 5, 6, 0]), values["dy"]


def on_rank(sequence_parallel: bool):
    weight, ids, dy = data()
    t, rank = dist.get_world_size(), dist.get_rank()
    per_rank = -(-ROWS // t)
    local = weight[rank * per_rank : (rank + 1) * per_rank].clone().requires_grad_()
    with record_collectives() as forward:
        y = ops.vocab_parallel_embedding(
            ids, local, first=rank * per_rank, group=dist.group.WORLD, sequence_parallel=sequence_parallel
        )
    with record_collectives() as backward:
        y.backward(dy.chunk(t)[rank] if sequence_parallel else dy)
    return y.detach(), local.grad, list(forward), list(backward)


@pytest.mark.parametrize("t", [1, 2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_equals_embedding(ranks, t, sequence_parallel):
    weight, ids, dy = data()
    leaf = weight.requires_grad_()
    y = F.embedding(ids, leaf)
    y.backward(dy)
    results = ranks(t).run(on_rank, sequence_parallel)
    # exact: every row is one rank's value plus zeros
    assert torch.equal(join([r[0] for r in results], 0 if sequence_parallel else "equal"), y.detach())
    torch.testing.assert_close(join([r[1] for r in results], 0), leaf.grad, rtol=1e-14, atol=1e-14)
    nbytes = TOKENS * N * 8
    for *_, forward, backward in results:
        if t == 1:
            assert forward == backward == []
        elif sequence_parallel:
            assert (forward, backward) == ([("reduce_scatter", nbytes)], [("all_gather", nbytes)])
        else:
            assert (forward, backward) == ([("all_reduce", nbytes)], [])
