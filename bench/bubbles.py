"""`python -m bench bubbles`: the bubble of executed pipeline schedules beside theory, on four CPU processes.

Belongs here: stages that take a given time, the steps that are recorded, the rows, what must hold, the result files.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.bars import Bar, write_bars
from harness.ranks import Calls, Ranks
from harness.runner import Bench, Report, columns
from tpformer.distributed import build_mesh
from tpformer.layers import ColumnParallelLinear
from tpformer.ops import active_queue
from tpformer.parallel import SCHEDULES, Action, Layout, Pipeline
from tpformer.planner import (
    RATIOS,
    bubble_lines,
    bubble_ratio,
    bubble_share,
    schedule_order,
    simulate,
    write_svg,
    write_trace,
)

RANKS, HIDDEN = 4, 8
NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
MICROBATCHES = (4, 8, 16)
DRAWN = 8  # the number of microbatches of the timelines that are drawn
SHORTEST, QUICK = 0.1, 0.01  # seconds that forward, input gradients and weight gradients take each, on each stage
LENGTHENED = 0.015  # those seconds times the share: a quarter millisecond that runs besides is then 2 % of the bubble
BUDGET = 180.0  # seconds in which cases that missed the bar are repeated
BAR = 0.05  # how far the measured share may be from theory's, as a part of the latter
NOTE = (
    "share: idle part of all ranks' time from the first start to the last end. simulated: the schedule's order with "
    "F = I = W, communication free; this is what the bar is about. formula: closed form, B = 2F = 2I = 2W; "
    "ZBVZeroBubble's needs m >= 2p-1 (torch drops the surplus microbatches of its schedule for 2p-1, which leaves "
    "holes), and its paper calls this bubble zero: it counts each rank from its own first start to its own last end. "
    "Steps that miss the bar are repeated, as the machine may have been busy, and the fastest counts."
)


Row = dict[str, Any]


class _Sleep(torch.autograd.Function):
    """The identity, which takes a stage's time: the weight gradient's in the queue, where the forward had one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.queue = seconds, active_queue()
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        weight = partial(time.sleep, ctx.seconds)
        if ctx.queue is None:
            weight()
        else:
            ctx.queue.add(weight)
        return grads[0], None


class SleepingStage(nn.Module):
    """A tiny linear whose forward, input gradients and weight gradients take `seconds` each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = ColumnParallelLinear(HIDDEN, HIDDEN)
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(self.linear(x), self.seconds)


def build(schedule: str, n_microbatches: int, seconds: float, mesh: DeviceMesh) -> Callable[[], list[Action]]:
    """A call that runs one training step and returns this rank's actions; its connections are already open.

    One sample of HIDDEN numbers in a microbatch, so what is sent takes no time of note.
    """
    layout = Layout(pipeline_parallel=mesh["pp"].size(), pipeline_schedule=schedule)
    parts = [SleepingStage() for _ in range(layout.stages_per_rank)]
    pipeline = Pipeline(
        parts,
        layout,
        mesh,
        n_microbatches=n_microbatches,
        boundaries=[torch.empty(1, HIDDEN, device="meta") for _ in range(layout.n_stages + 1)],
        loss_fn=lambda result, target: (result - target).square().sum(),
        device=torch.device("cpu"),
    )
    x = torch.randn(n_microbatches, HIDDEN)
    pipeline.step(x, x)
    for part in parts:
        part.seconds = seconds

    def step() -> list[Action]:
        dist.barrier()
        with pipeline.recording() as actions:
            pipeline.step(x, x)
        return actions

    return step


class ScheduleCase(NamedTuple):
    """What is run. seconds: of F, I and W each."""

    schedule: str
    n_microbatches: int
    seconds: float


def setup(cases: Sequence[ScheduleCase]) -> Calls:
    """A rank's calls: one step of each case, by its schedule and number of microbatches."""
    mesh = build_mesh("cpu", tensor_parallel=1, pipeline_parallel=dist.get_world_size())
    return {f"{case.schedule} {case.n_microbatches}": build(*case, mesh) for case in cases}


def simulated_share(schedule: str, n_microbatches: int) -> float:
    """Theory: F = I = W on every stage, communication free."""
    order = schedule_order(schedule, RANKS, n_microbatches, SCHEDULES[schedule].stages_per_rank)
    return bubble_share(simulate(order, lambda step: 2 if step.kind == "B" else 1), RANKS)


def require_order(schedule: str, n_microbatches: int, actions: Sequence[Action]) -> None:
    """ValueError unless these are all actions of the schedule, on every rank in its order."""
    bubble_lines(actions, schedule, n_microbatches)
    order = schedule_order(schedule, RANKS, n_microbatches, SCHEDULES[schedule].stages_per_rank)
    for rank, groups in enumerate(order):
        ran = [action[1:4] for action in sorted(actions, key=lambda a: a.start) if action.rank == rank]
        meant = [(step.stage, step.microbatch, step.kind) for step in itertools.chain(*groups)]
        if [each for each in ran if each[2] != "R"] != meant:
            raise ValueError(f"{schedule}: rank {rank} ran {ran}, and the order that is simulated is {meant}")


def span(actions: Sequence[Action]) -> float:
    """Seconds from the first start to the last end."""
    return max(action.end for action in actions) - min(action.start for action in actions)


