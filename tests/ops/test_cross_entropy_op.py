"""Vocabulary-parallel cross entropy, from logits or fused with the projection, equals F.cross_entropy in float64.
Losses and every gradient are compared on 1 to 3 ranks with an uneven, padded last slice, in chunks of several sizes,
with label smoothing and z-loss."""

import itertools
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import Seen, assert_close, join, leaves, make
from testing import assert_same
from torch import Tensor

from tpformer import ops
from tpformer.distributed import record_collectives
from tpformer.ops import cross_entropy

EPS = 1e-5
SMOOTH = {"label_smoothing": 0.2, "z_loss": 1e-2}
MEAN = {**SMOOTH, "ignore_index": 2, "reduction": "mean"}


def case(
    tokens=12, k=5, vocab=20, rows=24, kind="layernorm", sp=True, chunk: int | None = 5, scale=1.0, terms=None
) -> dict:
    """rows: of the padded table; DTensor splits them, unevenly where t does not divide them."""
    return {**locals(), "terms": terms or {}}


def plain_loss(
    logits: Tensor, targets: Tensor, label_smoothing=0.0, z_loss=0.0, ignore_index=-100, reduction="none"
) -> Tensor:
    losses = F.cross_entropy(
        logits, targets, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    counts = targets != ignore_index
    losses = losses + z_loss * logits.logsumexp(-1).square() * counts
    return losses if reduction == "none" else losses.sum() / (counts.sum() if reduction == "mean" else 1)


def tensors(case: dict, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    values = make(3, dtype, x=(case["tokens"], case["k"]), weight=(case["rows"], case["k"]))
    values["weight"][case["vocab"] :] = 100.0  # padding would dominate if it were counted
    if case["kind"]:
        values |= make(4, dtype, norm_weight=(case["k"],))
        values |= make(5, dtype, norm_bias=(case["k"],)) if case["kind"] == "layernorm" else {}
    targets = torch.randint(case["vocab"], (case["tokens"],), generator=torch.Generator().manual_seed(6))
    targets[:: max(2, case["tokens"] // 3)] = case["terms"].get("ignore_index", -100)
    return values, targets


def plain(case: dict, dtype: torch.dtype, rounded: torch.dtype | None = None) -> dict[str, Tensor]:
    """The same in plain torch: inputs rounded to `rounded`, computed in dtype; the loss of 16-bit logits is in
    float32."""
    values, targets = tensors(case, rounded or dtype)
    inputs = leaves({name: x.to(dtype) for name, x in values.items()})
    normed, size = inputs["x"], (case["k"],)
    if case["kind"] == "layernorm":
        normed = F.layer_norm(normed, size, inputs["norm_weight"], inputs["norm_bias"], EPS)
    elif case["kind"] == "rmsnorm":
        normed = F.rms_norm(normed, size, inputs["norm_weight"], EPS)
    logits = (normed @ inputs["weight"].t())[:, : case["vocab"]]
    loss = plain_loss(
        logits.to(torch.promote_types(dtype, torch.float32)), targets, **{"reduction": "sum", **case["terms"]}
    )
    (loss * case["scale"]).backward()
    return {"loss": loss.detach()} | {f"d{name}": x.grad for name, x in inputs.items()}


def vocab_slice(case: dict) -> tuple[int, int, ops.VocabSlice]:
    per_rank = -(-case["rows"] // dist.get_world_size())
    first = dist.get_rank() * per_rank
    last = min(first + per_rank, case["rows"])
    return first, last, ops.VocabSlice(first, per_rank, case["vocab"])


def on_rank(case: dict, dtype: torch.dtype) -> tuple[dict[str, Tensor], list, list]:
    values, targets = tensors(case, dtype)
    first, last, vocab = vocab_slice(case)
    values["weight"] = values["weight"][first:last]
    if case["sp"]:
        values["x"] = values["x"].chunk(dist.get_world_size())[dist.get_rank()]
    inputs = leaves(values)
    norm = None
    if case["kind"]:
        norm = ops.Norm(case["kind"], inputs["norm_weight"], inputs.get("norm_bias"), EPS)
    how = {"norm": norm, "sequence_parallel": case["sp"], "chunk_tokens": case["chunk"], **case["terms"]}
    with record_collectives() as forward:
        loss = ops.linear_cross_entropy(inputs["x"], inputs["weight"], targets, vocab, group=dist.group.WORLD, **how)
    with record_collectives() as backward:
        (loss * case["scale"]).backward()
    return {"loss": loss.detach()} | {f"d{n}": x.grad for n, x in inputs.items()}, list(forward), list(backward)


def with_kernels(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function with the kernels instead of the reference, as on a GPU; they run in Triton's interpreter."""
    before = cross_entropy.implementation
    kernels = import_module("tpformer.kernels.cross_entropy.kernel")
    cross_entropy.implementation = lambda op, x: kernels if op == "cross_entropy" else before(op, x)
    try:
        return function(*args)
    finally:
        cross_entropy.implementation = before


def check(ranks, t: int, case: dict, dtype: torch.dtype, *call: Callable[..., Any]) -> list[tuple]:
    """call: a function that calls on_rank in the worker; none: the worker calls it itself."""
    results = ranks(t).run(*call, on_rank, case, dtype)
    sums: int | str = "sum" if case["sp"] else "equal"
    how = {"loss": "equal", "dx": 0 if case["sp"] else "equal", "dweight": 0, "dnorm_weight": sums, "dnorm_bias": sums}
    actual = {name: join([result[0][name] for result in results], how[name]) for name in results[0][0]}
    assert_close(actual, plain(case, torch.float64), plain(case, dtype))
    return results


# 3 ranks have 8, 8 and 6 of 22 rows; with a vocabulary of 16 the last one has nothing but padding
@pytest.mark.parametrize("t", [1, 2, 3])
def test_fused_equals_plain_torch(ranks, t):
    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(
        st.integers(1, 5).map(lambda n: 6 * n),
        st.sampled_from([(22, 22), (19, 22), (16, 22), (24, 24), (7, 30)]),
        st.sampled_from([None, "layernorm", "rmsnorm"]),
        st.booleans(),
        st.sampled_from([1, 2, 7, 100, None]),
        st.sampled_from([{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, SMOOTH, {"ignore_index": 2}, MEAN]),
    )
    def run(tokens, vocab_and_rows, kind, sp, chunk, terms):
        vocab, rows = vocab_and_rows
        check(ranks, t, case(tokens, 5, vocab, rows, kind, sp, chunk, 0.25, terms), torch.float64)

    run()


@pytest.mark.parametrize("sp", [True, False])
def test_fused_float32(ranks, sp):
    for terms in ({}, SMOOTH):
        check(ranks, 3, case(12, 5, 19, 22, "rmsnorm", sp, 5, terms=terms), torch.float32)


@pytest.mark.parametrize("sp", [True, False])
def test_fused_communication(ranks, sp):
    """Chunks of 5, 5, 2 tokens exchange three numbers for each token and rank, four with label smoothing."""
    t, nbytes = 2, 12 * 5 * 8
    for terms, numbers in (({}, 3), ({"z_loss": 1e-2}, 3), (SMOOTH, 4)):
        statistics = [("all_gather", numbers * tokens * t * 8) for tokens in (5, 5, 2)]
        whole = [("all_gather", nbytes), *statistics, ("reduce_scatter", nbytes)]
        for _, forward, backward in check(ranks, t, case(tokens=12, k=5, sp=sp, chunk=5, terms=terms), torch.float64):
            assert forward == (whole if sp else [*statistics, ("all_reduce", nbytes)]), terms
            assert backward == []


def without_gradients():
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    with torch.no_grad(), record_collectives() as calls:
        ops.linear_cross_entropy(
            x, weight, torch.arange(4), ops.VocabSlice(4 * dist.get_rank(), 4, 8),
            group=dist.group.WORLD,
        )  # fmt: skip
    return [name for name, _ in calls]


def test_fused_with_kernels(interpreted):
    """Unlike the reference, kernels turn logits into their gradient in the memory that all chunks share."""
    pytest.importorskip("triton")
    for t, terms in ((1, SMOOTH), (2, {}), (2, SMOOTH)):
        check(interpreted, t, case(8, 5, 19, 22, "rmsnorm", True, 3, terms=terms), torch.float32, with_kernels)


def test_without_gradients_nothing_is_reduced(ranks):
    assert ranks(2).run(without_gradients) == [["all_gather", "all_gather"]] * 2


def uneven_default_chunks():
    """2500 rows on 3 ranks are 834, 834, 832: 2**22 divided by each is 5029 or 5041 tokens a chunk."""
    per_rank, rank = 834, dist.get_rank()
    rows = min(per_rank, 2500 - rank * per_rank)
    x, weight = (torch.zeros(n, 1, dtype=torch.float64) for n in (5030, rows))
    with torch.no_grad():
        loss = ops.linear_cross_entropy(
            x, weight, torch.zeros(5030, dtype=torch.int64), ops.VocabSlice(rank * per_rank, per_rank, 2500),
            group=dist.group.WORLD, sequence_parallel=False,
        )  # fmt: skip
    return float(loss)


def test_default_chunks_agree_on_uneven_slices(ranks):
    """Ranks exchange once a chunk: if each sized chunks by its own slice, one would wait for ever."""
    for loss in ranks(3).run(uneven_default_chunks):
        assert_same(loss, 5030 * math.log(2500))


def test_logits_exist_a_chunk_at_a_time():
    tokens, vocab, k, chunk = 64, 500, 3, 4
    values = leaves(make(0, torch.float32, x=(tokens, k), weight=(vocab, k)))
    targets = torch.arange(tokens)
    with Seen() as fused:
        ops.linear_cross_entropy(
            **values, targets=targets, vocab=ops.VocabSlice(0, vocab, vocab), chunk_tokens=chunk
        ).backward()
    assert fused.largest == chunk * vocab
    with Seen() as plain:  # the meter does see logits where they exist
        F.cross_entropy(values["x"] @ values["weight"].t(), targets).backward()
    assert plain.largest == tokens * vocab


def logits_case(vocab: int, rows: int, terms: dict, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets, and the gradient of the losses or of the one number that they are reduced to."""
    values = make(7, dtype, logits=(9, rows), upstream=(9,))
    values["logits"][:, vocab:] = 100.0
    targets = torch.arange(9) % vocab
    targets[3] = terms.get("ignore_index", -100)
    return values["logits"], targets, values["upstream"][0 if "reduction" in terms else slice(None)]


def from_logits(
    vocab: int, rows: int, terms: dict, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, list, list]:
    logits, targets, upstream = logits_case(vocab, rows, terms, dtype)
    first, last, piece = vocab_slice({"rows": rows, "vocab": vocab})
    local = logits[:, first:last].clone().requires_grad_()
    with record_collectives() as forward:
        losses = ops.vocab_parallel_cross_entropy(local, targets, piece, group=dist.group.WORLD, **terms)
    with record_collectives() as backward:
        losses.backward(upstream)
    return losses.detach(), local.grad, list(forward), list(backward)


Cases = list[tuple[int, int, dict]]  # vocabulary, rows of the table, terms


def all_from_logits(cases: Cases, dtype: torch.dtype) -> list[tuple]:
    return [from_logits(*case, dtype) for case in cases]


def check_logits(ranks, t: int, cases: Cases, dtype: torch.dtype, *call) -> None:
    """call: a function that calls all_from_logits in the worker; none: the worker calls it itself."""
    found = ranks(t).run(*call, all_from_logits, cases, dtype)
    for (vocab, rows, terms), results in zip(cases, zip(*found, strict=True), strict=True):
        expected = []
        for each in (torch.float64, dtype):
            logits, targets, upstream = logits_case(vocab, rows, terms, each)
            terms_of_torch = {name: value for name, value in terms.items() if name != "in_place"}
            losses = plain_loss(logits.requires_grad_()[:, :vocab], targets, **terms_of_torch)
            losses.backward(upstream)
            expected.append({"losses": losses.detach(), "dlogits": logits.grad})
        actual = {"losses": join([r[0] for r in results], "equal"), "dlogits": join([r[1] for r in results], 1)}
        named = [{f"{name} of {vocab, rows, terms}": x for name, x in each.items()} for each in (actual, *expected)]
        assert_close(*named)
        numbers = 4 if "label_smoothing" in terms else 3
        gathered = [] if t == 1 else [("all_gather", numbers * 9 * dtype.itemsize * t)]
        assert [result[2:] for result in results] == [(gathered, [])] * t, terms


IN_PLACE = {**SMOOTH, "in_place": True}
IGNORED = {"ignore_index": 2}  # it is also a real entry of the vocabulary


def test_from_logits_with_kernels(interpreted):
    pytest.importorskip("triton")
    cases = [(19, 22, {**terms, **IGNORED}) for terms in ({}, SMOOTH, IN_PLACE)]
    check_logits(interpreted, 1, cases[2:], torch.float32, with_kernels)
    check_logits(interpreted, 2, cases, torch.float32, with_kernels)


@pytest.mark.parametrize("t", [1, 2, 3])
def test_from_logits_equals_plain_torch(ranks, t):
    terms = itertools.product(({}, SMOOTH, IN_PLACE, MEAN, {"reduction": "sum"}), ({}, IGNORED))
    cases = itertools.product((22, 19, 16), terms)
    check_logits(ranks, t, [(vocab, 22, {**each, **ignored}) for vocab, (each, ignored) in cases], torch.float64)


def logits_of_a_linear(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    values = {name: x.to(device, dtype) for name, x in make(8, torch.float64, x=(6, 4), weight=(32, 4)).items()}
    weight = values["weight"].requires_grad_()
    return weight, values["x"] @ weight.t(), torch.arange(6, device=device)


def taken_memory(device: str, dtype: torch.dtype) -> None:
    vocab = ops.VocabSlice(0, 32, 32)
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


def test_in_place_gradient_is_seen_by_autograd():
    taken_memory("cpu", torch.float32)


@pytest.mark.parametrize(
    "terms, words",
    [
        ({"label_smoothing": 1.0}, r"label_smoothing=1.0 must be in \[0, 1\)"),
        ({"label_smoothing": -0.1}, r"label_smoothing=-0.1 must be in \[0, 1\)"),
        ({"z_loss": -1e-4}, "z_loss=-0.0001 must be at least 0"),
        ({"z_loss": float("nan")}, "z_loss=nan must be at least 0"),
    ],
)
def test_impossible_terms_are_refused(terms, words):
    targets, vocab = torch.arange(2), ops.VocabSlice(0, 4, 4)
    with pytest.raises(ValueError, match=words):
        ops.vocab_parallel_cross_entropy(torch.randn(2, 4), targets, vocab, **terms)
    with pytest.raises(ValueError, match=words):
        ops.linear_cross_entropy(torch.randn(2, 3), torch.randn(4, 3), targets, vocab, **terms)


def test_the_upstream_gradient_is_not_rounded_to_16_bits():
    """1 / 6000 rounded to bfloat16 is 0.1 % off, and so would be every parameter's gradient."""
    factor = torch.tensor(1 / 6000)
    x, weight = torch.randn(8, 4).bfloat16().requires_grad_(), torch.randn(32, 4).bfloat16().requires_grad_()
    loss = ops.linear_cross_entropy(x, weight, torch.arange(8), ops.VocabSlice(0, 32, 32))
    raw = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    (loss * factor).backward()
    for gradient, unscaled in zip((x.grad, weight.grad), raw, strict=True):
        assert torch.equal(gradient, (unscaled.float() * factor).bfloat16())


def on_gpu(dtype: torch.dtype, tokens: int, k: int, vocab: int, rows: int, kind: str | None, terms: dict) -> None:
    """One rank's fused loss and gradients in four chunks, against float64."""
    how = case(tokens, k, vocab, rows, kind, terms=terms)
    values, targets = tensors(how, dtype)
    inputs = {name: x.detach().cuda().requires_grad_() for name, x in values.items()}
    norm = ops.Norm(kind, inputs["norm_weight"], inputs.get("norm_bias"), EPS) if kind else None
    loss = ops.linear_cross_entropy(
        inputs["x"], inputs["weight"], targets.cuda(), ops.VocabSlice(0, rows, vocab),
        norm=norm, chunk_tokens=-(-tokens // 4), **terms,
    )  # fmt: skip
    loss.backward()
    actual = {"loss": loss.detach()} | {f"d{name}": x.grad for name, x in inputs.items()}
    oracle, baseline = plain(how, torch.float64, dtype), plain(how, dtype)
    # The loss is one number, and torch's error of it may be 0 by chance: the bound adds what rounding does to a sum.
    loss, expected, other = (float(results.pop("loss")) for results in (actual, oracle, baseline))
    rounding = torch.finfo(dtype).eps / tokens**0.5 + torch.finfo(torch.float32).eps
    assert abs(loss - expected) <= 2 * (abs(other - expected) + rounding * abs(expected))
    assert_close({name: x.cpu() for name, x in actual.items()}, oracle, baseline)
    assert not bool(inputs["weight"].grad[vocab:].any())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fused_on_gpu(dtype):
    on_gpu(dtype, 37, 24, 250, 256, "layernorm", {})
    on_gpu(dtype, 64, 64, 1000, 1024, "rmsnorm", SMOOTH)
    on_gpu(dtype, 129, 128, 50257, 50304, None, {"label_smoothing": 0.1, "z_loss": 1e-4})
    on_gpu(dtype, 16, 128, 128256, 128256, "rmsnorm", {"z_loss": 1e-4})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_in_place_on_gpu(dtype):
    taken_memory("cuda", dtype)
    logits = torch.randn(64, 128256, device="cuda", dtype=dtype, requires_grad=True)
    targets, vocab = torch.arange(64, device="cuda"), ops.VocabSlice(0, 128256, 128256)
    results = []
    for in_place in (False, True):
        inner = logits.clone()
        losses = ops.vocab_parallel_cross_entropy(inner, targets, vocab, in_place=in_place, **SMOOTH)
        (gradient,) = torch.autograd.grad(losses.sum(), inner)
        assert (gradient.data_ptr() == inner.data_ptr()) == in_place
        results.append((losses.detach(), gradient.clone()))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
