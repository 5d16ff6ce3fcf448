"""Cross entropy from slices of the vocabulary, however uneven, equals F.cross_entropy of the whole in float64. The
reference and the kernels take the same tests; NaNs stand beside the logits, and must not reach in."""

import itertools
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from row_checks import FLOATS, OF_KERNEL, between_nans, columnwise, everywhere
from testing import assert_kernel_close, assert_same, poisoned_memory
from torch import Tensor

from tpformer.kernels.cross_entropy import reference
from tpformer.kernels.cross_entropy.reference import LossTerms, VocabSlice

PLAIN = LossTerms()
TERMS = (PLAIN, LossTerms(label_smoothing=0.1), LossTerms(z_loss=1e-2), LossTerms(5, 0.3, 1e-3))
NAN = float("nan")


def slices(columns: int, per_slice: int, vocab: int) -> list[VocabSlice]:
    return [VocabSlice(first, per_slice, vocab) for first in range(0, columns, per_slice)]


def in_slices(
    kernels: Any, logits: Tensor, targets: Tensor, scale: Tensor | None, per_slice: int, vocab: int,
    terms: LossTerms = PLAIN, rebuild: bool = False, in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (losses, dlogits) from slices of per_slice columns; the columns from `vocab` on are padding."""
    pieces = slices(logits.shape[1], per_slice, vocab)
    # between the NaNs rows start at multiples of 16 elements if the width is such a multiple
    inputs = [between_nans(logits[:, piece.first : piece.first + per_slice], margin=16) for piece in pieces]
    for x, piece in zip(inputs, pieces, strict=True):
        x[:, piece.valid :] = NAN
    before = [x.clone() for x in inputs]
    with poisoned_memory():
        steps = [kernels.slice_statistics(x, targets, piece, terms) for x, piece in zip(inputs, pieces, strict=True)]
        parts = torch.stack([statistics for statistics, _ in steps])
        normalisers, losses = kernels.combine_statistics(parts, targets, pieces[0], terms)
        assert parts.shape == (len(pieces), terms.rows, len(targets))
        assert all(torch.equal(x, y) for x, y in zip(map(bits, inputs), map(bits, before), strict=True))
        scale = None if scale is None else scale.to(losses.dtype)
        gradients = [
            kernels.slice_gradient(
                x, normalisers, targets, scale, piece, terms, work=None if rebuild else work, in_place=in_place
            )
            for x, piece, (_, work) in zip(inputs, pieces, steps, strict=True)
        ]
    for x, gradient, own in zip(inputs, gradients, before, strict=True):
        assert gradient.dtype == x.dtype and gradient.shape == x.shape
        if not in_place:
            assert torch.equal(bits(x), bits(own))
        whole = x._base
        assert bool(whole[:, :16].isnan().all()) and bool(whole[:, -16:].isnan().all())  # nothing is written beside x
    return losses, torch.cat(gradients, 1)


def bits(x: Tensor) -> Tensor:
    """Integers with the same bits, because a NaN differs from itself."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def by_torch(
    logits: Tensor, targets: Tensor, scale: Tensor | None, vocab: int, terms: LossTerms = PLAIN
) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    valid, ignore, smoothing = leaf[:, :vocab], terms.ignore_index, terms.label_smoothing
    losses = F.cross_entropy(valid, targets, reduction="none", ignore_index=ignore, label_smoothing=smoothing)
    if terms.z_loss:
        losses = losses + terms.z_loss * valid.logsumexp(-1).square() * (targets != ignore)
    upstream = torch.ones_like(losses) if scale is None else scale.to(losses.dtype)
    (gradient,) = torch.autograd.grad(losses, leaf, upstream)
    return losses.detach(), gradient


