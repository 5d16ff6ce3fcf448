"""Attention over whole samples or packed documents, on PyTorch's scaled_dot_product_attention."""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor

from tpformer.kernels.operands import FLOATS, require

from .autocast import autocast_dtype


def check_window(window: int | None, is_causal: bool) -> None:
    """ValueError for a window that is no whole number above 0, or one of attention that is not causal."""
    if window is not None and (not isinstance(window, int) or window < 1 or not is_causal):
        raise ValueError(
            f"a sliding window of {window} with is_causal={is_causal}: it has at least 1 token, the query itself, and "
            f"the tokens before it; give a whole sliding_window >= 1 and is_causal=True, or no window"
        )


def check_heads(operation: str, q: Tensor, k: Tensor, v: Tensor, slots: int) -> None:
    """ValueError unless q (batch, seq, heads, head_dim) and k and v (batch, slots, kv_heads, head_dim) fit."""
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"{operation}: q is {tuple(q.shape)} and k {tuple(k.shape)}: give (batch, tokens, heads, head_dim)"
        )
    (batch, _, heads, width), shared = q.shape, k.shape[2]
    if heads % shared if shared else heads:
        raise ValueError(f"{operation}: {heads} heads of q and {shared} of k: give k a number that divides q's")
    shape, dtype, device = (batch, slots, shared, width), q.dtype, q.device
    alike = k.dtype == v.dtype == dtype
    if not alike or dtype not in FLOATS or not k.shape == v.shape == shape or not k.device == v.device == device:
        own = (dtype,) if alike or autocast_dtype(q) is None else FLOATS  # autocast casts them all
        require(operation, q, ("q", q, q.shape, FLOATS), ("k", k, shape, own), ("v", v, shape, own))


def _check_documents(boundaries: Tensor, longest: int, lengths: list[int], tokens: int) -> None:
    """ValueError unless documents of these lengths follow one another from the first token to the last."""
    first = boundaries[:1].tolist()
    if first != [0] or sum(lengths) != tokens or not lengths or min(lengths) < 0 or max(lengths) > longest:
        raise ValueError(
            f"documents of {lengths} tokens, the longest said to have {longest}, from boundaries that begin with "
            f"{first}: give boundaries that rise from 0 to all {tokens} tokens, and their greatest difference"
        )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, window: int | None) -> Tensor:
    """SDPA of (batch, seq, heads, head_dim). The result is a view of what SDPA saves, not a second copy."""
    seq, grouped, mask = q.shape[1], q.shape[2] != k.shape[2], None
    if window is not None and window < seq:
        mask = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    is_causal = is_causal and mask is None
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=grouped).transpose(1, 2)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, is_causal: bool, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # between 2.10 and 2.12 torch replaced is_causal by window_size
    if "is_causal" not in inspect.signature(varlen_attn).parameters:
        options: dict = {"window_size": (-1 if window is None else window - 1, 0 if is_causal else -1)}
    elif window is None:
        options = {"is_causal": is_causal}
    else:
        raise ValueError(
            f"a sliding window of {window} on CUDA needs torch 2.12, not {torch.__version__}: update torch"
        )
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return varlen_attn(q, k, v, boundaries, boundaries, longest, longest, **options)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: tuple[Tensor, int] | None = None,
    is_causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v within each sample, or within each packed document.

    Shapes:  q (batch, seq, heads, head_dim); k, v (batch, seq, kv_heads, head_dim), kv_heads dividing heads (each
             serves heads / kv_heads consecutive query heads); result like q.
             documents: where they begin and end among the batch * seq tokens, (n_documents + 1,) int32 from 0 to the
             last token's end, and the longest document's length. None: every sample is one document.
    is_causal: a token attends to itself and to earlier ones; otherwise to all of its document.
    window: a token attends to itself and to the window - 1 tokens before it.
    On CUDA, documents and windows in 16 bits take PyTorch's variable-length kernel. Elsewhere a loop runs over the
    documents, and a document longer than the window gets a bool mask of its length squared.
    No communication.
    Errors: ValueError for a window below 1, without is_causal, or on CUDA with torch older than 2.12, for operands of
            other shapes, dtypes or devices, and on a CPU for documents that are not all tokens in their order.
    """
    check_window(window, is_causal)
    check_heads("attention", q, k, v, q.shape[1])
    fused = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    batch, seq = q.shape[:2]
    if documents is None:
        if window is None or window >= seq or not fused:
            return _sdpa(q, k, v, is_causal, window)
        documents = torch.arange(0, batch * seq + 1, seq, dtype=torch.int32, device=q.device), seq
    boundaries, longest = documents
    require("attention", q, ("the documents' boundaries", boundaries, (boundaries.numel(),), (torch.int32,)))
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    if fused:
        return _varlen(q, k, v, boundaries, longest, is_causal, window).unflatten(0, (batch, seq))
    lengths = boundaries.diff().tolist()
    _check_documents(boundaries, longest, lengths, batch * seq)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    y = torch.cat([_sdpa(q[None], k[None], v[None], is_causal, window)[0] for q, k, v in parts])
    return y.unflatten(0, (batch, seq))


def cached_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v of new tokens over the keys and values of a cache.

    Shapes:  q (batch, seq, heads, head_dim); k, v (batch, slots, kv_heads, head_dim), kv_heads dividing heads; mask
             (batch, seq, slots) or (1, seq, slots) bool, True where a token sees a slot, at least one for each token;
             None: each token sees all; result like q.
    The query heads that share a key-value head become rows of one head, so that no key is read or copied twice.
    No communication.
    Errors: ValueError for operands of other shapes, dtypes or devices.
    """
    check_heads("cached_attention", q, k, v, k.shape[1])
    if mask is not None:
        masks = 1 if mask.shape[:1] == (1,) else q.shape[0]
        require("cached_attention", q, ("mask", mask, (masks, q.shape[1], k.shape[1]), (torch.bool,)))
    seq, groups = q.shape[1], q.shape[2] // k.shape[2]
    rows = q.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if mask is not None:
        mask = mask.repeat(1, groups, 1)[:, None]
    y = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), mask)
    return y.unflatten(2, (groups, seq)).permute(0, 3, 1, 2, 4).flatten(2, 3)
