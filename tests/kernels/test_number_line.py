"""The ends of the number line: kernel, reference and torch agree at infinities, NaN, the largest numbers, denormals, zeros
of both signs, and where a square or a cube overflows. What torch gives in float64, rounded, is right; its float32 has
NaN for gelu(inf)."""

import pytest
import torch
import torch.nn.functional as F
from testing import assert_identical, assert_kernel_close
from torch import Tensor

pytest.importorskip("triton")


INF, NAN = float("inf"), float("nan")
PLACES = {
    "reference": (torch.float32, torch.float16),
    "interpreter": (torch.float32, torch.float16),
    "gpu": (torch.float32, torch.float16),
}
ORDINARY = (-0.5, 1.0, 3.0)
TORCH = {
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}  # fmt: skip


def ends(dtype: torch.dtype, device: str) -> Tensor:
    """Both signs of the ends, and of powers of 4 up to them: squares and cubes overflow somewhere between."""
    info = torch.finfo(dtype)
    positive = [INF, info.max, info.tiny, info.smallest_normal / 8, 0.0, *(4.0**power for power in range(-4, 64))]
    return torch.tensor([*positive, *(-x for x in positive), NAN], dtype=torch.float64).to(device, dtype)


def assert_close(actual: Tensor, oracle: Tensor, what: str) -> None:
    """Infinities and NaNs are those of the float64 oracle in actual's dtype, and numbers are near, each by itself."""
    rounded = oracle.to(actual.dtype)
    finite = rounded.isfinite()
    assert_identical(actual[~finite], rounded[~finite], what)
    for x, y in zip(actual[finite].flatten(), oracle[finite].flatten(), strict=True):
        assert_kernel_close(x, y, y.float().to(actual.dtype), f"{what} {y}")
