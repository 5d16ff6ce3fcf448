"""An embedding over an evenly or unevenly sharded vocabulary has F.embedding's rows and gradient of the table."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shards import join, make
from testing import assert_same

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
    vocab = ops.VocabSlice(rank * per_rank, per_rank, ROWS)
    local = weight[rank * per_rank : (rank + 1) * per_rank].clone().requires_grad_()
    with record_collectives() as forward:
        y = ops.vocab_parallel_embedding(ids, local, vocab, group=dist.group.WORLD, sequence_parallel=sequence_parallel)
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
    # the sum is exact, because all ranks but one add zeros
    assert torch.equal(join([r[0] for r in results], 0 if sequence_parallel else "equal"), y.detach())
    assert_same(join([r[1] for r in results], 0), leaf.grad)
    nbytes = TOKENS * N * 8
    for *_, forward, backward in results:
        if t == 1:
            assert forward == backward == []
        elif sequence_parallel:
            assert (forward, backward) == ([("reduce_scatter", nbytes)], [("all_gather", nbytes)])
        else:
            assert (forward, backward) == ([("all_reduce", nbytes)], [])


def outside(device: str) -> tuple[list[int], torch.Tensor]:
    """Return which rows are NaN, and the gradient of the sum of the others."""
    weight, ids, _ = data()
    group, entries = dist.group.WORLD if dist.is_initialized() else None, ROWS - 1
    t, rank = (1, 0) if group is None else (group.size(), group.rank())
    ids[[2, 5]] = torch.tensor([-1, entries] if t > 1 else [entries, entries])  # the row `entries` is padding
    per_rank = -(-ROWS // t)
    local = weight[rank * per_rank : (rank + 1) * per_rank].to(device).requires_grad_()
    vocab = ops.VocabSlice(rank * per_rank, per_rank, entries)
    with mock.patch("tpformer.ops.embedding.check_ids"):  # nobody waits to check a GPU's ids
        y = ops.vocab_parallel_embedding(ids.to(device), local, vocab, group=group, sequence_parallel=False)
    y.nan_to_num().sum().backward()
    assert torch.equal(y.isnan().any(1), y.isnan().all(1))
    return y.isnan().any(1).nonzero()[:, 0].tolist(), local.grad.cpu()


def check_outside(found: list) -> None:
    ids = data()[1].tolist()
    counts = torch.tensor([(ids[:2] + ids[3:5] + ids[6:]).count(row) for row in range(ROWS)])
    counts[-1] = 0
    wanted = [1, 2, 5]  # ids[1] is 21, the last row, which is padding here
    assert all(rows == wanted for rows, _ in found)
    assert torch.equal(join([gradient for _, gradient in found], 0), counts[:, None].expand(-1, N).double())


@pytest.mark.parametrize("t", [2, 3])
def test_ids_outside_the_vocabulary_are_nan_where_nobody_looks(ranks, t):
    check_outside(ranks(t).run(outside, "cpu"))


@pytest.mark.gpu
def test_padding_ids_are_nan_on_gpu():
    check_outside([outside("cuda")])
