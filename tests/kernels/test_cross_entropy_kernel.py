"""Cross entropy from slices of the vocabulary, however uneven, equals F.cross_entropy of the whole in float64. The
reference and the kernels take the same tests; NaNs stand beside the logits, and must not reach in."""

import itertools
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from row_checks import FLOATS, OF_KERNEL, between_nans, columnwise, everywhere
from testing import assert_identical, assert_kernel_close, poisoned_memory
from torch import Tensor

from tpformer.kernels.cross_entropy import reference
from tpformer.kernels.cross_entropy.reference import LossTerms, VocabSlice

kernel = partial(import_module, "tpformer.kernels.cross_entropy.kernel")
PLAIN = LossTerms()
TERMS = (PLAIN, LossTerms(label_smoothing=0.1), LossTerms(z_loss=1e-2), LossTerms(5, 0.3, 1e-3))
NAN = float("nan")
NARROW = FLOATS | {"reference": (torch.float32, torch.bfloat16, torch.float16)}


def in_slices(
    kernels, logits, targets, scale, per_slice: int, vocab: int, terms: LossTerms = PLAIN, in_place=False
) -> tuple[Tensor, Tensor]:
    """Return (losses, dlogits) from slices of per_slice columns; the columns from `vocab` on are padding."""
    pieces = [VocabSlice(first, per_slice, vocab) for first in range(0, logits.shape[1], per_slice)]
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
        assert_identical(inputs, before)
        scale = None if scale is None else scale.to(losses.dtype)
        gradients = [
            kernels.slice_gradient(x, normalisers, targets, scale, piece, terms, work=work, in_place=in_place)
            for x, piece, (_, work) in zip(inputs, pieces, steps, strict=True)
        ]
    if not in_place:
        assert_identical(inputs, before)
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.dtype == x.dtype and gradient.shape == x.shape
        beside = x._base[:, :16], x._base[:, -16:]
        assert all(bool(nans.isnan().all()) for nans in beside)  # nothing is written there
    return losses, torch.cat(gradients, 1)


def by_torch(logits: Tensor, targets: Tensor, scale: Tensor | None, vocab: int, terms: LossTerms):
    leaf = logits.detach().requires_grad_()
    valid, ignore, smoothing = leaf[:, :vocab], terms.ignore_index, terms.label_smoothing
    losses = F.cross_entropy(valid, targets, reduction="none", ignore_index=ignore, label_smoothing=smoothing)
    if terms.z_loss:
        losses = losses + terms.z_loss * valid.logsumexp(-1).square() * (targets != ignore)
    upstream = torch.ones_like(losses) if scale is None else scale.to(losses.dtype)
    (gradient,) = torch.autograd.grad(losses, leaf, upstream)
    return losses.detach(), gradient


def draw(seed: int, tokens: int, vocab: int, padding: int, dtype, device="cpu", ignore=-100) -> tuple[Tensor, ...]:
    """Logits, targets of which every third is ignored, and a scale; padding would dominate if it were counted."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, vocab + padding, generator=generator, dtype=torch.float64) * 3
    logits[:, vocab:] = 50.0
    targets = torch.randint(vocab, (tokens,), generator=generator)
    targets[2::3] = ignore
    scale = torch.randn(tokens, generator=generator, dtype=torch.float64)
    return logits.to(device, dtype), targets.to(device), scale.to(device)


def check(kernels, case: tuple[Tensor, ...], per_slice: int, vocab: int, terms: LossTerms, **how) -> None:
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


@everywhere("cross_entropy", NARROW)
def test_huge_logits(kernels: Any, dtype: torch.dtype, device: str) -> None:
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


@everywhere("cross_entropy")
@poisoned_memory()
def test_slices_without_entries(kernels: Any, device: str) -> None:
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


# (vocabulary, padding, columns of a slice): one entry, odd ones, whole 16-byte vectors and several blocks; slices have
# some padding, much, or nothing else
WIDTHS = ((1, 0, 1), (3, 2, 2), (17, 0, 17), (64, 0, 64), (60, 4, 64), (33, 31, 16), (1000, 24, 1024), (1001, 0, 501))
GPU_WIDTHS = ((50257, 47, 25152), (50257, 0, 50257), (128256, 0, 128256), (128256, 0, 16032))


@everywhere("cross_entropy", NARROW)
def test_widths_and_terms(kernels: Any, dtype: torch.dtype, device: str) -> None:
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


def in_one(kernels, x: Tensor, targets: Tensor, scale: Tensor | None, terms: LossTerms, **memory: bool) -> list[Tensor]:
    """Statistics, normalisers, losses and dlogits, of one slice that is the whole vocabulary."""
    vocab = VocabSlice(0, x.shape[1], x.shape[1])
    statistics, _ = kernels.slice_statistics(x, targets, vocab, terms)
    normalisers, losses = kernels.combine_statistics(statistics[None], targets, vocab, terms)
    gradient = kernels.slice_gradient(x, normalisers, targets, scale, vocab, terms, **memory)
    return [statistics, normalisers, losses, gradient]


@everywhere("cross_entropy", OF_KERNEL)
@poisoned_memory()
def test_memory_and_repeats(kernels: Any, device: str) -> None:
    """Strides and repeats change no bit; an ignored row is not read; a gradient in place is where the logits were."""
    logits, targets, scale = draw(3, 3, 600, 0, torch.float32, device, TERMS[3].ignore_index)
    given = targets, scale.float(), TERMS[3]
    results = in_one(kernels, logits, *given)
    for x in (columnwise(logits), logits):
        assert_identical(in_one(kernels, x, *given), results)
    # an upstream gradient of ones may be one number without strides, or None
    ones = in_one(kernels, logits, targets, torch.ones((), device=device).expand(3), TERMS[3])
    assert_identical(in_one(kernels, logits, targets, None, TERMS[3]), ones)
    logits[2] = NAN  # ignored, so the gradient does not read it
    gradient = kernels.slice_gradient(logits, results[1], *given[:2], VocabSlice(0, 600, 600), TERMS[3], in_place=True)
    assert gradient.data_ptr() == logits.data_ptr() and torch.equal(gradient, results[3])


test_infinite_logits = everywhere("cross_entropy")(infinite_logits)
test_targets_outside = everywhere("cross_entropy")(outside)


@pytest.mark.gpu
def test_offsets_beyond_32_bits_on_gpu() -> None:
    tokens = 2**31 // 50304 + 9
    logits = torch.zeros(tokens, 50304, dtype=torch.bfloat16, device="cuda")
    targets = torch.arange(tokens, device="cuda")
    logits[-1] = torch.randn(50304, generator=torch.Generator().manual_seed(0))
    alone = in_one(kernel(), logits[-1:].clone(), targets[-1:], None, TERMS[1])[2:]
    whole = in_one(kernel(), logits, targets, None, TERMS[1], in_place=True)[2:]
    assert_identical([x[-1:] for x in whole], alone)
