"""What people do to a GPT's lm_head means what it means with torch.nn: modules, hooks, subclasses, FSDP2."""

from collections.abc import Callable

import pytest
import theirs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tpformer.distributed import build_mesh
from tpformer.layers import LMHead, TensorParallel
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import reduce_partial_gradients

VOCAB, BATCH, SEQ = 30, 2, 6
IDS = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))


def build(mesh=None, tied: bool = False, sequence_parallel: bool = True) -> GPT:
    config = GPTConfig(
        vocab_size=VOCAB, vocab_multiple=16, seq_length=SEQ, n_layers=1, hidden_size=24, n_heads=4, tie_embeddings=tied
    )
    tp = None if mesh is None else TensorParallel(mesh, sequence_parallel)
    return GPT(config, tp=tp, seed=1, dtype=torch.float64, label_smoothing=0.1)


def plain_head() -> nn.Linear:
    return theirs.linear(24, VOCAB, 3)


def replace(model: GPT, path: str) -> None:
    setattr(model, path, plain_head())


def lora(p: float) -> Callable[[nn.Module, str], None]:
    def add(model: nn.Module, path: str) -> None:
        base, b = getattr(model, path), theirs.linear(4, VOCAB, 2)
        if isinstance(base, LMHead) and base.tp.size > 1:
            b = with_values(LMHead(VOCAB, 4, vocab_multiple=16, tp=base.tp, dtype=torch.float64), b)
        setattr(model, path, theirs.LoRA(base, theirs.linear(24, 4, 1), b, p))

    return add


HABITS = {
    **theirs.ANYWHERE,
    **theirs.ON_LINEARS,
    "replaced": replace,
    "LoRA": lora(0.0),
    "LoRA with dropout": lora(0.5),
}
SHARDED = ("forward pre-hook", "backward hook", "subclass", "forward replaced", "replaced", "LoRA")


def step(model: nn.Module, reduction: str = "sum") -> dict[str, Tensor | None]:
    torch.manual_seed(5)
    loss = model(IDS[:, :-1], targets=IDS[:, 1:], reduction=reduction)
    loss.backward()
    torch.manual_seed(5)
    with torch.no_grad():
        logits = model(IDS[:, :-1])
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), "logits": logits} | gradients


class Theirs(nn.Module):
    """The body of a GPT, whose head is torch.nn's, and torch's loss."""

    def __init__(self, body: GPT) -> None:
        super().__init__()
        self.body, self.lm_head = body, plain_head()
        body.lm_head = nn.Identity()
        body.vocab = body.vocab._replace(entries=24, width=24)  # what comes out are the rows

    def forward(self, ids: Tensor, targets: Tensor | None = None, reduction: str = "sum") -> Tensor:
        logits = self.lm_head(self.body(ids).flatten(0, 1))
        if targets is None:
            return logits.unflatten(0, ids.shape)
        return F.cross_entropy(logits, targets.flatten(), reduction=reduction, label_smoothing=0.1)


def with_values(head: LMHead, plain: nn.Linear) -> LMHead:
    """Those of a plain one, and zeros in the padding."""
    p, values = head.weight, F.pad(plain.weight.detach(), (0, 0, 0, head.rows - VOCAB))
    with torch.no_grad():
        if isinstance(p, DTensor):
            p.to_local().copy_(values.chunk(p.device_mesh.size())[p.device_mesh.get_local_rank()])
        else:
            p.copy_(values)
    return head


def with_head(model: GPT) -> GPT:
    with_values(model.lm_head, plain_head())
    return model


def expected(habit: str, reduction: str = "sum") -> dict[str, Tensor | None]:
    oracle = Theirs(build())
    HABITS[habit](oracle, "lm_head")
    return {name.removeprefix("body."): value for name, value in step(oracle, reduction).items()}


