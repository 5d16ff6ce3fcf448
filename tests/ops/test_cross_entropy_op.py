"""Vocabulary-parallel cross entropy, from logits or fused with the projection, equals F.cross_entropy in float64.
Losses and every gradient are compared on 1 to 3 ranks with an uneven, padded last slice, in chunks of several sizes,
with label smoothing and z-loss; and the collectives. What is frozen costs nothing; what is wrong is refused."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from linears import norm_of, plain_norm
from shards import Seen, assert_close, check, inputs_of, leaves, make, plain, upstream_of, with_gradients
from testing import assert_identical, assert_same, on_every_rank
from torch import Tensor
from turns import in_turns

from tpformer import ops
from tpformer.distributed import record_collectives
from tpformer.ops import cross_entropy
from tpformer.planner.storages import Saved

SMOOTH = {"label_smoothing": 0.2, "z_loss": 1e-2}
MEAN = {**SMOOTH, "ignore_index": 2, "reduction": "mean"}
IN_PLACE = {**SMOOTH, "in_place": True}
IGNORED = {"ignore_index": 2}  # it is also a real entry of the vocabulary
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PLACES = [("cpu", torch.float32), *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in DTYPES)]


def plain_loss(
    logits: Tensor, targets: Tensor, label_smoothing=0.0, z_loss=0.0, ignore_index=-100, reduction="none", in_place=None
) -> Tensor:
    """The loss of 16-bit logits is in float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    losses, counts = F.cross_entropy(logits, targets, reduction="none", **how), targets != ignore_index
    losses = losses + z_loss * logits.logsumexp(-1).square() * counts
    return losses if reduction == "none" else losses.sum() / (counts.sum() if reduction == "mean" else 1)


