"""Dense GEMMs and their epilogues: the specification (torch only), and the cost."""

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
    a: Tensor, b: Tensor, x: Tensor, activation: str | None, gate: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dx, dgate or None, act(x) or act(gate) * x): activation_backward of da = A B, which is never rounded.

    Shapes: a (M, K); b (K, N); x, gate and results (M, N).
    """
    da = _wide(a) @ _wide(b)
    dx, dgate, rebuilt = activation_backward(da, _wide(x), activation, None if gate is None else _wide(gate))
    return dx.to(a.dtype), None if dgate is None else dgate.to(a.dtype), rebuilt.to(a.dtype)


def matmul_cost(m: int, n: int, k: int, itemsize: int) -> Cost:
    """2 M N K flops; A and B are read and the result is written. The epilogue's flops do not count."""
    return Cost(2 * m * n * k, (m * k + n * k + m * n) * itemsize)
