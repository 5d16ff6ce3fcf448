"""What do the transports of tensor-parallel linears, and context-parallel attention (nvlink_attention.py), take on
several GPUs, each beside its prediction?

Belongs here: providers, what must agree, rows, the table of measured times. Started by torchrun; rank 0 reports:

    torchrun --nproc-per-node 8 -m bench nvlink
"""

import argparse
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from harness.accuracy import require_accurate
from harness.ratios import Row, compared, draw_ratios, means, ratios, table
from harness.runner import Bench, Report
from harness.timing import FULL, QUICK, Call, Effort, Seconds, cold, flush_buffer, interleave
from tpformer.config.transport_table import TIMES, WAYS
from tpformer.distributed.symmetric import PRIVATE_MODULE
from tpformer.ops import column_linear, row_linear
from tpformer.ops.choice import Request, open_transport
from tpformer.ops.transports.interface import GATHER, OPERATIONS, SCATTER, Transport

from . import nvlink_attention as attention
from .predict import FUSED as PREDICTED
from .predict import MODEL, predict, predicted_rows, present_machine
from .shapes import GROUPS, RANKS, Shape, operation_shapes

DEVICE = "cuda"
SEQUENTIAL, FUSED, ASYNC_TP = "sequential", "fused", "torch async-TP"
FORCED = {"copy": "fused, by copies", "push": "fused, by a push"}  # of gathers, which else are as the model says


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def obstacle() -> str | None:
    """What is missing here: several GPUs, and torchrun."""
    devices, world = torch.cuda.device_count(), world_size()
    if devices < 2:
        return f"several CUDA devices of one NVLink node (here: {devices}) and torchrun --nproc-per-node N"
    if world == 1 or "LOCAL_RANK" not in os.environ:
        return f"several processes: torchrun --nproc-per-node {devices} -m bench nvlink"
    if RANKS % world or devices < world:
        return f"a number of processes that divides {RANKS}, one per device of one node (here: {world} on {devices})"
    return None


