"""Which transport carries a tensor-parallel linear: the choice, its reason, and the error if it cannot run.

Belongs here: what decides, from a request to an opened transport. The times that "auto" compares are those of
prediction.py. `TensorParallel` asks once for each shape; a tensor on its way never does.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from tpformer.config import FP8, TRANSPORTS, check_choice, check_fp8_run
from tpformer.config.transport_table import read_transport_table
from tpformer.distributed.groups import why_copied_flags, why_no_kernels
from tpformer.distributed.shared_memory import torch_backend
from tpformer.kernels.cost import Machine, break_even_width, break_evens_in_blocks, machine_for
from tpformer.kernels.quantize.format import NUMBER_BYTES, VALUES
from tpformer.words import dtype_name

from ..implementation import KERNEL_DTYPES
from ..transports.interface import ALL_REDUCE, GATHER, REGISTRY, SCATTER, Transport
from ..transports.pipelined import Pipelined
from ..transports.products import PLAIN
from ..transports.quantized import BLOCKS
from ..transports.sequential import Sequential, local
from .prediction import Times, chosen_launch, fused_times, grouped_seconds, sequential_times, times_of_blocks
from .request import Request
from .spare import spare_processors

FUSED_DTYPES = (torch.bfloat16, torch.float16)
FUSED_ROWS = 1024  # on a GPU without a model: with fewer rows a collective and a library GEMM are probably faster
PIPELINED_ROWS = 1024  # per rank; smaller GEMM chunks lose more time than their overlap gains
NEEDS = {
    "fused": "fused needs a CUDA device with NVLink (or TRITON_INTERPRET=1 for tests on CPU)",
    "pipelined": "pipelined needs a backend that sends tensors of the device (gloo for CPU, nccl for CUDA)",
}


class Decision(NamedTuple):
    """transport: "local" for one rank, else "sequential", "pipelined" or "fused".

    reason: one line with numbers.
    """

    transport: str
    reason: str


def open_transport(request: Request) -> Transport:
    """The transport that choose_transport names, ready for use. Errors: ValueError, as there."""
    name, products = choose_transport(request).transport, BLOCKS if request.precision == FP8 else PLAIN
    if name == "local":
        return local(products)
    assert request.group is not None
    if name == "sequential":
        return Sequential(request.group, request.sequence_parallel, products)
    if name == "pipelined":
        return Pipelined(request.group, request.sequence_parallel, products)
    if request.precision == FP8:
        from ..transports.fused_blocks import FusedBlocks  # imports triton

        return FusedBlocks(request.group, request.sequence_parallel)
    from ..transports.fused import Fused  # imports triton

    return Fused(request.group, request.sequence_parallel)


def choose_transport(request: Request) -> Decision:
    """The transport that carries a linear, forward and backward; used by the operations and by explain().

    One rank gets "local". A transport asked for by name is taken, or ValueError gives the reason and the remedy.
    "auto" takes the first of these that applies:
        "sequential" on devices other than CUDA
        the fastest transport that was measured for the nearest shape, if `use_measured_table` gave a table
        the faster one of "fused" and "sequential" by the performance model, if topology and dtype (16 bits) allow both
        "pipelined", if the topology forbids "fused" and the chunks of the GEMM are large
        "sequential"
    In FP8 nothing is measured. ValueError where FP8 cannot be.
    """
    check_choice("transport", request.transport, TRANSPORTS)
    if request.precision == FP8:
        _check_fp8(request)
    if request.ranks == 1:
        return _with_notes(Decision("local", "one rank"), request)
    if request.transport == "auto":
        decision = _automatic(request)
    elif (reason := why_not(request.transport, request)) is None:
        decision = Decision(request.transport, "as asked for")
    else:
        raise ValueError(f'{NEEDS[request.transport]}: {reason}; use transport="auto" to have one chosen')
    return _with_notes(decision, request)


def _check_fp8(request: Request) -> None:
    capability = torch.cuda.get_device_capability(request.device) if request.device.type == "cuda" else None
    check_fp8_run(request.device.type, dtype_name(request.dtype), capability)


def _break_evens(request: Request) -> str:
    """The widths from which a GEMM of blocks would hide each of a linear's two collectives; "" where none is known."""
    machine = machine_for(device_name(request.device))
    found = None if machine is None else break_evens_in_blocks(request.ranks, machine, request.dtype.itemsize)
    if found is None or request.ranks == 1 or not request.sequence_parallel:
        return ""
    return f"; break-even of its gather {found[0]:.0f}, of its reduction in {dtype_name(request.dtype)} {found[1]:.0f}"


