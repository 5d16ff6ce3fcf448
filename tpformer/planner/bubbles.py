"""Theory of a pipeline schedule's bubble: closed forms where they exist, and a simulation of its order.

Belongs here: what follows from a schedule's name, its sizes and durations. Measured timelines are in timeline.py.

There are p ranks, m microbatches and v stages per rank. F, B, I and W are the times of one microbatch on one stage:
forward, full backward, input gradients and weight gradients (B = I + W). A rank without a bubble takes m v (F + B).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining.schedules import get_schedule_class

from tpformer.parallel import SCHEDULES, Action


class Step(NamedTuple):
    """What a stage computes for one microbatch. kind: F, B, I or W."""

    stage: int
    kind: str
    microbatch: int


Order = list[list[tuple[Step, ...]]]
"""Each rank's groups of steps in order of execution. torch sends a group's results together, after its last step."""

Seconds = Callable[[Step], float]

RATIOS = {
    "naive": "(p-1)/m",
    "GPipe": "(p-1)/m",
    "1F1B": "(p-1)/m",
    "LoopedBFS": "(p-1)/(v m)",
    "Interleaved1F1B": "(p-1)/(v m)",
    "InterleavedZeroBubble": "(p-1)/(3 v m)",
    "ZBVZeroBubble": "(p-1)/(6 m)",
    "DualPipeV": "(p-1)/(3 m)",
}
"""Idle time of a rank / its computing time, for equal stages. The last three hold only for F = I = W."""


def bubble_time(schedule: str, ranks: int, n_microbatches: int, seconds: Mapping[str, float]) -> float | None:
    """How long a rank idles between the first start and the last end on any rank, as a mean over the ranks.

    seconds: the times of F, I and W, by name, equal on all stages; communication takes no time. The closed forms:

        (p-1)(F+B)      naive, GPipe, 1F1B, and Interleaved1F1B, whose stages are v times smaller (arXiv:2104.04473,
                        section 2.2); LoopedBFS (arXiv:2211.05953)
        (p-1)(F+I-W)    InterleavedZeroBubble: ZB-H1 of arXiv:2401.10241, section 2.3
        (p-1)F          ZBVZeroBubble: the time until the first microbatch is on rank p-1; after that there is no bubble
                        (arXiv:2401.10241, section 6)
        (p-1)(F+2B-3W)  DualPipeV: arXiv:2412.19437, table 2, on half as many ranks; torch runs F and B in turn

    None where the form does not hold: for fewer microbatches than ranks; for InterleavedZeroBubble if W is larger than
    F or I; for ZBVZeroBubble and DualPipeV unless F = I = W, or with fewer than 2p-1 and 2p microbatches.
    """
    F, I, W = (seconds[kind] for kind in "FIW")
    if schedule != "naive" and n_microbatches < ranks:
        return None
    if schedule == "InterleavedZeroBubble":
        return (ranks - 1) * (F + I - W) if min(F, I) >= W else None
    if schedule == "ZBVZeroBubble":
        return (ranks - 1) * F if F == I == W and n_microbatches >= 2 * ranks - 1 else None
    if schedule == "DualPipeV":
        return (ranks - 1) * (F + 2 * I - W) if F == I == W and n_microbatches >= 2 * ranks else None
    return (ranks - 1) * (F + I + W)


def bubble_ratio(schedule: str, ranks: int, n_microbatches: int, stages_per_rank: int) -> float | None:
    """The value of the formula in RATIOS: bubble_time / (m v (F+B)) with F = I = W. None where it does not hold."""
    idle = bubble_time(schedule, ranks, n_microbatches, dict.fromkeys("FIW", 1))
    return None if idle is None else idle / (3 * stages_per_rank * n_microbatches)


class _ComputeOnly:
    """Goes before a schedule class of torch, and leaves out the messages that the class adds to its order: nobody here
    reads them, and with 64 ranks they take longer than all else. If torch renames its method, they are made again."""

    def _prepare_schedule_with_comms(self, actions: Any, format: str = "compute_only") -> None:
        pass


def schedule_order(schedule: str, ranks: int, n_microbatches: int, stages_per_rank: int) -> Order:
    """What every rank computes, in the order of torch.distributed.pipelining's schedule, which may raise ValueError."""
    if schedule in ("naive", "GPipe", "1F1B"):  # torch's own list of 1F1B begins at microbatch 1 on the last rank
        ahead = [min(n_microbatches, ranks - rank if schedule == "1F1B" else n_microbatches) for rank in range(ranks)]
        return [_one_stage(rank, n_microbatches, n) for rank, n in enumerate(ahead)]
    stage = dict(num_stages=ranks * stages_per_rank, group_size=ranks, group_rank=0, submod=None)
    stages = [SimpleNamespace(**stage) for _ in range(stages_per_rank)]  # a schedule reads nothing else of them
    kind = get_schedule_class(SCHEDULES[schedule].torch_name)
    order = type(kind.__name__, (_ComputeOnly, kind), {})(stages, n_microbatches).pipeline_order
    return [
        [
            tuple(Step(a.stage_index, a.computation_type.value, a.microbatch_index) for a in (e.sub_actions or (e,)))
            for e in order[rank]
            if e is not None
        ]
        for rank in range(ranks)
    ]


