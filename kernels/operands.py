"""What an operation asks of its operands: one comparison and its words, for kernels and references alike; torch only.

Belongs here: how operands are compared. Which operands an operation has stands beside its reference, and the kernel
calls the same function: a call has one meaning on all devices, or is refused on all of them. No check waits for a
device. A replayed launcher (replay.py) has made its checks when its plan was made.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)

Operand = tuple[str, Any, Sequence[int], Sequence[torch.dtype]]


def require(operation: str, like: Any, *operands: Operand) -> None:
    """ValueError unless each (name, x, shape, dtypes) has this shape, one of these dtypes, and the device of `like`.

    An x that is None is left out. Nothing is broadcast: on a GPU a kernel would read outside of the operand.
    Who is on the way of every forward compares first, and comes here where something differs: words take twice as long.
    """
    device = like.device
    for name, x, shape, dtypes in operands:
        if x is not None and (x.shape != shape or x.dtype not in dtypes or x.device != device):
            raise ValueError(
                f"{operation}: {name} is {tuple(x.shape)} {x.dtype} on {x.device}: give "
                f"{tuple(shape)} {' or '.join(map(str, dtypes))} on {device}"
            )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """promote_types(dtype, float32) of a floating dtype. A launcher may not call that: its plan could not be kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def next_divisible(size: int, parts: int) -> int:
    """The least size from `size` on that is so many equal parts, of which none is empty: what to give in its place."""
    return max(1, -(-size // parts)) * parts


def unknown(what: str, name: Any, names: Iterable[str]) -> ValueError:
    """What to raise for a name that is none of these. Callers compare, as a call for each name would cost as much."""
    return ValueError(f"{what}={name!r} is unknown: choose one of {', '.join(map(repr, names))}")


def readable(values: Tensor) -> bool:
    """Whether a check may look at values: on a CPU. On a GPU it would wait for the device, and a fake tensor
    (planner.dry_run) has none. Called by its module's name, so that who pretends to be a GPU says no in one place."""
    return type(values) is Tensor and values.device.type == "cpu"


def require_within(what: str, values: Tensor, first: int, end: int, place: str = "") -> None:
    """ValueError, for values that are readable, for an integer outside of [first, end), which `place` names."""
    if readable(values) and values.numel():
        low, high = map(int, values.aminmax())
        if low < first or high >= end:
            raise ValueError(f"{what} span [{low}, {high}], outside {place}[{first}, {end - 1}]")
