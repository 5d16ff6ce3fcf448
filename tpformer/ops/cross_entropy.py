"""Cross entropy with the vocabulary sharded over the tensor-parallel group: from logits, and fused with the output
projection so that logits exist only a chunk of tokens at a time."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import all_gather, all_reduce, reduce_scatter
from tpformer.kernels.cross_entropy.reference import combine_statistics, slice_gradient, slice_statistics
from tpformer.kernels.norm.reference import norm_backward, norm_forward

from .norm import Norm
from .transports.interface import record_transport


class VocabSlice(NamedTuple):
    """This rank's entries of the vocabulary: global index of the first, and how many are real (the rest is padding)."""

    first: int
    valid: int


class VocabParallelCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, vocab: VocabSlice, group, ignore_index):
        mine, _ = slice_statistics(logits[:, : vocab.valid], targets, vocab.first)
        maximum, total, losses = combine_statistics(all_gather(mine[None], group))
        ctx.save_for_backward(logits, targets, maximum, total)
        ctx.vocab, ctx.ignore_index = vocab, ignore_index
        return losses.masked_fill(targets == ignore_index, 0)

    @staticmethod
    def backward(ctx, dlosses):
        logits, targets, maximum, total = ctx.saved_tensors
        first, valid = ctx.vocab
        scale = dlosses.masked_fill(targets == ctx.ignore_index, 0)
        exponentials = (logits[:, :valid] - maximum[:, None]).exp_()
        dlogits = torch.zeros_like(logits)
        dlogits[:, :valid] = slice_gradient(exponentials, 1 / total, targets, scale, first)
        return dlogits, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocab: VocabSlice,
    *,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Loss of each token (tokens,), from each rank's slice of its logits.

    Shapes:  logits (tokens, V_local); targets (tokens,) int64, equal on all ranks, `ignore_index` where no loss is
             wanted (0 there, no gradient); result in promote_types(logits.dtype, float32), equal on all ranks.
    Saves:   the logits as given and two numbers a token; the softmax is rebuilt.
    Communication, per rank: forward one all-gather of 3 numbers per token and rank; backward none.
    """
    return VocabParallelCrossEntropyFunction.apply(logits, targets, vocab, group, ignore_index)


class _Head(NamedTuple):
    vocab: VocabSlice
    group: ProcessGroup | None
    sequence_parallel: bool
    norm_kind: str | None
    eps: float
    ignore_index: int
    chunk_tokens: int


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The gradients are made in the forward, while each chunk's logits exist; the backward scales them."""

    @staticmethod
    def forward(ctx, x, weight, norm_weight, norm_bias, targets, head: _Head):
        normed, (mean, rstd) = x, (None, None)
        if head.norm_kind:
            normed, (mean, rstd) = norm_forward(x, norm_weight, norm_bias, head.norm_kind, head.eps)
        if head.group is not None:
            record_transport("linear_cross_entropy", "sequential")
        gathered = all_gather(normed, head.group) if head.sequence_parallel else normed
        wide = torch.promote_types(x.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=x.device)
        first, valid = head.vocab
        entries = weight[:valid]  # the padding has no logits and no gradient
        wants_gradient = any(ctx.needs_input_grad)
        if wants_gradient:
            dgathered = torch.empty_like(gathered)
            dweight = torch.zeros(weight.shape, dtype=wide, device=x.device)
        for start in range(0, len(targets), head.chunk_tokens):
            rows = slice(start, start + head.chunk_tokens)
            logits = F.linear(gathered[rows], entries)
            mine, exponentials = slice_statistics(logits, targets[rows], first)
            maximum, total, losses = combine_statistics(all_gather(mine[None], head.group))
            counted = (targets[rows] != head.ignore_index).to(wide)
            loss += (losses * counted).sum()
            if wants_gradient:
                factor = (mine[0] - maximum).exp() / total
                dlogits = slice_gradient(exponentials, factor, targets[rows], counted, first).to(x.dtype)
                torch.mm(dlogits, entries, out=dgathered[rows])
                dweight[:valid] += dlogits.t() @ gathered[rows]
        if wants_gradient:
            reduce = reduce_scatter if head.sequence_parallel else all_reduce
            kept = x if head.norm_kind else None  # without a norm the gradient is ready
            ctx.save_for_backward(
                kept, norm_weight, norm_bias, mean, rstd, reduce(dgathered, head.group), dweight.to(weight.dtype)
            )
            ctx.norm_kind = head.norm_kind
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, norm_weight, norm_bias, mean, rstd, dnormed, dweight = ctx.saved_tensors
        dx, dnorm_weight, dnorm_bias = dnormed * dloss.to(dnormed.dtype), None, None
        if ctx.norm_kind:
            dx, dnorm_weight, dnorm_bias = norm_backward(dx, x, (mean, rstd), norm_weight, norm_bias, ctx.norm_kind)
        return dx, dweight * dloss.to(dweight.dtype), dnorm_weight, dnorm_bias, None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab: VocabSlice,
    *,
    norm: Norm | None = None,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Summed cross entropy of norm(x) W^T against targets; neither all logits nor the whole vocabulary ever exist.

    Shapes:  x (tokens / t, K) with sequence_parallel, else (tokens, K); weight (V_local, K); targets (tokens,) int64,
             equal on all ranks, `ignore_index` where no loss is wanted; result a scalar in promote_types(x.dtype,
             float32), equal on all ranks. Every slice but the last has as many entries as the first.
             chunk_tokens, equal on all ranks: tokens whose logits are held at once (default: about 4 million logits).
    Saves:   the gradient of x and of W (made in the forward), and x where a norm needs it. No double backward.
    Communication, per rank, B = tokens * K * itemsize: sequence parallel: all-gather B, reduce-scatter B; otherwise
             all-reduce B; and per chunk one all-gather of 3 numbers per token and rank. All of it in the forward,
             which without gradients skips the reductions.
    Source:  the chunked loss of Liger-Kernel (arXiv:2410.10989), made vocab-parallel
    """
    kind, norm_weight, norm_bias, eps = norm or (None, None, None, 0.0)
    if chunk_tokens is None:
        # ranks exchange once per chunk, so the size must be the same on all: from the first slice, the largest
        rank = 0 if group is None else group.rank()
        chunk_tokens = max(64, 2**22 // (vocab.first // rank if rank else weight.shape[0]))
    head = _Head(vocab, group, sequence_parallel, kind, eps, ignore_index, chunk_tokens)
    return LinearCrossEntropyFunction.apply(x, weight, norm_weight, norm_bias, targets, head)
