"""A token attends to what it should: a block equals the plain one with an explicit mask, with every gradient in
float64. Attention is causal, bidirectional or in sliding windows; samples are whole, packed or padded; on one rank and
on two."""

from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
from steps import Results, joined, step
from test_block_layer import BATCH, HIDDEN, SEQ, by_plain_block, inputs, make_block
from testing import assert_same
from torch import Tensor

from tpformer.distributed import build_mesh
from tpformer.layers import PositionEmbedding, Positions, SelfAttention, TransformerBlock

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


def on_rank() -> list[Results]:
    t, rank, found = dist.get_world_size(), dist.get_rank(), []
    mesh = build_mesh("cpu", tensor_parallel=t)["tp"]
    for kind, attention, samples in CASES:
        block = make_block(kind, mesh, **ATTENTION[attention][0])
        x, dy = (z.chunk(t, 1)[rank] for z in upstream(samples)[:2])
        arguments = SAMPLES[samples][0]
        if t > 1 or "key_padding_mask" not in arguments:  # on one rank the block itself takes a mask
            arguments = {"positions": Positions(BATCH, SEQ, **arguments)}
        found.append(step(block, x, dy, **arguments))
    return found


@pytest.mark.parametrize("t", [1, 2])
def test_equals_plain_block(ranks, t):
    for case, *by_rank in zip(CASES, *ranks(t).run(on_rank), strict=True):
        wanted, document = expected(*case), upstream(case[-1])[2]
        for found in joined(by_rank, 1):
            assert_same(found | {"y": found["y"][document >= 0]}, wanted, f"{case}")


@pytest.mark.parametrize("options", [{"sliding_window": 0}, {"sliding_window": 4, "is_causal": False}])
def test_windows_that_are_refused(options):
    with pytest.raises(ValueError, match="it has at least 1 token, the query itself"):
        TransformerBlock(8, 2, **options)


def test_learned_positions_begin_at_the_first_real_token():
    embedding = PositionEmbedding(SEQ, HIDDEN)
    mask = torch.tensor([[True, True, False, False, False, True]])
    y = embedding(torch.zeros(1, SEQ, HIDDEN), Positions(1, SEQ, key_padding_mask=mask))
    assert torch.equal(y[0, 2:5], embedding.weight[:3])


REAL = torch.zeros(1, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"key_padding_mask": torch.tensor([[False, True, False]])}, "padding between real tokens of a sample: move"),
        ({"key_padding_mask": REAL.float()}, r"is \(1, 3\) torch.float32: give .* = \(1, 3\) bool"),
        ({"key_padding_mask": REAL[:, :2]}, r"is \(1, 2\) torch.bool: give .* = \(1, 3\) bool"),
        ({"key_padding_mask": REAL, "offset": 1}, "offset=1 is where whole samples begin"),
        ({"key_padding_mask": REAL, "ids": torch.arange(3)[None]}, "beside ids: let ids restart at 0 where padding"),
    ],
)
def test_masks_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Positions(1, 3, **arguments)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_tokens_are_no_error(shape):
    mask, block = torch.zeros(shape, dtype=torch.bool), make_block("mqa")
    x = torch.zeros(*shape, HIDDEN, dtype=torch.float64, requires_grad=True)
    for y in (block(x), block(x, key_padding_mask=mask)):
        assert y.shape == x.shape
        y.sum().backward()


def test_padding_beside_positions_is_refused():
    with pytest.raises(ValueError, match=r"beside positions: give it once, as Positions\(..., key_padding_mask=...\)"):
        SelfAttention(8, 2)(torch.zeros(1, 3, 8), positions=Positions(1, 3), key_padding_mask=REAL)
