"""What follows a reduction, once: bias, dropout, residual, and the norm of the next linear. tile.finish's host side."""

from typing import NamedTuple

from torch import Tensor

from .dropout.reference import dropout_apply
from .norm.reference import Norm


class Dropout(NamedTuple):
    """start (rows,) int64: the global index of each row's first element, a multiple of 4 where rows are of such a width
    (as whole rows' indices are); key: 64 bits; p: probability of zeroing."""

    start: Tensor
    key: int
    p: float


class Finish(NamedTuple):
    """z = residual + dropout(sum + bias): bias (N,), residual (rows, N) like the result; None leaves a part out.

    norm: a second result is y = norm(z), of z as it is stored; for what works on whole rows.
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

    def require_no_norm(self, operation: str) -> None:
        if self.norm is not None:
            raise ValueError(f"{operation} finishes tiles, not whole rows: normalise its result instead")

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
