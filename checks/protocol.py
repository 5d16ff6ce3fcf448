"""How often do the programs of a fused GEMM wait and publish, what do they send, and how long do their flags take?

Belongs here: the shapes of the benches, and the gate, which compares the closed forms (ops/transports/exchange.py)
with what compiled kernels do when the executor runs a small group.
"""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import torch

from bench.predict import ITEMSIZE, predict, present_machine
from bench.ratios import Row, compared, draw_ratios, ratios
from bench.runner import Bench, Report, columns
from bench.shapes import Shape, operation_shapes
from checks.compile.compiler import unavailable
from tpformer.kernels.cost import ONE_SHOT_BYTES, gemm_seconds
from tpformer.ops.transports import exchange
from tpformer.ops.transports.exchange import Exchange, shipped_exchange, tiled_exchange
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER

if TYPE_CHECKING:
    from tpformer.kernels.launch import Tile

BARE, TOGETHER = "GEMM alone", "fused, with its flags"
GATED_N, GATED_K, GATED_PROGRAMS = 35, 40, 3
NOTE = (
    "Predictions: no GPU has run them. waits, releases: flags that the program with the most to do acquires and sets, "
    "one after another. sent: what a rank stores into its peers' memory. flags: waits and releases by the times in "
    "ops/transports/exchange.py. exposed: kernels/cost.py's time of the fused operation and its flags, less the "
    "GEMM's. The counts are exact: before the table is made, the compiled kernels are executed on small shapes, and "
    "must count the same (of a reduce-scatter's releases, the mean). executed: the first of their programs that "
    "multiplies; bytes of memory by its rank, 0 for the own; chain: atomics of system scope one after another."
)


class Small(NamedTuple):
    """A small shape of the gate, with partial tiles in each direction."""

    name: str
    op: str
    m: int
    t: int
    push: bool = False
    """Whether programs send the shards of a gather; otherwise copies do."""
    one_shot_bytes: int = 0

    @property
    def shape(self) -> Shape:
        """With what all of them share."""
        return Shape(self.name, "small", self.op, self.m, GATED_N, GATED_K, self.t)


GATED = (
    Small("gather", GATHER, 69, 3, push=True),
    Small("gather, copies", GATHER, 46, 2),
    Small("scatter", SCATTER, 69, 3),
    Small("all-reduce, one shot", ALL_REDUCE, 41, 3, one_shot_bytes=ONE_SHOT_BYTES),
    Small("all-reduce, two shots", ALL_REDUCE, 41, 3),
)


class Processor(NamedTuple):
    """What launchers ask of an H200."""

    multi_processor_count: int = 132
    shared_memory_per_multiprocessor: int = 228 * 1024


def on_machine(shape: Shape) -> tuple[Tile, Exchange]:
    """The tile that an H200 would have, and the closed form with its programs."""
    with ExitStack() as stack:
        for name, value in (("capability", (9, 0)), ("properties", Processor())):
            stack.enter_context(mock.patch.object(torch.cuda, f"get_device_{name}", lambda _, value=value: value))
        sizes = (shape.m, shape.n, shape.k)
        return shipped_exchange(shape.op, sizes, shape.t, torch.bfloat16, torch.device("cuda"))


