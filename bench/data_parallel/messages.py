"""What all-reduces send, beside their formulas, and how long they take on CPU processes, beside a fit.

Belongs here: counts, the messages of each step for a picture, times. The algorithms are in
tpformer/lessons/reductions.py, their formulas in algorithms.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table

from harness.ranks import Calls, Ranks
from harness.runner import columns
from tpformer.distributed import record_collectives
from tpformer.lessons.algorithms import ALGORITHMS, HIERARCHICAL, Traffic, hierarchical
from tpformer.lessons.reductions import RUNNABLE, Members, reduce_by

RANKS, QUICK_RANKS = (2, 3, 4, 5, 6, 7, 8), (4,)
COUNTED = 840  # values, which any of these numbers of ranks divides
TIMED_RANKS = 4
TIMED = tuple(1 << power for power in range(8, 23, 2))  # values, in float32
REPEATS, QUICK_REPEATS = 30, 3
DRAWN = 4  # values of each of as many ranks, as textbooks count them
Row = dict[str, Any]


def nodes_of(size: int) -> int:
    """The nodes in which ranks are counted as hierarchical."""
    return 2 if size % 2 == 0 else 1


def cost_of(name: str, size: int, values: float) -> Traffic:
    """The formula of an algorithm for so many ranks."""
    nodes = nodes_of(size)
    return hierarchical(size // nodes, nodes, values) if name == HIERARCHICAL else ALGORITHMS[name](size, values)


def rank_calls(repeats: int) -> Calls:
    """A rank's counts and times of each algorithm."""
    group = dist.group.WORLD
    assert group is not None
    size = group.size()
    inside = size // nodes_of(size)

    def count(name: str) -> tuple[int, float, list[float]]:
        """(messages, values) that this rank sends, and its result."""
        x = torch.randn(COUNTED, generator=torch.Generator().manual_seed(group.rank()), dtype=torch.float64)
        with record_collectives() as sent:
            reduce_by(name, x, group, inside=inside)
        return len(sent), sum(nbytes for _, nbytes in sent) / x.itemsize, x.tolist()

    def seconds(name: str, values: int) -> float:
        """The median of this rank's times; all begin together."""
        x, found = torch.zeros(values), []
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            reduce_by(name, x, group, inside=inside)
            found.append(time.perf_counter() - began)
        return median(found)

    calls: dict[str, Any] = {}
    for name in RUNNABLE:
        calls[f"trace {name}"] = lambda name=name: trace(name, inside)
        calls[f"count {name}"] = lambda name=name: count(name)
        for values in TIMED:
            calls[f"{name} {values}"] = lambda name=name, values=values: seconds(name, values)
    return calls


def trace(name: str, inside: int) -> list[tuple[int, int, int, int]]:
    """(step, from, to, values) of each message that this rank sends, of DRAWN values on each rank."""
    group = dist.group.WORLD
    assert group is not None
    exchange, found, clock = Members.exchange, [], 0

    def timed_exchange(members: Members, sends: Sequence, receives: Sequence) -> None:
        """A step begins when what it waits for is there: each message also brings the step that its sender is at."""
        nonlocal clock
        found.extend((clock, members.ranks[members.me], members.ranks[to], x.numel()) for to, x in sends if x.numel())
        exchange(members, sends, receives)
        came = [(peer, torch.zeros(1, dtype=torch.int64)) for peer, x in receives if x.numel()]
        exchange(members, [(peer, torch.tensor([clock])) for peer, x in sends if x.numel()], came)
        clock = 1 + max([clock, *(int(each) for _, each in came)])

    with mock.patch.object(Members, "exchange", timed_exchange):
        reduce_by(name, torch.zeros(DRAWN), group, inside=inside)
    return found


def traced(ranks: Ranks) -> Row:
    """The messages of each algorithm, of all ranks, in order."""
    return {name: sorted(each for own in ranks.call(f"trace {name}") for each in own) for name in RUNNABLE}


