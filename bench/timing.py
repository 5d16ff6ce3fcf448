"""How a comparison is timed.

Belongs here: interleaving, medians, ratios. Nothing about what is timed (the bench's own file) or printed (runner.py).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

Sample = Callable[[], float]  # runs what is timed; seconds of one repetition


class Comparison(NamedTuple):
    """Medians in seconds, and the median and range over the rounds of baseline / provider (above 1: faster)."""

    seconds: float
    baseline_seconds: float
    ratio: float
    ratio_min: float
    ratio_max: float


def timed(function: Callable[[], object], repetitions: int) -> Sample:
    """A sample of `repetitions` calls in a row, after one that is not timed: another provider just had the caches."""

    def sample() -> float:
        function()
        start = time.perf_counter()
        for _ in range(repetitions):
            function()
        return (time.perf_counter() - start) / repetitions

    return sample


def interleave(samples: Mapping[str, Sample], rounds: int, turns: int = 1) -> dict[str, list[float]]:
    """Per round the mean of `turns` samples of each provider, taken in turn: a slow second of the machine hits all.

    Every other turn runs in reverse order, so that drift does too.
    """
    seconds: dict[str, list[float]] = {name: [] for name in samples}
    for index in range(rounds):
        total = dict.fromkeys(samples, 0.0)
        for turn in range(turns):
            for name in list(samples)[:: -1 if (index + turn) % 2 else 1]:
                total[name] += samples[name]()
        for name in samples:
            seconds[name].append(total[name] / turns)
    return seconds


def compare(provider: Sequence[float], baseline: Sequence[float]) -> Comparison:
    """Compare two providers' samples round by round."""
    ratios = [theirs / ours for ours, theirs in zip(provider, baseline, strict=True)]
    return Comparison(median(provider), median(baseline), median(ratios), min(ratios), max(ratios))
