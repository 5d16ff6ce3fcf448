"""What is done to a sum once it is complete: bias, dropout, residual, and the norm of the next linear.

Belongs here: the types that describe it, and the arguments that kernels take for it. Its formulas in torch are
dropout/reference.py's and norm/reference.py's; on the device tile.finish_tile and rows.finished_tile do it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Addends, Mask, Rows
from .operands import FLOATS, require
from .pack.format import Packed


class Dropout(NamedTuple):
    """Which elements dropout zeroes: those whose Philox word is below the threshold (philox/reference.py)."""

    start: Tensor
    """int64 (rows,): the global index of each row's first element, a multiple of 4 if the width of rows is one."""
    key: int
    """64 bits."""
    p: float
    """The probability that an element is zeroed."""

    @property
    def threshold(self) -> int:
        """The 32-bit word from which on elements are kept."""
        return round(self.p * 2**32)

    @property
    def scale(self) -> float:
        """The factor of the elements that are kept."""
        return 1.0 / (1.0 - self.p)


class Norm(NamedTuple):
    """LayerNorm or RMSNorm over rows of N elements."""

    kind: str
    """"layernorm" or "rmsnorm"."""
    weight: Tensor | None
    """(N,); None stands for ones."""
    bias: Tensor | None
    """(N,) or None; rmsnorm does not use it."""
    eps: float | None
    """None stands for the machine epsilon of the dtype that statistics are computed in."""


class Finish(NamedTuple):
    """z = residual + dropout(sum + bias), where a part that is None is left out."""

    bias: Tensor | None = None
    """(N,)."""
    dropout: Dropout | None = None
    residual: Tensor | None = None
    """(rows, N), like the result."""
    norm: Norm | None = None
    """If given, there is a second result, the norm of z as z is stored. Only operations on whole rows take it."""

    def check(
        self, operation: str, like: Tensor | Packed, shape: tuple[int, int] | None = None, served: int = 1
    ) -> None:
        """ValueError unless bias, residual and dropout fit sums of this shape on the device of `like`, or `like`
        itself. served: of virtual ranks, whose biases are stacked. The norm's parts are norm/reference.py's to check.
        """
        bias, dropout, residual, _ = self
        own = like.shape if shape is None else shape
        rows, columns = own[0], own[-1]
        start = None if dropout is None else dropout.start
        require(
            operation, like, ("x", like if shape is None else None, (rows, columns), FLOATS),
            ("bias", bias, (served * columns,), FLOATS), ("residual", residual, (rows, columns), FLOATS),
            ("dropout's start", start, (rows,), (torch.int64,)),
        )  # fmt: skip

    def arguments(self) -> Addends:
        """What kernels take of it beside the key; norm is not among them. They read elements that lie side by side."""
        bias, mask, residual = self.bias, None, None
        if self.dropout is not None:
            mask = Mask(self.dropout.start.contiguous(), self.dropout.threshold, self.dropout.scale)
        if self.residual is not None:
            rows = self.residual if self.residual.stride(1) == 1 else self.residual.contiguous()
            residual = Rows(rows, rows.stride(0))
        return Addends(None if bias is None else bias.contiguous(), residual, mask)

    @property
    def key(self) -> int:
        """The dropout's key as int64, the one type in which kernels take every key; 0 without dropout."""
        return 0 if self.dropout is None else signed(self.dropout.key)

    @property
    def adds(self) -> bool:
        """Whether z is anything else than the sum."""
        return self.bias is not None or self.dropout is not None or self.residual is not None

    def check_of_tiles(self, operation: str, like: Tensor, shape: tuple[int, int], served: int) -> None:
        """As check, for an operation that finishes tiles and not whole rows: it refuses a norm."""
        if self.norm is not None:
            raise ValueError(f"{operation} finishes tiles, not whole rows: normalise its result instead")
        self.check(operation, like, shape, served)


def signed(key: int) -> int:
    """64 bits as int64."""
    return key - 2**64 if key >= 2**63 else key


NOTHING = Finish()