def counted(ranks: Ranks, size: int) -> list[Row]:
    """A row for each algorithm."""
    rows = []
    for name in RUNNABLE:
        messages, values, results = zip(*ranks.call(f"count {name}"), strict=True)
        found = sum(messages), sum(values), max(values)
        cost = cost_of(name, size, COUNTED)
        equal = all(math.isclose(*pair) for pair in zip(found, cost[1:], strict=True))
        same = all(result == results[0] for result in results)
        formula = dict(zip(("messages", "values", "busiest"), cost[1:], strict=True))
        rows.append(
            {"ranks": size, "algorithm": name, "n": COUNTED, "steps": cost.steps}
            | {key: [number, formula[key]] for key, number in zip(formula, found, strict=True)}
            | {"ok": equal and same}
        )
    return rows


def timed(ranks: Ranks) -> tuple[list[Row], Row]:
    """(a row for each algorithm and size, latency in us and bandwidth in GB/s of the fit with its mean error)."""
    rows = []
    for name in RUNNABLE:
        for values in TIMED:
            cost = cost_of(name, TIMED_RANKS, values)
            row = {"algorithm": name, "bytes": 4 * values, "steps": cost.steps, "busiest": 4 * cost.busiest}
            rows.append(row | {"us": 1e6 * ranks.sample(f"{name} {values}")})
    terms = np.array([[row["steps"], row["busiest"]] for row in rows])
    measured = np.array([row["us"] for row in rows])
    (latency, each), *_ = np.linalg.lstsq(terms / measured[:, None], np.ones(len(rows)), rcond=None)
    fitted = terms @ np.array([latency, each])
    for row, us in zip(rows, fitted, strict=True):
        row |= {"us": round(row["us"], 1), "fit": round(float(us), 1)}
    error = float(np.abs(fitted / measured - 1).mean())
    return rows, {"latency_us": float(latency), "gigabytes_per_second": 1e-3 / float(each), "mean_error": error}


def count_table(rows: Sequence[Row]) -> Table:
    names = ("messages", "values", "busiest")
    table = columns(("algorithm",), ("ranks", "rounds", *(f"{name}, formula" for name in names), "ok"))
    for row in rows:
        cells = [f"{row[name][0]:g}, {row[name][1]:g}" for name in names]
        table.add_row(row["algorithm"], str(row["ranks"]), str(row["steps"]), *cells, "yes" if row["ok"] else "NO")
    return table


def time_table(rows: Sequence[Row]) -> Table:
    """A line for each algorithm, a column for each number of bytes: measured us, and the fit's."""
    sizes = sorted({row["bytes"] for row in rows})
    table = columns(("us, fit",), [f"{size} B" for size in sizes])
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        own = {row["bytes"]: row for row in rows if row["algorithm"] == name}
        table.add_row(name, *(f"{own[size]['us']:.0f}, {own[size]['fit']:.0f}" for size in sizes))
    return table


def fit_words(fit: Row) -> str:
    """What a fit has found."""
    return (
        f"{fit['latency_us']:.0f} us for each round, {fit['gigabytes_per_second']:.2f} GB/s, mean error "
        f"{100 * fit['mean_error']:.0f} %"
    )


def measure(quick: bool) -> Row:
    """Count for each number of ranks, and time and trace one of them."""
    counts: list[Row] = []
    times: list[Row] = []
    content: Row = {}
    for size in QUICK_RANKS if quick else RANKS:
        with Ranks(size, 1, rank_calls, QUICK_REPEATS if quick else REPEATS) as ranks:
            counts += counted(ranks, size)
            if size == TIMED_RANKS:
                times, content["fit"] = timed(ranks)
                content["messages"] = traced(ranks)
    return {"rows": counts, "times": times, **content}


def problems(rows: Sequence[Row]) -> list[str]:
    """The counts that are not their formula's."""
    return [f"{row['algorithm']} on {row['ranks']} ranks is not as its formula says" for row in rows if not row["ok"]]
