"""Whether a tensor is a DTensor, asked without importing DTensor. One function, and no more."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """isinstance(x, DTensor). The import takes most of a second, and nothing can be one before somebody has done it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)
