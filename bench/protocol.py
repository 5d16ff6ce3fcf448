"""How often do the programs of a fused GEMM wait and publish, what do they send, and how long should that take?

Belongs here: the table, and the gate, which compares the closed forms (ops/choice/traffic.py) with what compiled
kernels do when the executor runs a small group.
"""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import torch

from checks.compile.compiler import unavailable
from harness.ratios import Row, compared, draw_ratios, ratios
from harness.runner import Bench, Report, columns
from tpformer.kernels import cost
from tpformer.kernels.cost import Machine, communication_bytes, gemm_seconds, is_one_shot, machine_for
from tpformer.ops.choice.prediction import chosen_launch
from tpformer.ops.choice.traffic import Launch, Traffic, tiled_traffic
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER

from .predict import DEFAULT_MACHINE, ITEMSIZE, as_if_on, predict
from .shapes import RANKS, Shape, every_shape

if TYPE_CHECKING:
    from tpformer.kernels.launch import Tile

FUSED, IDEAL = "fused", "max(GEMM, links)"
GATED_N, GATED_K, GATED_PROGRAMS, GATED_PIECE = 35, 40, 4, 256  # bytes of what a pusher sends at a time
COUNTED = 4  # members of an Traffic that executions show, the first ones
NUMBERS = (
    "tile", "tiles", "waits", "releases", "chain", "units", "programs", "in flight, KiB", "sent, MiB", "sent / needed",
    "GEMM, us", "links, us", "fused, us", "exposed, us", "of ideal", "sequential, us", "auto",
)  # fmt: skip
NOTE = (
    f"Predictions for {DEFAULT_MACHINE}s: no GPU has run them. tiles, waits, releases: what the program with the "
    "most to do multiplies, acquires and releases, one after another; chain: flags of both kinds. units: pieces in "
    "which the rank's programs add sums. in flight: what a program asks for at a time to push or to add. needed: "
    "what one rank must send. links: all that travels, by the model (ops/choice/prediction.py); fused: the "
    "device's time. exposed: fused, less the GEMM alone. of ideal: max(GEMM, needed / link bandwidth) / fused. "
    "auto: the transport that is predicted to be the faster one, with the host's time. The counts are exact: before "
    "the table is made, the compiled kernels are executed on small shapes, and must count the same (of a "
    "reduce-scatter's releases, the mean). executed: the first of their programs that multiplies, of a gather the "
    "last; bytes of memory by its rank, 0 for the own; chain: atomics of system scope one after another."
)


class Small(NamedTuple):
    """A small shape of the gate, with partial tiles in each direction."""

    name: str
    op: str
    m: int
    t: int
    joins: int = -1
    """The chunk from which on the two programs that send a gather's shards take tiles; -1: copies send them."""
    one_shot: bool = False

    @property
    def shape(self) -> Shape:
        """The whole shape, with the sizes that all small ones share."""
        return Shape(self.name, "small", self.op, self.m, GATED_N, GATED_K, self.t)


GATED = (
    Small("gather", GATHER, 69, 3, joins=3),
    Small("gather, pushers join", GATHER, 69, 3, joins=1),
    Small("gather, copies", GATHER, 46, 2),
    Small("scatter", SCATTER, 69, 3),
    Small("all-reduce, one shot", ALL_REDUCE, 41, 3, one_shot=True),
    Small("all-reduce, two shots", ALL_REDUCE, 41, 3),  # 9 tiles: 3 programs have none of the last turn, and add
    Small("all-reduce, all add", ALL_REDUCE, 41, 2),  # 12 tiles
)


