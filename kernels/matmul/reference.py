"""Dense GEMMs and their epilogues: the specification (torch only), and the cost."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..activation.reference import ACTIVATIONS, activation_backward, activation_forward
from ..activation.reference import check_operands as check_activation
from ..cost import Cost
from ..operands import FLOATS, next_divisible, require, unknown
from ..pack.format import Packed


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_linears(
    operation: str, like: Any, a: Tensor, k: int, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None,
    activation: str | None, b_transposed: bool, served: int = 1,
) -> None:  # fmt: skip
    """ValueError unless every weight has the K of a, every bias the N of its weight, and all a's dtype and the device
    of `like`.

    served: of virtual ranks, whose weights and biases are stacked along dim 0, and whose input is a, if it is gathered.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    shape, dtype, device = a.shape, a.dtype, like.device
    biases = [None] * len(weights) if biases is None else biases
    if len(biases) != len(weights):
        raise ValueError(f"{len(weights)} weights but {len(biases)} biases: pass one bias (or None) per weight")
    if len(shape) != 2 or shape[0] % served or dtype not in FLOATS or a.device != device:
        require(operation, like, ("the input", a, (next_divisible(shape[0], served), shape[-1]), FLOATS))
    for weight, bias in zip(weights, biases, strict=True):
        own = weight.shape
        matrix = (served * k, own[-1]) if b_transposed else (own[0] // served * served, k)
        row = (served * own[-1],) if b_transposed else matrix[:1]
        if (own != matrix or weight.dtype != dtype or weight.device != device) or (
            bias is not None and (bias.shape != row or bias.dtype != dtype or bias.device != device)
        ):
            require(operation, like, ("the weight", weight, matrix, (dtype,)), ("the bias", bias, row, (dtype,)))


def check_derivative(
    operation: str, like: Any, a: Tensor, weight: Tensor, x: Tensor | Packed, gate: Tensor | Packed | None, rows: int,
    activation: str | None, served: int = 1,
) -> None:  # fmt: skip
    """ValueError unless the weight has the K of a, x and gate have `rows` rows of its N, and all a's dtype."""
    check_linears(operation, like, a, a.shape[-1], [weight], None, None, True, served)
    check_activation(x, activation, gate)
    require(operation, like, ("x", x, (rows, weight.shape[-1]), (a.dtype,)))


def check_products(
    operation: str, like: Any, inputs: Sequence[Tensor], weights: Sequence[Tensor], b_transposed: bool, served: int = 1,
    chunks: int = 1,
) -> None:  # fmt: skip
    """ValueError unless inputs have equally many rows, weights equally many columns of the result, and each pair one K;
    all have one dtype and device.

    served: of virtual ranks, whose tensors are stacked along dim 0, and whose rows are so many chunks of equal size.
    """
    rows, dtype = next_divisible(inputs[0].shape[0], served * chunks), (inputs[0].dtype,)
    n = weights[0].shape[-1] if b_transposed else weights[0].shape[0] // served * served
    if len(inputs) != len(weights):
        raise ValueError(f"{operation}: {len(inputs)} inputs and {len(weights)} weights: give one for each")
    for a, weight in zip(inputs, weights, strict=True):
        k = a.shape[-1]
        require(
            operation, like, ("an input", a, (rows, k), dtype),
            ("its weight", weight, (served * k, n) if b_transposed else (n, k), dtype),
        )  # fmt: skip


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
