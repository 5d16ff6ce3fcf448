"""Counts, by the library's functions, what may make the host wait for a GPU, while something runs on a CPU.

Belongs here: the count. What may be counted where is in tests/training/test_host_waits.py. Copies by `copy_` look the
same for any two devices of a CPU run: tests/training/test_run_gpu.py has torch refuse them.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from commands import ROOT
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tpformer.torch_private import TorchDispatchMode

LIBRARY = (str(ROOT / "tpformer"), str(ROOT / "kernels"))
# values, or a size that depends on values, come to the host
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}
MASKED = {"index", "index_put", "index_put_"}  # of a mask, they ask how many elements it has
COPIES = {Tensor.tolist, Tensor.cpu, Tensor.cuda}
CPU_READS = (  # by functions that do not read where ids, or what is dropped, are on a GPU
    "tpformer/kernels/operands.py:require_within",  # returns before
    "tpformer/kernels/philox/reference.py:_blocks",  # a kernel takes its place
)
MOVES = {Tensor.to, torch.tensor, torch.as_tensor}  # to a device, unless they are told not to wait


def place() -> str:
    """The library's innermost function that runs, as "tpformer/training/step.py:train_step"."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(LIBRARY):
        frame = frame.f_back
    found = frame and f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_code.co_qualname}"
    return found or "elsewhere"


def reads(func: Any, args: Any) -> bool:
    """Whether an operator brings values to the host, or a size that depends on them."""
    name = func.overloadpacket.__name__
    masks = name in MASKED and any(index is not None and index.dtype == torch.bool for index in args[1])
    return masks or name in READS


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Yield a counter of "place operation", which grows while the context is open. It sees this thread alone."""
    found: Counter[str] = Counter()

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if reads(func, args):
                found[f"{place()} {func.overloadpacket.__name__}"] += 1
            return func(*args, **(kwargs or {}))

    class Copies(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            to_device = any(isinstance(x, str | torch.device) for x in (*args[1:], kwargs.get("device")))
            if func in COPIES or (func in MOVES and to_device and not kwargs.get("non_blocking")):
                found[f"{place()} {func.__name__}"] += 1
            return func(*args, **kwargs)

    with Reads(), Copies():
        yield found