def own_slice(rows: int, vocab: int) -> ops.VocabSlice:
    """This rank's entries of a table with `rows` rows: DTensor splits them, unevenly where t does not divide them."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    per_rank = -(-rows // size)
    return ops.VocabSlice(rank * per_rank, per_rank, vocab)


@dataclass(frozen=True)
class Head:
    """A projection and its loss, a case of shards.py. rows: of the padded table, of which `vocab` are entries."""

    t: int
    tokens: int = 4  # of each rank
    k: int = 5
    vocab: int = 19
    rows: int = 22
    norm: str | None = "rmsnorm"
    sequence_parallel: bool = True
    chunk: int | None = 5
    terms: dict = field(default_factory=dict)
    fused: bool = True  # linear_cross_entropy; else a product, and vocab_parallel_cross_entropy of its logits

    def inputs(self):
        x, norm = (0, "sum") if self.sequence_parallel else ("equal", "equal")
        shapes = {"x": ((self.t * self.tokens, self.k), x if self.fused else "sum"), "weight": ((self.rows, self.k), 0)}
        shapes |= {"norm_weight": ((self.k,), norm)} if self.norm else {}
        return shapes | ({"norm_bias": ((self.k,), norm)} if self.norm == "layernorm" else {})

    def outputs(self):
        """Losses, or the one number that they are reduced to."""
        several = not self.fused and "reduction" not in self.terms
        return {"loss": ((self.t * self.tokens,) if several else (), "equal")}

    def targets(self) -> Tensor:
        tokens = self.t * self.tokens
        targets = torch.randint(self.vocab, (tokens,), generator=torch.Generator().manual_seed(6))
        targets[:: max(2, tokens // 3)] = self.terms.get("ignore_index", -100)
        return targets

    def plain(self, x, weight, norm_weight=None, norm_bias=None):
        logits = (plain_norm(self.norm, x, norm_weight, norm_bias) @ weight.t())[:, : self.vocab]
        terms = {"reduction": "sum" if self.fused else "none", **self.terms}
        return {"loss": plain_loss(logits, self.targets(), **terms)}

    def ours(self, group, x, weight, norm_weight=None, norm_bias=None):
        targets, vocab = self.targets().to(x.device), own_slice(self.rows, self.vocab)
        weight.detach()[vocab.valid :] = 100.0  # padding would dominate if it were counted
        if not self.fused:
            logits = x @ weight.t()
            return {"loss": ops.vocab_parallel_cross_entropy(logits, targets, vocab, group=group, **self.terms)}
        how = {"norm": norm_of(self.norm, norm_weight, norm_bias), "chunk_tokens": self.chunk, **self.terms}
        how |= {"group": group, "sequence_parallel": self.sequence_parallel}
        return {"loss": ops.linear_cross_entropy(x, weight, targets, vocab, **how)}

    def calls(self, itemsize):
        """Ranks exchange three numbers for each token and rank of a chunk, four with label smoothing."""
        tokens, numbers = self.t * self.tokens, 4 if "label_smoothing" in self.terms else 3
        size = self.chunk if self.chunk and self.fused else tokens
        chunks = [min(size, tokens - first) for first in range(0, tokens, size)]
        statistics = [("all_gather", numbers * chunk * self.t * itemsize) for chunk in chunks]
        if not self.fused:
            return statistics, []
        nbytes = tokens * self.k * itemsize
        if self.sequence_parallel:
            return [("all_gather", nbytes), *statistics, ("reduce_scatter", nbytes)], []
        return [*statistics, ("all_reduce", nbytes)], []


def heads(t: int) -> st.SearchStrategy[Head]:
    """3 ranks have 8, 8 and 6 of 22 rows; with a vocabulary of 16 the last one has nothing but padding."""
    chosen = {
        "vocab_and_rows": [(22, 22), (19, 22), (16, 22), (24, 24), (7, 30)], "tokens": range(1, 11),
        "norm": [None, "layernorm", "rmsnorm"], "sequence_parallel": [False, True], "chunk": [1, 2, 7, 100, None],
        "terms": [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, SMOOTH, IGNORED, MEAN],
    }  # fmt: skip
    return st.builds(
        lambda vocab_and_rows, **how: Head(t, vocab=vocab_and_rows[0], rows=vocab_and_rows[1], **how),
        **{name: st.sampled_from(values) for name, values in chosen.items()},
    )


@pytest.mark.parametrize("t", [2, *in_turns([1, 3], first=1)])
def test_fused_equals_plain_torch(ranks, t):
    @settings(max_examples=4)
    @given(st.lists(heads(t), min_size=6, max_size=6))
    def run(cases):
        check(ranks(t).run, cases, torch.float64)

    run()


def of_logits(t: int, vocab: int, terms: dict) -> Head:
    return Head(t, 3, vocab=vocab, norm=None, sequence_parallel=False, terms=terms, fused=False)


@pytest.mark.parametrize("t", [1, 2, 3])
def test_from_logits_equals_plain_torch(ranks, t):
    terms = itertools.product(({}, SMOOTH, IN_PLACE, MEAN, {"reduction": "sum"}), ({}, IGNORED))
    cases = itertools.product((22, 19, 16), terms)
    check(ranks(t).run, [of_logits(t, vocab, {**each, **ignored}) for vocab, (each, ignored) in cases], torch.float64)


def with_kernels(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function with the kernels instead of the reference, as on a GPU; they run in Triton's interpreter."""
    before, kernels = cross_entropy.implementation, import_module("tpformer.kernels.cross_entropy.kernel")
    with mock.patch.object(cross_entropy, "implementation") as implementation:
        implementation.side_effect = lambda op, x: kernels if op == "cross_entropy" else before(op, x)
        return function(*args)


@pytest.mark.parametrize("t", [1, 2])
def test_with_kernels(interpreted, t):
    """Unlike the reference, kernels turn logits into their gradient in the memory that all chunks share."""
    pytest.importorskip("triton")
    cases = [Head(t, chunk=3, terms=terms) for terms in ({}, SMOOTH)]
    cases += [of_logits(t, 19, {**terms, **IGNORED}) for terms in ({}, SMOOTH, IN_PLACE)]
    check(partial(interpreted(t).run, with_kernels), cases, torch.float32)


