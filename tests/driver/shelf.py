"""What calls of launchers are made of: memory that is handed out again, and the types of a call.

Belongs here: what lists of calls share.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from checks.driver.stub import memory

Call = tuple[Callable, tuple, dict[str, Any]]
Variant = tuple[str, bool, Callable[..., Call]]


class Shelf:
    """Hands out memory, and on a later round the same in the same order."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        """All that it has ever handed out."""
        self.begin([])

    def begin(self, tensors: list[Tensor]) -> None:
        """Hand out these from now on, and append to them what is wanted beyond."""
        self.tensors, self.taken = tensors, 0

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, skew: int = 0) -> Tensor:
        """skew: elements by which the memory begins behind a multiple of 16 bytes."""
        if self.taken == len(self.tensors):
            numel = torch.Size(shape).numel()
            self.tensors.append(memory(numel + skew, dtype=dtype)[skew:].view(shape))
            self.given.append(self.tensors[-1])
        self.taken += 1
        return self.tensors[self.taken - 1]
