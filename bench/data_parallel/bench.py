"""The bench `data_parallel`: its parts, its tables, and what must hold.

Belongs here: one question after the other, and the picture beside the results. How each is measured is in the other
files of this folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness.bars import Bar, write_bars
from harness.marks import table_of
from harness.runner import Bench, Report

from . import messages, servers, strategies
from .page import write_files

NOTE = (
    "Counted: messages and values that all ranks send together, and values that the rank with the most to send sends, "
    "beside the formulas; all ranks must end with the same bits. Hierarchical: two nodes, or one if the number of "
    "ranks is odd. Timed: the median of the slowest rank's seconds, over gloo. The fit is one latency and one "
    "bandwidth for all algorithms and sizes: steps * latency + bytes of the busiest rank / bandwidth, with the least "
    "relative error. Ranks share cores, and the formula knows no sums and no contention: these are no network's times."
)


def run(options: argparse.Namespace) -> Report:
    """Count and time messages, then servers, then train; --only chooses."""
    parts = {"messages": messages.measure, "servers": servers.measure, "strategies": strategies.measure}
    wanted = [options.only] if options.only else list(parts)
    content, tables, problems = {}, [], []
    found = {name: parts[name](options.quick) for name in wanted}
    if "messages" in found:
        content |= found["messages"]
        line = f"{messages.TIMED_RANKS} ranks: {messages.fit_words(content['fit'])}"
        tables += [messages.count_table(content["rows"]), messages.time_table(content["times"]), line]
        problems += messages.problems(content["rows"])
    if "servers" in found:
        content["servers"] = found["servers"]
        tables += [
            messages.count_table(found["servers"]["counts"]),
            table_of(servers.time_cells(found["servers"]["times"])),
        ]
        problems += servers.problems(found["servers"])
    if "strategies" in found:
        content |= found["strategies"]
        tables += [table_of(strategies.strategy_cells(content)), table_of(strategies.depth_cells(content))]
        problems += [] if options.quick else strategies.problems(content)
    return Report(tables, content, problems, "counts equal formulas", write_files)


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
    description="all-reduces, parameter servers, PipeDream, compression on CPU ranks: counts, seconds, losses",
    run=run,
    draw=draw,
    options={
        "--quick": {"action": "store_true", "help": "few ranks, few steps, nothing written"},
        "--only": {"choices": ("messages", "servers", "strategies"), "help": "one part, nothing written"},
    },
    note=NOTE,
)
