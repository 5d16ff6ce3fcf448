"""A CPU core's rates as `python -m bench cpu` measured them.

Belongs here: what rows of that bench say about the constants of a core. GPUs are in calibration.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from pathlib import Path

from tpformer.config import build_config
from tpformer.kernels.cost import MOVED

from .devices import Device, fitted_rate
from .software import ON_CPU
from .step_time import StepModel

SINGLE = "1 sample at a time"  # as `bench cpu` says it
CORES = 2  # of `bench cpu`, which has a rank on each, or one process on both
STEP = re.compile(r"(\d+) layers of (\d+), (\d+) x (\d+)")  # how it writes a model and a batch
SIZE = re.compile(r"(\d+) (KiB|MiB)")


def calibrated_core(device: Device, folder: Path) -> Device:
    """The core with what `bench cpu` measured: memory by the norms and activations that a step's backward rebuilds,
    links by collectives in shared memory, messages by gloo's, products and launches by steps of two tensor-parallel
    ranks. ValueError for a folder without it, a file of another kind, or a device of another dtype."""
    path = folder / "cpu.json"
    if device.itemsize != 4:
        raise ValueError(f'`bench cpu` measures float32: set dtype = "float32" in the file of {device.name}')
    if not path.is_file():
        raise ValueError(f"{folder} has no results of `bench cpu`: give a folder like bench/results/cpu")
    try:
        return _calibrated(device, json.loads(path.read_text())["rows"])
    except (AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError):
        raise ValueError(
            f"{path} is no result of `python -m bench cpu`: give a folder like bench/results/cpu"
        ) from None


def _calibrated(device: Device, rows: list[dict]) -> Device:
    rebuilt = [_rebuilt(row) for row in rows if row["case"] == "step if not rebuilt"]
    memory = sum(nbytes for nbytes, _ in rebuilt) / sum(seconds for _, seconds in rebuilt) / CORES
    shared, gloo = _collectives(rows, "value"), _collectives(rows, "baseline_value")
    device = dataclasses.replace(
        device, machine=device.machine._replace(memory=memory, link=shared[1] / MOVED[1][1]), node=gloo
    )
    steps = [row for row in rows if row["case"] == "tensor parallel"]
    whole, single = ([row for row in steps if (SINGLE in row["provider"]) is one] for one in (False, True))

    def too_high(rate: float) -> bool:
        scaled = device.scaled(rate)
        return statistics.median(_step_seconds(row, scaled) / _measured(row) for row in whole) < 1

    for _ in range(3):  # products are a part of what one sample at a time costs, and launches of a whole step
        device = device.scaled(fitted_rate(0.1, 10.0, too_high))
        device = dataclasses.replace(device, launch=statistics.median(_launch(row, device) for row in single))
    return device


def _launch(row: dict, device: Device) -> float:
    """Seconds of a kernel's launch, by what steps of one sample at a time take longer than whole ones."""
    n_layers, _, samples, _ = _sizes(row)
    device = dataclasses.replace(device, launch=0.0)
    longer = (_measured(row) - _tokens(row) / row["baseline_value"]) - (
        _step_seconds(row, device, 1) - _step_seconds(row, device)
    )
    return max(0.0, longer / ((samples - 1) * n_layers * sum(ON_CPU.kernels)))


def _sizes(row: dict) -> list[int]:
    """Layers, hidden size, samples and their length."""
    return [int(size) for size in STEP.fullmatch(row["shape"]).groups()]  # type: ignore[union-attr]


def _tokens(row: dict) -> int:
    return math.prod(_sizes(row)[2:])


def _measured(row: dict) -> float:
    """Seconds of a step."""
    return _tokens(row) / row["value"]


def _step_seconds(row: dict, device: Device, microbatch: int | None = None) -> float:
    """Predicted seconds of a step of two tensor-parallel ranks. microbatch: samples of one; None: all of them."""
    n_layers, hidden_size, samples, seq_length = _sizes(row)
    model = {"n_layers": n_layers, "hidden_size": hidden_size, "seq_length": seq_length, "n_heads": 4}
    train = {
        "global_batch_size": samples,
        "microbatch_size": microbatch or samples,
        "device": "cpu",
        "dtype": "float32",
    }
    config = build_config(
        {"model": {**model, "vocab_size": 257}, "train": train, "parallel": {"tensor_parallel": CORES}}
    )
    return StepModel(config, device, ON_CPU).step().seconds


def _rebuilt(row: dict) -> tuple[float, float]:
    """Bytes and seconds of a step's norms or activations, by how much faster a step is without them."""
    n_layers, hidden_size, _, _ = _sizes(row)
    tokens = _tokens(row)
    numbers = (2 * n_layers + 1) * hidden_size if row["provider"] == "norm outputs" else 4 * n_layers * hidden_size
    seconds = tokens / row["baseline_value"] - tokens / row["value"]
    return 2 * 4 * tokens * numbers, seconds  # float32, read and written


def _collectives(rows: list[dict], column: str) -> tuple[float, float]:
    """(seconds of a small message, bytes/s) of gathers and scatters between two ranks, each of half of the bytes."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["case"].startswith(("all_gather", "reduce_scatter")):
            number, unit = SIZE.fullmatch(row["shape"]).groups()  # type: ignore[union-attr]
            found.setdefault(int(number) * (1024 if unit == "KiB" else 2**20) // 2, []).append(1e-6 * row[column])
    seconds = {nbytes: statistics.mean(each) for nbytes, each in sorted(found.items())}
    (least, small), *_, (most, large) = seconds.items()
    return small, (most - least) / (large - small)