def executed(shape: Shape, push: bool) -> tuple[Traffic, Counter[str]]:
    """What one rank's compiled kernel does when its peers are there already: as in the closed form, and all counts of
    the first program that multiplies.

    AssertionError if its result is wrong, or if an access races.
    """
    from checks.execute.session import Execution

    from . import fused_gemm

    gemm = fused_gemm.build(shape, "cpu", torch.bfloat16, tile=small_tile())
    memory = torch.empty(0, dtype=torch.uint8).set_(gemm.channel.slots[0].untyped_storage())
    with Execution() as execution:
        for rank, address in enumerate(gemm.channel.data[0].tolist()):
            for parity in (0, 1):
                first = address + parity * gemm.channel.parity_stride - memory.data_ptr()
                execution.memory.add(
                    memory[first:], rank=0 if rank == fused_gemm.RANK else rank + 1
                )  # 0: the own memory
        fused_gemm.check(gemm, push=push, programs=GATED_PROGRAMS)
    assert not execution.log.reports, execution.log.reports
    programs = {
        program: counts
        for (name, _, program), counts in execution.log.counts.items()
        if name == f"{shape.op}_kernel" and counts["flops"]
    }
    # the programs that push are the first ones, and may multiply less
    first = programs[max(programs) if shape.op == GATHER else min(programs)]
    releases = first["release"] + first["fence"]
    if shape.op == ALL_REDUCE:  # whichever multiplies or adds the most
        releases = max(counts["release"] + counts["fence"] for counts in programs.values())
    elif shape.op == SCATTER:  # whichever program completes a row block
        releases = -(-sum(counts["release"] for counts in programs.values()) // len(programs))
    sent = sum(
        size
        for (name, _, _), counts in execution.log.counts.items()
        for what, size in counts.items()
        if name == f"{shape.op}_kernel" and what.startswith("written, rank ") and what != "written, rank 0"
    )
    tile = gemm.tile
    per_tile = 2 * tile.m * tile.n * tile.k * -(-shape.k // tile.k)
    waits = max(counts["acquire"] for counts in programs.values())
    return Traffic(first["flops"] // per_tile, waits, releases, sent), first


def small_tile() -> Tile:
    """The gate's: many programs run in a second."""
    from tpformer.kernels.launch import Tile

    return Tile(16, 16, 16, 2, 2, False)


def gate() -> list[Counter[str]]:
    """What the first programs of the small shapes count. AssertionError unless it is as the closed forms say."""
    from tpformer.kernels.all_gather_matmul import plan

    counted = []
    for small in GATED:
        push = plan.NO_PUSH if small.joins < 0 else plan.Push(GATED_PROGRAMS // 2, small.joins)
        with ExitStack() as stack:
            for name, value in (("IN_FLIGHT", GATED_PIECE), ("plan_push", lambda *_, push=push: push)):
                stack.enter_context(mock.patch.object(plan, name, value))
            if not small.one_shot:
                stack.enter_context(mock.patch.multiple(cost, ONE_SHOT_BYTES=0, ONE_SHOT_ROWS=0))
            found, counts = executed(small.shape, push.pushers > 0)
            sizes = (small.m, GATED_N, GATED_K)
            form = tiled_traffic(small.op, sizes, small.t, ITEMSIZE, small_tile(), GATED_PROGRAMS, push)
        if small.op == GATHER and not push.pushers:
            form = form._replace(sent=0)  # a copy engine sends
        if found[:COUNTED] != form[:COUNTED]:
            raise AssertionError(f"{small}: executed {found}, but the closed form says {form}")
        counted.append(counts)
    return counted


class Line(NamedTuple):
    """A shape, what a machine would launch for it, and the predicted times."""

    shape: Shape
    launch: Launch
    needed: int
    """Bytes that a rank must send."""
    ideal: float
    """Seconds of the GEMM and of these bytes, if the shorter costs nothing."""
    gemm: float
    """Seconds of the GEMM alone."""
    links: float
    fused: float
    sequential: float
    auto: str

    def cells(self) -> list[str]:
        """The row's texts, in the order of NUMBERS."""
        found = self.launch.traffic
        times = (self.gemm, self.links, self.fused, self.fused - self.gemm)
        return [
            f"{self.launch.tile.m}x{self.launch.tile.n}", *map(str, (found.tiles, found.waits, found.releases)),
            *map(str, (found.waits + found.releases, found.units, self.launch.programs)),
            f"{found.in_flight / 1024:g}", f"{found.sent / 2**20:.1f}", f"{found.sent / self.needed:.2f}",
            *(f"{1e6 * each:.0f}" for each in times), f"{self.ideal / self.fused:.3f}",
            f"{1e6 * self.sequential:.0f}", self.auto,
        ]  # fmt: skip


def line_of(shape: Shape, machine: Machine) -> Line:
    """What is predicted of a shape."""
    sizes = (shape.m, shape.n, shape.k)
    with as_if_on(machine) as device:
        launch = chosen_launch(shape.op, sizes, shape.t, torch.bfloat16, device)
    fused, sequential = predict(shape, machine)
    needed = communication_bytes(shape.op, *sizes, shape.t, ITEMSIZE)
    if shape.op == ALL_REDUCE and is_one_shot(shape.m, shape.n, ITEMSIZE):
        needed = (shape.t - 1) * shape.m * shape.n * ITEMSIZE
    gemm = gemm_seconds(*sizes, ITEMSIZE, machine)
    auto = "fused" if fused.seconds <= sequential.seconds else "sequential"
    ideal = max(gemm, needed / machine.link)
    return Line(shape, launch, needed, ideal, gemm, fused.links, fused.device, sequential.device, auto)


def run(options: argparse.Namespace) -> Report:
    """The counts of every shape, and its predicted times."""
    machine = machine_for(DEFAULT_MACHINE)
    assert machine is not None
    found = [line_of(shape, machine) for op in (GATHER, SCATTER, ALL_REDUCE) for shape in every_shape(op)]
    table = columns(("operation", "t", "shape"), NUMBERS)
    for line in found:
        table.add_row(line.shape.op, str(line.shape.t), str(line.shape), *line.cells())
    rows: list[Row] = []
    for line in found:
        if line.shape.t == RANKS:
            label = f"prediction: {line.shape.op}, {RANKS} {machine.name}"
            rows += compared(label, line.shape, {FUSED: [line.fused], IDEAL: [line.ideal]}, [(FUSED, IDEAL)])
    report = ratios(lambda quick: rows)(argparse.Namespace(quick=False))
    counted = gate()
    executions = columns(("executed",), (small.name for small in GATED))
    for kind in sorted({kind for counts in counted for kind in counts}):
        executions.add_row(kind, *(str(counts[kind]) for counts in counted))
    content = {
        **report.content,
        "counts": {
            "columns": ["operation", "t", "shape", *NUMBERS],
            "lines": [[line.shape.op, line.shape.t, str(line.shape), *line.cells()] for line in found],
        },
        "executed": {small.name: dict(counts) for small, counts in zip(GATED, counted, strict=True)},
    }
    outcome = f"{len(GATED)} kernels were executed, and count as the closed forms of these {len(found)} shapes do"
    return report._replace(tables=[table, executions], content=content, outcome=outcome)


BENCH = Bench(
    name="protocol",
    description="flags of the fused GEMMs: counts checked on executed kernels, and predicted times on 8 GPUs",
    options={},
    obstacle=unavailable,
    run=run,
    draw=draw_ratios,
    note=NOTE,
)
