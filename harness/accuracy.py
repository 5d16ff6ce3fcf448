"""When a low-precision result is right: the rule of every gate on a GPU.

Belongs here: the comparison with float64. No shapes, no kernels.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def require_accurate(what: str, actual: Tensor, oracle: Tensor, baseline: Tensor) -> None:
    """AssertionError unless err(actual) <= 2 * (err(baseline) + eps * max|oracle|), for the maximum and for the RMS.

    oracle: float64; baseline: what plain torch gets in actual's dtype, so that no tolerance is picked by hand.
    """
    if actual.shape != oracle.shape or actual.dtype != baseline.dtype:
        raise AssertionError(
            f"{what}: {tuple(actual.shape)} {actual.dtype}, not {tuple(oracle.shape)} {baseline.dtype}"
        )
    allowed = errors(baseline, oracle) + torch.finfo(actual.dtype).eps * oracle.abs().max()
    found = errors(actual, oracle)
    if not bool((found <= 2 * allowed).all()):  # NaN is not
        raise AssertionError(
            f"{what}: error (maximum, RMS) {found.tolist()}, at most {(2 * allowed).tolist()} is right"
        )


def errors(x: Tensor, oracle: Tensor) -> Tensor:
    """Maximum and root mean square of x - oracle, in float64."""
    difference = x.double() - oracle
    return torch.stack([difference.abs().max(), difference.square_().mean().sqrt()])


def poisoned(function: Callable[[], Tensor], like: Tensor) -> Tensor:
    """The function's result, in memory that most likely held NaNs before: what it leaves out then shows."""
    torch.full_like(like, float("nan"))  # freed at once, and the next block of this size that the allocator gives
    return function()
