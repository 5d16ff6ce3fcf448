"""Linears and embeddings sharded in place compute what the plain modules do: results, gradients and AdamW's steps.
Column linears that get one tensor communicate once for all."""

import copy
import io
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from block import HIDDEN, Model, in_place
from steps import tp_mesh
from testing import assert_same, on_every_rank
from tiny import VOCAB, batch, train, unchanged
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D
from turns import in_turns

from tpformer.distributed import build_mesh
from tpformer.distributed.collectives import record_collectives
from tpformer.distributed.dtensor import full_tensor
from tpformer.in_place.linears import make_column, make_embedding, make_row
from tpformer.in_place.siblings import share_inputs
from tpformer.in_place.summing import sum_gradients
from tpformer.layers import TensorParallel
from tpformer.parallel import reduce_partial_gradients

STEPS = [batch(8, number, 4) for number in range(3)]
TWICE = ["same", "same"]
CASES = [*TWICE, "another", *TWICE, "written", "same", "skipped", *TWICE, "no_grad", *TWICE, "same"]


def conv(k, n):
    return Conv1D(n, k)


def copies(model, tp):
    """Models that ought to train as this one: a copy, a pickled one, and one that was built on meta and then filled."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.device("meta"):
        meta = Model(conv, 16)
        meta.table, meta.head = nn.Embedding(VOCAB, HIDDEN, padding_idx=5), nn.Linear(HIDDEN, VOCAB, bias=False)
        meta.head.weight = meta.table.weight
    in_place(meta.double(), tp)
    assert all(p.is_meta for p in meta.parameters())
    expected = Model(conv, 16)
    with torch.no_grad():
        meta.norm.weight, meta.heads.weight = expected.norm.weight, expected.heads.weight
    meta.load_state_dict(expected.state_dict(), assign=True)
    meta.head.weight = meta.table.weight  # as after any load_state_dict with assign=True
    return {"deepcopy": copy.deepcopy(model), "pickle": torch.load(file, weights_only=False), "meta": meta}


def on_rank(t, linear, wide, sequence_parallel):
    model = Model(linear, wide)
    classes = [type(module) for module in model.modules()]
    before = {name: (p.shape, p.stride()) for name, p in model.named_parameters()}
    tp = TensorParallel(build_mesh("cpu", tensor_parallel=t)["tp"], sequence_parallel)
    in_place(model, tp)
    assert {name: (p.shape, p.stride()) for name, p in model.named_parameters()} == before
    assert all(isinstance(module, own) for module, own in zip(model.modules(), classes, strict=True))
    models = {} if sequence_parallel or linear is nn.Linear or t > 2 else copies(model, tp)
    assert all(each.head.weight is each.table.weight for each in (model, *models.values()))
    if models:
        models["compiled"] = torch.compile(model, backend="aot_eager")
    # a loop that reduces partial gradients itself changes nothing
    return {name: train(each, STEPS, reduce_partial_gradients) for name, each in (models or {"": model}).items()}


@pytest.mark.parametrize(("t", "linear", "wide", "sequence_parallel"), [
    (2, nn.Linear, 16, True), (4, conv, 14, True), *in_turns([(4, nn.Linear, 14, False), (2, conv, 16, False)]),
])  # fmt: skip
def test_same_as_plain_modules(ranks, t, linear, wide, sequence_parallel):
    """In one case also of copies and compiled: enter and leave of the others are not to be pickled."""
    expected = train(Model(linear, wide), STEPS, reduce_partial_gradients)
    for found in ranks(t).run(on_rank, t, linear, wide, sequence_parallel):
        assert_same(found, dict.fromkeys(found, expected))


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
    make_row(other, tp_mesh())
    return linear


REFUSED = [
    (make_column, lambda: type("Scaled", (nn.Linear,), {})(4, 4), {}, TypeError, "a Scaled cannot be sharded in pl"),
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


@on_every_rank(2)
def test_rows_that_no_rank_computes_with_stay_where_they_are():
    """All ranks compute with the first rank's rows, so that the second one sends nothing, and gets no gradient."""
    torch.manual_seed(0)
    plain, x = nn.Linear(4, 6).double(), torch.rand(3, 4, dtype=torch.float64)
    dy = torch.rand(3, 2, dtype=torch.float64)
    make_column(cut := copy.deepcopy(plain), tp_mesh(), rows=[slice(1, 3)])
    y, expected = cut(x), plain(x)[:, 1:3]
    y.backward(dy)
    expected.backward(2 * dy)  # those of both ranks
    assert_same([y.detach(), full_tensor(cut.weight.grad)], [expected.detach(), plain.weight.grad])


