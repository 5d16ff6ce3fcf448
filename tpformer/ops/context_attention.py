"""Causal attention of samples whose tokens lie on several ranks: context parallelism.

Belongs here: the differentiable operation, and what it communicates. Which tokens a rank has is in context.py, and what
computes is in flash.py.

Keys and values are gathered, not passed around a ring: a ring moves as many bytes, and knows no windows.
Source: Llama 3 (arXiv:2407.21783), section 3.3.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config import check_context_length
from tpformer.distributed.collectives import start_all_gather, start_scatter_sum
from tpformer.torch_private import Function

from .attention import check_heads, check_window
from .autocast import autocast_dtype, cast, without_autocast
from .calls import called
from .context import Part, RankSegments, Segment, chunk_owners, own_chunks, parts, undivided
from .first_derivative import first_derivative
from .flash import Batch, attend, attend_backward, check_head_dim, prepared
from .uncompiled import uncompiled

Documents = Sequence[Sequence[int]]


def _gathered(k: Tensor, v: Tensor, cut: Sequence[Part], kept: Kept) -> Iterator[Tensor]:
    """Keys and values of whole samples, (2, batch, positions, kv_heads, head_dim), of one part after another: by an
    all-gather each, of which the next one is then under way. Nothing is held here that has been taken."""

    def start(part: Part) -> Callable[[], Tensor]:
        rows = part.rows(k.shape[1])
        return start_all_gather(torch.stack([x[:, rows, part.heads] for x in (k, v)])[None], kept.group)

    under_way = [start(cut[0])]
    for part, following in zip(cut, [*cut[1:], None], strict=True):
        came = [under_way.pop()()]
        if following is not None:
            under_way.append(start(following))
        yield _in_order(came.pop(), part.places, kept.size)


def _in_order(gathered: Tensor, places: tuple[int, ...], size: int) -> Tensor:
    """(2, batch, positions, ...) in their order, of what came from the ranks, (ranks, 2, batch, own, ...)."""
    chunks = gathered.unflatten(3, (len(places), -1))
    owners = [(rank, places.index(place)) for rank, place in chunk_owners(size) if place in places]
    return torch.cat([chunks[rank, :, :, index] for rank, index in owners], 2)


def _scattered(gradients: Tensor, places: tuple[int, ...], own: Tensor, kept: Kept) -> Callable[[], None]:
    """Begin to put into `own`, (2, batch, own, heads, width), those gradients of the own tokens, summed over ranks, of
    gradients like _gathered's result. What it returns waits, and puts them there.

    Ranks exchange them in own's dtype and add them up in at least float32, in rank order: NCCL's reduce-scatter would
    add in an order of its own, and round at every hop.
    """
    size = kept.size
    chunks, first = gradients.chunk(len(places) * size, 2), places[0] * size
    sent = torch.empty(len(chunks), *chunks[0].shape, dtype=own.dtype, device=own.device)
    for index, (rank, place) in enumerate(product(range(size), places)):
        sent[index] = chunks[own_chunks(size, rank)[place] - first]
    wait = start_scatter_sum(sent, kept.group)

    def put() -> None:
        for chunk, summed in zip(own.chunk(len(places), 2), wait(), strict=True):
            chunk.copy_(summed)

    return put


class Kept(NamedTuple):
    """What the operation's two halves have in common."""

    segments: RankSegments
    window: int | None
    group: ProcessGroup | None

    @property
    def size(self) -> int:
        """How many ranks share the samples."""
        return self.segments.place[1]

    def work(self, q: Tensor, part: Part) -> Sequence[Sequence[Segment | Batch]]:
        """What to attend to of a part's keys, for each sample: made once for all layers."""
        seq_length, _, _ = self.segments.place
        return prepared(self.segments, part.positions(seq_length), self.window, q)


