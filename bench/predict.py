"""What several GPUs are expected to take, by the model of kernels/cost.py, from shapes alone or from measured GEMMs.

Belongs here: the model's terms for each operation, and its rows. Nobody has run it on several GPUs.
"""

from collections.abc import Iterable
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

from .ratios import Row, compared
from .shapes import Shape

ITEMSIZE = 2
DEFAULT_MACHINE = "H200"
FUSED, SEQUENTIAL, PEAK = "predicted fused", "predicted sequential", "data-sheet peak"
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


def predicted_rows(shapes: Iterable[Shape], compute: float | None = None, library: float | None = None) -> list[Row]:
    """How much faster the fused operation should be than its parts, on the present machine."""
    machine, rows = present_machine(), []
    for shape in shapes:
        found = predict(shape, machine, compute, library)
        seconds = {FUSED: [found.fused], SEQUENTIAL: [found.sequential]}
        rows += compared(f"prediction: {shape.op}, {shape.t} {machine.name}", shape, seconds, [(FUSED, SEQUENTIAL)])
    return rows


def share_row(case: str, shape: object, seconds: float, flops: float, provider: str = "predicted") -> Row:
    """Predicted seconds on one GPU as a share of the data sheet's peak."""
    machine = present_machine()
    times = {provider: [seconds], PEAK: [flops / machine.peak_flops]}
    label = f"prediction: {case}, 1 {machine.name}"
    return compared(label, shape, times, [(provider, PEAK)], unit="TFLOP/s", amount=flops / 1e12)[0]