@on_every_rank(2)
def test_what_is_refused_stays_as_it_was():
    tp = tp_mesh()
    for make, module, options, error, words in REFUSED:
        module = module()
        with unchanged(module), pytest.raises(error, match=words):
            make(module, tp, **options)
    twice = nn.LayerNorm(4)
    sum_gradients(twice, tp)
    with pytest.raises(ValueError, match="summed already"):
        sum_gradients(twice, tp)


class Siblings(nn.Module):
    """Linears that get one tensor. What becomes of it between them is the case that a test is about."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, 12, dtype=torch.float64) for _ in range(3))
        self.case = "same"

    def sharded(self, tp):
        """It, whose linears are cut and communicate once for all."""
        for linear in (self.q, self.k, self.v):
            make_column(linear, tp)
        share_inputs(self)
        return self

    def forward(self, x):
        q = self.q(x)
        if self.case == "another":
            x = x * 2
        elif self.case == "written":
            x.mul_(2)
        elif self.case == "written behind autograd":
            x.data.mul_(2)
        k = self.k(x)
        if self.case == "skipped":
            return q * k
        with torch.no_grad() if self.case == "no_grad" else nullcontext():
            v = self.v(x)
        return q * k + v


def in_every_case(block, compute=None):
    """Results, gradients and the number of collectives of one forward and backward for each case."""
    found, counts = {}, []
    for index, case in enumerate(CASES):
        block.case = case
        x = torch.randn(2, 4, HIDDEN, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        x.requires_grad_()
        with record_collectives() as calls, torch.set_grad_enabled(case != "written"):
            y = (block if compute is None else compute)(x * 1)
            if case != "written":  # a linear has saved x
                y.sum().backward()
        found |= {f"y {index}": y.detach(), f"x {index}": x.grad}
        for name, p in block.named_parameters():
            found[f"{name} {index}"] = None if p.grad is None else full_tensor(p.grad).clone()
        counts.append(len(calls))
        block.zero_grad()
    return found, counts


@pytest.mark.parametrize(
    "kind", ["called", "recomputed", *in_turns(["recomputed from the first", "copied", "compiled"], first=0)]
)
@on_every_rank(2)
def test_columns_that_get_one_tensor_communicate_once_for_all(kind):
    tp = TensorParallel(tp_mesh())
    block, compute = Siblings().sharded(tp), None
    if kind == "copied":
        block = copy.deepcopy(block)
    elif kind == "compiled":
        compute = torch.compile(block, backend="aot_eager")
    elif "recomputed" in kind:
        if kind == "recomputed":
            with torch.no_grad():
                block(torch.ones(2, 4, HIDDEN, dtype=torch.float64))
        compute = partial(checkpoint, block, use_reentrant=False)
    found, counts = in_every_case(block, compute)
    plain, _ = in_every_case(Siblings())
    assert_same(found, {name: y.chunk(2, -1)[tp.rank] if name.startswith("y") else y for name, y in plain.items()})
    assert counts[:2] == {"recomputed": [1, 1], "recomputed from the first": [3, 3]}.get(kind, [3, 1])
    assert counts[-1] == (3 if "first" in kind else 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_every_rank(2)
def test_nothing_is_shared_where_a_tensor_has_no_version_that_tells(mode):
    tp = TensorParallel(tp_mesh())
    for case in ("written", "written behind autograd"):
        block, plain = Siblings().sharded(tp), Siblings()
        block.case = plain.case = case
        with mode():
            for _ in range(3):
                x = torch.rand(2, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
                assert_same(block(x.clone()), plain(x.clone()).chunk(2, -1)[tp.rank])
