"""Queries of one sample that see keys from before them, by PyTorch's flash attention with its log-sum-exp.

Belongs here: how segments become calls of the kernels that a device has, and how their results become one. Who has
which queries and keys, and everything that communicates, is in context_attention.py.

CPU: a segment's keys before its first query are seen by all of its queries, those from there on causally. These are two
calls, whose results are merged, so that no mask is made; a window takes one call with a mask of the segment's queries
and keys. CUDA in 16 bits: one variable-length call for each run of segments whose keys are adjacent, as those of a
chunk are. Otherwise (CUDA in float32 or float64, to verify with) scores are made whole. Where keys come in halves of a
sample, the results over the second half are merged with those over the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tpformer.torch_private import flash_on_cpu, flash_on_cpu_backward, flash_varlen, flash_varlen_backward, is_fake

from .context import RankSegments, Segment


class Call(NamedTuple):
    """One call of a kernel. rows: its queries; keys: their positions; mask: (queries, keys) bool, True where seen."""

    rows: slice
    keys: slice
    is_causal: bool
    mask: Tensor | None = None


class Batch(NamedTuple):
    """Segments of one variable-length call: their rows are adjacent, and so are their keys.

    lengths: boundaries of the queries and of the keys, (segments + 1,) int32 each; the longest of each. window: what
    the kernel is told, whose last query is beside the last key.
    """

    segments: tuple[Segment, ...]
    lengths: tuple[Tensor, Tensor, int, int]
    window: int | None

    @property
    def rows(self) -> slice:
        return slice(self.segments[0].row, self.segments[-1].rows.stop)

    @property
    def keys(self) -> slice:
        return slice(self.segments[0].keys.start, self.segments[-1].keys.stop)

    @property
    def is_causal(self) -> bool:
        return self.segments[0].until is None


def prepared(segments: RankSegments, keys: slice, window: int | None, q: Tensor) -> Sequence[Sequence[Segment | Batch]]:
    """What each sample's queries, of q's device and dtype, attend to of the keys at these positions, by calls of
    kernels. It is made once, and what a GPU needs of it goes there in one copy, for which nothing waits."""
    found = segments.seen(keys, window)
    if not _varlen(q):
        return found
    if is_fake(q):
        return _batched(found, window, q.device, pinned=False)
    key = "batches", keys.start, keys.stop, window, q.device
    return segments.made(key, lambda: _batched(found, window, q.device, pinned=q.is_cuda))


def _batched(
    samples: Sequence[Sequence[Segment]], window: int | None, device: torch.device, *, pinned: bool
) -> list[list[Batch]]:
    runs = [list(adjacent(found)) for found in samples]
    lengths = [
        list(each)
        for of in runs
        for run in of
        for each in zip(*((s.length, s.keys.stop - s.first) for s in run), strict=True)
    ]
    with torch.inference_mode(False):
        counts = [n for each in lengths for n in accumulate(each, initial=0)]
        boundaries = torch.tensor(counts, dtype=torch.int32, pin_memory=pinned).to(device, non_blocking=pinned)
    of_calls = zip(boundaries.split([len(each) + 1 for each in lengths]), map(max, lengths), strict=True)

    def batch(run: list[Segment]) -> Batch:
        (queries, most), (keys, most_keys) = next(of_calls), next(of_calls)
        end, until = run[-1].end, run[-1].until
        told = window if window is None or until is None else window - (end - until)
        return Batch(tuple(run), (queries, keys, most, most_keys), told)

    return [[batch(run) for run in of] for of in runs]


def adjacent(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Runs of segments in which each begins where the one before it ends, in rows and in keys. What has attended to
    earlier keys, or waits for later ones, is alone or begins a run."""
    run: list[Segment] = []
    for segment in segments:
        joins = run and (segment.first, segment.row) == (run[-1].keys.stop, run[-1].rows.stop)
        if run and not (joins and segment.until is run[-1].until is None and not segment.earlier):
            yield run
            run = []
        run.append(segment)
    if run:
        yield run


def attend(
    q: Tensor, k: Tensor, v: Tensor, work: Sequence[Segment | Batch], window: int | None, out: Tensor, lse: Tensor
) -> None:
    """Fill out (rows, heads, head_dim) and lse (heads, rows), float32 or float64, of one sample's own queries.

    q (rows, heads, head_dim); k, v (positions, kv_heads, head_dim) of the whole sample or of a part of it, kv_heads
    dividing heads. work: a sample's of `prepared`. Rows that have attended to an earlier part have its results in out
    and lse.
    """
    forward, _ = KERNELS.get(q.device.type, PLAIN)
    for segment in work:
        if isinstance(segment, Batch):
            keys, values = k[segment.keys], v[segment.keys]
            y, sums = flash_varlen(q[segment.rows], keys, values, *segment.lengths, segment.window, segment.is_causal)
            _put(y.transpose(0, 1), sums, segment.segments[0], out, lse)
            continue
        found = []
        for call in _calls(segment, window, q.device):
            keys, values = (_heads(x[call.keys], q.shape[1]) for x in (k, v))
            mask = None if call.mask is None else _bias(call.mask, q.dtype)
            y, sums = forward(_heads(q[call.rows], q.shape[1]), keys, values, call.is_causal, mask)
            found.append((y[0], sums[0]))
        _put(*_merged(found), segment, out, lse)


