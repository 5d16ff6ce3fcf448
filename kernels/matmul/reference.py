"""Dense GEMMs with the epilogues that transformer layers need: the specification (torch only), and their cost."""

import torch
from torch import Tensor

from ..activation.reference import activation_backward, activation_forward
from ..cost import Cost


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def matmul_reference(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    a_transposed: bool = False,
    b_transposed: bool = False,
) -> Tensor:
    """act(A B^T + bias) (M, N), accumulated in at least float32 and rounded once to a's dtype.

    Shapes: a (M, K), or (K, M) if a_transposed; b (N, K) like a Linear's weight, or (K, N) if b_transposed; bias (N,).
    """
    left, right = _wide(a.t() if a_transposed else a), _wide(b if b_transposed else b.t())
    y = left @ right
    if bias is not None:
        y = y + _wide(bias)
    return activation_forward(y, activation).to(a.dtype)


def matmul_derivative_reference(
    a: Tensor, b: Tensor, x: Tensor, activation: str | None, gate: Tensor | None = None, *, b_transposed: bool = True
) -> tuple[Tensor, Tensor | None, Tensor]:
    """activation_backward of da = A B^T, which is never rounded: (dx, dgate or None, act(x) or act(gate) * x)."""
    da = matmul_reference(_wide(a), _wide(b), b_transposed=b_transposed)
    wide = activation_backward(da, _wide(x), activation, None if gate is None else _wide(gate))
    dx, dgate, rebuilt = wide
    return dx.to(a.dtype), None if dgate is None else dgate.to(a.dtype), rebuilt.to(a.dtype)


def matmul_cost(m: int, n: int, k: int, itemsize: int) -> Cost:
    """2 M N K flops; A, B and the result cross memory once. The epilogue's flops are not counted."""
    return Cost(2 * m * n * k, (m * k + n * k + m * n) * itemsize)
