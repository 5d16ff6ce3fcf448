"""Linears and embeddings sharded in place compute what the plain modules do: results, gradients and AdamW's steps."""

import copy
import io

import pytest
import torch
from testing import assert_same
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune
from transformers.pytorch_utils import Conv1D

from tpformer import ops
from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.in_place.linears import make_column, make_embedding, make_row, sum_gradients
from tpformer.layers import TensorParallel
from tpformer.parallel import reduce_partial_gradients

BATCH, SEQ, HIDDEN, VOCAB, STEPS = 4, 8, 10, 13, 3


class Scale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 2, size))

    def forward(self, x):
        return x * self.weight


class Model(nn.Module):
    """Tied tables around a block with a fused projection, heads that share a scale, and a norm on rows."""

    enter = leave = nn.Identity()

    def __init__(self, linear, wide):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCAB, HIDDEN, padding_idx=1)
        self.norm, self.heads = Scale(HIDDEN), Scale(2)
        self.fused, self.column, self.row = linear(HIDDEN, 2 * wide), linear(HIDDEN, wide), linear(wide, HIDDEN)
        self.split = linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.table.weight
        for module in (self.double(), self.fused, self.column, self.row, self.split):
            if hasattr(module, "bias"):
                nn.init.normal_(module.bias)

    def forward(self, ids):
        x = self.enter(self.table(ids))
        y = self.norm(x)
        gate, up = self.fused(y).chunk(2, -1)
        heads = (torch.tanh(gate) * up * self.column(y)).unflatten(-1, (-1, 2))
        x = self.leave(x + self.row(self.heads(heads).flatten(-2)))
        return self.head(x + self.split(x))


def conv(k, n):
    return Conv1D(n, k)


