"""Causal attention of samples whose tokens lie on several ranks: context parallelism.

Belongs here: the differentiable operation, and what it communicates. Which tokens a rank has is in context.py, and what
computes is in flash.py.

Keys and values are gathered, not passed around a ring: a ring moves as many bytes, and knows no windows.
Source: Llama 3 (arXiv:2407.21783), section 3.3.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config import check_context_length
from tpformer.distributed.collectives import scatter_sum, start_all_gather
from tpformer.words import shown

from .attention import check_heads, check_window
from .autocast import autocast_dtype, cast, without_autocast
from .calls import called
from .context import Segment, chunk_owners, own_chunks, segments
from .first_derivative import first_derivative
from .flash import attend, attend_backward, check_head_dim
from .uncompiled import uncompiled

Documents = Sequence[Sequence[int]]
TOLD = 31  # numbers by which ranks compare documents, few, as each makes a text of its own (distributed/calls.py)


# Heads come in parts, those of the next part gathered while one attends. A CPU computes nothing beside a collective. On
# CUDA four is a choice that nobody has measured: three quarters of the gather may hide, and parts are still large.
PARTS = {"cpu": 1, "cuda": 4}


def _parts(q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    """(heads of q, the heads of k that serve them) of each part."""
    heads, shared = q.shape[2], k.shape[2]
    n = max(1, min(PARTS.get(k.device.type, 1), shared))
    ends, each = [shared * part // n for part in range(n + 1)], heads // max(1, shared)
    return [(slice(each * a, each * b), slice(a, b)) for a, b in pairwise(ends)]


def _gathered(k: Tensor, v: Tensor, parts: Sequence[tuple[slice, slice]], group: ProcessGroup) -> Iterator[Tensor]:
    """Keys and values of whole samples, (2, batch, seq, kv_heads, head_dim), of one part's heads after another's: by an
    all-gather each, of which the next one is then under way. Nothing is held here that has been taken."""

    def start(heads: slice) -> Callable[[], Tensor]:
        return start_all_gather(torch.stack([k[:, :, heads], v[:, :, heads]])[None], group)

    under_way = [start(parts[0][1])]
    for heads in [*(heads for _, heads in parts[1:]), None]:
        came = [under_way.pop()()]
        if heads is not None:
            under_way.append(start(heads))
        yield _in_order(came.pop(), group.size())


def _in_order(gathered: Tensor, size: int) -> Tensor:
    """(2, batch, seq, ...) in the order of positions, of what came from the ranks, (ranks, 2, batch, own, ...)."""
    chunks = gathered.unflatten(3, (2, -1))
    return torch.cat([chunks[rank, :, :, place] for rank, place in chunk_owners(size)], 2)


def _scattered(gradients: Tensor, dtype: torch.dtype, group: ProcessGroup) -> Tensor:
    """Of gradients like _gathered's result those of the own tokens, summed over ranks: (2, batch, own, heads, width).

    Ranks exchange them in `dtype` and add them up in at least float32, in rank order: NCCL's reduce-scatter would add
    in an order of its own, and round at every hop.
    """
    size, chunks = group.size(), gradients.chunk(2 * group.size(), 2)
    sent = torch.empty(len(chunks), *chunks[0].shape, dtype=dtype, device=gradients.device)
    for place, index in enumerate(index for rank in range(size) for index in own_chunks(size, rank)):
        sent[place] = chunks[index]
    return torch.cat(list(scatter_sum(sent, group)), 2)


class Kept(NamedTuple):
    """What the operation's two halves have in common. starts: where each sample's documents begin."""

    starts: Documents
    window: int | None
    group: ProcessGroup

    def segments(self, own: int) -> Iterator[tuple[int, list[Segment]]]:
        """(sample, its segments on this rank), for `own` tokens of each sample."""
        size, rank = self.group.size(), self.group.rank()
        for sample, starts in enumerate(self.starts):
            yield sample, segments(starts, own * size, size, rank)


class ContextAttention(torch.autograd.Function):
    """out = softmax(q K^T / sqrt(head_dim)) V, causal within documents, with K and V of all ranks' tokens.

    forward   gather k and v; out and the log-sum-exp of each own query's scores
    backward  gather k and v again; dq, and dK and dV of all tokens from the own queries; exchange and add up dk and dv
    """

    @staticmethod
    def forward(ctx, q, k, v, kept: Kept):
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(len(q), q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
        parts = _parts(q, k)
        gathers = _gathered(k, v, parts, kept.group)
        for heads, _ in parts:
            keys, values = next(gathers)
            for i, found in kept.segments(q.shape[1]):
                attend(q[i, :, heads], keys[i], values[i], found, kept.window, out[i, :, heads], lse[i, heads])
            del keys, values
        ctx.save_for_backward(q, k, v, out, lse)  # nothing that was gathered
        ctx.kept = kept
        return out

    @staticmethod
    @first_derivative
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        kept, dkv = ctx.kept, list[Tensor]()
        with without_autocast(q):
            dq, parts = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32)), _parts(q, k)
            gathers = _gathered(k, v, parts, kept.group)
            for heads, _ in parts:
                keys, values = next(gathers)
                sums = torch.zeros(2, *keys.shape, dtype=dq.dtype, device=q.device)
                for i, found in kept.segments(q.shape[1]):
                    dy, own, y, total = (x[i, :, heads] for x in (dout, q, out, dq))
                    sums_of = sums[0, i], sums[1, i]
                    attend_backward(dy, own, keys[i], values[i], found, kept.window, y, lse[i, heads], total, *sums_of)
                del keys, values  # before as much is made to send
                dkv.append(_scattered(sums, k.dtype, kept.group))
        dk, dv = dkv[0] if len(dkv) == 1 else torch.cat(dkv, 3)
        return dq.to(q.dtype), dk, dv, None


@uncompiled
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None = None,
    window: int | None = None,
    *,
    group: ProcessGroup,
) -> Tensor:
    """Causal ops.attention of samples whose tokens the ranks of a group share.

    Shapes:  q (batch, seq / n, heads, head_dim), k, v (batch, seq / n, kv_heads, head_dim) on n ranks, kv_heads
             dividing heads; the rows are `own_tokens` of each sample. The result is like q.
             documents: the positions at which each sample's documents begin, ascending from 0, equal on all ranks.
             None: every sample is one document. Documents and windows may cross from one rank's tokens to another's.
    window:  a token attends to itself and to the window - 1 tokens before it.
    Saves:   q, k, v, the result and a log-sum-exp: (2 heads + 2 kv_heads) head_dim + heads numbers for each own token,
             the last ones in at least float32. Nothing gathered is kept.
    Communication, per rank, B = 2 batch seq kv_heads head_dim itemsize: an all-gather of B in the forward, another and
             an all-to-all of B in the backward; on CUDA in up to 4 parts, by heads, of which the next is gathered while
             one attends.
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
    size = group.size()
    seq = q.shape[1] * size
    check_context_length(seq, size)
    starts = [[0]] * len(q) if documents is None else documents
    if len(starts) != len(q) or any(list(s[:1]) != [0] or list(s) != sorted(set(s)) or s[-1] >= seq for s in starts):
        raise ValueError(
            f"documents of {len(starts)} samples begin at {shown(starts)}: give for each of {len(q)} samples ascending "
            f"positions from 0 to below {seq}"
        )
    window = None if window is None or window >= seq else window
    told = "whole samples" if documents is None else f"documents {hash(tuple(map(tuple, starts))) % TOLD}"
    called(group, "context_attention", q.shape, q.dtype, True, (q, k, v), (), k.shape[2], window, told)
    dtype = autocast_dtype(q) or q.dtype
    q, k, v = (cast(x, dtype) for x in (q, k, v))
    with without_autocast(q):
        return ContextAttention.apply(q, k, v, Kept(starts, window, group))
