"""A device's rates as `python -m bench` measured them on it.

Belongs here: what results of the bench say about the constants of a device. The folder is one of bench/results.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tpformer.kernels.cost import MACHINES

from .core_calibration import calibrated_core
from .devices import Device, fitted_rate
from .roofline import gemm_seconds

COPY = "copy"
CASES = ("forward", "dgrad", "wgrad")


def calibrated(device: Device, folder: Path) -> Device:
    """The device with rates of its own in place of the file's. ValueError for a folder without results for it."""
    return _calibrated_gpu(device, folder) if device.capability else calibrated_core(device, folder)


def _calibrated_gpu(device: Device, folder: Path) -> Device:
    """The device with the GEMM rate that `bench matmul` measured of the library, and the memory rate of copies.

    The rate of GEMMs is the one with which the model is right in the median over the shapes. Attention's rates change
    with it. The memory rate is the largest that a copy reached in `bench norm`. ValueError for a folder without either,
    a file of another kind, and results of another GPU.
    """
    products, memory = _rows(folder / "matmul.json", device), _rows(folder / "norm.json", device)
    measured = {row.shape: row for row in products if row.sizes}
    copies = [row.value for row in memory if row.baseline == COPY]
    if not measured and not copies:
        raise ValueError(
            f"{folder} has no results of `bench matmul` or `bench norm`: give a folder like bench/results/NAME"
        )
    if copies:
        device = dataclasses.replace(device, machine=device.machine._replace(memory=1e9 * max(copies)))
    if measured:
        device = device.scaled(_rate(device, measured))
    return device


class MeasuredRate(NamedTuple):
    """A rate that the bench measured of a baseline. sizes: M, N and K of a product in CASES, or nothing."""

    baseline: str
    shape: str
    sizes: tuple[int, ...]
    value: float


def _rows(path: Path, device: Device) -> list[MeasuredRate]:
    """The rates in a result of the bench, if it is there. ValueError for another file, or another GPU's result."""
    if not path.is_file():
        return []
    try:
        result = json.loads(path.read_text())
        gpu = str(result["machine"]["gpu"])
        rows = [_row(row) for row in result["rows"] if row["unit"].endswith("/s")]
    except (AttributeError, LookupError, TypeError, ValueError):
        raise ValueError(f"{path} is no result of `python -m bench`: give a folder like bench/results/NAME") from None
    names = [machine.name for machine in MACHINES]
    if device.machine.name in names and any(name in gpu for name in names if name != device.machine.name):
        raise ValueError(f"{path} was measured on {gpu}, which is no {device.machine.name}: give its --device")
    return rows


def _row(row: Mapping[str, Any]) -> MeasuredRate:
    value = float(row["baseline_value"])
    sizes: tuple[int, ...] = ()
    if row["case"] in CASES:
        m, n, k = map(int, row["shape"].split()[-1].split("x"))
        sizes = m, n, k
    if not value > 0:
        raise ValueError("a rate is above 0")
    return MeasuredRate(row["baseline"], row["shape"], sizes, value)


def _rate(device: Device, measured: Mapping[str, MeasuredRate]) -> float:
    """Times the device's FLOP/s: then as many shapes are predicted to be slower as are predicted to be faster."""

    def too_high(rate: float) -> bool:
        scaled, ratios = device.scaled(rate), []
        for row in measured.values():
            m, n, k = row.sizes
            seconds = 2 * m * n * k / (1e12 * row.value)
            ratios.append(gemm_seconds(m, n, k, scaled) / seconds)
        return statistics.median(ratios) < 1

    return fitted_rate(0.1, 3.0, too_high)