@on_every_rank(3)
def test_default_chunks_agree_on_uneven_slices() -> None:
    """Ranks exchange once a chunk: if each sized chunks by its own slice, one would wait for ever. 2500 rows on 3 ranks
    are 834, 834, 832: 2**22 divided by each is 5029 or 5041 tokens a chunk. Without gradients nothing is reduced."""
    vocab = own_slice(2500, 2500)
    sizes = (5030, min(834, 2500 - vocab.first))
    x, weight = (torch.zeros(n, 1, dtype=torch.float64, requires_grad=True) for n in sizes)
    targets = torch.zeros(3 * 5030, dtype=torch.int64)
    with torch.no_grad(), record_collectives() as calls:
        loss = ops.linear_cross_entropy(x, weight, targets, vocab, group=dist.group.WORLD)
    assert_same(float(loss), 3 * 5030 * math.log(2500))
    assert [name for name, _ in calls] == ["all_gather"] * 5  # of x, and of four chunks


def test_a_chunk_has_as_many_tokens_as_the_device_has_room_for():
    gpt2, small = ops.VocabSlice(0, 50304, 50257), ops.VocabSlice(0, 250, 250)
    tokens = [ops.default_chunk_tokens(gpt2, "cuda", int(1e9 * memory)) for memory in (16, 40, 80, 141)]
    assert tokens == [2048, 4096, 8192, 8192] and ops.default_chunk_tokens(gpt2, "cuda") == 8192
    assert [ops.default_chunk_tokens(vocab, "cpu") for vocab in (gpt2, small)] == [83, 16777]


def test_logits_exist_a_chunk_at_a_time():
    """And nothing is kept but the gradients of x and of the table. From logits these are, and two numbers a token."""
    x, weight = leaves(make(0, torch.float32, x=(12, 3), weight=(200, 3))).values()
    targets, vocab = torch.arange(12), own_slice(200, 200)
    with Saved(weight).recording() as saved, Seen() as seen:
        loss = ops.linear_cross_entropy(x, weight, targets, vocab, chunk_tokens=4)
    assert x.untyped_storage() not in saved.sizes()
    assert sorted(saved.sizes().values()) == [x.nbytes, weight.nbytes]
    with seen:
        loss.backward()
    assert seen.largest == 4 * 200
    logits = torch.randn(12, 200, requires_grad=True)
    with Saved().recording() as saved:
        ops.vocab_parallel_cross_entropy(logits, targets, vocab)
    assert sorted(saved.sizes().values()) == [targets.nbytes, 2 * 4 * 12, logits.nbytes]


