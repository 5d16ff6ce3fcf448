"""VocabParallelEmbedding, PositionEmbedding and LMHead have torch's values, also tied and padded; wrong ids are
refused."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from testing import assert_same
from torch.distributed.tensor import Shard

from tpformer import ops
from tpformer.distributed import build_mesh
from tpformer.layers import LMHead, PositionEmbedding, Positions, TensorParallel, VocabParallelEmbedding
from tpformer.parallel import reduce_partial_gradients

VOCAB, ROWS, HIDDEN, BATCH, SEQ = 19, 22, 6, 2, 6
IDS = torch.tensor([[0, 18, 7, 8, 7, 3], [15, 16, 5, 1, 2, 0]])
TARGETS = torch.tensor([[1, 18, 0, 8, -100, 3], [15, 16, -100, 1, 2, 0]])


def tied_model(mesh, sequence_parallel: bool) -> tuple[torch.Tensor, dict, tuple]:
    """Embed ids, add positions, and take the loss with the embedding's own table."""
    torch.manual_seed(0)
    options = {"tp": TensorParallel(mesh, sequence_parallel), "dtype": torch.float64}
    embedding = VocabParallelEmbedding(VOCAB, HIDDEN, vocab_multiple=ROWS, init_std=1.0, **options)
    positions = PositionEmbedding(SEQ, HIDDEN, init_std=1.0, **options)
    head = LMHead(VOCAB, HIDDEN, vocab_multiple=ROWS, weight=False, **options)
    assert head.weight is None and not list(head.parameters())
    x = embedding(IDS)
    embedded_shape = tuple(x.shape)
    x = positions(x.reshape(-1, HIDDEN), Positions(BATCH, SEQ))
    tied = embedding.local("weight")
    loss = head(x, targets=TARGETS.reshape(-1), tied=tied)
    loss.backward()
    logits = head(x.detach(), tied=tied).detach()
    for module in (embedding, positions):
        reduce_partial_gradients(module)
    parameters = {"table": embedding.weight, "positions": positions.weight}
    return loss.detach(), parameters, (embedded_shape, logits)


def on_rank(sequence_parallel: bool):
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    loss, parameters, others = tied_model(mesh, sequence_parallel)
    assert parameters["table"].placements == (Shard(0),) and parameters["table"].shape == (ROWS, HIDDEN)
    return loss, {name: (p.detach().full_tensor(), p.grad.full_tensor()) for name, p in parameters.items()}, others


