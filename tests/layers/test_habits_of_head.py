"""Hooks, wrappers and FSDP2 on a GPT's lm_head mean for its loss what they mean for a torch.nn model's. The vocabulary
of 30 has 2 rows of padding."""

from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest
import theirs
import torch
import torch.nn.functional as F
from habits import BATCH, ON_LINEARS, SEQ, SIZES, VOCAB, fill
from steps import Results, each_case, gradients, tp_mesh
from testing import assert_same, on_every_rank
from torch import nn
from torch.distributed.fsdp import fully_shard
from turns import in_turns

from tpformer.distributed import build_mesh
from tpformer.layers import TensorParallel
from tpformer.models import GPT, GPTConfig

IDS = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
# what recipes pass to fully_shard, one after the other, before the model itself
ORDERS = {
    "embedding, layers, norm and head": lambda m: [m.embed_tokens, *m.layers.values(), [m.norm, m.lm_head]],
    "norm and head, layers, embedding": lambda m: [[m.norm, m.lm_head], *m.layers.values(), m.embed_tokens],
    "layers, embedding and norm and head": lambda m: [*m.layers.values(), [m.embed_tokens, m.norm, m.lm_head]],
    "layers, embedding and norm": lambda m: [*m.layers.values(), [m.embed_tokens, m.norm]],
}


def build(tp: TensorParallel | None = None, tied: bool = False) -> GPT:
    config = GPTConfig(**SIZES | {"vocab_multiple": 16}, n_layers=1, tie_embeddings=tied)
    model = GPT(config, tp=tp, dtype=torch.float64, label_smoothing=0.1)
    fill(model, theirs.GPT(VOCAB, SEQ, 1).state_dict())
    return model


REPLACED = {"replaced": lambda model, path: theirs.put(model, path, theirs.linear(24, VOCAB, 3))}
HABITS = {**theirs.ANYWHERE, **ON_LINEARS, **REPLACED}
COMPUTED = ("weight_norm", "spectral_norm", "prune")  # torch's module has no padding rows to compare theirs with
SHARDED = ("forward pre-hook", "backward hook", "subclass", "forward replaced", "replaced", "LoRA")
# (habit, reduction, sequence shards) by ranks
CASES = {
    1: [*product(sorted(HABITS.keys() - COMPUTED), ("sum", "mean"), (False,))],
    2: [*product(SHARDED, ("sum",), (True, False))],
}


def real(found: Results) -> Results:
    """The results without rows of padding."""
    tables = ("embed_tokens", "lm_head")
    return {name: x[:VOCAB] if name.startswith(tables) and x is not None else x for name, x in found.items()}


def run(model: nn.Module, partial: Sequence[str] = (), **terms) -> Results:
    torch.manual_seed(5)
    loss = model(IDS[:, :-1], targets=IDS[:, 1:], **terms)
    loss.backward()
    torch.manual_seed(5)
    with torch.no_grad():
        logits = model(IDS[:, :-1])
    return {"loss": loss.detach(), "logits": logits} | real(gradients(model, partial))


def check(found: Results, wanted: Results, what: str) -> None:
    """The loss is a sum over tokens, beside which the rounding of a gradient would not show: it is compared alone."""
    assert_same(found["loss"], wanted["loss"], f"{what} loss")
    assert_same(found | {"loss": None}, wanted | {"loss": None}, what)


@cache
def expected(habit: str, reduction: str) -> Results:
    oracle = theirs.GPT(VOCAB, SEQ, 1)
    HABITS[habit](oracle, "lm_head")
    return run(oracle, reduction=reduction, label_smoothing=0.1)


def on_rank(mesh, habit: str, reduction: str, sequence_parallel: bool) -> Results:
    model = build(TensorParallel(mesh, sequence_parallel) if mesh.size() > 1 else None)
    HABITS[habit](model, "lm_head")
    return run(model, partial=["*.a.weight"], reduction=reduction)


@pytest.mark.parametrize("t", [2, *in_turns([1], first=2)])
def test_habits_equal_torch(ranks, t):
    for (habit, reduction, sequence_parallel), by_rank in each_case(ranks, t, on_rank, CASES[t]):
        logits = torch.cat([each["logits"] for each in by_rank], -1)
        for each in by_rank:
            check(each | {"logits": logits}, expected(habit, reduction), f"{habit} {reduction=} {sequence_parallel=}")


def test_a_table_that_is_computed_has_the_gradients_of_its_logits():
    """The oracle is torch's loss of the logits of the same module."""
    model, other = build(), build()
    for each in (model, other):
        each.lm_head.weight.data[VOCAB:] = 1.0  # else pruning would take only these rows
        HABITS["prune"](each, "lm_head")
    model(IDS[:, :-1], targets=IDS[:, 1:]).backward()
    logits = other(IDS[:, :-1]).flatten(0, 1)
    F.cross_entropy(logits, IDS[:, 1:].flatten(), reduction="sum", label_smoothing=0.1).backward()
    assert_same(gradients(model), gradients(other), "prune")


