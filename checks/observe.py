"""What do logging at every step, validation and checkpoints cost a run, and does its memory grow?

Belongs here: the three runs, what is read from them, the required ratio, the bound of memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from harness.ratios import Row, compared, draw_ratios, ratios
from harness.runner import Bench, Report
from harness.timing import interleave
from tpformer.config import build_config, to_toml
from tpformer.training.data import build_stdlib
from tpformer.training.metrics import read_metrics

from .faulty_run import Command

STEPS, QUICK_STEPS = 300, 12
WINDOWS = 6  # of a run; the observed run validates and saves once in each
SAVES = 48  # of the run whose memory is read: the allocator's heap needs about ten to find its size
ROUNDS, QUICK_ROUNDS = 3, 1
LAYERS, HIDDEN, SEQ, BATCH = 4, 256, 256, 8
OBSERVED, PLAIN, OFTEN = "observed", "plain", "saving often"
REQUIRED = 0.97
GROWTH = 0.02  # of memory, from the second third of a run to its last
POLL = 0.1  # seconds
NOTE = (
    "Two tensor-parallel ranks with one core each. observed: logs every step, and validates and saves a checkpoint "
    "every 50; plain: does nothing of it, and logs every 50. tokens/s is what the run itself logs, which leaves out "
    "validation, in the median of five windows of 50 steps; the first 50 are left out. A checkpoint takes each core "
    "about half a second, however long a step is. memory: the sum of the ranks' RSS in a run that validates and saves "
    "every 6 steps, the median of each 50 steps."
)


def settings(folder: Path, train: Path, valid: Path, name: str, steps: int) -> dict[str, dict[str, Any]]:
    """The configuration of a run."""
    every, each = max(1, steps // (SAVES if name == OFTEN else WINDOWS)), name != PLAIN
    return {
        "run": {"dir": str(folder / "run")},
        "model": {"seq_length": SEQ, "n_layers": LAYERS, "hidden_size": HIDDEN, "n_heads": 4, "position": "rope"},
        "data": {"train": [str(train)], "valid": [str(valid)] if each else []},
        "parallel": {"tensor_parallel": 2},
        "train": {
            "steps": steps,
            "global_batch_size": BATCH,
            "validation_interval": every,
            "validation_samples": BATCH,
        },
        "optimizer": {"warmup_steps": 2},
        "checkpoint": {"interval": every if each else 0, "keep": 2},
        "log": {"interval": 1 if each else every, "plot": False, "tensorboard": each},
    }


def rss(pid: int) -> int:
    """The resident bytes of a process; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)


def training_seconds(run: Path, steps: int) -> float:
    """The seconds of the steps after the first window, by the tokens/s that the run logged.

    They are those of the median window, times the windows, so that what else the machine does counts less.
    """
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "tokens_per_second" in row]
    windows = [0.0] * WINDOWS
    for before, row in zip([{"tokens": 0}, *rows], rows, strict=False):
        seconds = (row["tokens"] - before["tokens"]) / row["tokens_per_second"]
        windows[(row["step"] - 1) * WINDOWS // steps] += seconds
    return median(windows[1:]) * (WINDOWS - 1)


def train(data: tuple[Path, Path], steps: int, name: str) -> tuple[float, list[int]]:
    """Run it. Returns its seconds, and its memory: the median of each window."""
    with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as directory:
        folder = Path(directory)
        samples: list[list[int]] = [[0] for _ in range(WINDOWS)]
        (folder / "run.toml").write_text(to_toml(build_config(settings(folder, *data, name, steps))))
        command = Command(folder, 0, ["pretrain", str(folder / "run.toml")], None)
        log = folder / "run" / "metrics.jsonl"
        while command.process.exitcode is None:
            window = min(WINDOWS - 1, WINDOWS * (len(log.read_bytes().splitlines()) if log.exists() else 0) // steps)
            samples[window].append(sum(map(rss, command.ranks())))
            time.sleep(POLL)
        if command.process.exitcode != 0:
            raise RuntimeError(f"the {name} run ended with {command.process.exitcode}: {command.said}")
        return training_seconds(folder / "run", steps), [int(median(window)) for window in samples]


def growth(windows: list[int]) -> float:
    """How much more memory a run has in its last third than in its second, as a share of the latter."""
    third = WINDOWS // 3
    return max(windows[2 * third :]) / max(1, *windows[third : 2 * third]) - 1


def measure(quick: bool) -> tuple[list[Row], list[int]]:
    """The rows, and the windows of the run that saves often."""
    steps, rounds = (QUICK_STEPS, QUICK_ROUNDS) if quick else (STEPS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as directory:
        data = build_stdlib(Path(directory), quiet=True)
        samples = {name: lambda name=name: train(data, steps, name)[0] for name in (OBSERVED, PLAIN)}
        seconds = interleave(samples, rounds)
        _, memory = train(data, steps, OFTEN)
    shape = f"{LAYERS} layers of {HIDDEN}, {BATCH} x {SEQ}, {steps} steps"
    tokens = (steps - steps // WINDOWS) * BATCH * SEQ
    bars = [(OBSERVED, PLAIN, REQUIRED)]
    what = "a run with logging, validation and checkpoints"
    return compared(what, shape, seconds, bars, unit="tokens/s", amount=tokens), memory


def run(options: argparse.Namespace) -> Report:
    """Train all, in turn."""
    rows, memory = measure(options.quick)
    report = ratios(lambda quick: rows)(options)
    grown, megabytes = growth(memory), [round(window / 2**20) for window in memory]
    lines = [f"memory of a run that saves often, MiB by windows: {json.dumps(megabytes)}; growth {grown:+.2%}"]
    found: Mapping[str, Any] = {"memory_mib": megabytes, "memory_growth": round(grown, 4)}
    leak = [f"memory grows by {grown:.2%}, more than {GROWTH:.0%}"] if grown > GROWTH and not options.quick else []
    tables, content = [*report.tables, *lines], {**report.content, **found}
    return report._replace(tables=tables, content=content, problems=[*report.problems, *leak])


BENCH = Bench(
    name="observe",
    description="what logging, validation and checkpoints cost a run of 2 CPU ranks, and whether its memory grows",
    run=run,
    draw=draw_ratios,
    note=NOTE,
)
