"""What follows a reduction: a bias, dropout, a residual, and the norm of the next linear.

Belongs here: the types that describe it, and the arguments that kernels take for it. Its formulas in torch are
dropout/reference.py's and norm/reference.py's.
"""

from typing import NamedTuple

from torch import Tensor


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

    def arguments(self, placeholder: Tensor) -> tuple:
        """A kernel's arguments from `bias` to `scale`; the placeholder is passed for each tensor that is None."""
        dropout = self.dropout or Dropout(placeholder, 0, 0.0)
        halves = [_signed(dropout.key & 0xFFFFFFFF), _signed(dropout.key >> 32)]
        tensors = [placeholder if x is None else x for x in (self.bias, self.residual)]
        return *tensors, dropout.start, *halves, dropout.threshold, dropout.scale

    def flags(self) -> dict[str, bool]:
        """A kernel's constants that say which parts are given."""
        return {
            "BIAS": self.bias is not None,
            "DROPOUT": self.dropout is not None,
            "RESIDUAL": self.residual is not None,
        }

    def require_no_norm(self, operation: str) -> None:
        """ValueError if there is a norm, for an operation that finishes tiles and not whole rows."""
        if self.norm is not None:
            raise ValueError(f"{operation} finishes tiles, not whole rows: normalise its result instead")


def _signed(word: int) -> int:
    """A 32-bit word as int32, so that every key has one argument type."""
    return word - 2**32 if word >= 2**31 else word


NOTHING = Finish()
