"""Dividing consecutive layers among pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from operator import add


def split_stages(costs: Sequence[float], n_stages: int) -> list[range]:
    """Consecutive ranges of items, one per stage, none empty, whose largest cost is as small as possible.

    costs: of each item, in any unit (parameters, FLOPs). Among the splits with the smallest largest cost, the one with
    the smallest sum of squares is taken, so that the other stages are even too. O(items**3 * stages).
    ValueError for fewer items than stages.
    """
    n = len(costs)
    if not 1 <= n_stages <= n:
        raise ValueError(f"{n} layers cannot be divided among {n_stages} stages: each needs one")
    total = [0.0, *accumulate(costs)]
    largest, _ = _cheapest(total, n_stages, lambda cost: cost, max)
    # not both at once: the beginning of the best split may have a larger cost than another, and smaller squares
    _, begins = _cheapest(total, n_stages, lambda cost: cost**2 if cost <= largest else inf, add)
    return [range(begin, end) for begin, end in pairwise([*begins, n])]


def _cheapest(
    total: Sequence[float], n_stages: int, price: Callable[[float], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """(joined price, where each stage begins) of the best split; total[i] is the cost of the first i items."""
    # best[i]: of the first i items in the stages so far
    best: list[tuple[float, list[int]]] = [(price(cost), [0]) for cost in total]
    for stage in range(1, n_stages):
        best = [
            min(
                (
                    (join(best[begin][0], price(total[end] - total[begin])), [*best[begin][1], begin])
                    for begin in range(stage, end)
                ),
                key=lambda split: (split[0], split[1][-1]),
                default=(inf, []),
            )
            for end in range(len(total))
        ]
    return best[-1]