def _put(y: Tensor, sums: Tensor, segment: Segment, out: Tensor, lse: Tensor) -> None:
    """Write y (heads, rows, head_dim) and its log-sum-exps (heads, rows), from a segment's first row on. Its `earlier`
    rows have results over other keys in out and lse."""
    start, n = segment.row, segment.earlier
    if n:
        rows = slice(start, start + n)
        both = [(out[rows].transpose(0, 1), lse[:, rows]), (y[:, :n], sums[:, :n])]
        merged, lse[:, rows] = _merged(both)
        out[rows] = merged.transpose(0, 1)
    rows = slice(start + n, start + sums.shape[1])
    out[rows], lse[:, rows] = y[:, n:].transpose(0, 1), sums[:, n:]


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: Sequence[Segment | Batch],
    window: int | None,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add to dq, dk and dv, like q, k and v in at least float32, the gradients that `attend`'s own queries make.

    out, lse: all of `attend`. With the log-sum-exp of all keys, each call's gradients are those of the whole.
    """
    _, backward = KERNELS.get(q.device.type, PLAIN)
    heads, shared = q.shape[1], k.shape[1]
    for segment in work:
        if isinstance(segment, Batch):
            rows, seen = segment.rows, segment.keys
            forward = q[rows], k[seen], v[seen], out[rows], lse[:, rows].contiguous()
            options = segment.window, segment.is_causal
            gradients = flash_varlen_backward(dout[rows], *forward, *segment.lengths, *options)
            for total, part, of in zip((dq, dk, dv), gradients, (rows, seen, seen), strict=True):
                total[of] += part
            continue
        own = [_heads(x[segment.rows], heads) for x in (dout, q, out)]
        for call in _calls(segment, window, q.device):
            keys, values = (_heads(x[call.keys], heads) for x in (k, v))
            mask = None if call.mask is None else _bias(call.mask, q.dtype)
            sums = lse[None, :, segment.rows]
            gradients = backward(own[0], own[1], keys, values, own[2], sums, call.is_causal, mask)
            dq[segment.rows] += gradients[0][0].transpose(0, 1)
            for total, part in ((dk, gradients[1]), (dv, gradients[2])):
                total[call.keys] += (
                    part[0].unflatten(0, (shared, heads // shared)).to(total.dtype).sum(1).transpose(0, 1)
                )


def _calls(segment: Segment, window: int | None, device: torch.device) -> Iterator[Call]:
    """What computes a segment where kernels are causal from the first key on, for as many queries as keys."""
    first, until, rows, end = segment.first, segment.keys.stop, segment.rows, segment.end
    if window is not None and window < end - first:
        first = max(first, segment.position + 1 - window)
        query = torch.arange(segment.position, end, device=device)[:, None]
        key = torch.arange(first, until, device=device)
        yield Call(rows, slice(first, until), False, (key <= query) & (key > query - window))
        return
    if segment.position > first:
        yield Call(rows, slice(first, min(until, segment.position)), False)
    if segment.until is None:
        yield Call(rows, slice(segment.position, end), True)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores: 0 where a query sees a key, else minus infinity."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _heads(x: Tensor, heads: int) -> Tensor:
    """(rows, kv_heads, head_dim) as (1, heads, rows, head_dim), each head as often as it serves queries' heads."""
    if heads != x.shape[1]:
        x = x.repeat_interleave(heads // x.shape[1], 1)
    return x.transpose(0, 1)[None]


def _merged(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Results (heads, rows, head_dim) and log-sum-exps (heads, rows) over disjoint keys, as those over all keys. Of
    several the result has the log-sum-exps' dtype."""
    (out, lse), *others = found
    if not others:
        return out, lse
    wide = out.to(lse.dtype)
    for more, sums in others:
        total = torch.logaddexp(lse, sums)
        wide = wide * (lse - total).exp()[..., None] + more * (sums - total).exp()[..., None]
        lse = total
    return wide, lse


def check_head_dim(q: Tensor) -> None:
    """ValueError for heads (..., head_dim) that the variable-length kernels of CUDA in 16 bits do not take."""
    width = q.shape[-1]
    if _varlen(q) and (width % 8 or width > 256):
        raise ValueError(
            f"head_dim={width} on context-parallel GPUs: their kernels take multiples of 8 up to 256; change the head "
            f"dim, or leave context parallelism out"
        )


def _varlen(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)


def _plain(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(head_dim)) v and the log-sum-exp of the scores, which are made whole."""
    scores = _scores(q, k, is_causal, mask)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def _scores(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(hidden, -math.inf)
    return scores if mask is None else scores + mask


def _plain_backward(dout, q, k, v, out, lse, is_causal, mask) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P * (dout v^T - sum(dout * out)) / sqrt(head_dim), with P = exp(scores - lse): dq = dS k, dk = dS^T q."""
    shares = (_scores(q, k, is_causal, mask) - lse[..., None]).exp()
    ds = shares * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return ds @ k, ds.transpose(-1, -2) @ q, shares.transpose(-1, -2) @ dout


PLAIN: tuple[Callable, Callable] = (_plain, _plain_backward)
KERNELS: dict[str, tuple[Callable, Callable]] = {"cpu": (flash_on_cpu, flash_on_cpu_backward)}