class ContextAttention(Function):
    """out = softmax(q K^T / sqrt(head_dim)) V, causal within documents, with K and V of all ranks' tokens.

    forward   gather k and v; out and the log-sum-exp of each own query's scores
    backward  gather k and v again; dq, and dK and dV of all tokens from the own queries; exchange and add up dk and dv
    """

    @staticmethod
    def forward(ctx, q, k, v, kept: Kept):
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(len(q), q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
        cut = parts(q.shape[2], k.shape[2], q.device.type)
        gathers = _gathered(k, v, cut, kept)
        for part in cut:
            keys, values = next(gathers)
            heads = part.queries
            for i, found in enumerate(kept.work(q, part)):
                attend(q[i, :, heads], keys[i], values[i], found, kept.window, out[i, :, heads], lse[i, heads])
            del keys, values
        ctx.save_for_backward(q, k, v, out, lse)  # nothing that was gathered
        ctx.kept = kept
        return out

    @staticmethod
    @first_derivative
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        kept, cut = ctx.kept, parts(q.shape[2], k.shape[2], q.device.type)
        dkv = torch.empty(2, *k.shape, dtype=k.dtype, device=k.device)
        with without_autocast(q):
            dq = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
            gathers, under_way = _gathered(k, v, cut, kept), list[Callable[[], None]]()
            for part in cut:
                sums = _key_gradients(next(gathers), part, kept, dout, q, out, lse, dq)
                while under_way:  # the exchange of the part before, which ran beside this one's work
                    under_way.pop()()
                own_rows = dkv[:, :, part.rows(k.shape[1]), part.heads]
                under_way.append(_scattered(sums, part.places, own_rows, kept))
                del sums
            under_way.pop()()
        return dq.to(q.dtype), *dkv, None


def _key_gradients(gathered: Tensor, part: Part, kept: Kept, dout, q, out, lse, dq: Tensor) -> Tensor:
    """Gradients like `gathered`, a part's keys and values, in dq's dtype, from the own queries. Theirs are added to
    dq."""
    sums, heads = torch.zeros(gathered.shape, dtype=dq.dtype, device=q.device), part.queries
    for i, found in enumerate(kept.work(q, part)):
        dy, own, y, total = (x[i, :, heads] for x in (dout, q, out, dq))
        (keys, values), sums_of = gathered[:, i], (sums[0, i], sums[1, i])
        attend_backward(dy, own, keys, values, found, kept.window, y, lse[i, heads], total, *sums_of)
    return sums


@uncompiled
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | RankSegments | None = None,
    window: int | None = None,
    *,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Causal ops.attention of samples whose tokens the ranks of a group share; None is one rank, which has all.

    Shapes:  q (batch, seq / n, heads, head_dim), k, v (batch, seq / n, kv_heads, head_dim) on n ranks, kv_heads
             dividing heads; the rows are `own_tokens` of each sample. The result is like q.
             documents: the positions at which each sample's documents begin, ascending from 0, equal on all ranks.
             None: every sample is one document. Documents and windows may cross from one rank's tokens to another's.
             A RankSegments of them serves several calls, and is made once.
    window:  a token attends to itself and to the window - 1 tokens before it.
    Saves:   q, k, v, the result and a log-sum-exp: (2 heads + 2 kv_heads) head_dim + heads numbers for each own token,
             the last ones in at least float32. Nothing gathered is kept.
    Communication, per rank, B = 2 batch seq kv_heads head_dim itemsize: an all-gather of B in the forward, another and
             an all-to-all of B in the backward; on CUDA in up to 4 parts, by heads or also by halves of the samples, of
             which the next is gathered, and the one before exchanged, while one attends.
    Gradients of keys and values are summed over ranks in their order, so this sum is the same in every run. CUDA's
    flash attention repeats its bits only under torch.use_deterministic_algorithms(True).
    On CUDA in 32 and 64 bits scores are made whole, (heads, own tokens, keys) of a part at a time: to verify with.
    Errors:  ValueError for operands of other shapes, dtypes or devices, a length that 2 n does not divide, a window
             below 1, documents that do not begin like that, and a head_dim that CUDA's kernels do not take;
             RuntimeError if ranks differ in what they call.
    """
    check_window(window, is_causal=True)
    check_heads("context_attention", q, k, v, q.shape[1] if q.dim() == 4 else 0)
    check_head_dim(q)
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    seq = q.shape[1] * size
    told = "whole samples"
    if documents is None:
        check_context_length(seq, size)
        documents = undivided(len(q), seq, size, rank)
    else:
        if not isinstance(documents, RankSegments):
            documents = RankSegments(documents, seq, size, rank)
        told = documents.told
    if (documents.samples, documents.place) != (len(q), (seq, size, rank)):
        raise ValueError(
            f"documents of {documents.samples} samples of {documents.place[0]} tokens on {documents.place[1]} ranks, "
            f"for {len(q)} of {seq} on {size}: give those of the samples that q is of"
        )
    window = None if window is None or window >= seq else window
    called(group, "context_attention", q.shape, q.dtype, True, (q, k, v), (), k.shape[2], window, told)
    dtype = autocast_dtype(q) or q.dtype
    q, k, v = (cast(x, dtype) for x in (q, k, v))
    with without_autocast(q):
        if q.stride(-1) != 1:  # kernels take adjacent features: CUDA's refuse others, and a CPU's read wrong ones
            q = q.contiguous()
        return ContextAttention.apply(q, k, v, Kept(documents, window, group))