def _with_notes(decision: Decision, request: Request) -> Decision:
    """The decision, whose reason also says what FP8 sends and multiplies; and if copy engines may send a fused linear's
    rows and cannot fence their flags, that."""
    reason = decision.reason
    if request.precision == FP8:
        gathers = "blocks are gathered, and " * (request.ranks > 1 and request.sequence_parallel)
        reason += f"; FP8: {gathers}the GEMM multiplies what blocks stand for{_break_evens(request)}"
    if decision.transport == "fused" and request.op != ALL_REDUCE:
        assert request.group is not None
        if (why := why_copied_flags(request.group, request.device)) is not None:
            reason += f"; copy engines set flags by copies: {why}"
    return decision._replace(reason=reason)


def why_not(transport: str, request: Request) -> str | None:
    """Why this transport cannot carry a request, None if it can; "sequential" always can."""
    if transport == "fused":
        return why_not_fused(request)
    return why_not_pipelined(request) if transport == "pipelined" else None


def why_not_fused(request: Request) -> str | None:
    """Why the fused kernels cannot serve a request's group, device and dtype; None if they can.

    Collective over the group at its first use.
    """
    assert request.group is not None
    obstacle = why_no_kernels(request.group, request.device)
    if obstacle is None and request.dtype not in KERNEL_DTYPES:
        return f"the operands are {request.dtype}, and the kernels take bfloat16, float16 and float32"
    if obstacle is None and request.m == 0:
        return "there is no row, and the kernels take at least one row"
    if obstacle is None and request.op == SCATTER and request.m < request.ranks:
        return f"{request.ranks} ranks cannot have a row each of {request.m}, and the kernels take at least one row"
    return obstacle


def why_not_pipelined(request: Request) -> str | None:
    """Why the group's backend cannot send chunks of a request's tensors one by one; None if it can."""
    assert request.group is not None
    backend, device = torch_backend(request.group, request.device.type), request.device.type
    if backend == "none" or (backend == "gloo" and device != "cpu"):
        return f"the group's backend for {device} is {backend}"
    return None


def use_measured_table(path: str | Path | None) -> None:
    """Let "auto" choose by a file of measured times (config.transport_table). With None the performance model chooses.

    It holds for this process, and all ranks must use the same file.
    Errors: FileNotFoundError, or ValueError for a file that is not such a table.
    """
    REGISTRY.table = None if path is None else read_transport_table(path)
    chosen_launch.cache_clear()  # the table also says who sends a gather's shards


def device_name(device: torch.device) -> str:
    """The name by which the performance model knows a GPU; for other devices their type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def machine_of_request(request: Request) -> Machine | None:
    """The performance model of a request's device, at the rate of its precision; None if either is not known."""
    machine = machine_for(device_name(request.device))
    return machine if machine is None or request.precision != FP8 else machine.of_blocks


def break_even(request: Request) -> float | None:
    """The Request.width from which the GEMM takes longer than the communication; None on an unknown device."""
    machine = machine_of_request(request)
    if machine is None:
        return None
    blocks = request.precision == FP8 and request.op == GATHER
    itemsize = NUMBER_BYTES if blocks else request.dtype.itemsize
    return break_even_width(request.ranks, machine, itemsize, 2 if request.op == ALL_REDUCE else 1)


