"""How a call on one GPU is timed: by CUDA events, every repetition with a cold L2.

Belongs here: the sample that timing.interleave takes. Nothing about what is timed, no CUDA graphs.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from .timing import Sample, interleave

FLUSHED = 4  # times the L2: what a repetition's predecessor left there is gone, also where L2 is in two halves
CYCLES = 2e9  # a second, of a GPU's fastest clock
HEAD_START = 0.5e-3  # seconds per repetition, at least


class Call(NamedTuple):
    """run is timed; prepare goes before it and is not."""

    run: Callable[[], object]
    prepare: Callable[[], object] | None = None


class Effort(NamedTuple):
    """rounds: how often every provider has its turn; repetitions: of a call in each turn."""

    rounds: int
    repetitions: int


FULL, QUICK = Effort(7, 10), Effort(2, 3)


def flush_buffer() -> Tensor:
    """Memory that fills the current device's L2 when it is written."""
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return torch.empty(FLUSHED * size, dtype=torch.uint8, device="cuda")


def cold(call: Call, repetitions: int, flushed: Tensor) -> Sample:
    """A sample: the median over repetitions, each after the buffer `flushed` has been written and `prepare` has run.

    The GPU first sleeps, for twice the time that the host takes to enqueue: it is never the host's pace that is
    measured. Two calls come before: one compiles what there is to compile, the other says what the host takes.
    """

    def prepare() -> None:
        flushed.zero_()
        if call.prepare is not None:
            call.prepare()

    def sample() -> float:
        for _ in range(2):
            began = time.perf_counter()
            prepare()
            call.run()
            host = time.perf_counter() - began
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
        torch.cuda._sleep(int(CYCLES * repetitions * max(HEAD_START, 2 * host)))
        for start, end in events:
            prepare()
            start.record()
            call.run()
            end.record()
        torch.cuda.synchronize()
        return median(start.elapsed_time(end) for start, end in events) * 1e-3

    return sample


def measure(calls: Mapping[str, Call], effort: Effort) -> dict[str, list[float]]:
    """Seconds of every call, by rounds: what timing.compare takes."""
    flushed = flush_buffer()
    samples = {name: cold(call, effort.repetitions, flushed) for name, call in calls.items()}
    return interleave(samples, effort.rounds)