@pytest.mark.parametrize("path", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("normed", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_norms_of_padding_rows_are_refused(normed, path):
    """Rows of zeros have norm 0 and NaN gradients. Columns are never all padding, so norms over them are allowed."""
    model = build()
    normed(model.get_submodule(path))
    with pytest.raises(ValueError, match="0 in the 2 rows that pad this table of vocab_size=30: .* vocab_multiple"):
        model(IDS[:, :-1], targets=IDS[:, 1:])
    model = build()
    normed(model.get_submodule(path), dim=1)
    assert all(bool(value.isfinite().all()) for value in run(model).values())


@on_every_rank(2)
def test_adapters_of_whole_features_are_refused() -> None:
    tp, ffn = TensorParallel(tp_mesh(), True), theirs.FFN
    for path, k, n in (("lm_head", 24, VOCAB), ("layers.0.mlp.fc1", 24, ffn), ("layers.0.mlp.fc2", ffn, 24)):
        model = build(tp)
        theirs.put(model, path, theirs.LoRA(model.get_submodule(path), theirs.linear(k, 4, 1), theirs.linear(4, n, 2)))
        with pytest.raises(ValueError, match=r"LoRA has modules for all features beside .*\(.*\): take .* an lm_head"):
            model(IDS[:, :-1])


@pytest.mark.parametrize("tied, path, child, words", [
    (False, "lm_head", nn.Linear(24, 32), "Linear computes 32 features of 30: a module that is not built"),
    (True, "lm_head", None, r"no table of its own \(weight=False\): give each call one, .* tie_embeddings=False"),
    (True, "embed_tokens", nn.Embedding(VOCAB, 24),
     r"but embed_tokens \(Embedding\) contains no VocabParallelEmbedding: wrap the original one"),
])  # fmt: skip
def test_heads_and_tables_that_cannot_be(tied, path, child, words):
    model = build(tied=tied)
    theirs.put(model, path, nn.Sequential(model.lm_head) if child is None else child.double())
    with pytest.raises(ValueError, match=words):
        model(IDS[:, :-1], targets=IDS[:, 1:])


@cache
def two_steps(order: str | None, tp: int, tied: bool, wrapped: bool = False) -> Results:
    """The loss of the second step, a sum over samples, and its gradients; an evaluation follows each step.
    order: None for torch.nn's model. wrapped: the embedding is inside a module of somebody else."""
    ids, terms = IDS, {}
    if order is None:
        model, terms = theirs.GPT(VOCAB, SEQ, 1), {"reduction": "sum", "label_smoothing": 0.1}
        if tied:
            model.lm_head.weight = model.embed_tokens.weight
    else:
        mesh = build_mesh("cpu", tensor_parallel=tp, data_parallel_shard=2)
        model = build(TensorParallel(mesh["tp"], True) if tp > 1 else None, tied)
        ids = IDS[[mesh["dp_shard"].get_local_rank()]]
        if wrapped:
            model.embed_tokens = nn.Sequential(model.embed_tokens)
        for part in [*ORDERS[order](model), model]:
            fully_shard(part, mesh=mesh["dp_shard"])
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), {}
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        loss = model(ids[:, :-1], targets=ids[:, 1:], **terms)
        (loss / 2 if order is None else loss).backward()  # FSDP2 takes the mean
        found = {"loss": loss.detach()} | real(gradients(model))
        with torch.no_grad():
            model(ids[:, :-1])
        if order is not None:
            model.reshard()  # FSDP2 leaves the root gathered after an evaluation
    return found


FIRST, *_ = ORDERS
# tied, order, wrapped
FSDP = [(True, FIRST, True), (False, FIRST, False), *((True, order, False) for order in ORDERS)]


def in_orders(tp: int, chosen: slice) -> list[Results]:
    return [two_steps(order, tp, tied, wrapped) for tied, order, wrapped in FSDP[chosen]]


@pytest.mark.parametrize("tp, chosen", [
    (2, slice(2)), *in_turns([(1, slice(None)), (2, slice(2, None))], first=1)
])  # fmt: skip
def test_fsdp_in_every_order_equals_torch(ranks, tp, chosen):
    """On tensor-parallel ranks the suite has the first order alone."""
    for (tied, order, wrapped), *results in zip(FSDP[chosen], *ranks(2 * tp).run(in_orders, tp, chosen), strict=True):
        for each in results:
            found = {name.replace("embed_tokens.0", "embed_tokens"): value for name, value in each.items()}
            found["loss"] = results[0]["loss"] + results[-1]["loss"]
            check(found, two_steps(None, 1, tied), f"{order} {tied=} {wrapped=}")