def world() -> dist.ProcessGroup:
    """The group of all ranks, joined at first use."""
    if not dist.is_initialized():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def inputs(shape: Shape, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's x and W: every rank can draw those of all others."""
    generator = torch.Generator(DEVICE).manual_seed(rank)
    rows = shape.m // shape.t if shape.op == GATHER else shape.m
    options: dict = {"generator": generator, "device": DEVICE, "dtype": torch.bfloat16}
    x = torch.randn(rows, shape.k, **options)
    return x, torch.randn(shape.n, shape.k, **options) * shape.k**-0.5


def torch_operation(shape: Shape, x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor] | None:
    """The same by torch's own asynchronous tensor parallelism; None where this torch has no such operation."""
    importlib.import_module(PRIVATE_MODULE)  # registers them
    name = {GATHER: "fused_all_gather_matmul", SCATTER: "fused_matmul_reduce_scatter"}.get(shape.op, "")
    operation = getattr(torch.ops.symm_mem, name, None)
    if operation is None:
        return None
    if shape.op == GATHER:
        return lambda: operation(x, [w.t()], 0, group.group_name)[1][0]
    return lambda: operation(x, w.t(), "sum", 0, group.group_name)


def providers(shape: Shape) -> dict[str, Callable[[], Tensor]]:
    """The forwards of one linear by the transport's name; sequential is always there and comes first."""
    group = world()
    x, w = inputs(shape, group.rank())

    @torch.no_grad()
    def linear(transport: Transport) -> Tensor:
        return (column_linear if shape.op == GATHER else row_linear)(x, w, transport=transport)

    def opened(transport: str) -> Transport:
        return open_transport(Request(shape.op, shape.m, shape.n, shape.k, x.dtype, x.device, group, transport))

    result: dict[str, Callable[[], Tensor]] = {}
    for transport in TIMES:
        try:
            carrier = opened(transport)
        except ValueError as error:  # raised by all ranks or by none
            if transport == SEQUENTIAL:
                raise
            if group.rank() == 0:
                print(f"{shape}: {error}")
            continue
        result[transport] = partial(linear, carrier)
    for way, name in FORCED.items() if shape.op == GATHER and FUSED in result else ():
        result[name] = partial(gathered_by, way, result[FUSED])
    other = torch_operation(shape, x, w, group)
    if other is not None:
        result[ASYNC_TP] = other
    return result


def gathered_by(way: str, linear: Callable[[], Tensor]) -> Tensor:
    """What a fused linear gives if its rows are gathered in one of WAYS."""
    from tpformer.ops.transports import fused

    with mock.patch.object(fused, "send_by_copies", lambda *_: way == "copy"):
        return linear()


def expected(shape: Shape, rank: int) -> Tensor:
    """The rank's result in float64, from every rank's inputs."""
    if shape.op == GATHER:
        rows = torch.cat([inputs(shape, peer)[0] for peer in range(shape.t)])
        return rows.double() @ inputs(shape, rank)[1].double().t()
    own = slice(rank * shape.m // shape.t, (rank + 1) * shape.m // shape.t) if shape.op == SCATTER else slice(None)
    every = (inputs(shape, peer) for peer in range(shape.t))
    return sum(x[own].double() @ w.double().t() for x, w in every)  # type: ignore[return-value]


def listed(quick: bool) -> list[Shape]:
    found = [shape for op in OPERATIONS for shape in operation_shapes(op, world_size())]
    return [shape for shape in found if not quick or (shape.model == "8B" and shape.m in (8, 1024))]


def check(quick: bool) -> None:
    for shape in listed(quick):
        check_shape(shape)
    raise_together(attention.check(world_size(), world(), DEVICE))


def check_shape(shape: Shape) -> None:
    """Every provider against float64. A rank's mistake is raised by all ranks, before the others would wait for it."""
    group = world()
    calls, oracle = providers(shape), expected(shape, group.rank())
    baseline, failure = calls[SEQUENTIAL](), None
    for name, call in calls.items():
        actual = call()
        try:
            require_accurate(f"rank {group.rank()} {shape} {name}", actual, oracle, baseline)
        except AssertionError as error:
            failure = str(error)
    raise_together(failure)


def raise_together(failure: str | None) -> None:
    """Every rank's mistake is raised by all."""
    failures: list[str | None] = [None] * world().size()
    dist.all_gather_object(failures, failure, world())
    if any(failures):
        raise AssertionError("; ".join(text for text in failures if text))


def measure(calls: Mapping[str, Callable[[], object]], effort: Effort) -> Seconds:
    """Seconds of the slowest rank by provider and round: equal on all ranks."""
    flushed, together = flush_buffer(), torch.zeros((), device=DEVICE)

    def sample(call: Callable[[], object]) -> Callable[[], float]:
        start_at_once = Call(call, lambda: dist.all_reduce(together))
        own = cold(start_at_once, effort.repetitions, flushed)

        def slowest() -> float:
            seconds = torch.tensor(own(), device=DEVICE)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            return float(seconds)

        return slowest

    return interleave({name: sample(call) for name, call in calls.items()}, effort.rounds)


def rows_of(shape: Shape, seconds: Seconds, predicted: float) -> list[Row]:
    """Every provider against the sequential transport, and the fused one against its prediction (1: as predicted)."""
    pairs = [*((name, SEQUENTIAL) for name in seconds if name != SEQUENTIAL), (FUSED, PREDICTED)]
    return compared(shape.op, shape, {**seconds, PREDICTED: [predicted] * len(seconds[SEQUENTIAL])}, pairs)


def table_row(shape: Shape, seconds: Seconds) -> dict:
    """One row as tpformer.config.transport_table reads it."""
    sizes = {"op": shape.op, "ranks": shape.t, "dtype": "bfloat16", "m": shape.m, "n": shape.n, "k": shape.k}
    keys = dict(TIMES)
    if shape.op == GATHER:
        keys |= {FORCED[way]: key for way, key in WAYS.items()}
    times = {key: round(1e6 * median(seconds[name]), 1) if name in seconds else None for name, key in keys.items()}
    return sizes | times


def write_table(measured: Sequence[dict], directory: Path) -> Path:
    """The file for parallel.transport_table: by it, "auto" takes the fastest transport of the nearest shape."""
    path = directory / f"transports_{measured[0]['ranks']}.json"
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in measured) + "\n]\n")
    return path


def run(options: argparse.Namespace) -> Report:
    machine, effort = present_machine(), QUICK if options.quick else FULL
    rows: list[Row] = []
    measured: list[dict] = []
    for shape in listed(options.quick):
        seconds = measure(providers(shape), effort)
        rows += rows_of(shape, seconds, predict(shape, machine).fused)
        measured.append(table_row(shape, seconds))
    for sample in attention.samples(world_size(), options.quick):
        times = measure(attention.providers(sample, world(), DEVICE), effort)
        rows += attention.rows_of(sample, times, attention.predict(sample, machine)[0])
    dist.destroy_process_group()
    for op in OPERATIONS:
        rows += means((row for row in rows if row["case"] == op), case=f"{op}, geometric mean")
    report = ratios(lambda quick: rows)(options)
    return report._replace(files=partial(write_table, measured))


def predicted() -> str:
    """The table of what should come out."""
    rows = predicted_rows(shape for op in OPERATIONS for shape in operation_shapes(op))
    of_attention = [sample for n in GROUPS for sample in attention.samples(n)]
    return table([*rows, *attention.predicted_rows(of_attention, present_machine())])


BENCH = Bench(
    name="nvlink",
    description="linears by each transport, and attention of shared samples, on several GPUs, beside the prediction",
    device="cuda",
    check=check,
    run=run,
    obstacle=obstacle,
    predict=predicted,
    draw=draw_ratios,
    note=f"Each time is of the slowest rank. Rows against {PREDICTED}: above 1 is faster than predicted. {MODEL}",
)
