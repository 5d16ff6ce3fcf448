"""What do the all-reduces of data parallelism send, and how long do they take on CPU processes?

Belongs here: counts beside formulas, times beside a fit of latency and bandwidth, and their picture. The algorithms
are in tpformer/distributed/reductions.py, their formulas in algorithms.py.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table

from tpformer.distributed import record_collectives
from tpformer.distributed.algorithms import ALGORITHMS, HIERARCHICAL, Traffic, hierarchical
from tpformer.distributed.reductions import RUNNABLE, reduce_by

from .bars import Bar, write_bars
from .ranks import Calls, Ranks
from .runner import Bench, Report, columns

RANKS, QUICK_RANKS = (2, 3, 4, 5, 6, 7, 8), (4,)
COUNTED = 840  # values, which any of these numbers of ranks divides
TIMED_RANKS = 4
TIMED = tuple(1 << power for power in range(8, 23, 2))  # values, in float32
REPEATS, QUICK_REPEATS = 30, 3
NOTE = (
    "Counted: messages and values that all ranks send together, and values that the rank with the most to send sends, "
    "beside the formulas; all ranks must end with the same bits. Hierarchical: two nodes, or one if the number of "
    "ranks is odd. Timed: the median of the slowest rank's seconds, over gloo. The fit is one latency and one "
    "bandwidth for all algorithms and sizes: steps * latency + bytes of the busiest rank / bandwidth, with the least "
    "relative error. Ranks share cores, and the formula knows no sums and no contention: these are no network's times."
)
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
        calls[f"count {name}"] = lambda name=name: count(name)
        for values in TIMED:
            calls[f"{name} {values}"] = lambda name=name, values=values: seconds(name, values)
    return calls


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
            {"ranks": size, "algorithm": name, "steps": cost.steps}
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
    table = columns(("algorithm",), ("ranks", "steps", *(f"{name}, formula" for name in names), "ok"))
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


def run(options: argparse.Namespace) -> Report:
    """Count for each number of ranks, and time one of them."""
    counts: list[Row] = []
    times: list[Row] = []
    fit: Row = {}
    for size in QUICK_RANKS if options.quick else RANKS:
        with Ranks(size, 1, rank_calls, QUICK_REPEATS if options.quick else REPEATS) as ranks:
            counts += counted(ranks, size)
            if size == TIMED_RANKS:
                times, fit = timed(ranks)
    line = (
        f"{TIMED_RANKS} ranks: latency {fit['latency_us']:.0f} us, bandwidth {fit['gigabytes_per_second']:.2f} GB/s, "
        f"mean error {100 * fit['mean_error']:.0f} %"
    )
    problems = [
        f"{row['algorithm']} on {row['ranks']} ranks is not as its formula says" for row in counts if not row["ok"]
    ]
    content = {"rows": counts, "times": times, "fit": fit}
    return Report(
        [count_table(counts), time_table(times), line], content, problems, f"{len(counts)} counts equal formulas"
    )


def draw(path: Path) -> Path:
    """Bars of measured times at each size, with a red line where the fit is."""
    rows = json.loads(path.read_text())["times"]
    sizes = sorted({row["bytes"] for row in rows})[1::2]
    bars = [
        Bar(
            f"{size:,} bytes",
            row["algorithm"],
            {"measured": row["us"] / 1e3},
            f"{row['us'] / 1e3:.2f}",
            row["fit"] / 1e3,
        )
        for size in sizes
        for row in rows
        if row["bytes"] == size
    ]
    return write_bars(path, NOTE, "milliseconds of an all-reduce on 4 ranks; red: the fit", bars)


BENCH = Bench(
    name="data_parallel",
    description="all-reduce algorithms on CPU ranks: messages and values beside formulas, seconds beside a fit",
    run=run,
    draw=draw,
    note=NOTE,
)
