"""Cross entropy with the vocabulary sharded over the tensor-parallel group.

One operation takes logits. The other takes the rows before the output projection, and makes logits of a chunk of
tokens at a time, so that all of them never exist.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config import check_range
from tpformer.distributed.collectives import all_gather, all_reduce, reduce_scatter
from tpformer.kernels.cross_entropy.reference import IGNORE_INDEX, LossTerms, VocabSlice
from tpformer.kernels.operands import FLOATS, require
from tpformer.torch_private import Function

from .autocast import autocast_dtype, cast
from .calls import called
from .embedding import check_ids, check_slice, of_slices
from .first_derivative import first_derivative, trace
from .implementation import implementation
from .norm import Norm, parameters, restored
from .norm import norm as normalise
from .transports.interface import record_transport
from .uncompiled import uncompiled

# How many logits linear_cross_entropy holds at once, and the fewest tokens of a chunk. Each chunk reads and writes the
# float32 gradient of W. On an H200, by its data sheet, that takes a tenth of the time of 2048 tokens' GEMMs. So a GPU
# takes more at once where it has room: GPU_SHARE of its memory, of which GPU_MEMORY bytes count at most.
CPU_LOGITS, CPU_TOKENS = 2**22, 64
GPU_MEMORY, GPU_SHARE, GPU_TOKENS = 80 * 10**9, 1 / 96, 2048
TOKEN_MULTIPLE = 1024  # so many tokens' GEMMs have no tile that is empty in part
REDUCTIONS = ("sum", "mean", "none")  # those of torch.nn.functional.cross_entropy
ROW_MULTIPLE = 16  # the columns of a chunk's logits are a multiple of this, with padding, so that rows stay aligned


def loss_terms(ignore_index: int, label_smoothing: float, z_loss: float) -> LossTerms:
    """The terms of a loss. ValueError unless label_smoothing is in [0, 1) and z_loss is not negative."""
    check_range("train.label_smoothing", label_smoothing, "label_smoothing")
    check_range("train.z_loss", z_loss, "z_loss")
    return LossTerms(ignore_index, label_smoothing, z_loss)


def check_shapes(
    x: Tensor,
    rows: int,
    columns: int,
    targets: Tensor,
    vocab: VocabSlice,
    ignore_index: int,
    group: ProcessGroup | None,
) -> None:
    """ValueError unless x is rows, targets are (rows,) int64 and the columns are those of this rank's slice.

    On a CPU also for a target outside the vocabulary.
    """
    if x.ndim != 2 or targets.shape != (rows,) or targets.dtype != torch.int64:
        raise ValueError(
            f"targets are {tuple(targets.shape)} {targets.dtype} for a {tuple(x.shape)} input of {rows} tokens: "
            f"flatten both, and give each token one int64 id, ignore_index={ignore_index} where no loss is wanted"
        )
    require("cross entropy", x, ("x", x, x.shape, FLOATS), ("targets", targets, (rows,), (torch.int64,)))
    check_slice("logits a token", columns, vocab, group)
    check_ids(targets, vocab.entries, "targets", ignored=ignore_index)


def reduced(losses: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The losses (tokens,), their sum, or their mean over the targets that are not ignore_index.

    If all are ignored, the mean is NaN and its gradients are 0.
    """
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    counted = (targets != ignore_index).sum()
    return torch.where(counted > 0, total / counted.clamp(min=1), torch.nan)


class VocabParallelCrossEntropyFunction(Function):
    """loss = logsumexp(x) - x_target for logits x (tokens, V_local); LossTerms has label smoothing and the z-loss.

    forward   each rank finds its slice's maximum, sum of exponentials and target logit; an all-gather of these numbers
              gives every rank the normalisers and the losses (tokens,)
    backward  dx = dloss * (softmax(x) - onehot(target)), from the logits and the normalisers; no communication
    """

    @staticmethod
    def forward(ctx, logits, targets, vocab: VocabSlice, terms: LossTerms, group, in_place: bool):
        kernels = implementation("cross_entropy", logits)
        mine, _ = kernels.slice_statistics(logits, targets, vocab, terms)
        normalisers, losses = kernels.combine_statistics(all_gather(mine[None], group), targets, vocab, terms)
        ctx.save_for_backward(logits, targets, normalisers)
        ctx.vocab, ctx.terms, ctx.in_place = vocab, terms, in_place
        return losses

    @staticmethod
    @first_derivative
    def backward(ctx, dlosses):
        logits, targets, normalisers = ctx.saved_tensors
        dlogits = implementation("cross_entropy", logits).slice_gradient(
            logits.detach(), normalisers, targets, dlosses, ctx.vocab, ctx.terms, in_place=ctx.in_place
        )
        if ctx.in_place:
            # autograd does not see what a kernel writes. A second backward, or another user of the logits, must fail.
            torch.autograd.graph.increment_version(logits)
        return dlogits, None, None, None, None, None