def draw(
    seed: int, tokens: int, vocab: int, padding: int, dtype: torch.dtype, device: str = "cpu", ignore: int = -100
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets of which every third is ignored, and a scale; padding would dominate if it were counted."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, vocab + padding, generator=generator, dtype=torch.float64) * 3
    logits[:, vocab:] = 50.0
    targets = torch.randint(vocab, (tokens,), generator=generator)
    targets[2::3] = ignore
    scale = torch.randn(tokens, generator=generator, dtype=torch.float64)
    return logits.to(device, dtype), targets.to(device), scale.to(device)


def check(kernels: Any, case: tuple[Tensor, Tensor, Tensor | None], per_slice: int, vocab: int, terms, **how) -> None:
    """Compare losses and gradients with float64. The baseline is torch in float32, rounded once."""
    logits, targets, scale = case
    losses, gradient = in_slices(kernels, logits, targets, scale, per_slice, vocab, terms, **how)
    oracle = by_torch(logits.double(), targets, scale, vocab, terms)
    baseline = by_torch(logits.float(), targets, scale, vocab, terms)
    name = f"{tuple(logits.shape)} {logits.dtype} by {per_slice}, {terms}, {how}"
    assert_kernel_close(losses, oracle[0], baseline[0], f"losses {name}")
    assert_kernel_close(gradient, oracle[1], baseline[1].to(logits.dtype), f"dlogits {name}")
    assert not bool(gradient[:, vocab:].any()), name
    assert not bool(gradient[targets == terms.ignore_index].any()), name


# padding may fill part of the last slice, all of it, or several slices
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 7), st.integers(1, 20), st.integers(0, 12), st.integers(1, 12), st.integers(0, 1000),
    st.sampled_from(TERMS), st.booleans(),
)  # fmt: skip
def test_slices_equal_the_whole(tokens, vocab, padding, per_slice, seed, terms, rebuild):
    ignore = min(terms.ignore_index, vocab - 1)
    terms = terms._replace(ignore_index=ignore)
    logits, targets, scale = draw(seed, tokens, vocab, padding, torch.float64, ignore=ignore)
    losses, gradient = in_slices(reference, logits, targets, scale, per_slice, vocab, terms, rebuild=rebuild)
    expected_losses, expected_gradient = by_torch(logits, targets, scale, vocab, terms)
    # a loss is a difference of numbers as large as logits, and its gradient of numbers as large as the scale
    assert_same([losses, logits[:, :vocab]], [expected_losses, logits[:, :vocab]])
    assert_same([gradient, scale], [expected_gradient, scale])
    assert torch.equal(gradient[:, vocab:], torch.zeros(tokens, padding, dtype=torch.float64))


def huge_logits(kernels: Any, dtype: torch.dtype, device: str) -> None:
    """Near the largest numbers, alone or all of them equal: only differences count."""
    largest = 6e4 if dtype == torch.float16 else 3e38
    logits, _, scale = draw(0, 5, 9, 0, dtype, device)
    logits[0] *= 1e3
    logits[1, 3], logits[2, 3] = largest, -largest
    targets = torch.tensor([8, 3, 0, 4, 0], device=device)
    for per_slice in (4, 9):
        check(kernels, (logits, targets, scale), per_slice, 9, PLAIN)
    for value, terms in itertools.product((1e4, largest), TERMS[:2]):
        equal = torch.full((2, 13), value, dtype=dtype, device=device)
        check(kernels, (equal, targets[:2], None), 4, 9, terms)  # the slices have 4, 4, 1 and none of the columns


