"""Copies between host and device that the host does not wait for: of a batch to there, of numbers back."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor's values on the device. A GPU copies them from pinned memory, behind all that is queued there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class Fetched:
    """Numbers of the device, by name, that come to the host. Constructing it waits for nothing.

    values: tensors on one device, with at most one dimension; a None is left out.
    at: when the numbers were there, as time.perf_counter tells it. On a GPU that is known when they are read.
    """

    def __init__(self, values: Mapping[str, Tensor | None]) -> None:
        given = {name: value for name, value in values.items() if value is not None}
        self._shapes = {name: value.shape for name, value in given.items()}
        packed = torch.cat([value.detach().reshape(-1).double() for value in given.values()])
        self._values, self._ready = packed, None
        if packed.is_cuda:
            self._values = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._values.copy_(packed, non_blocking=True)
            self._ready = torch.cuda.Event(blocking=True)
            self._ready.record()
        self.at = time.perf_counter()

    def read(self) -> dict[str, Any]:
        """A float for each scalar, a list for each vector. Waits for this copy, not for what was queued behind it."""
        if self._ready is not None:
            self._ready.synchronize()
            self._ready, self.at = None, time.perf_counter()
        numbers = iter(self._values.tolist())
        found = {name: [next(numbers) for _ in range(shape.numel())] for name, shape in self._shapes.items()}
        return {name: found[name] if shape else found[name][0] for name, shape in self._shapes.items()}
