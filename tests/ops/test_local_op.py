"""Operations that know nothing of ranks: activations, dropout and rope have the right gradients; dropout's bits follow
the global (sample, position, column). Attention and what rope makes of positions is in tests/layers."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from shards import Seen, leaves, make
from torch.autograd import gradcheck

from tpformer import ops
from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.rope.reference import rope_table
from tpformer.layers import Positions, transformer_block

CPU = torch.device("cpu")
SEQ, HIDDEN = 6, 5


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_s_gradients(name):
    """It does not write to the gradient that it is given."""
    for names in (["x"], ["x", "gate"]):
        inputs = list(leaves(make(0, torch.float64, **dict.fromkeys(names, (5, 6)))).values())
        assert gradcheck(lambda *xs: ops.activation(xs[0], name, *xs[1:]), inputs)
        da = make(1, torch.float64, da=(5, 6))["da"]
        before = da.clone()
        ops.activation(inputs[0], name, *inputs[1:]).backward(da)
        assert torch.equal(da, before)


def site(samples: list[int], rows: slice | None = None) -> ops.Dropout:
    rows = rows or slice(0, len(samples) * SEQ)
    return ops.Dropout(ops.dropout_starts(torch.tensor(samples), SEQ, HIDDEN, rows), 7, 0.4)


def test_dropout_bits_follow_the_sample_not_its_place():
    """They are the same in every shard, microbatch and order, and in the backward."""
    samples, rows = [3, 9, 0, 4], torch.ones(4 * SEQ, HIDDEN)
    whole = ops.dropout(rows, site(samples))
    assert 0 < int((whole == 0).sum()) < whole.numel()
    for t in (2, 3, 4):
        n = len(rows) // t
        shards = [ops.dropout(rows[:n], site(samples, slice(rank * n, (rank + 1) * n))) for rank in range(t)]
        assert torch.equal(torch.cat(shards), whole)
    other = ops.dropout(rows, site([samples[-1], *samples[:-1]]))
    assert torch.equal(whole, other.roll(-SEQ, 0)) and not torch.equal(whole, other)
    assert torch.equal(ops.dropout(rows[:SEQ], site([9])), whole[SEQ : 2 * SEQ])
    x = torch.randn(SEQ, HIDDEN, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: ops.dropout(x, site([2])), x)
    assert ops.dropout(x, None) is x


@pytest.mark.parametrize("p", [1.0, -0.1, float("nan")])
def test_what_is_no_probability_of_zeroing_is_refused(p):
    x, wrong = torch.ones(SEQ, HIDDEN), site([0])._replace(p=p)
    calls = partial(ops.dropout, x, wrong), partial(ops.row_linear, x, x, dropout=wrong)
    for call in (*calls, partial(transformer_block, 8, 2, dropout=p)):
        with pytest.raises(ValueError, match=rf"dropout={p} must be in \[0, 1\)"):
            call()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_s_gradients(interleaved):
    inputs = list(leaves(make(0, torch.float64, q=(4, 2, 6), k=(4, 1, 6))).values())
    table, positions = rope_table(71, 6, 10000.0, torch.float64, CPU), torch.tensor([0, 3, 1, 70])
    assert gradcheck(lambda q, k: ops.rope(q, k, table, positions, interleaved), inputs)

    def strided(q, k):
        headwise = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
        return ops.rope(*headwise, table, positions, interleaved)

    assert gradcheck(strided, inputs)


def test_what_a_backward_reads_again_must_not_be_written_before_it():
    """Autograd does not see it: rope, dropout and queues of weight gradients save no tensor."""
    x, w = (x.requires_grad_() for x in torch.randn(2, SEQ, SEQ, dtype=torch.float64))
    table, positions, drop = rope_table(SEQ, SEQ, 1e4, torch.float64, CPU), torch.arange(SEQ), site([0])
    rows, queue = x.detach().clone(), ops.WeightGradientQueue()
    rope = partial(ops.rope, x[:, None], x[:, None], table, positions)
    for call, *each in (
        (lambda: rope()[0], *table, positions),
        (partial(ops.dropout, x, drop), drop.start),
        (partial(ops.row_linear, x, w, dropout=drop), drop.start),
    ):
        for written in each:
            y = call()
            y.sum().backward(retain_graph=True)
            written += 0
            with pytest.raises(RuntimeError, match="was written in place between the forward and its backward"):
                y.sum().backward()
    ops.column_linear(rows, w, deferred=ops.Deferred(queue, [print])).sum().backward()
    rows.zero_()
    with pytest.raises(RuntimeError, match="a linear has kept for its weight gradient was written in place"):
        queue.run()


REGIONS: dict[str, tuple[Callable, int]] = {
    "the end": (lambda x: ops.row_linear(ops.row_linear(x, x).tanh(), x), 1),
    "another shape": (lambda x: ops.row_linear(ops.row_linear(x, x).tanh()[None], x), 1),
    "one of two": (lambda x: (x.sin(), ops.row_linear(ops.row_linear(x, x).tanh(), x)), 1),
    "not the last one": (lambda x: (ops.row_linear(x, x), ops.row_linear(x.sin(), x).exp()), 2),
    "something follows": (lambda x: ops.row_linear(ops.row_linear(x, x).tanh(), x).tanh(), 2),
    "without gradients": (lambda x: (torch.no_grad()(ops.row_linear)(x, x), ops.row_linear(x, x))[1], 1),
    "a region within": (lambda x: ops.recompute(lambda x: ops.row_linear(x, x), x).tanh(), 1),  # and its own run
}


@pytest.mark.parametrize("name", REGIONS)
def test_a_region_leaves_out_the_end_that_makes_its_result(name: str) -> None:
    """The second run has all GEMMs but that one; gradients are those without a region."""
    region, again = REGIONS[name]
    x, found = torch.randn(SEQ, SEQ, dtype=torch.float64, requires_grad=True), []
    for run in (region, partial(ops.recompute, region, skip_end=True), partial(ops.recompute, region)):
        y = run(x)
        loss = sum(each.square().sum() for each in (y if isinstance(y, tuple) else (y,)))
        gradients = []
        for _ in range(2):
            with Seen() as seen:
                gradients += torch.autograd.grad(loss, x, retain_graph=True)
        assert torch.equal(*gradients)
        found.append((seen.gemms, gradients[0]))
    (own, expected), (left_out, first), (whole, second) = found
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert left_out - own == again and whole >= left_out


def test_layers_share_one_table_and_one_list_of_positions():
    positions = Positions(2, 5, offset=4)
    one, other = (positions.rope(8, 1e4, CPU, torch.float32) for _ in range(2))
    assert one[0] is other[0] and one[1] is other[1]
    assert one[0][0].shape == (9, 4) and one[1].tolist() == [4, 5, 6, 7, 8] * 2
    with pytest.raises(ValueError, match="offset=2 is where whole samples begin: with ids, every document begins at 0"):
        Positions(1, 3, torch.tensor([[0, 1, 2]]), offset=2)
