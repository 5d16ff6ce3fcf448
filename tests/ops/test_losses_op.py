"""Both losses refuse wrong targets, give torch's mean of no targets, and compute nothing for frozen inputs."""

import pytest
import torch
import torch.nn.functional as F
from shards import Seen, leaves, make
from testing import assert_identical

from tpformer import ops


@pytest.mark.parametrize(
    "targets, words",
    [
        (torch.arange(3), r"targets are \(3,\) torch.int64 for a \(4, 2\) input of 4 tokens: flatten both"),
        (torch.arange(1), r"targets are \(1,\) torch.int64 for a \(4, 2\) input of 4 tokens"),
        (torch.arange(4)[:, None], r"targets are \(4, 1\) torch.int64 for"),
        (torch.rand(4), r"targets are \(4,\) torch.float32 for a \(4, 2\) input of 4 tokens: .* one int64 id"),
        (torch.tensor([0, 1, -1, -100]), r"targets span \[-1, 1\], outside the vocabulary \[0, 1\]"),
        (torch.tensor([0, 1, 2, -100]), r"targets span \[0, 2\], outside the vocabulary \[0, 1\]"),
    ],
)
def test_targets_that_do_not_fit_are_refused(targets, words):
    x = torch.randn(4, 2)
    with pytest.raises(ValueError, match=words):
        ops.vocab_parallel_cross_entropy(x, targets, ops.VocabSlice(0, 2, 2))
    with pytest.raises(ValueError, match=words):
        ops.linear_cross_entropy(x, torch.randn(2, 2), targets, ops.VocabSlice(0, 2, 2))


def test_a_slice_without_all_of_its_entries_is_refused():
    words = "3 logits a token, but .* has 4 entries here"
    with pytest.raises(ValueError, match=words):
        ops.vocab_parallel_cross_entropy(torch.randn(2, 3), torch.arange(2), ops.VocabSlice(0, 4, 4))
    with pytest.raises(ValueError, match=words):
        ops.linear_cross_entropy(torch.randn(2, 5), torch.randn(3, 5), torch.arange(2), ops.VocabSlice(0, 4, 4))


@pytest.mark.parametrize(
    "targets", [torch.full((3,), -100), torch.zeros(0, dtype=torch.int64)], ids=["ignored", "none"]
)
def test_the_mean_of_nothing_is_torchs(targets):
    """It is NaN, and its gradients are 0."""
    values = leaves(make(1, torch.float64, x=(len(targets), 4), weight=(7, 4)))
    vocab, inputs = ops.VocabSlice(0, 7, 7), list(values.values())
    logits = values["x"] @ values["weight"].t()
    for loss in (
        F.cross_entropy(logits, targets),
        ops.vocab_parallel_cross_entropy(logits, targets, vocab, reduction="mean"),
        ops.linear_cross_entropy(*inputs, targets, vocab, reduction="mean"),
    ):
        assert bool(loss.isnan())
        assert not any(bool(each.any()) for each in torch.autograd.grad(loss, inputs, retain_graph=True))


def test_unknown_reductions_are_refused():
    x, weight, targets, vocab = torch.randn(2, 3), torch.randn(4, 3), torch.arange(2), ops.VocabSlice(0, 4, 4)
    with pytest.raises(ValueError, match="reduction='avg' is none of"):
        ops.vocab_parallel_cross_entropy(x @ weight.t(), targets, vocab, reduction="avg")
    with pytest.raises(ValueError, match="reduction='none' is neither of .*take vocab_parallel_cross_entropy"):
        ops.linear_cross_entropy(x, weight, targets, vocab, reduction="none")


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("frozen, gemms", [((), 3), (("weight",), 2), (("x",), 3), (("x", "scale"), 2)])
def test_what_is_frozen_costs_nothing(frozen, gemms, norm):
    """The other gradients stay the same. Without a norm a frozen input needs no GEMM for its gradient."""
    values = leaves(make(1, torch.bfloat16, x=(4, 8), weight=(64, 8), scale=(8,)))
    targets, vocab = torch.arange(4), ops.VocabSlice(0, 64, 64)
    results = []
    for names in ((), frozen):
        for name, each in values.items():
            each.requires_grad_(name not in names)
            each.grad = None
        prologue = ops.Norm("rmsnorm", values["scale"], None, 1e-5) if norm else None
        with Seen() as seen:
            ops.linear_cross_entropy(values["x"], values["weight"], targets, vocab, norm=prologue).backward()
        results.append({name: each.grad for name, each in values.items() if name not in frozen})
    assert_identical(results[1], results[0])
    assert seen.gemms == (gemms if norm or "x" not in frozen else 2)
    assert (seen.largest_float32 < 64 * 8) == ("weight" in frozen)


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