@uncompiled
def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocab: VocabSlice,
    *,
    group: ProcessGroup | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "none",
    in_place: bool = False,
) -> Tensor:
    """Loss of each token (tokens,), from each rank's slice of its logits; with reduction "sum" or "mean" a scalar.

    Math:    kernels.cross_entropy.reference.LossTerms: label smoothing as in torch.nn.functional.cross_entropy, over
             the whole vocabulary; z_loss * logsumexp**2 is added (PaLM, arXiv:2204.02311, with 1e-4).
             reduction "mean": the sum divided by the number of targets that are not ignore_index; NaN if there are none
    Shapes:  logits (tokens, V_local), of any row stride; columns from vocab.valid on are padding, and get gradient 0;
             targets (tokens,) int64, equal on all ranks; a target of `ignore_index` has loss 0 and no gradient;
             result in promote_types(logits.dtype, float32), equal on all ranks.
    Saves:   the logits as given, and two numbers a token; the backward rebuilds the softmax. in_place: the gradient is
             written over the logits. Nothing else may read them after the loss, and a second backward raises
             RuntimeError.
    Communication, per rank: forward one all-gather of 3 numbers per token and rank, 4 with label smoothing; backward
             none.
    Errors:  ValueError for another reduction, a label_smoothing outside [0, 1), a negative z_loss, targets of another
             shape or dtype, a slice that is not this rank's, columns that are not the slice's (whole logits, say), and
             on a CPU a target outside the vocabulary. The check would make a GPU wait, so there such a target's loss
             and gradient are NaN.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is none of {REDUCTIONS}: choose one")
    terms = loss_terms(ignore_index, label_smoothing, z_loss)
    check_shapes(logits, len(logits), logits.shape[-1], targets, vocab, ignore_index, group)
    agreed = of_slices(vocab), terms, reduction
    called(group, "vocab_parallel_cross_entropy", targets.shape, logits.dtype, True, (), (), *agreed)
    losses = VocabParallelCrossEntropyFunction.apply(logits, targets, vocab, terms, group, in_place)
    return reduced(losses, targets, ignore_index, reduction)


class _Head(NamedTuple):
    """What the Function takes that is no tensor."""

    vocab: VocabSlice
    terms: LossTerms
    group: ProcessGroup | None
    sequence_parallel: bool
    norm: Norm | None
    chunk_tokens: int
    gradients: bool  # whether grad mode was on; inside a Function it is always off


class LinearCrossEntropyFunction(Function):
    """L = the sum of the losses of logits = G(norm(X)) W^T. G gathers all rows; its transpose R reduces gradients.

    t ranks, M tokens in total, V entries on this rank; X (M / t, K) with sequence parallelism, else (M, K); W (V, K):
        forward  L, and for dL = 1, a chunk of tokens at a time while its logits (chunk, V) exist:
                 dlogits = softmax(logits) - onehot(target), dnorm(X) = R(dlogits W), dW = dlogits^T G(norm(X))
        backward dX = norm'(X)^T dnorm(X) dL, and dW dL; no communication
    With sequence parallelism G is an all-gather and R a reduce-scatter; without it nothing is gathered, and R is an
    all-reduce.
    """

    @staticmethod
    def forward(ctx, x, weight, norm_weight, norm_bias, targets, head: _Head, *traces):
        kernels, vocab, terms = implementation("cross_entropy", x), head.vocab, head.terms
        normed, (mean, rstd) = x, (None, None)
        if head.norm is not None:
            normed, (mean, rstd) = implementation("norm", x).norm_forward(x, head.norm)
        if head.group is not None:
            record_transport("linear_cross_entropy", "sequential")
        gathered = all_gather(normed, head.group) if head.sequence_parallel else normed
        wide = torch.promote_types(x.dtype, torch.float32)
        losses = torch.zeros(len(targets), dtype=wide, device=x.device)
        entries = weight[: -(-vocab.valid // ROW_MULTIPLE) * ROW_MULTIPLE]  # padding rows after it get no gradient
        chunk = gathered.new_empty(min(head.chunk_tokens, len(targets)), len(entries))
        x_wants, weight_wants, *norm_wants = (head.gradients and wants for wants in ctx.needs_input_grad[:4])
        x_wants |= any(norm_wants)
        dgathered = torch.empty_like(gathered) if x_wants else None
        dweight = torch.empty(weight.shape, dtype=wide, device=x.device) if weight_wants else None
        if dweight is not None:
            dweight[len(entries) if len(targets) else 0 :].zero_()
        for start in range(0, len(targets), head.chunk_tokens):
            rows = slice(start, start + head.chunk_tokens)
            wanted = targets[rows]
            logits = torch.mm(gathered[rows], entries.t(), out=chunk[: len(wanted)])
            mine, work = kernels.slice_statistics(logits, wanted, vocab, terms)
            parts = all_gather(mine[None], head.group)
            normalisers, losses[rows] = kernels.combine_statistics(parts, wanted, vocab, terms)
            if x_wants or weight_wants:
                dlogits = kernels.slice_gradient(
                    logits, normalisers, wanted, None, vocab, terms, work=work, in_place=True
                )
                del work  # a chunk's; it would wait beside the next chunk's
                if dgathered is not None:
                    torch.mm(dlogits, entries, out=dgathered[rows])
                if dweight is not None:
                    _add_product(dweight[: len(entries)], dlogits.t(), gathered[rows], first=start == 0)
        if x_wants or weight_wants:
            reduce = reduce_scatter if head.sequence_parallel else all_reduce
            dnormed = None if dgathered is None else reduce(dgathered, head.group)
            kept = x if head.norm is not None and x_wants else None  # without a norm the gradient is ready
            if dweight is not None and weight.dtype != torch.float16:  # float16 overflows before dL scales it
                dweight = dweight.to(weight.dtype)
            ctx.save_for_backward(kept, norm_weight, norm_bias, mean, rstd, dnormed, dweight, *traces)
            ctx.norm, ctx.weight_dtype = head.norm, weight.dtype
        return losses.sum()

    @staticmethod
    @first_derivative
    def backward(ctx, dloss):
        x, norm_weight, norm_bias, mean, rstd, dnormed, dweight, *_ = ctx.saved_tensors
        dx, dnorm_weight, dnorm_bias = None if dnormed is None else _scaled(dnormed, dloss), None, None
        norm = restored(ctx.norm, norm_weight, norm_bias)
        if norm is not None and dx is not None:
            dx, dnorm_weight, dnorm_bias = implementation("norm", x).norm_backward(dx, x, (mean, rstd), norm)
        if dweight is not None:
            dweight = _scaled(dweight, dloss).to(ctx.weight_dtype)
        return dx, dweight, dnorm_weight, dnorm_bias, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total += A B, or the first time total = A B. The GEMM adds, so that 16-bit products are not rounded first."""
    if a.dtype == total.dtype:
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif not a.is_cuda:  # a CPU has no such GEMM: the product is rounded to 16 bits
        total.copy_(a @ b) if first else total.add_(a @ b)
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor, rounded once. factor is a scalar tensor of at least x's precision."""
    if x.is_cuda:  # torch would first round a factor without dims to x's dtype; it does not with one dim
        return torch.mul(x, factor.reshape(1), out=torch.empty_like(x))
    return x * factor


