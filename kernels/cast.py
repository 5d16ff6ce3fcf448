"""Tensors in another dtype, for references, which upcast by torch.promote_types; torch only."""

from typing import Any

import torch


def cast(x: Any, dtype: torch.dtype) -> Any:
    """x in this dtype, None as it is. Tensor.to takes ten times as long to find that there is nothing to do."""
    return x if x is None or x.dtype == dtype else x.to(dtype)
