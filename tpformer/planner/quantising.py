"""What FP8 adds to a layer's linears: passes that quantise and dequantise, their launches, and the memory of blocks.

Belongs here: what ops/transports/quantized.py does beside GEMMs and collectives, counted. Seconds are layer_time.py's.
All figures are predictions.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpformer.config import RunConfig, check_fp8_run
from tpformer.kernels.cost import MACHINES
from tpformer.kernels.quantize.format import NUMBER_BYTES

from .devices import Device
from .terms import Linear

PASS = 2 + NUMBER_BYTES  # bytes of a number that a pass takes from 16 bits to blocks, or back
WRITTEN = NUMBER_BYTES - 2  # of one that a kernel writes in blocks in place of 16 bits
ATTENTION = "o"  # the row linear without an activation
SCALES = 6  # launches that make the scales of a product's two operands what cuBLASLt takes


def check_fp8_device(device: Device) -> float:
    """The FLOP/s of GEMMs of blocks on a device. ValueError for one of which it is not known."""
    if device.capability is not None:
        check_fp8_run("cuda", "bfloat16", device.capability)
    if (rate := device.machine.fp8_flops) is not None:
        return rate
    known = ", ".join(machine.name for machine in MACHINES if machine.fp8_flops)
    raise ValueError(
        f"FP8 on {device.name}: the rate of its GEMMs of blocks is not known, only that of {known}; give a device's "
        f"file with fp8_tflops, choose another --device, or plan without FP8"
    )


def rate_of_blocks(config: RunConfig, device: Device) -> float:
    """The same for a model. ValueError also for one with experts."""
    if config.model.n_experts is not None:
        raise ValueError(f"FP8 with model.n_experts={config.model.n_experts} has no model of its time: plan in 16 bits")
    return check_fp8_device(device)


def quantising_bytes(linear: Linear, own: float, gathered: bool) -> tuple[float, float, float]:
    """Bytes that FP8's passes read and write in the forward, for the gradients of the input and for those of weights.

    own: this rank's rows, of the residual stream. gathered: whether these rows are gathered, as a column linear's input
    and a row linear's output gradient are: values and exponents are joined before, and parted behind.

    A weight is quantised in each use: 2 bytes read, 1 written, or 2 with the transposed copy for the gradient of its
    input. What each weight of several adds to that gradient is added up in 16 bits. Norms, also where a backward makes
    them again, and the forwards of activations write blocks in place of 16 bits; a pass quantises attention's result,
    output gradients, and an activation that a backward makes again. For weight gradients both factors are dequantised.
    """
    m, n, k, several = linear.rows, linear.n, linear.k, linear.weights - 1
    sent = 2 * NUMBER_BYTES * (own + m) * gathered  # of one feature of what may be gathered
    if linear.column:
        inputs = PASS * m * n + 4 * n * k + 6 * several * m * k
        normed = own * WRITTEN + sent
        return normed * k + 3 * n * k, inputs, normed * k + PASS * m * (n + k)
    read = PASS if linear.name == ATTENTION else WRITTEN
    return read * m * k + 3 * n * k, (own * PASS + sent) * n + 4 * n * k + PASS * m * k, PASS * m * (n + k)


def launches(linears: Sequence[Linear]) -> tuple[int, int]:
    """Kernels that FP8 adds to the forward and to the backward, to within those of a gather, which are three."""
    forward = backward = 0
    for linear in linears:
        forward += linear.weights * (1 + SCALES) + (linear.name == ATTENTION)
        # rows of each output's gradient, and of an activation again; a sum less than weights; what is dequantised
        backward += linear.weights * (2 + SCALES) + (not linear.column) + (linear.weights - 1) + linear.weights + 1
    return forward, backward
