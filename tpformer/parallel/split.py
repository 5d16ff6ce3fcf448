"""How consecutive layers are divided among pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

Array = np.ndarray
Join = Callable[[Array, Array], Array]


def split_stages(costs: Sequence[float], n_stages: int) -> list[range]:
    """Consecutive ranges of items, one per stage and none empty. The largest cost of a range is as small as possible.

    costs: each item's cost, in any unit (parameters, FLOPs). Among the splits with the smallest largest cost, the one
    with the smallest sum of squares is taken, so that the other stages are even too.
    ValueError for fewer items than stages.
    """
    n = len(costs)
    if not 1 <= n_stages <= n:
        raise ValueError(f"{n} layers cannot be divided among {n_stages} stages: each needs one")
    total = np.array([0.0, *accumulate(costs)])
    largest, _ = _cheapest(total, n_stages, lambda cost: cost, np.maximum)
    # one pass cannot do both: the start of the best split may have a larger cost than another, and smaller squares
    _, begins = _cheapest(total, n_stages, lambda cost: np.where(cost <= largest, cost**2, np.inf), np.add)
    return [range(begin, end) for begin, end in pairwise([*begins, n])]


def _cheapest(total: Array, n_stages: int, price: Callable[[Array], Array], join: Join) -> tuple[float, list[int]]:
    """(joined price, where each stage begins) of the best split; total[i] is the cost of the first i items."""
    items = np.arange(len(total))
    prices = np.where(items[:, None] < items, price(total - total[:, None]), np.inf)  # of a stage, by begin and end
    best = price(total)  # best[i]: the price of the first i items in the stages so far
    last_begins = []  # per stage after the first: where it begins in the best split of the first i items
    for stage in range(1, n_stages):
        choices = join(np.where(items < stage, np.inf, best)[:, None], prices)
        begins = choices.argmin(0)
        best = choices[begins, items]
        last_begins.append(begins)
    found = [len(total) - 1]
    for chosen in reversed(last_begins):
        found.append(int(chosen[found[-1]]))
    return float(best[-1]), [0, *found[:0:-1]]
