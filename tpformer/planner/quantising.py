"""What FP8 adds to a layer's linears: passes that quantise and dequantise, their launches, and the memory of blocks.

Belongs here: what ops/transports/quantized.py does beside GEMMs and collectives, counted. Seconds are layer_time.py's.
All figures are predictions.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpformer.config import check_fp8_run
from tpformer.kernels.cost import MACHINES
from tpformer.kernels.quantize.format import NUMBER_BYTES

from .devices import Device
from .terms import Linear

PASS = 2 + NUMBER_BYTES  # bytes of a number that a pass takes from 16 bits to blocks, or back
WRITTEN = NUMBER_BYTES - 2  # of one that a kernel writes in blocks in place of 16 bits
PROJECTIONS, ATTENTION = "qkv", "o"  # the linears around attention; around an activation are the others
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


def quantising_bytes(
    linear: Linear, own: float, gathered: bool, there: float = 0.0, fused: bool = False
) -> tuple[float, float, float]:
    """Bytes that FP8's passes over rows read and write in the forward, for the gradients of the input and for those of
    weights.

    own: this rank's rows, of the residual stream. gathered: whether these rows are gathered, as a column linear's input
    and a row linear's output gradient are: values and exponents are joined before, and parted behind. there: for
    experts, the rows that are there, gathered or by an exchange, of which each expert takes some. fused: whether fused
    kernels multiply what is gathered or reduced, but that of experts.

    What each weight of several adds to the gradient of its input is added up in 16 bits, but by a fused kernel, which
    reads what is gathered for a forward from where it arrives, too. Norms and activations, also
    where a backward makes them again, write blocks in place of 16 bits, as dropout's backward does, and the backward of
    an activation writes those of its gradients beside them, as that of a block's second norm does, and as the sum for a
    bias does of what it reads; a pass quantises attention's result, also again, and all other output gradients. For
    weight gradients both factors are dequantised.
    Of experts passes quantise rows before these go to them, also again, their activations, also again, and all of their
    gradients but what dropout's backward writes. A shared expert on the same rows takes their blocks, and has no
    gradient of an output of its own.
    """
    m, n, k, several = linear.rows * (linear.experts or 1), linear.n, linear.k, (linear.weights - 1) * (not fused)
    if linear.experts is not None:
        taken = finished(linear) * own + 2 * NUMBER_BYTES * (own + there) * gathered
        if linear.column:
            return taken * k, PASS * m * n, taken * k + PASS * (there * k + m * n)
        return PASS * m * k, taken * n + PASS * m * k, PASS * (there * n + m * k)
    if linear.silent:
        if linear.column:
            return 0.0, NUMBER_BYTES * m * n + 6 * linear.weights * m * k, PASS * m * n
        return WRITTEN * m * k + 6 * m * n, WRITTEN * m * k, PASS * m * k
    sent = 2 * NUMBER_BYTES * (own + m) * gathered  # of one feature of what may be gathered
    if linear.column:
        normed, given = own * WRITTEN + sent, PASS if linear.name == PROJECTIONS else NUMBER_BYTES
        parted = 2 * NUMBER_BYTES * m * (gathered and fused)
        return (normed - parted) * k, given * m * n + 6 * several * m * k, normed * k + PASS * m * (n + k)
    read = PASS if linear.name == ATTENTION else WRITTEN
    return read * m * k, (own * finished(linear) + sent) * n + read * m * k, PASS * m * (n + k)


def finished(linear: Linear) -> float:
    """Bytes that make blocks of a number of a row linear's output gradient, or of what an expert's takes."""
    return WRITTEN if linear.dropout else NUMBER_BYTES if linear.bias or linear.normed else PASS


def quantised_weights(uses: int | None) -> tuple[float, float]:
    """How often a weight is quantised in the forward of a microbatch, and with its transposed copy in a pass that reads
    2 bytes and writes 2: for the gradients of inputs, or in the forward for all `uses` microbatches of a step. None: in
    each use.
    """
    return (1.0, 1.0) if uses is None else (1 / uses, 0.0)


def weight_bytes(linear: Linear, uses: int | None) -> tuple[float, float]:
    """Bytes of the passes over a linear's weights in the forward and for the gradients of its input."""
    elements, (forward, inputs) = linear.n * linear.k * (linear.experts or 1), quantised_weights(uses)
    return (3 if uses is None else 4) * elements * forward, 4 * elements * inputs


def launches(linears: Sequence[Linear], uses: int | None, fused: bool = False) -> tuple[float, float]:
    """Kernels that FP8 adds to the forward and to the backward, to within those of a gather, which are three. fused: as
    of quantising_bytes; a fused kernel takes scales as they are, and several weights at once."""
    forward = backward = 0.0
    of_weights = quantised_weights(uses)
    for linear in linears:
        if linear.experts is not None:  # of whose products no library takes scales: rows there and back, their gradient
            forward, backward = forward + of_weights[0] + 1, backward + of_weights[1] + 4 - linear.dropout
            continue
        if linear.silent:  # added to what experts make: of a product's own rows only the gradients are dequantised
            forward += linear.weights * (of_weights[0] + SCALES) + (not linear.column)
            backward += linear.weights * (of_weights[1] + SCALES + 1 + linear.column)
            continue
        scales = 0 if fused else SCALES
        forward += linear.weights * (of_weights[0] + scales) + (linear.name == ATTENTION)
        # rows of output gradients, and of attention's result again; a sum less than weights; what is dequantised
        of_row = not (linear.column or linear.dropout or linear.bias or linear.normed)
        quantised = linear.weights if linear.name == PROJECTIONS else of_row
        backward += linear.weights * (of_weights[1] + scales) + quantised + (linear.name == ATTENTION)
        backward += (linear.weights - 1) * (not fused) + linear.weights + 1
    return forward, backward