def assert_same(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None], what: str) -> None:
    assert found.keys() == wanted.keys(), what
    for name, value in wanted.items():
        if value is None or found[name] is None:
            assert value is found[name], (what, name)
            continue
        own = found[name][: len(value)] if "lm_head" in name else found[name]  # without the padding
        torch.testing.assert_close(own, value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{what}, {n}: {m}")


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("habit", sorted(set(HABITS) - {"weight_norm", "spectral_norm", "prune"}))
def test_on_one_rank(habit, reduction):
    model = with_head(build())
    HABITS[habit](model, "lm_head")
    assert_same(step(model, reduction), expected(habit, reduction), habit)


def on_rank(habit: str, sequence_parallel: bool) -> dict[str, Tensor | None]:
    model = with_head(build(build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"], False, sequence_parallel))
    HABITS[habit](model, "lm_head")
    found = step(model)
    reduce_partial_gradients(model, partial="*.a.weight")
    found |= {name: p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("habit", SHARDED)
def test_on_two_ranks(ranks, habit, sequence_parallel):
    results = ranks(2).run(on_rank, habit, sequence_parallel)
    logits = torch.cat([each["logits"] for each in results], -1)
    for each in results:
        assert_same(each | {"logits": logits}, expected(habit), habit)


def test_a_table_that_is_computed_has_the_gradients_of_its_logits():
    """Its padding rows are the head's own: torch's loss of the same module's logits is the oracle."""
    model, other = with_head(build()), with_head(build())
    for each in (model, other):
        with torch.no_grad():
            each.lm_head.weight[VOCAB:] = 1.0  # or only these were pruned
        HABITS["prune"](each, "lm_head")
    found = step(model)
    loss = F.cross_entropy(other(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum", label_smoothing=0.1)
    loss.backward()
    wanted = {"loss": loss.detach(), "logits": found["logits"]} | {n: p.grad for n, p in other.named_parameters()}
    assert_same(found, wanted, "prune")


@pytest.mark.parametrize("path", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("normed", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_norms_of_padding_rows_are_refused(normed, path):
    """They are 0, and have NaN gradients; a norm of columns has none of them alone."""
    model = build()
    normed(model.get_submodule(path))
    with pytest.raises(ValueError, match="0 in the 2 rows that pad this table of vocab_size=30: .* vocab_multiple"):
        model(IDS[:, :-1], targets=IDS[:, 1:])
    model = build()
    normed(model.get_submodule(path), dim=1)
    assert all(bool(value.isfinite().all()) for value in step(model).values())


def test_a_head_of_another_size_is_refused():
    model = build()
    model.lm_head = nn.Linear(24, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="Linear computes 32 features of 30: a module that is not built"):
        model(IDS[:, :-1], targets=IDS[:, 1:])


def plain_adapters(path: str, k: int, n: int) -> None:
    model = build(build_mesh("cpu", tensor_parallel=2)["tp"])
    theirs.put(model, path, theirs.LoRA(model.get_submodule(path), theirs.linear(k, 4, 1), theirs.linear(4, n, 2)))
    with pytest.raises(ValueError, match=r"LoRA puts modules of whole features beside .*\(.*\): build .* an lm_head"):
        model(IDS[:, :-1])


@pytest.mark.parametrize(
    "path, k, n", [("lm_head", 24, VOCAB), ("layers.0.mlp.fc1", 24, 96), ("layers.0.mlp.fc2", 96, 24)]
)
def test_adapters_of_whole_features_are_refused(ranks, path, k, n):
    ranks(2).run(plain_adapters, path, k, n)


def test_a_wrapped_head_without_a_table_is_refused():
    model = build(tied=True)
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match=r"no table of its own \(weight=False\): give it .* tie_embeddings=False"):
        model(IDS[:, :-1])


def test_a_tied_embedding_of_others_is_refused():
    model = build(tied=True)
    model.embed_tokens = nn.Embedding(VOCAB, 24)
    with pytest.raises(ValueError, match="which is a Embedding without a VocabParallelEmbedding: wrap that one, or"):
        model(IDS[:, :-1])


def orders(model: GPT) -> dict[str, list]:
    """What recipes hand to fully_shard, one after the other, before the model itself."""
    layers, norm_and_head = [*model.layers.values()], [model.norm, model.lm_head]
    return {
        "embedding, layers, norm and head": [model.embed_tokens, *layers, norm_and_head],
        "norm and head, layers, embedding": [norm_and_head, *layers, model.embed_tokens],
        "layers, embedding and norm and head": [*layers, [model.embed_tokens, *norm_and_head]],
        "layers, embedding and norm": [*layers, [model.embed_tokens, model.norm]],
    }


ORDERS = list(orders(build(tied=True)))


def two_steps(order: str | None, tp: int, wrapped: bool = False) -> dict[str, Tensor]:
    """The second loss of tied weights, the sum over samples, and its gradients, halved; an evaluation in between.
    wrapped: others have put the embedding into a module of theirs."""
    model, ids = build(tied=True), IDS
    if order is not None:
        mesh = build_mesh("cpu", tensor_parallel=tp, data_parallel_shard=2)
        model, ids = build(mesh["tp"] if tp > 1 else None, tied=True), IDS[[mesh["dp_shard"].get_local_rank()]]
        if wrapped:
            model.embed_tokens = nn.Sequential(model.embed_tokens)
        for part in [*orders(model)[order], model]:
            fully_shard(part, mesh=mesh["dp_shard"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        loss = model(ids[:, :-1], targets=ids[:, 1:])
        (loss / 2 if order is None else loss).backward()  # FSDP2 takes the mean
        reduce_partial_gradients(model)
        with torch.no_grad():
            model(ids[:, :-1])
        if order is not None:
            model.reshard()  # the root, which FSDP2 itself leaves gathered after an evaluation
    gradients = {name: p.grad for name, p in model.named_parameters()}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return {"loss": loss.detach()} | whole


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("order, wrapped", [*((order, False) for order in ORDERS), (ORDERS[0], True)])
def test_fsdp_of_a_tied_embedding(ranks, order, wrapped, tp):
    results, wanted = ranks(2 * tp).run(two_steps, order, tp, wrapped), two_steps(None, 1)
    for each in results:
        found = {name.replace("embed_tokens.0", "embed_tokens"): value for name, value in each.items()}
        assert_same(found | {"loss": results[0]["loss"] + results[-1]["loss"]}, wanted, order)
