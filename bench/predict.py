"""What several GPUs should take by the model (ops/choice/prediction.py), from shapes alone or from measured GEMMs.

Belongs here: the rows. Nobody has run the fused kernels on several GPUs.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from harness.ratios import Row, compared
from tpformer.kernels.cost import Machine, machine_for
from tpformer.ops.choice.prediction import Times, fused_times, sequential_times
from tpformer.planner import devices

from .shapes import Shape

ITEMSIZE = 2
DEFAULT_MACHINE = "H200"
DEVICES = {"H200": "h200", "H100": "h100", "A100": "a100-80", "B200": "b200"}  # the planner's, by their machines
FUSED, SEQUENTIAL, PEAK = "predicted fused", "predicted sequential", "data-sheet peak"

MODEL = (
    "Prediction, run by nobody (ops/choice/prediction.py; constants and their sources: kernels/cost.py). "
    "sequential = GEMM + collective, by figures that others measured of NCCL. The fused kernel's GEMM: the waves of "
    "its tiles, by times measured on one H100, or as it is measured here. A gather: each program's waits and tiles, "
    "chunk by chunk as they arrive. A reduction: the longer of GEMM and links, and of the shorter what its first or "
    "last tiles take, + flags + the pass over the received partial sums, of an all-reduce over those that the last "
    "tiles bring, + the copy of what then travels on a second hop. Times are of the device; a host that takes longer "
    "to launch would delay it."
)


class Prediction(NamedTuple):
    """One operation on t GPUs."""

    fused: Times
    sequential: Times


def as_if_on(machine: Machine) -> AbstractContextManager[torch.device]:
    """Within, launchers plan for this GPU, whatever there is; the device that it seems to be."""
    return devices.as_if_on(devices.load_device(DEVICES[machine.name]))


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
    sizes = (shape.m, shape.n, shape.k)
    with as_if_on(machine) as device:
        fused = fused_times(shape.op, sizes, shape.t, torch.bfloat16, device, machine, gemm=compute)
    return Prediction(fused, sequential_times(shape.op, sizes, shape.t, ITEMSIZE, machine, library))


def predicted_rows(shapes: Iterable[Shape], compute: float | None = None, library: float | None = None) -> list[Row]:
    """How much faster the fused operation should be than its parts, on the present machine."""
    machine, rows = present_machine(), []
    for shape in shapes:
        found = predict(shape, machine, compute, library)
        seconds = {FUSED: [found.fused.device], SEQUENTIAL: [found.sequential.device]}
        rows += compared(f"prediction: {shape.op}, {shape.t} {machine.name}", shape, seconds, [(FUSED, SEQUENTIAL)])
    return rows


def share_row(case: str, shape: object, seconds: float, flops: float, provider: str = "predicted") -> Row:
    """Predicted seconds on one GPU as a share of the data sheet's peak."""
    machine = present_machine()
    times = {provider: [seconds], PEAK: [flops / machine.peak_flops]}
    label = f"prediction: {case}, 1 {machine.name}"
    return compared(label, shape, times, [(provider, PEAK)], unit="TFLOP/s", amount=flops / 1e12)[0]
