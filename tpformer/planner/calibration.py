"""A device's rates as `python -m bench` measured them on it.

Belongs here: what results of the bench say about the constants of a device. The folder is one of bench/results.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

from .devices import Device, fitted_rate
from .roofline import gemm_seconds

COPY = "copy"


def calibrated(device: Device, folder: Path) -> Device:
    """The device with the GEMM rate that `bench matmul` measured of the library, and the memory rate of copies.

    The rate of GEMMs is the one with which the model is right in the median over the shapes. Attention's rates change
    with it. The memory rate is the largest that a copy reached in `bench norm`. ValueError for a folder without either.
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
