"""How calls are timed: interleaved, and on a GPU by CUDA events, every repetition with a cold L2.

Belongs here: samples, rounds, medians, ratios. Nothing about what is timed, no CUDA graphs.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

Sample = Callable[[], float]  # runs what is timed; seconds of one repetition
Seconds = dict[str, list[float]]  # by provider, one number for each round

FLUSHED = 4  # times the L2: what a repetition's predecessor left there is gone, also where L2 is in two halves
CYCLES = 2e9  # a second, of a GPU's fastest clock
HEAD_START = 0.5e-3  # seconds per repetition, at least


class Comparison(NamedTuple):
    """Medians in seconds, and the median and range over the rounds of baseline / provider (above 1: faster)."""

    seconds: float
    baseline_seconds: float
    ratio: float
    ratio_min: float
    ratio_max: float


class Call(NamedTuple):
    """run is timed; prepare goes before it and is not."""

    run: Callable[[], object]
    prepare: Callable[[], object] | None = None


class Effort(NamedTuple):
    """rounds: how often every provider has its turn; repetitions: of a call in each turn."""

    rounds: int
    repetitions: int


FULL, QUICK = Effort(7, 10), Effort(2, 3)


def compare(provider: Sequence[float], baseline: Sequence[float]) -> Comparison:
    """Compare two providers' samples round by round."""
    ratios = [theirs / ours for ours, theirs in zip(provider, baseline, strict=True)]
    return Comparison(median(provider), median(baseline), median(ratios), min(ratios), max(ratios))


def interleave(samples: Mapping[str, Sample], rounds: int, turns: int = 1) -> Seconds:
    """Each round's mean of `turns` samples of each provider, taken in turn: a slow second of the machine hits all.

    Every other turn runs in reverse order, so that drift does too.
    """
    seconds: Seconds = {name: [] for name in samples}
    for index in range(rounds):
        total = dict.fromkeys(samples, 0.0)
        for turn in range(turns):
            for name in list(samples)[:: -1 if (index + turn) % 2 else 1]:
                total[name] += samples[name]()
        for name in samples:
            seconds[name].append(total[name] / turns)
    return seconds


def timed(function: Callable[[], object], repetitions: int) -> Sample:
    """A sample of `repetitions` calls in a row on a CPU, after one untimed: another provider just had the caches."""

    def sample() -> float:
        function()
        start = time.perf_counter()
        for _ in range(repetitions):
            function()
        return (time.perf_counter() - start) / repetitions

    return sample


def flush_buffer() -> Tensor:
    """Memory that fills the current GPU's L2 when it is written."""
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return torch.empty(FLUSHED * size, dtype=torch.uint8, device="cuda")


def cold(call: Call, repetitions: int, flushed: Tensor) -> Sample:
    """Take a sample on a GPU: the median over repetitions. Each first writes `flushed` and runs `prepare`, untimed.

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


def copying(nbytes: int, device: str) -> Callable[[], Tensor]:
    """A copy of so many random bytes, which reads and writes as many. On zeros a GPU is faster."""
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def measure(calls: Mapping[str, Call], effort: Effort) -> Seconds:
    """Seconds of every call on a GPU, by rounds."""
    flushed = flush_buffer()
    samples = {name: cold(call, effort.repetitions, flushed) for name, call in calls.items()}
    return interleave(samples, effort.rounds)
