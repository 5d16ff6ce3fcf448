"""VocabParallelEmbedding, PositionEmbedding and LMHead have torch's values, also padded. tests/models has tied ones."""

import pytest
import torch
import torch.distributed as dist
from steps import draw, each_case, own, tp_mesh
from testing import assert_same, on_every_rank
from torch import Tensor

from tpformer import ops
from tpformer.layers import LMHead, PositionEmbedding, Positions, TensorParallel, VocabParallelEmbedding

VOCAB, ROWS, HIDDEN, BATCH, SEQ = 19, 22, 6, 2, 6
IDS = torch.tensor([[0, 18, 7, 8, 7, 3], [15, 16, 5, 1, 2, 0]])
TARGETS = torch.tensor([[1, 18, 0, 8, -100, 3], [15, 16, -100, 1, 2, 0]])


@on_every_rank(3)
def test_logits_have_no_padding() -> None:
    """Of 12 rows on 3 ranks the first 5 are real, so the last rank has nothing but padding."""
    torch.manual_seed(0)
    head = LMHead(5, HIDDEN, vocab_multiple=12, tp=tp_mesh(), dtype=torch.float64)
    logits = head(torch.ones(3, HIDDEN, dtype=torch.float64))
    logits.sum().backward()
    gradient = head.weight.grad.full_tensor()
    assert logits.shape == (3, (4, 1, 0)[dist.get_rank()])
    assert bool((gradient[:5] != 0).all()) and not bool(gradient[5:].any())


def test_head_takes_leading_dims_and_the_terms_of_the_loss():
    head, (x,) = LMHead(VOCAB, HIDDEN, vocab_multiple=ROWS, dtype=torch.float64), draw((BATCH, SEQ, HIDDEN))
    rows, targets = x.flatten(0, 1), TARGETS.clamp(min=-7)
    terms = {"ignore_index": -7, "reduction": "mean", "label_smoothing": 0.1, "z_loss": 1e-3}
    expected = ops.linear_cross_entropy(rows, head.weight, targets.flatten(), head.vocab_slice(), **terms)
    assert torch.equal(head(x, targets=targets, **terms), expected)
    assert torch.equal(head(x), head(rows).view(BATCH, SEQ, VOCAB))


def padded_embedding(mesh, padding_idx: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    table = VocabParallelEmbedding(VOCAB, HIDDEN, padding_idx, vocab_multiple=ROWS, tp=mesh, dtype=torch.float64)
    initial = table.weight.full_tensor()[:VOCAB].detach().clone()
    with torch.no_grad():
        table.weight += 1.0
    y = table(IDS)
    y.square().sum().backward()
    return initial, y.detach(), table.weight.grad.full_tensor()[:VOCAB]


@pytest.mark.parametrize("t", [1, 3])
def test_padding_idx_is_torchs(ranks, t):
    for (padding_idx,), by_rank in each_case(ranks, t, padded_embedding, [(0,), (7,), (-1,)]):
        for initial, y, gradient in by_rank:
            theirs = torch.nn.Embedding(VOCAB, HIDDEN, padding_idx, dtype=torch.float64)
            assert torch.equal(initial.any(1), theirs.weight.any(1))
            with torch.no_grad():
                theirs.weight.copy_(initial + 1.0)
            theirs(IDS).square().sum().backward()
            assert_same((y, gradient), (theirs(IDS), theirs.weight.grad), f"{padding_idx=} on {t}")


def test_learned_positions_begin_at_the_offset_or_at_the_first_real_token():
    embedding, x = PositionEmbedding(7, HIDDEN), torch.zeros(2 * 4, HIDDEN)
    assert torch.equal(embedding(x, Positions(2, 4, offset=3)), embedding.weight[3:].repeat(2, 1))
    assert torch.equal(embedding(x, Positions(2, 4)), embedding.weight[:4].repeat(2, 1))
    padding = torch.tensor([[True, True, False, False, False, True]])
    y = embedding(torch.zeros(1, SEQ, HIDDEN), Positions(1, SEQ, key_padding_mask=padding))
    assert torch.equal(y[0, 2:5], embedding.weight[:3])


@on_every_rank(2)
def test_positions_past_the_table_are_refused() -> None:
    """Samples of 8 tokens meet a table of 6 positions. They are not refused where nobody reads what stands there."""
    ids, long = (torch.tensor([[0, 1, 2, 3, 4, 5, *last]] * 2) for last in ((0, 1), (6, 0)))
    for sequence_parallel in (True, False):
        embedding = PositionEmbedding(6, HIDDEN, tp=TensorParallel(tp_mesh(), sequence_parallel))
        x, weight = own(torch.zeros(2, 8, HIDDEN), 0 if sequence_parallel else None), embedding.local("weight")
        shard = slice(dist.get_rank(), dist.get_rank() + 1) if sequence_parallel else slice(None)
        assert torch.equal(embedding(x, Positions(2, 8, ids)), weight[ids][shard])
        assert torch.equal(embedding(x, Positions(2, 8, unread=2))[:, :6], weight.expand(2, -1, -1)[shard])
        for positions, last in ((Positions(2, 8), 7), (Positions(2, 8, long), 6), (Positions(2, 8, unread=1), 6)):
            with pytest.raises(ValueError, match=f"positions up to {last}, but this PositionEmbedding has 6"):
                embedding(x, positions)
