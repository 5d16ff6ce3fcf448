"""How consecutive layers are divided among pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from operator import add


def split_stages(costs: Sequence[float], n_stages: int) -> list[range]:
    """Consecutive ranges of items, one per stage and none empty. The largest cost of a range is as small as possible.

    costs: each item's cost, in any unit (parameters, FLOPs). Among the splits with the smallest largest cost, the one
    with the smallest sum of squares is taken, so that the other stages are even too. Takes O(items**2 * stages).
    ValueError for fewer items than stages.
    """
    n = len(costs)
    if not 1 <= n_stages <= n:
        raise ValueError(f"{n} layers cannot be divided among {n_stages} stages: each needs one")
    total = [0.0, *accumulate(costs)]
    largest, _ = _cheapest(total, n_stages, lambda cost: cost, max)
    # one pass cannot do both: the start of the best split may have a larger cost than another, and smaller squares
    _, begins = _cheapest(total, n_stages, lambda cost: cost**2 if cost <= largest else inf, add)
    return [range(begin, end) for begin, end in pairwise([*begins, n])]


def _cheapest(
    total: Sequence[float], n_stages: int, price: Callable[[float], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """(joined price, where each stage begins) of the best split; total[i] is the cost of the first i items."""
    best = [price(cost) for cost in total]  # best[i]: the price of the first i items in the stages so far
    last_begins = []  # per stage after the first: where it begins in the best split of the first i items
    for stage in range(1, n_stages):
        choices = [
            min(
                ((join(best[begin], price(total[end] - total[begin])), begin) for begin in range(stage, end)),
                default=(inf, 0),
            )
            for end in range(len(total))
        ]
        best = [joined for joined, _ in choices]
        last_begins.append([begin for _, begin in choices])
    begins = [len(total) - 1]
    for chosen in reversed(last_begins):
        begins.append(chosen[begins[-1]])
    return best[-1], [0, *begins[:0:-1]]
