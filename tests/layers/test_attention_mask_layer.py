"""A token attends to what it should: a block equals the plain one with an explicit mask, with every gradient in
float64. Attention is causal, bidirectional or in sliding windows; samples are whole, packed or padded; on one rank and
on two."""

from functools import cache
from itertools import product

import pytest
import torch
from steps import Results, each_case, joined, own, step
from test_block_layer import BATCH, HIDDEN, SEQ, by_plain_block, inputs, make_block
from testing import assert_same
from torch import Tensor

from tpformer.layers import PositionEmbedding, Positions

ROW, COLUMN = torch.arange(SEQ)[:, None], torch.arange(SEQ)
ATTENTION = {
    "causal": ({}, COLUMN <= ROW),
    "bidirectional": ({"is_causal": False}, COLUMN >= 0),
    "window": ({"sliding_window": 2}, (COLUMN <= ROW) & (COLUMN > ROW - 2)),
    "window of one": ({"sliding_window": 1}, COLUMN == ROW),
    "window of all": ({"sliding_window": SEQ}, COLUMN <= ROW),
}
# name -> (arguments of Positions, the document that each token is in; padding is in document -1)
SAMPLES: dict[str, tuple[dict, list[list[int]]]] = {
    "whole": ({}, [[0] * SEQ] * BATCH),
    "documents": (
        {"ids": torch.tensor([[0, 1, 0, 1, 2, 3], [0, 0, 1, 0, 1, 2]])},
        [[0, 0, 1, 1, 1, 1], [0, 1, 1, 2, 2, 2]],
    ),
}

for name, documents in {
    "left padding": [[-1, -1, 0, 0, 0, 0], [0] * SEQ],
    "right padding": [[0, 0, 0, -1, -1, -1], [0, 0, 0, 0, 0, -1]],
    "padding around": [[-1, 0, 0, 0, -1, -1], [-1] * SEQ],
}.items():
    SAMPLES[name] = ({"key_padding_mask": torch.tensor(documents) < 0}, documents)


CASES = list(product(("gelu-erf", "qk-norm-head-dim-scaling"), ATTENTION, SAMPLES))


def upstream(samples: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the gradient of the result (zero at padding, which nobody reads) and the document of each token."""
    x, dy = inputs()
    document = torch.tensor(SAMPLES[samples][1])
    return x, dy * (document >= 0)[..., None], document


@cache
def expected(kind: str, attention: str, samples: str) -> Results:
    x, dy, document = upstream(samples)
    same = (document[:, :, None] == document[:, None]) & (document >= 0)[:, None] | torch.eye(SEQ).bool()
    found = by_plain_block(kind, make_block(kind), x, dy, visible=same & ATTENTION[attention][1])
    return found | {"y": found["y"][document >= 0]}


def on_rank(mesh, kind: str, attention: str, samples: str) -> Results:
    block = make_block(kind, mesh, **ATTENTION[attention][0])
    x, dy = (own(z, 1) for z in upstream(samples)[:2])
    arguments = SAMPLES[samples][0]
    if mesh.size() > 1 or "key_padding_mask" not in arguments:  # on one rank the block itself takes a mask
        arguments = {"positions": Positions(BATCH, SEQ, **arguments)}
    return step(block, x, dy, **arguments)


@pytest.mark.parametrize("t", [1, 2])
def test_equals_plain_block(ranks, t):
    for case, by_rank in each_case(ranks, t, on_rank, CASES):
        wanted, document = expected(*case), upstream(case[-1])[2]
        for found in joined(by_rank, 1):
            assert_same(found | {"y": found["y"][document >= 0]}, wanted, f"{case}")


def test_learned_positions_begin_at_the_first_real_token():
    embedding = PositionEmbedding(SEQ, HIDDEN)
    mask = torch.tensor([[True, True, False, False, False, True]])
    y = embedding(torch.zeros(1, SEQ, HIDDEN), Positions(1, SEQ, key_padding_mask=mask))
    assert torch.equal(y[0, 2:5], embedding.weight[:3])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_tokens_are_no_error(shape):
    mask, block = torch.zeros(shape, dtype=torch.bool), make_block("mqa")
    x = torch.zeros(*shape, HIDDEN, dtype=torch.float64, requires_grad=True)
    for y in (block(x), block(x, key_padding_mask=mask)):
        assert y.shape == x.shape
        y.sum().backward()
