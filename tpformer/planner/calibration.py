"""A device's rates as `python -m bench` measured them on it.

Belongs here: what results of the bench say about the constants of a device. The folder is one of bench/results.
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
from .roofline import gemm_seconds
from .software import ON_CPU
from .step_time import StepModel

COPY = "copy"


def calibrated(device: Device, folder: Path) -> Device:
    """The device with rates of its own in place of the file's. ValueError for a folder without results for it."""
    return _calibrated_gpu(device, folder) if device.capability else _calibrated_cpu(device, folder)


def _calibrated_gpu(device: Device, folder: Path) -> Device:
    """The device with the GEMM rate that `bench matmul` measured of the library, and the memory rate of copies.

    The rate of GEMMs is the one with which the model is right in the median over the shapes. Attention's rates change
    with it. The memory rate is the largest that a copy reached in `bench norm`.
    """
    products, memory = _rows(folder / "matmul.json"), _rows(folder / "norm.json")
    cases = ("forward", "dgrad", "wgrad")
    measured = {row["shape"]: row["baseline_value"] for row in products if row["case"] in cases}
    copies = [row["baseline_value"] for row in memory if row["baseline"] == COPY and row["unit"] == "GB/s"]
    if not measured and not copies:
        raise ValueError(
            f"{folder} has no results of `bench matmul` or `bench norm`: give a folder like bench/results/NAME"
        )
    if copies:
        device = dataclasses.replace(device, machine=device.machine._replace(memory=1e9 * max(copies)))
    if measured:
        device = device.scaled(_rate(device, measured))
    return device


SINGLE = "1 sample at a time"  # as `bench cpu` says it
CORES = 2  # of `bench cpu`, which has a rank on each, or one process on both
STEP = re.compile(r"(\d+) layers of (\d+), (\d+) x (\d+)")  # how it writes a model and a batch
SIZE = re.compile(r"(\d+) (KiB|MiB)")


def _calibrated_cpu(device: Device, folder: Path) -> Device:
    """The core with what `bench cpu` measured: memory by the norms and activations that a step's backward rebuilds,
    links by collectives in shared memory, messages by gloo's, and products by steps of two tensor-parallel ranks."""
    rows = _rows(folder / "cpu.json")
    if not rows:
        raise ValueError(f"{folder} has no results of `bench cpu`: give a folder like bench/results/cpu")
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


def _rows(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def _rate(device: Device, measured: dict[str, float]) -> float:
    """Times the device's FLOP/s: then as many shapes are predicted to be slower as are predicted to be faster."""
    shapes = {shape: tuple(map(int, shape.split()[-1].split("x"))) for shape in measured}

    def too_high(rate: float) -> bool:
        scaled, ratios = device.scaled(rate), []
        for shape, (m, n, k) in shapes.items():
            seconds = 2 * m * n * k / (1e12 * measured[shape])
            ratios.append(gemm_seconds(m, n, k, scaled) / seconds)
        return statistics.median(ratios) < 1

    return fitted_rate(0.1, 3.0, too_high)