@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tied_embedding_and_head_equal_plain_torch(ranks, t, sequence_parallel):
    results = ranks(t).run(on_rank, sequence_parallel)
    table, positions = (results[0][1][name][0].requires_grad_() for name in ("table", "positions"))
    x = F.embedding(IDS, table) + positions
    logits = (x @ table.t())[..., :VOCAB]
    loss = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="sum")
    loss.backward()
    for actual, parameters, (shape, _) in results:
        assert_same(actual, loss)
        assert_same([parameters["table"][1], parameters["positions"][1]], [table.grad, positions.grad])
        assert shape == ((BATCH * SEQ // t, HIDDEN) if sequence_parallel and t > 1 else (BATCH, SEQ, HIDDEN))
    whole = torch.cat([others[1] for *_, others in results], 1)
    assert_same(whole, logits.flatten(0, 1))


def logits_of_few_entries() -> tuple[torch.Tensor, torch.Tensor]:
    mesh = build_mesh("cpu", tensor_parallel=3)["tp"]
    torch.manual_seed(0)
    head = LMHead(5, HIDDEN, vocab_multiple=12, tp=mesh, dtype=torch.float64)
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


def test_the_table_is_padded_to_a_multiple_of_128():
    """GPT-2's 50257 rows become 50304."""
    assert VocabParallelEmbedding(50257, 1, device="meta").weight.shape == (50304, 1)
    assert VocabParallelEmbedding(256, 1, device="meta").weight.shape == (256, 1)


@pytest.mark.parametrize("ids, span", [([3, 19], r"\[3, 19\]"), ([-1, 4], r"\[-1, 4\]")])
def test_ids_out_of_range_are_refused(ids, span):
    """The table has a row 19, but it is padding."""
    with pytest.raises(ValueError, match=rf"token ids span {span}, outside the vocabulary \[0, 18\]"):
        VocabParallelEmbedding(VOCAB, HIDDEN, vocab_multiple=ROWS)(torch.tensor(ids))


def padded_embedding(padding_idx: int) -> tuple[torch.Tensor, ...]:
    tp = TensorParallel(build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"])
    torch.manual_seed(0)
    table = VocabParallelEmbedding(VOCAB, HIDDEN, padding_idx, vocab_multiple=ROWS, tp=tp, dtype=torch.float64)
    initial = table.weight.full_tensor()[:VOCAB].detach().clone()
    with torch.no_grad():
        table.weight += 1.0
    table(IDS).square().sum().backward()
    return initial, table(IDS).detach(), table.weight.grad.full_tensor()[:VOCAB]


@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("padding_idx", [0, 7, -1])
def test_padding_idx_is_torchs(ranks, t, padding_idx):
    for initial, y, gradient in ranks(t).run(padded_embedding, padding_idx):
        theirs = torch.nn.Embedding(VOCAB, HIDDEN, padding_idx, dtype=torch.float64)
        assert torch.equal(initial.any(1), theirs.weight.any(1))
        with torch.no_grad():
            theirs.weight.copy_(initial + 1.0)
        theirs(IDS).square().sum().backward()
        assert_same((y, gradient), (theirs(IDS), theirs.weight.grad))
    with pytest.raises(ValueError, match=r"padding_idx=19 is outside the vocabulary \[0, 18\]"):
        VocabParallelEmbedding(VOCAB, HIDDEN, 19)


def test_learned_positions_begin_at_the_offset():
    embedding = PositionEmbedding(7, HIDDEN)
    x = torch.zeros(2 * 4, HIDDEN)
    assert torch.equal(embedding(x, Positions(2, 4, offset=3)), embedding.weight[3:].repeat(2, 1))
    assert torch.equal(embedding(x, Positions(2, 4)), embedding.weight[:4].repeat(2, 1))
    with pytest.raises(ValueError, match="positions up to 7, but this PositionEmbedding has 7 .* seq_length=8"):
        embedding(x, Positions(2, 4, offset=4))


def long_samples(sequence_parallel: bool) -> None:
    """Samples of 8 tokens meet a table of 6 positions."""
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
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


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_positions_past_the_table_are_refused(ranks, sequence_parallel):
    """They are not refused where nobody reads what stands there."""
    ranks(2).run(long_samples, sequence_parallel)


@pytest.mark.parametrize(
    "tied, words",
    [
        (None, r"no table of its own \(weight=False\): give each call one"),
        (torch.randn(32, 8), r"the output table is a Tensor \(32, 8\), but has to be this rank's plain \(64, 8\)"),
        (torch.randn(64, 4), r"the output table is a Tensor \(64, 4\), but has to be"),
    ],
)
def test_a_table_that_is_not_the_ranks_is_refused(tied, words):
    with pytest.raises(ValueError, match=words):
        LMHead(50, 8, vocab_multiple=64, weight=False)(torch.randn(4, 8), tied=tied)


def test_head_takes_leading_dims():
    head, x, targets = LMHead(50, 8), torch.randn(2, 3, 8), torch.arange(6).view(2, 3)
    assert torch.equal(head(x), head(x.flatten(0, 1)).view(2, 3, 50))
    assert torch.equal(head(x, targets=targets), head(x.flatten(0, 1), targets=targets.flatten()))
    with pytest.raises(ValueError, match=r"targets are \(3, 2\)"):
        head(x, targets=targets.t())
