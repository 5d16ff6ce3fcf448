"""Dropout's bits follow the global (sample, position, column): they are the same in every shard, microbatch and
order."""

import pytest
import torch
import torch.distributed as dist
from shards import join

from tpformer import ops
from tpformer.layers import TransformerBlock

SEQ, HIDDEN = 6, 5


def site(samples: list[int], rows: slice | None = None, key: int = 7) -> ops.Dropout:
    rows = rows or slice(0, len(samples) * SEQ)
    return ops.Dropout(ops.dropout_starts(torch.tensor(samples), SEQ, HIDDEN, rows), key, 0.4)


def on_rank():
    t, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(4 * SEQ, HIDDEN).chunk(t)[rank].requires_grad_()
    y = ops.dropout(x, site([3, 9, 0, 4], slice(rank * len(x), (rank + 1) * len(x))))
    y.sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_shards_have_the_bits_of_the_whole(ranks, t):
    results = ranks(t).run(on_rank)
    whole = ops.dropout(torch.ones(4 * SEQ, HIDDEN), site([3, 9, 0, 4]))
    assert torch.equal(join([r[0] for r in results], 0), whole)
    assert torch.equal(join([r[1] for r in results], 0), whole)
    assert 0 < int((whole == 0).sum()) < whole.numel()


def test_bits_follow_the_sample_not_its_place_in_the_batch():
    rows = torch.ones(2 * SEQ, HIDDEN)
    one, other = ops.dropout(rows, site([3, 9])), ops.dropout(rows, site([9, 3]))
    assert torch.equal(one, other.roll(SEQ, 0)) and not torch.equal(one, other)
    assert torch.equal(ops.dropout(rows[:SEQ], site([9])), one[SEQ:])


def test_gradient_equals_that_of_the_product_with_the_mask():
    x = torch.randn(SEQ, HIDDEN, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.dropout(x, site([2])), x)
    assert ops.dropout(x, None) is x


@pytest.mark.parametrize("p", [1.0, -0.1, float("nan")])
def test_what_is_no_probability_of_zeroing_is_refused(p):
    x, wrong = torch.ones(SEQ, HIDDEN), site([0])._replace(p=p)
    for call in (
        lambda: ops.dropout(x, wrong),
        lambda: ops.row_linear(x, x, dropout=wrong),
        lambda: TransformerBlock(8, 2, dropout=p),
    ):
        with pytest.raises(ValueError, match=rf"dropout={p} must be in \[0, 1\)"):
            call()
