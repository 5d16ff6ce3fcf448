"""Dividing consecutive layers among pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def split_stages(costs: Sequence[float], n_stages: int) -> list[range]:
    """Consecutive ranges of items, one per stage, none empty, whose largest cost is as small as possible.

    costs: of each item, in any unit (parameters, FLOPs). Among the splits with the smallest largest cost, the one with
    the smallest sum of squares is taken, so that the other stages are even too. O(items**2 * stages).
    ValueError for fewer items than stages.
    """
    n = len(costs)
    if not 1 <= n_stages <= n:
        raise ValueError(f"{n} layers cannot be divided among {n_stages} stages: each needs one")
    total = [0.0, *accumulate(costs)]
    # best[i]: (largest cost, sum of squares, where the last stage begins) of the first i items in the stages so far
    best: list[list[tuple[float, float, int]]] = [[(total[i], total[i] ** 2, 0) for i in range(n + 1)]]
    for stage in range(1, n_stages):
        row = [(float("inf"), float("inf"), 0)] * (n + 1)
        for end in range(stage + 1, n + 1):
            for begin in range(stage, end):
                cost = total[end] - total[begin]
                largest, squares, _ = best[-1][begin]
                row[end] = min(row[end], (max(largest, cost), squares + cost**2, begin))
        best.append(row)
    ranges, end = [], n
    for row in reversed(best):
        begin = row[end][2]
        ranges.append(range(begin, end))
        end = begin
    return ranges[::-1]