def executed(shape: Shape, push: bool) -> tuple[Exchange, Counter[str]]:
    """What one rank's compiled kernel does when its peers are there already: as in the closed form, and all counts of
    the first program that multiplies.

    AssertionError if its result is wrong, or if an access races.
    """
    from bench import fused_gemm
    from checks.execute.session import Execution

    gemm = fused_gemm.build(shape, "cpu", torch.bfloat16, tile=small_tile())
    memory = torch.empty(0, dtype=torch.uint8).set_(gemm.channel.slots[0].untyped_storage())
    with Execution() as execution:
        for rank, address in enumerate(gemm.channel.data[0].tolist()):
            for parity in (0, 1):
                first = address + parity * gemm.channel.parity_stride - memory.data_ptr()
                execution.share(memory[first:], rank=0 if rank == fused_gemm.RANK else rank + 1)  # 0: the own memory
        fused_gemm.check(gemm, push=push, programs=GATED_PROGRAMS)
    assert not execution.log.reports, execution.log.reports
    programs = {
        program: counts
        for (name, _, program), counts in execution.log.counts.items()
        if name == f"{shape.op}_kernel" and counts["flops"]
    }
    first = programs[min(programs)]
    releases = first["release"]
    if shape.op == SCATTER:  # whichever program completes a row block
        releases = -(-sum(counts["release"] for counts in programs.values()) // len(programs))
    sent = sum(
        size
        for (name, _, _), counts in execution.log.counts.items()
        for what, size in counts.items()
        if name == f"{shape.op}_kernel" and what.startswith("written, rank ") and what != "written, rank 0"
    )
    tile = gemm.tile
    per_tile = 2 * tile.m * tile.n * tile.k * -(-shape.k // tile.k)
    return Exchange(first["flops"] // per_tile, first["acquire"], releases, sent), first


def small_tile() -> Tile:
    """The gate's: many programs run in a second."""
    from tpformer.kernels.launch import Tile

    return Tile(16, 16, 16, 2, 2, False)


def gate() -> list[Counter[str]]:
    """What the first programs of the small shapes count. AssertionError unless it is as the closed forms say."""
    from tpformer.kernels.all_gather_matmul.kernel import PUSHERS
    from tpformer.kernels.matmul_all_reduce import kernel

    counted = []
    for small in GATED:
        with ExitStack() as stack:
            for module in (kernel, exchange):
                stack.enter_context(mock.patch.object(module, "ONE_SHOT_BYTES", small.one_shot_bytes))
            found, counts = executed(small.shape, small.push)
            sizes, signals = (small.m, GATED_N, GATED_K), PUSHERS if small.push else 1
            form = tiled_exchange(small.op, sizes, small.t, ITEMSIZE, small_tile(), GATED_PROGRAMS, signals)
        if small.op == GATHER and not small.push:
            form = form._replace(sent=0)  # a copy engine sends
        if found != form:
            raise AssertionError(f"{small}: executed {found}, but the closed form says {form}")
        counted.append(counts)
    return counted


def rows_of(shape: Shape) -> tuple[list[str], list[Row]]:
    """The cells of the table, and the predicted times."""
    tile, found = on_machine(shape)
    machine = present_machine()
    bare = gemm_seconds(shape.m, shape.n, shape.k, ITEMSIZE, machine)
    fused = predict(shape, machine).fused
    seconds = {TOGETHER: [fused + found.seconds], BARE: [bare]}
    exposed = fused + found.seconds - bare
    cells = [
        f"{tile.m}x{tile.n}", *map(str, (found.tiles, found.waits, found.releases)),
        f"{found.sent / 2**20:.1f}", *(f"{1e6 * each:.0f}" for each in (found.seconds, exposed, bare)),
    ]  # fmt: skip
    label = f"prediction: {shape.op}, {shape.t} {machine.name}"
    return [shape.op, str(shape), *cells], compared(label, shape, seconds, [(TOGETHER, BARE)])


def run(options: argparse.Namespace) -> Report:
    """The counts of every shape of the fused benches, and their predicted times."""
    numbers = ("tile", "tiles", "waits", "releases", "sent, MiB", "flags, us", "exposed, us", "GEMM, us")
    table, found, lines = columns(("operation", "shape"), numbers), [], []
    for op in (GATHER, SCATTER, ALL_REDUCE):
        for shape in operation_shapes(op):
            cells, rows = rows_of(shape)
            table.add_row(*cells)
            lines.append(cells)
            found += rows
    report = ratios(lambda quick: found)(argparse.Namespace(quick=False))
    counted = gate()
    executions = columns(("executed",), (small.name for small in GATED))
    for kind in sorted({kind for counts in counted for kind in counts}):
        executions.add_row(kind, *(str(counts[kind]) for counts in counted))
    content = {
        **report.content,
        "counts": [dict(zip(("operation", "shape", *numbers), row, strict=True)) for row in lines],
        "executed": {small.name: dict(counts) for small, counts in zip(GATED, counted, strict=True)},
    }
    outcome = f"{len(GATED)} kernels were executed, and count as the closed forms of these {len(lines)} shapes do"
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
