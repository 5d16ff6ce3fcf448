"""Causal attention over whole samples or packed documents, on PyTorch's scaled_dot_product_attention."""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(batch, seq, heads, head_dim) -> same. The output's storage is SDPA's own, so it is saved once."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch renamed the way to ask for causal attention between 2.10 and 2.12, and grouped heads came with the new one
    if "is_causal" in inspect.signature(varlen_attn).parameters:
        causal: dict = {"is_causal": True}
    else:
        causal = {"window_size": (-1, 0)}
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return varlen_attn(q, k, v, boundaries, boundaries, longest, longest, **causal)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, batch: int, documents: tuple[Tensor, int] | None = None
) -> Tensor:
    """Causal softmax(q k^T / sqrt(head_dim)) v within each sample, or within each packed document.

    Shapes:  q (tokens, heads, head_dim); k, v (tokens, kv_heads, head_dim), kv_heads dividing heads (each serves
             heads / kv_heads consecutive query heads); tokens = batch * seq, batch-major; result like q.
             documents: boundaries (n_documents + 1,) int32 of the flattened tokens, from 0 to tokens, and the longest
             document's length; None when every sample is one document.
    CUDA uses PyTorch's variable-length kernel for documents, a CPU loops over them. No communication.
    """
    if documents is None:
        q, k, v = (x.unflatten(0, (batch, -1)) for x in (q, k, v))
        return _sdpa(q, k, v).flatten(0, 1)
    boundaries, longest = documents
    if q.is_cuda:
        return _varlen(q, k, v, boundaries, longest)
    lengths = boundaries.diff().tolist()
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([_sdpa(*(x[None] for x in part))[0] for part in parts])