def train(model, compute=None, samples=slice(None)):
    """Every result, gradient and parameter of some AdamW steps; the loss is a sum over the samples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = {}
    for step in range(STEPS):
        ids = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(step))[samples]
        logits = (model if compute is None else compute)(ids)
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten(), reduction="sum").backward()
        reduce_partial_gradients(model)  # a loop that calls it changes nothing
        found |= {f"logits {step}": logits.detach()}
        found |= {f"{name} {step}": full_tensor(p.grad).clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}


def in_place(model, tp):
    """The model, sharded; with sequence shards between `enter` and `leave`."""
    width = model.column.weight.shape[0] if isinstance(model.column, nn.Linear) else model.column.nf
    chunk = -(-width // tp.size)
    first, last = tp.rank * chunk, min((tp.rank + 1) * chunk, width)
    dim = None
    if tp.sequence_parallel:
        dim = 1
        model.enter = lambda x: ops.scatter_rows(x.movedim(1, 0), tp.group).movedim(0, 1)
        model.leave = lambda x: ops.gather_rows(x.movedim(1, 0), tp.group).movedim(0, 1)
        sum_gradients(model.norm, tp)
    make_embedding(model.table, tp)
    make_column(model.fused, tp, rows=[slice(first, last), slice(width + first, width + last)], sequence_dim=dim)
    make_column(model.column, tp, sequence_dim=dim)
    sum_gradients(model.heads, tp)
    make_row(model.row, tp, sequence_dim=dim)
    make_row(model.split, tp, split_input=True)
    make_column(model.head, tp, gather_output=True)
    return model


def on_rank(t, linear, wide, sequence_parallel):
    model = Model(linear, wide)
    classes = [type(module) for module in model.modules()]
    before = {name: (p.shape, p.stride()) for name, p in model.named_parameters()}
    in_place(model, TensorParallel(build_mesh("cpu", tensor_parallel=t)["tp"], sequence_parallel))
    assert {name: (p.shape, p.stride()) for name, p in model.named_parameters()} == before
    assert all(isinstance(module, own) for module, own in zip(model.modules(), classes, strict=True))
    assert model.head.weight is model.table.weight
    return train(model)


@pytest.mark.parametrize(
    ("t", "linear", "wide", "sequence_parallel"),
    [(2, nn.Linear, 16, False), (2, conv, 16, True), (4, conv, 14, False), (4, nn.Linear, 14, True)],
)
def test_same_as_plain_modules(ranks, t, linear, wide, sequence_parallel):
    expected = train(Model(linear, wide))
    for found in ranks(t).run(on_rank, t, linear, wide, sequence_parallel):
        assert_same(found, expected)


def copied():
    """The steps of a copied, a pickled and a compiled model."""
    model, file = in_place(Model(conv, 16), TensorParallel(build_mesh("cpu", tensor_parallel=2)["tp"])), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.head.weight is loaded.table.weight
    found = {"deepcopy": train(copy.deepcopy(model)), "pickle": train(loaded)}
    return found | {"compiled": train(model, torch.compile(model, backend="aot_eager"))}


def test_copies_and_compiled_models(ranks):
    expected = train(Model(conv, 16))
    for found in ranks(2).run(copied):
        assert_same(found, dict.fromkeys(found, expected))


def with_fsdp(linear, sequence_parallel):
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=2)
    model = in_place(Model(linear, 16), TensorParallel(mesh["tp"], sequence_parallel))
    for part in (model.column, model.row, model.heads, model):
        fully_shard(part, mesh=mesh["dp_shard"])
        part.set_gradient_divide_factor(1.0)
    half = mesh["dp_shard"].get_local_rank() * BATCH // 2
    return half, train(model, samples=slice(half, half + BATCH // 2))


@pytest.mark.parametrize(("linear", "sequence_parallel"), [(nn.Linear, False), (conv, True)])
def test_fsdp_on_top(ranks, linear, sequence_parallel):
    expected = train(Model(linear, 16))
    for half, found in ranks(4).run(with_fsdp, linear, sequence_parallel):
        logits = {f"logits {step}": expected[f"logits {step}"][half : half + BATCH // 2] for step in range(STEPS)}
        assert_same(found, expected | logits)


class Scaled(nn.Linear):
    pass


def with_gradient():
    linear = nn.Linear(4, 4)
    linear(torch.ones(4)).sum().backward()
    return linear


def hooked():
    linear = nn.Linear(4, 4)
    linear.weight.register_post_accumulate_grad_hook(print)
    return linear


def tied_across():
    linear, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = linear.weight
    make_row(other, build_mesh("cpu", tensor_parallel=2)["tp"])
    return linear


REFUSED = [
    (make_column, lambda: Scaled(4, 4), {}, TypeError, "a Scaled cannot be sharded in place"),
    (make_row, lambda: nn.Bilinear(4, 4, 4), {}, TypeError, "only an nn.Linear itself can, or a Conv1D"),
    (make_column, with_gradient, {}, ValueError, "has a gradient or hooks"),
    (make_column, hooked, {}, ValueError, "has a gradient or hooks"),
    (make_column, tied_across, {}, ValueError, "is tied to a parameter"),
    (make_column, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), {}, TypeError, "forward of another"),
    (make_column, lambda: prune.identity(nn.Linear(4, 4), "weight"), {}, ValueError, "is computed from other"),
    (make_column, lambda: nn.Linear(4, 1), {}, ValueError, "1 output features, too few for 2"),
    (make_row, lambda: nn.Linear(1, 4), {}, ValueError, "1 input features, too few for 2"),
    (make_column, lambda: nn.Linear(4, 4), {"rows": [slice(2, 5)]}, ValueError, "within 4 output features"),
    (make_column, lambda: nn.Linear(4, 4), {"rows": [slice(0, 2)], "gather_output": True}, ValueError, "leave one"),
    (make_embedding, lambda: nn.Embedding(4, 4, max_norm=1.0), {}, ValueError, "max_norm=1.0 cannot be sharded"),
    (make_embedding, lambda: nn.Embedding(1, 4), {}, ValueError, "1 rows, too few for 2"),
]


def refusals():
    """What each refusal says; the module is then as it was."""
    tp, said = build_mesh("cpu", tensor_parallel=2)["tp"], []
    for make, module, options, error, words in REFUSED:
        module = module()
        before = type(module), {name: id(p) for name, p in module.named_parameters()}
        with pytest.raises(error, match=words) as raised:
            make(module, tp, **options)
        assert before == (type(module), {name: id(p) for name, p in module.named_parameters()})
        said.append(str(raised.value))
    twice = nn.LayerNorm(4)
    sum_gradients(twice, tp)
    with pytest.raises(ValueError, match="summed already"):
        sum_gradients(twice, tp)
    return said


def test_refused(ranks):
    assert all(len(said) == len(REFUSED) for said in ranks(2).run(refusals))


def on_meta():
    tp = build_mesh("cpu", tensor_parallel=2)["tp"]
    with torch.device("meta"):
        model = Model(nn.Linear, 16)
        model.table, model.head = nn.Embedding(VOCAB, HIDDEN, padding_idx=1), nn.Linear(HIDDEN, VOCAB, bias=False)
        model.head.weight = model.table.weight
    in_place(model.double(), TensorParallel(tp))
    assert all(p.is_meta for p in model.parameters())
    expected = Model(nn.Linear, 16)
    with torch.no_grad():
        model.norm.weight, model.heads.weight = expected.norm.weight, expected.heads.weight
    model.load_state_dict(expected.state_dict(), assign=True)
    model.head.weight = model.table.weight  # as after any load_state_dict with assign=True
    return train(model)


def test_built_on_meta(ranks):
    expected = train(Model(nn.Linear, 16))
    for found in ranks(2).run(on_meta):
        assert_same(found, expected)
