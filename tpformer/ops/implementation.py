"""Kernel or reference: the choice for operations that do not communicate. choice/choose.py chooses for the others."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tpformer.distributed.kernel_workspace import check_current_device

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def implementation(op: str, x: Tensor) -> Any:
    """The module kernels/<op>/kernel.py or kernels/<op>/reference.py, which have the same functions.

    CUDA tensors of KERNEL_DTYPES get the kernel, all others the reference. So a CPU never gets Triton's interpreter,
    and float64, which is for verification, stays in torch.
    Raises ValueError if the tensor lies on another GPU than the current one.
    """
    module = "kernel" if x.is_cuda and x.dtype in KERNEL_DTYPES else "reference"
    if module == "kernel":
        check_current_device(f"{op} of a tensor", x.device)
    return _module(op, module)


@cache
def _module(op: str, name: str) -> Any:
    return import_module(f"tpformer.kernels.{op}.{name}")
