"""torch.autocast, with the dtypes that torch.nn's modules have under it.

GEMMs run in autocast's 16 bits; norms, the residual stream and losses in float32. An operation casts its inputs, and
autograd casts their gradients back.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from tpformer.torch_private import any_autocast

from .weight_gradients import Deferred, GradientSink


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives to GEMMs with x; None if autocast is off on x's device, or if x is float64."""
    if not any_autocast() or x.dtype == torch.float64:
        return None
    device = x.device.type
    available = torch.amp.is_autocast_available(device)  # not for meta tensors
    return torch.get_autocast_dtype(device) if available and torch.is_autocast_enabled(device) else None


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast is off on x's device, for an operation that has cast what is to be cast."""
    if not any_autocast() or not torch.amp.is_autocast_available(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """x in this dtype; None and float64 tensors are returned as they are."""
    return x if x is None or x.dtype == torch.float64 else x.to(dtype)


def cast_back(deferred: Deferred | None, weights: Sequence[Tensor]) -> Deferred | None:
    """The same queue, for weights that are cast before use. Its sinks cast each gradient to the weight's dtype."""
    if deferred is None:
        return None
    sinks = [partial(_sink, sink, weight.dtype) for sink, weight in zip(deferred.sinks, weights, strict=True)]
    return Deferred(deferred.queue, sinks)


def _sink(sink: GradientSink, dtype: torch.dtype, gradient: Tensor) -> None:
    sink(gradient.to(dtype))