def make_row(case: ScheduleCase, steps: int, actions: Sequence[Action]) -> Row:
    """The row of the recorded step that counts; ValueError as require_order.

    steps: recorded in all; formula_share: None where the closed form does not hold; relative: measured / simulated - 1.
    """
    name, n, seconds = case
    require_order(name, n, actions)
    stages = SCHEDULES[name].stages_per_rank
    simulated, measured = simulated_share(name, n), bubble_share(actions, RANKS)
    ratio, relative = bubble_ratio(name, RANKS, n, stages), measured / simulated - 1
    return {
        "schedule": name,
        "ranks": RANKS,
        "microbatches": n,
        "stages_per_rank": stages,
        "seconds": round(seconds, 4),
        "steps": steps,
        "span": round(span(actions), 4),
        "measured_share": round(measured, 5),
        "simulated_share": round(simulated, 5),
        "formula": RATIOS[name],
        "formula_share": None if ratio is None else round(ratio / (1 + ratio), 5),
        "difference": round(measured - simulated, 5),
        "relative": round(relative, 5),
        "ok": abs(relative) <= BAR,
    }


def measure(ranks: Ranks, cases: Sequence[ScheduleCase], budget: float) -> dict[ScheduleCase, tuple[Row, list[Action]]]:
    """The fastest step of each case and its row: one round of all, then more of those that missed, until the budget."""
    steps: dict[ScheduleCase, list[list[Action]]] = {case: [] for case in cases}
    found: dict[ScheduleCase, tuple[Row, list[Action]]] = {}
    end = time.monotonic() + budget
    missed = list(cases)
    while missed and (not found or time.monotonic() < end):
        for case in missed:
            steps[case].append(list(itertools.chain(*ranks.call(f"{case.schedule} {case.n_microbatches}"))))
            best = min(steps[case], key=span)
            found[case] = make_row(case, len(steps[case]), best), best
        missed = [case for case in missed if not found[case][0]["ok"]]
    return found


def result_table(rows: Sequence[Row]) -> Table:
    """A line for each case."""
    names = "p,m,v,F=I=W,step,measured,simulated,formula,bubble/compute,difference,relative,ok".split(",")
    table = columns(["schedule"], names)
    for row in rows:
        share = row["formula_share"]
        table.add_row(
            *(row["schedule"], str(row["ranks"]), str(row["microbatches"]), str(row["stages_per_rank"])),
            *(f"{row['seconds'] * 1e3:.0f} ms", f"{row['span']:.2f} s"),
            *(f"{row['measured_share']:.2%}", f"{row['simulated_share']:.2%}"),
            "" if share is None else f"{share:.2%}",
            row["formula"] if share is None else f"{row['formula']} = {share / (1 - share):.3f}",
            *(f"{row['difference']:+.2%}", f"{row['relative']:+.1%}", "yes" if row["ok"] else "NO"),
        )
    return table


def draw(path: Path) -> Path:
    """A bar for each measured share, and a line where theory has it."""
    note = (
        f"Share of the time in which {RANKS} pipeline ranks are idle, by number of microbatches. Bars: measured. Red "
        "lines: the schedule's order, simulated with communication free."
    )
    bars = [
        Bar(
            row["schedule"],
            f"{row['microbatches']} microbatches",
            {"idle": 100 * row["measured_share"]},
            f"{row['measured_share']:.1%}",
            mark=100 * row["simulated_share"],
        )
        for row in json.loads(path.read_text())["rows"]
    ]
    return write_bars(path, note, "% of the time from the first start to the last end", bars)


def write_timelines(recorded: Mapping[ScheduleCase, Sequence[Action]], directory: Path) -> None:
    """Write pipeline_<schedule>.svg, and .json for Perfetto, into an existing directory."""
    for (schedule, n, seconds), actions in recorded.items():
        path = directory / f"pipeline_{schedule}.svg"
        title = f"{schedule}: {RANKS} ranks, {n} microbatches, F = I = W = {seconds * 1e3:.0f} ms"
        write_svg(actions, path, title, bubble_lines(actions, schedule, n))
        write_trace(actions, path.with_suffix(".json"))


def run(options: argparse.Namespace) -> Report:
    """Run every case, and require each bubble to be what theory says."""
    quick = options.quick
    cases = [
        ScheduleCase(name, n, QUICK if quick else max(SHORTEST, LENGTHENED / simulated_share(name, n)))
        for name, n in itertools.product(NAMES, MICROBATCHES[:1] if quick else MICROBATCHES)
    ]
    with Ranks(RANKS, 1, setup, cases) as ranks:
        found = measure(ranks, cases, 0 if quick else BUDGET)
    rows = [row for row, _ in found.values()]
    drawn = {case: actions for case, (_, actions) in found.items() if case.n_microbatches == DRAWN}
    files = partial(write_timelines, drawn)
    if quick:
        return Report([result_table(rows)], {}, [], "short sleeps: no share is required")
    missed = [f"{row['schedule']} m={row['microbatches']}: {row['relative']:+.1%}" for row in rows if not row["ok"]]
    problems = [f"{len(missed)} of {len(rows)} bars missed: {'; '.join(missed)}"] if missed else []
    outcome = f"all {len(rows)} shares are within {BAR:.0%} of theory"
    return Report([result_table(rows)], {"bar": BAR, "rows": rows}, problems, outcome, files)


BENCH = Bench(
    name="bubbles",
    description="idle share of executed pipeline schedules beside theory, and their timelines; on 4 CPU processes",
    options={"--quick": {"action": "store_true", "help": "short sleeps, few microbatches, nothing written"}},
    run=run,
    draw=draw,
    note=NOTE,
)
