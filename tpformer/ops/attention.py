"""Attention over whole samples or packed documents, on PyTorch's scaled_dot_product_attention."""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor


def _sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """(batch, seq, heads, head_dim) -> same. The output's storage is SDPA's own, so it is saved once."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped).transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, is_causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch renamed the way to ask for causal attention between 2.10 and 2.12, and grouped heads came with the new one
    if "is_causal" in inspect.signature(varlen_attn).parameters:
        options: dict = {"is_causal": is_causal}
    else:
        options = {"window_size": (-1, 0 if is_causal else -1)}
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return varlen_attn(q, k, v, boundaries, boundaries, longest, longest, **options)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: int,
    documents: tuple[Tensor, int] | None = None,
    is_causal: bool = True,
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v within each sample, or within each packed document.

    Shapes:  q (tokens, heads, head_dim); k, v (tokens, kv_heads, head_dim), kv_heads dividing heads (each serves
             heads / kv_heads consecutive query heads); tokens = batch * seq, batch-major; result like q.
             documents: boundaries (n_documents + 1,) int32 of the flattened tokens, from 0 to tokens, and the longest
             document's length; None when every sample is one document.
    is_causal: a token attends to itself and earlier ones; else to all of its document.
    CUDA uses PyTorch's variable-length kernel for documents in 16 bits; elsewhere a loop runs over them.
    No communication.
    """
    if documents is None:
        q, k, v = (x.unflatten(0, (batch, len(x) // max(batch, 1))) for x in (q, k, v))
        return _sdpa(q, k, v, is_causal).flatten(0, 1)
    boundaries, longest = documents
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        return _varlen(q, k, v, boundaries, longest, is_causal)
    lengths = boundaries.diff().tolist()
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([_sdpa(q[None], k[None], v[None], is_causal)[0] for q, k, v in parts])