def infinite_logits(kernels: Any, device: str = "cpu") -> None:
    """Entries of -inf have probability 0, and a slice may have nothing else."""
    logits, targets, scale = draw(1, 4, 8, 0, torch.float32, device)
    logits[0, :4] = logits[1, 4:] = logits[3, ::3] = -torch.inf
    targets[:4] = torch.tensor([6, 1, -100, 1], device=device)
    for per_slice in (4, 8):
        check(kernels, (logits, targets, scale), per_slice, 8, PLAIN)
    with poisoned_memory():
        statistics, _ = kernels.slice_statistics(logits[:, :4], targets, VocabSlice(0, 4, 8), PLAIN)
    assert statistics[:, 0].tolist() == [-torch.inf, 0, 0]
    # the mean of the logits is -inf, as in torch, so the loss is infinite; the gradient is finite nonetheless
    smooth = LossTerms(label_smoothing=0.1)
    losses, gradient = in_slices(kernels, logits, targets, scale, 4, 8, smooth)
    assert losses.tolist() == [torch.inf, torch.inf, 0, torch.inf]
    oracle, baseline = (by_torch(x, targets, scale, 8, smooth)[1] for x in (logits.double(), logits))
    assert_kernel_close(gradient, oracle, baseline, "dlogits")
    # an ignored row is 0 even where all is -inf
    nothing = torch.full((1, 8), -torch.inf, device=device)
    losses, gradient = in_slices(kernels, nothing, targets[2:3], None, 4, 8)
    assert losses.tolist() == [0] and not bool(gradient.any())


@poisoned_memory()
def empty(kernels: Any, device: str) -> None:
    """A slice without entries takes no part, whether it has columns of padding or none. No tokens are no error."""
    targets = torch.tensor([0, 1, 2], device=device)
    for terms in TERMS[:2]:
        for columns in (0, 3):
            logits, vocab = torch.full((3, columns), NAN, device=device), VocabSlice(8, 4, 8)
            statistics, work = kernels.slice_statistics(logits, targets, vocab, terms)
            assert statistics.tolist() == [[-torch.inf] * 3, *[[0.0] * 3] * (terms.rows - 1)]
            for taken in (work, None):
                normalisers = torch.ones(2, 3, device=device)
                gradient = kernels.slice_gradient(logits, normalisers, targets, None, vocab, terms, work=taken)
                assert torch.equal(gradient, torch.zeros(3, columns, device=device))
        logits, vocab = torch.zeros(0, 4, device=device), VocabSlice(0, 4, 4)
        statistics, work = kernels.slice_statistics(logits, targets[:0], vocab, terms)
        normalisers, losses = kernels.combine_statistics(statistics[None], targets[:0], vocab, terms)
        gradient = kernels.slice_gradient(logits, normalisers, targets[:0], None, vocab, terms, work=work)
        assert (normalisers.shape, losses.shape, gradient.shape) == ((2, 0), (0,), (0, 4))


def outside(kernels: Any, device: str = "cpu") -> None:
    """A target that is in no slice makes its own loss and gradient NaN, and no others."""
    logits, _, _ = draw(2, 5, 8, 0, torch.float32, device)
    targets = torch.tensor([-1, 8, 3, -100, 2**40], device=device)
    for terms in TERMS[:3]:
        losses, gradient = in_slices(kernels, logits, targets, None, 4, 8, terms)
        for nan in (losses.isnan(), gradient.isnan().any(1), gradient.isnan().all(1)):
            assert nan.tolist() == [True, True, False, False, True]
        kept = slice(2, 4)
        oracles, baselines = (by_torch(each[kept], targets[kept], None, 8, terms) for each in (logits.double(), logits))
        for x, oracle, baseline in zip((losses[kept], gradient[kept]), oracles, baselines, strict=True):
            assert_kernel_close(x, oracle, baseline, f"kept rows, {terms}")


def kernel() -> Any:
    return import_module("tpformer.kernels.cross_entropy.kernel")


# (vocabulary, padding, columns of a slice): one entry, odd ones, whole 16-byte vectors and several blocks; slices have
# some padding, much, or nothing else
WIDTHS = ((1, 0, 1), (3, 2, 2), (17, 0, 17), (64, 0, 64), (60, 4, 64), (33, 31, 16), (1000, 24, 1024), (1001, 0, 501))
GPU_WIDTHS = ((50257, 47, 25152), (50257, 0, 50257), (128256, 0, 128256), (128256, 0, 16032))


