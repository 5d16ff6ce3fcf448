"""What several GPUs are expected to take: times from the model in kernels/cost.py, from shapes alone or on top of
GEMMs that one GPU has measured.

Belongs here: the model's terms for each operation, and its rows. Nobody has run it on several GPUs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tpformer.kernels.cost import (
    ONE_SHOT_BYTES,
    Machine,
    communication_bytes,
    gemm_seconds,
    machine_for,
    overlapped_seconds,
)
from tpformer.ops.transports.interface import ALL_REDUCE, SCATTER

from .runner import Row, make_row
from .shapes import Shape
from .timing import Comparison

ITEMSIZE = 2
DEFAULT_MACHINE = "H200"
FUSED, SEQUENTIAL = "predicted fused", "predicted sequential"
# Seconds of an all-reduce of 8 KB on 8 H100, where bytes do not count (symmetric-memory recipes, pull request 3): a
# Triton kernel's one hop, and NCCL's. Gathers and scatters of the list are far larger; the model gives them none.
HOP_LATENCY, LIBRARY_LATENCY = 10.8e-6, 21.8e-6

MODEL = (
    "Prediction, run by nobody: sequential = GEMM + communication; fused = max(GEMM, communication + GEMM / t) + tail "
    "(kernels/cost.py). GEMM is measured on one GPU where there is one, else max(2 M N K / F, bytes / memory "
    "bandwidth). Communication = bytes into one rank / link bandwidth: (t-1)/t of the gathered or scattered matrix; an "
    "all-reduce has twice that and a latency. Tail: the reduction's pass over the received partial sums; of a two-shot "
    "all-reduce also the second hop and the copy of what it brings. A one-shot all-reduce (at most "
    f"{ONE_SHOT_BYTES >> 10} KiB) sends (t-1) partial sums after its only wave of tiles: nothing overlaps."
)


class Prediction(NamedTuple):
    """Seconds of one operation on t GPUs."""

    fused: float
    sequential: float


def present_machine() -> Machine:
    """The model's numbers of the GPU that is here; DEFAULT_MACHINE's where there is none, or an unknown one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else DEFAULT_MACHINE
    machine = machine_for(name) or machine_for(DEFAULT_MACHINE)
    assert machine is not None
    return machine


def predict(shape: Shape, machine: Machine, compute: float | None = None, library: float | None = None) -> Prediction:
    """The operation fused, and one part after the other.

    compute, library: measured seconds of this rank's GEMM by our kernel and by cuBLAS, which the sequential transport
    uses; None: the model's for both.
    """
    op, m, n, k, t = shape.op, shape.m, shape.n, shape.k, shape.t
    modelled = gemm_seconds(m, n, k, ITEMSIZE, machine)
    compute, library = compute or modelled, library or modelled
    result = m * n * ITEMSIZE
    communication = communication_bytes(op, m, n, k, t, ITEMSIZE) / machine.link
    reduction = (result + result // t) / machine.memory
    if op == ALL_REDUCE and result <= ONE_SHOT_BYTES:
        tail = HOP_LATENCY + (t + 1) * result / machine.memory
        fused = overlapped_seconds(compute, (t - 1) * result / machine.link, 1, tail)
    elif op == ALL_REDUCE:
        copied = 2 * (t - 1) * result / t / machine.memory
        tail = reduction + communication / 2 + copied + 2 * HOP_LATENCY
        fused = overlapped_seconds(compute, communication / 2, t, tail)
    else:
        fused = overlapped_seconds(compute, communication, t, reduction if op == SCATTER else 0.0)
    return Prediction(fused, library + communication + (LIBRARY_LATENCY if op == ALL_REDUCE else 0.0))


def prediction_row(shape: Shape, machine: Machine, compute: float | None = None, library: float | None = None) -> Row:
    """The prediction as a row: how much faster the fused operation should be."""
    seconds = predict(shape, machine, compute, library)
    ratio = seconds.sequential / seconds.fused
    return make_row(
        case=f"prediction: {shape.op}, {shape.t} {machine.name}",
        shape=str(shape),
        provider=FUSED,
        baseline=SEQUENTIAL,
        unit="us",
        convert=lambda seconds: 1e6 * seconds,
        comparison=Comparison(seconds.fused, seconds.sequential, ratio, ratio, ratio),
    )


def gemm_prediction_rows(shapes: Sequence[Shape]) -> list[Row]:
    """What the model assumes of the bare GEMMs, as a share of the data sheet's peak."""
    machine, rows = present_machine(), []
    for shape in shapes:
        seconds = gemm_seconds(shape.m, shape.n, shape.k, ITEMSIZE, machine)
        peak = shape.flops / machine.peak_flops
        rows.append(
            make_row(
                case=f"prediction: matmul, 1 {machine.name}",
                shape=str(shape),
                provider="predicted",
                baseline="data-sheet peak",
                unit="TFLOP/s",
                convert=lambda seconds, flops=shape.flops: flops / seconds / 1e12,
                comparison=Comparison(seconds, peak, *[peak / seconds] * 3),
            )
        )
    return rows
