"""How long do a release, a poll, the host's part of a call, and a copy beside a GEMM take on this GPU?

Belongs here: the constants of kernels/cost.py that one GPU can say something about. Its own memory stands in for a
link, so what is measured of flags is a lower bound.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from harness.ratios import Row, compared, ratio_bench
from harness.timing import FULL, QUICK, Call, Effort, copying, measure
from tpformer.kernels.cost import HOST_SECONDS, POLL_SECONDS, RELEASE_SECONDS
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER

from .shapes import Shape

DEVICE, DTYPE = "cuda", torch.bfloat16
MEASURED, ASSUMED = "measured", "kernels/cost.py"
TURNS = 300  # stores and releases of one launch
LEAST = 1e-9  # seconds: what a difference of two times is at least taken for
STORED = (0, 4096, 32768)  # bytes before each release
PROGRAMS = (1, 18, 132)
POLLS = 100_000
CALLS = 80  # of the host in a row: fewer than a stream takes before the host has to wait
MOVED = (1, 16, 64)  # MiB copied beside GEMMs
SIDE = 8192  # of those


def against(case: str, shape: str, seconds: float, assumed: float) -> Row:
    """One constant beside what the model has for it."""
    return compared(case, shape, {MEASURED: [seconds], ASSUMED: [assumed]}, [(MEASURED, ASSUMED)])[0]


def release_rows(effort: Effort) -> list[Row]:
    """A turn of storing and releasing, less one of storing, at system and at GPU scope."""
    from .release import FENCES, release

    place = torch.empty(PROGRAMS[-1] * STORED[-1] // DTYPE.itemsize, device=DEVICE, dtype=DTYPE)
    flags = torch.zeros(PROGRAMS[-1], 32, device=DEVICE, dtype=torch.int32)
    found = []
    for nbytes in STORED:
        for programs in PROGRAMS:
            launch = partial(release, place, flags, TURNS, nbytes, programs)
            seconds = measure({fence: Call(partial(launch, fence)) for fence in FENCES}, effort)
            bare, *fenced = (median(seconds[fence]) / TURNS for fence in FENCES)
            for scope, turn in zip(FENCES[1:], fenced, strict=True):
                what = f"{nbytes} bytes, {programs} programs"
                found.append(against(f"release, {scope}", what, max(turn - bare, LEAST), RELEASE_SECONDS))
    return found


def poll_row(effort: Effort) -> Row:
    from tpformer.kernels.protocol import poll_in_vain

    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    seconds = measure({MEASURED: Call(partial(poll_in_vain, flag, POLLS))}, effort)[MEASURED]
    return against("poll", "its own memory", median(seconds) / POLLS, POLL_SECONDS)


def host_seconds(call: Callable[[], object], rounds: int) -> float:
    """What the host takes for a call, without a wait for the GPU."""
    found = []
    for _ in range(rounds + 1):  # the first one compiles, and plans
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - begun) / CALLS)
        torch.cuda.synchronize()
    return median(found[1:])


def host_rows(rounds: int) -> list[Row]:
    """The host's part of small calls."""
    from tpformer.kernels.matmul.kernel import matmul
    from tpformer.kernels.protocol import bump

    from . import fused_gemm

    a, w = (torch.randn(256, 256, device=DEVICE, dtype=DTYPE) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {"torch.matmul": partial(torch.matmul, a, w)}
    calls["matmul"] = lambda: matmul(a, [w])
    for op in (GATHER, SCATTER, ALL_REDUCE):
        gemm = fused_gemm.build(Shape("small", "any", op, 256, 256, 256, 8), DEVICE, DTYPE)
        calls[f"{op} with bump"] = lambda gemm=gemm: (bump(gemm.channel), fused_gemm.launch(gemm))
    fused, other = HOST_SECONDS["fused"], HOST_SECONDS["sequential"]
    return [
        against("host, a call", name, host_seconds(call, rounds), fused if "bump" in name else other)
        for name, call in calls.items()
    ]


def copy_rows(rounds: int) -> list[Row]:
    """Copies on a stream of their own, alone and beside GEMMs; and those GEMMs, alone and beside copies."""
    a, b = (torch.randn(SIDE, SIDE, device=DEVICE, dtype=DTYPE) for _ in range(2))
    here, side, count = torch.cuda.current_stream(), torch.cuda.Stream(), 10
    gemm, found = partial(torch.matmul, a, b), []
    gemm()
    for size in MOVED:
        works = {"copy": (copying(size << 20, DEVICE), side), "GEMM": (gemm, here)}
        alone = {name: [together({name: work}, count)[name] for _ in range(rounds)] for name, work in works.items()}
        both = [together(works, count) for _ in range(rounds)]
        for name in works:
            seconds = {"beside": [each[name] for each in both], "alone": alone[name]}
            found += compared(f"{name} beside the other", f"{size} MiB", seconds, [("beside", "alone")])
    return found


def together(works: dict[str, tuple[Callable[[], object], torch.cuda.Stream]], count: int) -> dict[str, float]:
    """Seconds of one call of each, so many in a row on their streams, which begin at one time."""
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)
    ready, events = torch.cuda.Event(), {}
    ready.record()
    for name, (call, stream) in works.items():
        events[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            events[name][0].record(stream)
            for _ in range(count):
                call()
            events[name][1].record(stream)
    torch.cuda.synchronize()
    return {name: begin.elapsed_time(end) * 1e-3 / count for name, (begin, end) in events.items()}


def rows(quick: bool) -> list[Row]:
    effort = QUICK if quick else FULL
    return [*release_rows(effort), poll_row(effort), *host_rows(effort.rounds), *copy_rows(effort.rounds)]


BENCH = ratio_bench(
    rows,
    name="constants",
    description="seconds of releases, polls, the host's part of calls, copies beside GEMMs; the model's beside (1 GPU)",
    device="cuda",
    note="A release: a turn of stores, a barrier and a release, less one of stores and a barrier alone. All is in the "
    "GPU's own memory, a lower bound for a link. The host's part of sequential calls has a collective in the model.",
)