def _automatic(request: Request) -> Decision:
    if request.device.type != "cuda":
        return Decision("sequential", f"on {request.device.type} the collective, then the GEMM")
    if (measured := _measured(request)) is not None:
        return measured
    if request.dtype not in FUSED_DTYPES:
        return Decision("sequential", f"{dtype_name(request.dtype)} is for verification, not for speed")
    obstacle = why_not_fused(request)
    if request.precision == FP8 and machine_of_request(request) is None:
        obstacle = obstacle or f"the rate of blocks on {device_name(request.device)} is not known"
    if obstacle is None:
        return _fused_or_sequential(request)
    rows = request.m // request.ranks
    if why_not_pipelined(request) is None and rows >= PIPELINED_ROWS:
        return Decision("pipelined", f"{rows} rows per rank >= {PIPELINED_ROWS}; not fused: {obstacle}")
    why = why_not_pipelined(request) or f"{rows} rows per rank < {PIPELINED_ROWS}"
    return Decision("sequential", f"{why}; not fused: {obstacle}")


def _fused_or_sequential(request: Request) -> Decision:
    """The faster one by the performance model, where both can run."""
    machine = machine_for(device_name(request.device))
    if machine is None:
        few = request.m < FUSED_ROWS
        rows = f"{request.m} rows {'<' if few else '>='} {FUSED_ROWS}"
        return Decision(
            "sequential" if few else "fused", f"no performance model of {device_name(request.device)}: {rows}"
        )
    times = predicted_times(request, machine)
    fastest = min(times, key=lambda name: times[name].seconds)
    what = "predicted of both ways: " if request.precision == FP8 and _backward_operation(request) else "predicted: "
    return Decision(fastest, what + ", ".join(f"{name} {time}" for name, time in times.items()))


def predicted_times(request: Request, machine: Machine, spare: int | None = None) -> dict[str, Times]:
    """What "auto" compares, by transport. spare: SMs that the fused kernel leaves free, by default as it does.

    In FP8 it is a linear's forward and the gradient of its input together, because a gather of half the bytes gains
    much less than a reduction. Experts' reductions are no part of it: no kernel fuses them.
    """
    assert request.group is not None
    op, sizes = request.op, (request.m, request.n, request.k)
    spare = spare_processors(request.group) if spare is None else spare
    t, dtype, device, blocks = request.ranks, request.dtype, request.device, request.precision == FP8
    if blocks:
        dtype, machine = VALUES, machine.of_blocks or machine

    def gemm(sources: int, spare: int) -> float | None:
        """Seconds of the experts' GEMM; None for a linear, whose GEMM the model knows."""
        if request.grouped is None:
            return None
        return grouped_seconds(request.grouped, request.m, request.k, t, sources, dtype, device, machine, spare)

    if blocks:
        ways = [(op, sizes)]
        if (back := _backward_operation(request)) is not None:
            ways.append((back, (request.m, request.k, request.n)))
        gemms = gemm(t, spare), gemm(1, 0)
        times = [times_of_blocks(*way, t, device, machine, spare, gemms) for way in ways]
        return {name: Times(*map(sum, zip(*(each[name] for each in times), strict=True))) for name in times[0]}
    return {
        "fused": fused_times(op, sizes, t, dtype, device, machine, spare, gemm(t, spare)),
        "sequential": sequential_times(op, sizes, t, dtype.itemsize, machine, gemm(1, 0)),
    }


def _backward_operation(request: Request) -> str | None:
    """The operation of a linear's backward; None if it communicates in one of both ways alone, and for experts."""
    return None if request.grouped is not None else {GATHER: SCATTER, SCATTER: GATHER}.get(request.op)


def _measured(request: Request) -> Decision | None:
    """The transport that was measured fastest for the nearest shape, among those that can run here. Nobody measures
    experts, or FP8."""
    if REGISTRY.table is None or request.grouped is not None or request.precision == FP8:
        return None
    row = REGISTRY.table.nearest(request.op, request.ranks, dtype_name(request.dtype), request.m, request.n, request.k)
    if row is None:
        return None
    times = {name: time for name, time in row.times.items() if why_not(name, request) is None}
    if not times:
        return None
    fastest = min(times, key=lambda name: times[name])
    shown = ", ".join(f"{name} {time:g} us" for name, time in sorted(times.items(), key=lambda item: item[1]))
    return Decision(fastest, f"{REGISTRY.table.path} row {row.number} ({row.m}x{row.n}x{row.k}): {shown}")
