"""What follows a reduction, once: bias, dropout, residual, and the norm of the next linear. tile.finish's host side."""

from typing import NamedTuple

import torch
from torch import Tensor

from .dropout.reference import dropout_apply
from .norm.reference import Norm, Statistics


class Dropout(NamedTuple):
    """start (rows,) int64: the global index of each row's first element, a multiple of 4 where rows are of such a width
    (as whole rows' indices are); key: 64 bits; p: probability of zeroing."""

    start: Tensor
    key: int
    p: float


class NormArgument(NamedTuple):
    """All that a kernel needs of a norm, results included, as one argument; y stands for what there is not."""

    y: Tensor
    mean: Tensor
    """(rows, 1) float32, as rstd."""
    rstd: Tensor
    weight: Tensor
    bias: Tensor
    eps: float

    @property
    def statistics(self) -> Statistics:
        return None if self.mean is self.y else self.mean, self.rstd


class Finish(NamedTuple):
    """z = residual + dropout(sum + bias): bias (N,), residual (rows, N) like the result; None leaves a part out.

    norm: a second result is y = norm(z), of z as it is stored.
    """

    bias: Tensor | None = None
    dropout: Dropout | None = None
    residual: Tensor | None = None
    norm: Norm | None = None

    def arguments(self, placeholder: Tensor) -> tuple:
        """Kernel arguments from `bias` to `scale`; the placeholder stands for tensors that are not there."""
        start, key, p = self.dropout or (placeholder, 0, 0.0)
        halves = [_signed(key & 0xFFFFFFFF), _signed(key >> 32)]
        tensors = [placeholder if x is None else x for x in (self.bias, self.residual)]
        return *tensors, start, *halves, round(p * 2**32), 1.0 / (1.0 - p)

    def flags(self) -> dict[str, bool]:
        return {
            "BIAS": self.bias is not None,
            "DROPOUT": self.dropout is not None,
            "RESIDUAL": self.residual is not None,
        }

    def norm_argument(self, z: Tensor) -> NormArgument | None:
        """With new memory for the norm's results; None is no parameter of the compiled kernel."""
        if self.norm is None:
            return None
        y, rstd = torch.empty_like(z), z.new_empty(len(z), 1, dtype=torch.float32)
        mean = torch.empty_like(rstd) if self.norm.kind == "layernorm" else y
        bias = y if self.norm.bias is None else self.norm.bias
        return NormArgument(y, mean, rstd, self.norm.weight, bias, self.norm.eps)

    def norm_flags(self) -> dict[str, str | bool]:
        if self.norm is None:
            return {"NORM": "", "NORM_BIAS": False}
        kind = self.norm.kind  # an RMSNorm has no bias, whatever there is
        return {"NORM": kind, "NORM_BIAS": kind == "layernorm" and self.norm.bias is not None}

    def apply(self, total: Tensor) -> Tensor:
        """z in torch, for references: in total's dtype, which should be wide."""
        if self.bias is not None:
            total = total + self.bias.to(total.dtype)
        if self.dropout is not None:
            total = dropout_apply(total, self.dropout.start, self.dropout.key, self.dropout.p)
        return total if self.residual is None else total + self.residual.to(total.dtype)


def _signed(word: int) -> int:
    """A 32-bit word as int32, so that every key has one argument type."""
    return word - 2**32 if word >= 2**31 else word


NOTHING = Finish()