def _one_stage(stage: int, n_microbatches: int, ahead: int) -> list[tuple[Step, ...]]:
    """`ahead` forwards, then a backward and a forward in turn."""
    forwards = [Step(stage, "F", index) for index in range(n_microbatches)]
    steps = forwards[:ahead]
    for index in range(n_microbatches):
        steps += [Step(stage, "B", index), *forwards[ahead + index : ahead + index + 1]]
    return [(step,) for step in steps]


def simulate(order: Order, seconds: Seconds, message: float = 0) -> list[Action]:
    """The timeline of an order. A step starts when its rank and its input are ready; the first one starts at 0.

    message: seconds that a result is under way to another rank, while both compute.
    ValueError for an order in which every rank waits for another.
    """
    rank_of = {step.stage: rank for rank, steps in enumerate(order) for together in steps for step in together}
    last = max(rank_of)
    here: dict[Step, float] = {}  # when a step's result can be read on its own rank
    sent: dict[Step, float] = {}  # when it can be read on other ranks
    waiting = [deque(steps) for steps in order]
    clock: list[float] = [0] * len(order)
    actions: list[Action] = []

    def ready(step: Step, rank: int) -> float | None:
        stage, kind, microbatch = step
        if kind == "F" and stage == 0:
            return 0
        source = {
            "F": Step(stage - 1, "F", microbatch),
            "W": Step(stage, "I", microbatch),
        }.get(kind, Step(stage + 1, "I", microbatch) if stage < last else Step(stage, "F", microbatch))
        return (here if rank_of[source.stage] == rank else sent).get(source)

    def run(rank: int) -> bool:
        """Run the rank's next group of steps. False if what one of them reads does not exist yet."""
        time, made = clock[rank], []
        for step in waiting[rank][0]:
            start = ready(step, rank)
            if start is None:
                return False
            start = max(time, start)
            time = start + seconds(step)
            made.append(Action(rank, step.stage, step.microbatch, step.kind, start, time))
            here[step._replace(kind="I") if step.kind == "B" else step] = time
        sent.update({Step(a.stage, "I" if a.kind == "B" else a.kind, a.microbatch): time + message for a in made})
        clock[rank] = time
        actions.extend(made)
        waiting[rank].popleft()
        return True

    while any(waiting):
        progress = [run(rank) for rank, steps in enumerate(waiting) if steps]
        if not any(progress):
            raise ValueError(f"every rank waits for another: next are {[steps[0] for steps in waiting if steps]}")
    return actions
