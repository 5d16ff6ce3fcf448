"""Operations that know nothing of ranks. Activations, dropout and rope have the right gradients; dropout's bits follow
the global (sample, position, column); rope turns tokens by their positions after an offset and in packed documents;
attention equals an explicit masked softmax in float64, with grouped heads and packed documents too."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import leaves, make
from testing import assert_identical, assert_same
from torch import Tensor
from torch.autograd import gradcheck

from tpformer import ops
from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.rope.reference import rope_table
from tpformer.layers import Positions, TransformerBlock

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
    """They are the same in every shard, microbatch and order."""
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


def test_dropout_s_gradient_is_that_of_the_product_with_the_mask():
    x = torch.randn(SEQ, HIDDEN, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: ops.dropout(x, site([2])), x)
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


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_s_gradients(interleaved):
    inputs = list(leaves(make(0, torch.float64, q=(4, 2, 6), k=(4, 1, 6))).values())
    table, positions = rope_table(71, 6, 10000.0, torch.float64, CPU), torch.tensor([0, 3, 1, 70])
    assert gradcheck(lambda q, k: ops.rope(q, k, table, positions, interleaved), inputs)

    def strided(q, k):
        headwise = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
        return ops.rope(*headwise, table, positions, interleaved)

    assert gradcheck(strided, inputs)


def turned(values: dict[str, Tensor], part: slice, positions: Positions, interleaved: bool = False) -> list[Tensor]:
    """A part of the tokens at these positions, in one list of rows."""
    q, k = (values[name][:, part].flatten(0, 1) for name in "qk")
    table, ids = positions.rope(8, 100.0, CPU, q.dtype)
    return list(ops.rope(q, k, table, ids, interleaved))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rope_after_an_offset_continues_a_longer_sample(dtype, interleaved):
    """The last four of seven tokens, at an offset of 3, get the bits that they get in the whole sample."""
    values = make(1, dtype, q=(2, 7, 3, 8), k=(2, 7, 1, 8))
    whole = turned(values, slice(None), Positions(2, 7), interleaved)
    tail = turned(values, slice(3, None), Positions(2, 4, offset=3), interleaved)
    assert_identical(tail, [y.unflatten(0, (2, 7))[:, 3:].flatten(0, 1) for y in whole])


def test_rope_begins_anew_in_each_document():
    values = make(2, torch.float64, q=(1, 6, 2, 8), k=(1, 6, 2, 8))
    packed = turned(values, slice(None), Positions(2, 3, torch.tensor([[0, 1, 0], [0, 1, 2]])))
    for first, last in ((0, 2), (2, 3), (3, 6)):
        apart = turned(values, slice(first, last), Positions(1, last - first))
        assert_identical([y[first:last] for y in packed], apart)


def test_layers_share_one_table_and_one_list_of_positions():
    positions = Positions(2, 5, offset=4)
    one, other = (positions.rope(8, 1e4, CPU, torch.float32) for _ in range(2))
    assert one[0] is other[0] and one[1] is other[1]
    assert one[0][0].shape == (9, 4) and one[1].tolist() == [4, 5, 6, 7, 8] * 2


def test_an_offset_and_documents_are_refused():
    with pytest.raises(ValueError, match="offset=2 is where whole samples begin: with ids, every document begins at 0"):
        Positions(1, 3, torch.tensor([[0, 1, 2]]), offset=2)


def explicit(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    """softmax over those keys of the same document that are not later. document (tokens,) is each token's document."""
    visible = (document[:, None] == document[None, :]).tril()
    by_head = [x.flatten(0, 1).transpose(0, 1) for x in (q, k, v)]
    groups = q.shape[2] // k.shape[2]
    queries, keys, values = by_head[0], *(x.repeat_interleave(groups, 0) for x in by_head[1:])
    scores = (queries @ keys.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1).view(q.shape)


def compare(batch: int, seq: int, heads: tuple[int, int], d: int, document: Tensor, **options) -> None:
    """Attention of a batch with explicit attention, where each token is of a document, and their gradients."""
    shapes = {name: (batch, seq, n, d) for name, n in (("q", heads[0]), ("k", heads[1]), ("v", heads[1]))}
    inputs = leaves(make(0, torch.float64, **shapes))
    results = [ops.attention(**inputs, **options), explicit(**inputs, document=document)]
    dy = make(1, torch.float64, dy=tuple(results[0].shape))["dy"]
    assert_same(*([y, torch.autograd.grad(y, list(inputs.values()), dy)] for y in results))


HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)])


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 9), HEADS, st.sampled_from([1, 2, 5, 8]))
def test_attention_of_whole_samples(batch, seq, heads, d):
    compare(batch, seq, heads, d, torch.arange(batch).repeat_interleave(seq))


@settings(max_examples=25)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), HEADS)
def test_attention_of_packed_documents(lengths, heads):
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    compare(1, sum(lengths), heads, 4, document, documents=(boundaries, max(lengths)))