def widths_and_terms(kernels: Any, dtype: torch.dtype, device: str) -> None:
    """All terms at every width; in the interpreter, which is slow, one of them at each."""
    turn = None if kernels is reference or device == "cuda" else int(dtype == torch.float16)
    for seed, (vocab, padding, per_slice) in enumerate(WIDTHS):
        for terms in TERMS if turn is None else [TERMS[(seed + turn) % len(TERMS)]]:
            if vocab == 1:  # with the other terms a gradient is what rounding leaves of 1 - 1
                terms = terms._replace(label_smoothing=0.0, z_loss=0.0)
            ignore = min(terms.ignore_index, vocab - 1)
            case = draw(seed, 3, vocab, padding, dtype, device, ignore)
            check(kernels, case, per_slice, vocab, terms._replace(ignore_index=ignore), in_place=seed % 2 == 0)
    for (vocab, padding, per_slice), terms in itertools.product(GPU_WIDTHS if device == "cuda" else (), TERMS):
        case = draw(9, 131, vocab, padding, dtype, device, terms.ignore_index)
        check(kernels, case, per_slice, vocab, terms, in_place=terms is PLAIN)


@poisoned_memory()
def memory_and_repeats(kernels: Any, device: str) -> None:
    """Strides and repeats change no bit; an ignored row is not read; in place, the gradient takes the logits'
    memory."""
    vocab, terms = VocabSlice(0, 600, 600), TERMS[3]
    logits, targets, scale = draw(3, 3, 600, 0, torch.float32, device, terms.ignore_index)
    results = []
    for x in (logits, columnwise(logits), logits):
        statistics, _ = kernels.slice_statistics(x, targets, vocab, terms)
        normalisers, losses = kernels.combine_statistics(statistics[None], targets, vocab, terms)
        given = (normalisers, targets, scale.float(), vocab, terms)
        results.append((statistics, losses, kernels.slice_gradient(x, *given)))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))
    # an upstream gradient of ones may be one number without strides, or None
    ones = (torch.ones((), device=device).expand(3), None)
    one, other = (kernels.slice_gradient(logits, normalisers, targets, scale, vocab, terms) for scale in ones)
    assert torch.equal(one, other)
    logits[2] = NAN  # ignored, so the gradient does not read it
    gradient = kernels.slice_gradient(logits, *given, in_place=True)
    assert gradient.data_ptr() == logits.data_ptr() and torch.equal(gradient, results[0][2])


NARROW = FLOATS | {"reference": (torch.float32, torch.bfloat16, torch.float16)}
test_widths_and_terms = everywhere("cross_entropy", widths_and_terms, NARROW)
test_huge_logits = everywhere("cross_entropy", huge_logits, NARROW)
test_infinite_logits = everywhere("cross_entropy", infinite_logits)
test_slices_without_entries = everywhere("cross_entropy", empty)
test_targets_outside = everywhere("cross_entropy", outside)
test_memory_and_repeats = everywhere("cross_entropy", memory_and_repeats, OF_KERNEL)


@pytest.mark.gpu
def test_offsets_beyond_32_bits_on_gpu() -> None:
    tokens, vocab = 2**31 // 50304 + 9, VocabSlice(0, 50304, 50304)
    logits = torch.zeros(tokens, 50304, dtype=torch.bfloat16, device="cuda")
    targets = torch.arange(tokens, device="cuda")
    logits[-1] = torch.randn(50304, generator=torch.Generator().manual_seed(0))

    def run(x: Tensor, targets: Tensor, **memory: bool) -> tuple[Tensor, Tensor]:
        statistics, _ = kernel().slice_statistics(x, targets, vocab, TERMS[1])
        normalisers, losses = kernel().combine_statistics(statistics[None], targets, vocab, TERMS[1])
        return losses, kernel().slice_gradient(x, normalisers, targets, None, vocab, TERMS[1], **memory)

    alone = run(logits[-1:].clone(), targets[-1:])
    losses, gradient = run(logits, targets, in_place=True)
    assert torch.equal(losses[-1:], alone[0]) and torch.equal(gradient[-1:], alone[1])
