"""VocabParallelEmbedding, PositionEmbedding and LMHead have torch's values, also tied and padded."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from steps import Results, each_case, gradients, tp_mesh
from testing import assert_same
from torch import Tensor
from torch.distributed.tensor import Shard

from tpformer import ops
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import LMHead, PositionEmbedding, Positions, TensorParallel, VocabParallelEmbedding

VOCAB, ROWS, HIDDEN, BATCH, SEQ = 19, 22, 6, 2, 6
IDS = torch.tensor([[0, 18, 7, 8, 7, 3], [15, 16, 5, 1, 2, 0]])
TARGETS = torch.tensor([[1, 18, 0, 8, -100, 3], [15, 16, -100, 1, 2, 0]])


def tied_model(mesh, sequence_parallel: bool) -> tuple[Results, dict[str, Tensor]]:
    """Embed ids, add positions, and take the loss with the embedding's own table: results and gradients, and tables."""
    torch.manual_seed(0)
    options = {"tp": TensorParallel(mesh, sequence_parallel), "dtype": torch.float64}
    embedding = VocabParallelEmbedding(VOCAB, HIDDEN, vocab_multiple=ROWS, init_std=1.0, **options)
    positions = PositionEmbedding(SEQ, HIDDEN, init_std=1.0, **options)
    head = LMHead(VOCAB, HIDDEN, vocab_multiple=ROWS, weight=False, **options)
    assert head.weight is None and not list(head.parameters())
    assert embedding.weight.placements == (Shard(0),) and embedding.weight.shape == (ROWS, HIDDEN)
    x = embedding(IDS)
    sharded = sequence_parallel and mesh.size() > 1
    assert x.shape == ((BATCH * SEQ // mesh.size(), HIDDEN) if sharded else (BATCH, SEQ, HIDDEN))
    x = positions(x.reshape(-1, HIDDEN), Positions(BATCH, SEQ))
    tied = embedding.local("weight")
    loss = head(x, targets=TARGETS.reshape(-1), tied=tied)
    loss.backward()
    model = torch.nn.ModuleDict({"table": embedding, "positions": positions})
    found = {"loss": loss.detach(), "logits": head(x.detach(), tied=tied).detach()} | gradients(model)
    return found, {name: full_tensor(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("t", [1, 2, 3])
def test_tied_embedding_and_head_equal_plain_torch(ranks, t):
    for case, by_rank in each_case(ranks, t, tied_model, [(True,), (False,)]):
        p = {name: value.clone().requires_grad_() for name, value in by_rank[0][1].items()}
        logits = ((F.embedding(IDS, p["table.weight"]) + p["positions.weight"]) @ p["table.weight"].t())[..., :VOCAB]
        loss = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="sum")
        loss.backward()
        logits = logits.detach().flatten(0, 1)
        assert_same(torch.cat([found["logits"] for found, _ in by_rank], 1), logits, f"{case} on {t}")
        wanted = {"loss": loss.detach()} | {name: value.grad for name, value in p.items()}
        for found, _ in by_rank:
            assert_same({name: found[name] for name in wanted}, wanted, f"{case} on {t}")


def logits_of_few_entries() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    head = LMHead(5, HIDDEN, vocab_multiple=12, tp=tp_mesh(), dtype=torch.float64)
    logits = head(torch.ones(3, HIDDEN, dtype=torch.float64))
    logits.sum().backward()
    return logits.detach(), head.weight.grad.full_tensor()


def test_logits_have_no_padding(ranks):
    """Of 12 rows on 3 ranks the first 5 are real, so the last rank has nothing but padding."""
    for index, (logits, gradient) in enumerate(ranks(3).run(logits_of_few_entries)):
        assert logits.shape == (3, (4, 1, 0)[index])
        assert bool((gradient[:5] != 0).all()) and not bool(gradient[5:].any())


def test_head_takes_the_terms_of_the_loss():
    head, x = LMHead(VOCAB, HIDDEN, vocab_multiple=ROWS, dtype=torch.float64), torch.randn(12, HIDDEN).double()
    targets = TARGETS.reshape(-1).clamp(min=-7)
    terms = {"ignore_index": -7, "reduction": "mean", "label_smoothing": 0.1, "z_loss": 1e-3}
    expected = ops.linear_cross_entropy(x, head.weight, targets, head.vocab_slice(), **terms)
    assert torch.equal(head(x, targets=targets, **terms), expected)


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


def test_learned_positions_begin_at_the_offset():
    embedding = PositionEmbedding(7, HIDDEN)
    x = torch.zeros(2 * 4, HIDDEN)
    assert torch.equal(embedding(x, Positions(2, 4, offset=3)), embedding.weight[3:].repeat(2, 1))
    assert torch.equal(embedding(x, Positions(2, 4)), embedding.weight[:4].repeat(2, 1))


def long_samples(mesh, sequence_parallel: bool) -> None:
    """Samples of 8 tokens meet a table of 6 positions."""
    embedding = PositionEmbedding(6, HIDDEN, tp=TensorParallel(mesh, sequence_parallel))
    x, weight = torch.zeros(2, 8, HIDDEN), embedding.local("weight")
    shard = slice(dist.get_rank(), dist.get_rank() + 1) if embedding.tp.sharded else slice(None)
    ids = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1]] * 2)
    assert torch.equal(embedding(x[shard], Positions(2, 8, ids)), weight[ids][shard])
    assert torch.equal(embedding(x[shard], Positions(2, 8, unread=2))[:, :6], weight.expand(2, -1, -1)[shard])
    long = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0]] * 2)
    for positions, last in ((Positions(2, 8), 7), (Positions(2, 8, long), 6), (Positions(2, 8, unread=1), 6)):
        with pytest.raises(ValueError, match=f"positions up to {last}, but this PositionEmbedding has 6"):
            embedding(x[shard], positions)


def test_positions_past_the_table_are_refused(ranks):
    """They are not refused where nobody reads what stands there."""
    assert len(list(each_case(ranks, 2, long_samples, [(True,), (False,)]))) == 2


def test_head_takes_leading_dims():
    head, x, targets = LMHead(50, 8), torch.randn(2, 3, 8), torch.arange(6).view(2, 3)
    assert torch.equal(head(x), head(x.flatten(0, 1)).view(2, 3, 50))
    assert torch.equal(head(x, targets=targets), head(x.flatten(0, 1), targets=targets.flatten()))