def default_chunk_tokens(vocab: VocabSlice, device_type: str, memory: int = GPU_MEMORY) -> int:
    """Tokens whose logits linear_cross_entropy holds at once. memory: a GPU's bytes, of which GPU_MEMORY count at most.

    Ranks exchange numbers once per chunk, so all need the same answer: it follows from vocab.width, which is equal on
    all ranks, though the last rank's shard may be smaller, and from the memory of their GPUs, which are alike.
    """
    if device_type != "cuda":
        return max(CPU_TOKENS, CPU_LOGITS // vocab.width)
    room = int(min(memory, GPU_MEMORY) * GPU_SHARE) // (2 * vocab.width)  # in 16 bits
    return max(GPU_TOKENS, room // TOKEN_MULTIPLE * TOKEN_MULTIPLE)


@uncompiled
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab: VocabSlice,
    *,
    norm: Norm | None = None,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "sum",
    chunk_tokens: int | None = None,
) -> Tensor:
    """Cross entropy of norm(x) W^T against targets, a scalar. Logits exist for a chunk of tokens at a time.

    Math:    vocab_parallel_cross_entropy of norm(x) W^T, with reduction "sum" or "mean"
    Shapes:  x (tokens / t, K) with sequence_parallel, else (tokens, K); weight (V_local, K), finite in padding rows;
             targets (tokens,) int64, equal on all ranks, `ignore_index` where no loss is wanted; result a scalar in
             promote_types(x.dtype, float32), equal on all ranks.
             chunk_tokens, equal on all ranks: how many tokens' logits are held at once, in x's dtype. Default: about
             4 million logits and at least 64 tokens; on a GPU a 96th of its memory, as if it had at most 80 GB, and at
             least 2048 (8192 of GPT-2's vocabulary). Ranks of one group need GPUs of one size, or this argument.
    Numerics: the gradients of logits are rounded to x's dtype. The gradient of W is summed over chunks in at least
             float32; on a CPU each chunk's part is rounded to x's dtype first. With float16, scale the loss, not x.
             Under torch.autocast the norm runs in float32, and logits have autocast's dtype.
    Saves:   the gradients of x and W, which the forward makes if they are wanted (a frozen W costs no GEMM and no
             memory), and x if there is a norm. There is no second derivative.
    Communication, per rank, B = tokens * K * itemsize, all of it in the forward:
             sequence parallel: all-gather B, reduce-scatter B; otherwise all-reduce B
             per chunk one all-gather of 3 numbers per token and rank, 4 with label smoothing
             Without gradients the reductions are left out.
    Errors:  as vocab_parallel_cross_entropy, and ValueError for reduction "none" or chunk_tokens below 1
    Source:  the chunked loss of Liger-Kernel (arXiv:2410.10989), made vocab-parallel
    """
    if reduction not in REDUCTIONS[:2]:
        raise ValueError(
            f"reduction={reduction!r} is neither of {REDUCTIONS[:2]}: the fused loss makes gradients in the forward, "
            f"for one scalar; for each token's loss take vocab_parallel_cross_entropy of the logits"
        )
    terms = loss_terms(ignore_index, label_smoothing, z_loss)
    ranks = group.size() if group is not None and sequence_parallel else 1
    check_shapes(x, len(x) * ranks, len(weight), targets, vocab, ignore_index, group)
    if (dtype := autocast_dtype(x)) is not None:
        x, weight = cast(x if norm is None else normalise(x, norm), dtype), cast(weight, dtype)
        norm = None
    require("linear_cross_entropy", x, ("weight", weight, (weight.shape[0], x.shape[-1]), (x.dtype,)))
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: at least 1 token's logits are held at once; leave it unset")
    if chunk_tokens is None:
        memory = torch.cuda.get_device_properties(x.device).total_memory if x.is_cuda else GPU_MEMORY
        chunk_tokens = default_chunk_tokens(vocab, x.device.type, memory)
    head = _Head(vocab, terms, group, sequence_parallel, norm, chunk_tokens, torch.is_grad_enabled())
    agreed = of_slices(vocab), terms, reduction, f"{chunk_tokens} tokens at once"
    called(group, "linear_cross_entropy", x.shape, x.dtype, True, (x, *parameters(norm)), (weight,), *agreed)
    traces = trace(x), trace(weight)  # neither is saved, and a second derivative has to be refused
    total = LinearCrossEntropyFunction.apply(x, weight, *parameters(norm), targets, head, *traces)
    return reduced(total, targets, ignore_index, reduction)