def logits_of_a_linear(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    values = {name: x.to(device, dtype) for name, x in make(8, torch.float64, x=(6, 4), weight=(32, 4)).items()}
    weight = values["weight"].requires_grad_()
    return weight, values["x"] @ weight.t(), torch.arange(6, device=device)


@pytest.mark.parametrize("device, dtype", PLACES)
def test_in_place_gradient_is_seen_by_autograd(device, dtype):
    vocab = own_slice(32, 32)
    weight, logits, targets = logits_of_a_linear(device, dtype)
    kept = ops.vocab_parallel_cross_entropy(logits, targets, vocab).sum()
    (expected,) = torch.autograd.grad(kept, weight, retain_graph=True)
    # a second backward shows that nothing was overwritten
    assert torch.equal(torch.autograd.grad(kept, weight)[0], expected)
    weight, logits, targets = logits_of_a_linear(device, dtype)
    squares = logits.square().sum()  # its backward needs the logits, too
    loss = ops.vocab_parallel_cross_entropy(logits, targets, vocab, in_place=True).sum()
    assert torch.equal(torch.autograd.grad(loss, weight, retain_graph=True)[0], expected)
    for other in (loss, squares):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()


def test_the_upstream_gradient_is_not_rounded_to_16_bits():
    """1 / 6000 rounded to bfloat16 is 0.1 % off, and so would be every parameter's gradient."""
    factor = torch.tensor(1 / 6000)
    x, weight = torch.randn(8, 4).bfloat16().requires_grad_(), torch.randn(32, 4).bfloat16().requires_grad_()
    loss = ops.linear_cross_entropy(x, weight, torch.arange(8), own_slice(32, 32))
    raw = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    (loss * factor).backward()
    assert_identical([x.grad, weight.grad], [(unscaled.float() * factor).bfloat16() for unscaled in raw])


def test_a_scaled_float16_loss_has_a_finite_gradient_of_the_weight() -> None:
    """It is 200,000 before the upstream gradient scales it, which float16 does not hold."""
    x, weight = torch.full((1000, 1), 400.0).half(), torch.zeros(2, 1).half().requires_grad_()
    loss = ops.linear_cross_entropy(x, weight, torch.zeros(1000).long(), own_slice(2, 2), chunk_tokens=100)
    (loss * 1e-3).backward()
    assert weight.grad.flatten().tolist() == [-200, 200]


@pytest.mark.parametrize("tokens", [0, 3], ids=["no tokens", "all ignored"])
def test_the_mean_of_nothing_is_torchs(tokens):
    """It is NaN, and its gradients are 0."""
    values = leaves(make(1, torch.float64, x=(tokens, 4), weight=(7, 4)))
    vocab, inputs, targets = own_slice(7, 7), list(values.values()), torch.full((tokens,), -100)
    logits = values["x"] @ values["weight"].t()
    for loss in (
        F.cross_entropy(logits, targets),
        ops.vocab_parallel_cross_entropy(logits, targets, vocab, reduction="mean"),
        ops.linear_cross_entropy(*inputs, targets, vocab, reduction="mean"),
    ):
        assert bool(loss.isnan())
        assert not any(bool(each.any()) for each in torch.autograd.grad(loss, inputs, retain_graph=True))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("frozen, gemms", [((), 3), (("weight",), 2), (("x",), 3), (("x", "scale"), 2)])
def test_what_is_frozen_costs_nothing(frozen, gemms, norm):
    """The other gradients stay the same. Without a norm a frozen input needs no GEMM for its gradient."""
    values = leaves(make(1, torch.bfloat16, x=(4, 8), weight=(64, 8), scale=(8,)))
    results = []
    for names in ((), frozen):
        for name, each in values.items():
            each.requires_grad_(name not in names)
            each.grad = None
        prologue = norm_of("rmsnorm" if norm else None, values["scale"], None)
        given = (values["x"], values["weight"], torch.arange(4), own_slice(64, 64))
        with Seen() as seen:
            ops.linear_cross_entropy(*given, norm=prologue).backward()
        results.append({name: each.grad for name, each in values.items() if name not in frozen})
    assert_identical(results[1], results[0])
    assert seen.gemms == (gemms if norm or "x" not in frozen else 2)
    assert (seen.largest_float32 < 64 * 8) == ("weight" in frozen)


FOUR = torch.zeros(4, dtype=torch.int64)


LOGITS, FUSED = ops.vocab_parallel_cross_entropy, partial(ops.linear_cross_entropy, weight=torch.ones(2, 2))


@pytest.mark.parametrize("targets, terms, words", [
    (torch.arange(3), {}, r"targets are \(3,\) torch.int64 for a \(4, 2\) input of 4 tokens: flatten both"),
    (torch.arange(1), {}, r"targets are \(1,\) torch.int64 for a \(4, 2\) input of 4 tokens"),
    (FOUR[:, None], {}, r"targets are \(4, 1\) torch.int64 for"),
    (torch.rand(4), {}, r"targets are \(4,\) torch.float32 for a \(4, 2\) input of 4 tokens: .* one int64 id"),
    (torch.tensor([0, 1, -1, -100]), {}, r"targets span \[-1, 1\], outside the vocabulary \[0, 1\]"),
    (torch.tensor([0, 1, 2, -100]), {}, r"targets span \[0, 2\], outside the vocabulary \[0, 1\]"),
    (FOUR, {"vocab": ops.VocabSlice(0, 4, 4)}, "2 logits a token, but .* has 4 entries here"),
    (FOUR, {"label_smoothing": 1.0}, r"label_smoothing=1.0 must be in \[0, 1\)"),
    (FOUR, {"label_smoothing": -0.1}, r"label_smoothing=-0.1 must be in \[0, 1\)"),
    (FOUR, {"z_loss": -1e-4}, "z_loss=-0.0001 must be at least 0"),
    (FOUR, {"z_loss": float("nan")}, "z_loss=nan must be at least 0"),
    (FOUR, {"reduction": "avg"}, "reduction='avg' is (none|neither) of"),
    # the fused loss is one number
    (FOUR, {"reduction": "none"}, "reduction='none' is neither of .*take vocab_parallel_cross_entropy"),
])  # fmt: skip
def test_both_losses_refuse_the_same(targets, terms, words):
    for call in (LOGITS, FUSED) if terms != {"reduction": "none"} else (FUSED,):
        with pytest.raises(ValueError, match=words):
            call(torch.ones(4, 2), **{"targets": targets, "vocab": ops.VocabSlice(0, 2, 2), **terms})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_on_gpu(dtype):
    """One rank's fused loss and gradients in four chunks, against float64."""
    for case in (
        Head(1, 37, 24, 250, 256, "layernorm", chunk=10),
        Head(1, 64, 64, 1000, 1024, "rmsnorm", chunk=16, terms=SMOOTH),
        Head(1, 129, 128, 50257, 50304, None, chunk=33, terms={"label_smoothing": 0.1, "z_loss": 1e-4}),
        Head(1, 16, 128, 128256, 128256, "rmsnorm", chunk=4, terms={"z_loss": 1e-4}),
    ):
        inputs = leaves({name: x.cuda() for name, x in inputs_of(case, dtype).items()})
        actual = with_gradients(inputs, case.ours(None, **inputs), upstream_of(case))
        oracle, baseline = plain(case, torch.float64, dtype), plain(case, dtype)
        # The loss is one number, and torch's error of it may be 0 by chance: the bound adds what rounding does to a sum
        loss, expected, other = (float(results.pop("loss")) for results in (actual, oracle, baseline))
        rounding = torch.finfo(dtype).eps / case.tokens**0.5 + torch.finfo(torch.float32).eps
        assert abs(loss - expected) <= 2 * (abs(other - expected) + rounding * abs(expected))
        assert not bool(actual["dweight"][case.vocab :].any())
        assert_close({name: x.cpu() for name, x in actual.items()}, oracle, baseline)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_target_outside_the_vocabulary_is_nan_on_gpu(dtype):
    """A GPU's targets are not checked, because the check would wait for the device."""
    values = leaves({name: x.cuda() for name, x in make(1, dtype, x=(3, 8), weight=(32, 8)).items()})
    vocab = ops.VocabSlice(0, 32, 30)
    for bad in (-1, 30, 31):
        targets = torch.tensor([0, bad, -100], device="cuda")
        logits = values["x"] @ values["weight"].t()
        losses = ops.vocab_parallel_cross_entropy(logits, targets, vocab)
        assert losses.isnan().tolist() == [False, True, False]
        total = ops.linear_cross_entropy(values["x"], values["weight"], targets, vocab, reduction="mean")
        assert bool(total.isnan())
        for loss in (losses.sum(), total):
            (dx,) = torch.autograd.grad(loss, values["x"])
            assert dx.isnan().any(1).tolist() == [False, True, False]
