"""attention equals an explicit masked softmax in float64, with grouped heads and packed documents too."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import leaves, make
from testing import assert_same
from torch import Tensor

from tpformer import ops


def explicit(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    """softmax over those keys of the same document that are not later. document (tokens,) is each token's document."""
    shape = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    visible = (document[:, None] == document[None, :]).tril()
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // groups].t() / q.shape[-1] ** 0.5
        heads.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v[:, head // groups])
    return torch.stack(heads, 1).view(shape)


def values(batch: int, seq: int, heads: int, kv_heads: int, d: int) -> dict[str, Tensor]:
    shapes = {name: (batch, seq, n, d) for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
    return leaves(make(0, torch.float64, **shapes))


def with_gradients(y: Tensor, inputs: dict[str, Tensor]) -> list[Tensor]:
    dy = make(1, y.dtype, dy=tuple(y.shape))["dy"]
    return [y.detach(), *torch.autograd.grad(y, list(inputs.values()), dy)]


HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 9), HEADS, st.sampled_from([1, 2, 5, 8]))
def test_whole_samples(batch, seq, heads, d):
    inputs = values(batch, seq, *heads, d)
    sample = torch.arange(batch).repeat_interleave(seq)
    actual = with_gradients(ops.attention(**inputs), inputs)
    expected = with_gradients(explicit(**inputs, document=sample), inputs)
    assert_same(actual, expected)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), HEADS)
def test_packed_documents(lengths, heads):
    inputs = values(1, sum(lengths), *heads, 4)
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = ops.attention(**inputs, documents=(boundaries, max(lengths)))
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    actual, expected = with_gradients(packed, inputs), with_gradients(explicit(**inputs, document=document), inputs)
    assert_same(actual, expected)
    # each document by itself has the same result
    alone = [
        ops.attention(*(x[:, first:last] for x in inputs.values()))
        for first, last in zip(boundaries[:-1], boundaries[1:], strict=True)
    ]
    assert_same(torch.cat(alone, 1), packed)
