"""What is done to a sum once it is complete: bias, dropout, residual, and the norm of the next linear.

Belongs here: host code. On the device it is done by tile.finish and rows.finished_tile.
"""

from typing import NamedTuple

from torch import Tensor

from .arguments import Addends, Mask, Rows
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

    def arguments(self) -> Addends:
        """What kernels take of it beside the key; norm is not among them."""
        mask = None
        if self.dropout is not None:
            mask = Mask(self.dropout.start, round(self.dropout.p * 2**32), 1.0 / (1.0 - self.dropout.p))
        residual = None if self.residual is None else Rows(self.residual, self.residual.stride(0))
        return Addends(self.bias, residual, mask)

    @property
    def key(self) -> int:
        """The dropout's key as int64, the one type in which kernels take every key; 0 without dropout."""
        key = 0 if self.dropout is None else self.dropout.key
        return key - 2**64 if key >= 2**63 else key

    @property
    def adds(self) -> bool:
        """Whether z is anything else than the sum."""
        return self.bias is not None or self.dropout is not None or self.residual is not None

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


NOTHING = Finish()
