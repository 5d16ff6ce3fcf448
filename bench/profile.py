"""What a step's time goes to: how long the device works, and in which kernels.

Belongs here: one profile by torch, summed up. What a step is, its bench says.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

LISTED = 24  # kernels
LETTERS = 100  # of a kernel's name


def profiled(steps: Callable[[], Sequence[object]], device: torch.device) -> dict[str, Any]:
    """A step's milliseconds from the first kernel's begin to the last one's end, and those in which the device worked;
    how many kernels began; and the longest kernels by name. On a CPU an operator counts as a kernel.

    steps: takes some steps and waits for them. It is called once before.
    """
    steps()
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        count = len(steps())
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in found.events() if event.device_type == kind]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    total: Counter[str] = Counter()
    for event in events:
        total[event.name[:LETTERS]] += event.time_range.end - event.time_range.start
    return {
        "wall_ms": milliseconds(max(end for _, end in spans) - spans[0][0], count),
        "busy_ms": milliseconds(united(spans), count),
        "kernels": len(events) / count,
        "longest": [[name, milliseconds(time, count)] for name, time in total.most_common(LISTED)],
    }


def milliseconds(microseconds: float, steps: int) -> float:
    return round(microseconds / 1e3 / steps, 3)


def united(spans: Sequence[tuple[float, float]]) -> float:
    """How much time sorted spans cover; where they overlap, it counts once."""
    covered, until = 0.0, float("-inf")
    for begin, end in spans:
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def profile_line(found: dict[str, Any]) -> str:
    """One line of a profile: the device's share, and the five longest kernels."""
    longest = ", ".join(f"{name[:40]} {time:g}" for name, time in found["longest"][:5])
    return (
        f"the device works {found['busy_ms']:g} of {found['wall_ms']:g} ms in {found['kernels']:g} kernels: {longest}"
    )
