"""Whether a tensor is a DTensor, without importing DTensor for the question."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """isinstance(x, DTensor). Importing DTensor takes most of a second; as long as nobody has, no tensor is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """A whole parameter, gradient or activation. Collective over the mesh of a DTensor.

    Where ranks hold copies, each rank gets its own, so that a copy that differs is found.
    """
    return tensor.full_tensor() if is_dtensor(tensor) else tensor
