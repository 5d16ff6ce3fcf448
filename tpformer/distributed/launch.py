"""Starting the ranks of a run on this machine, ending them together, and starting them again after a failure."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .watchdog import HANG_EXIT_CODE

POLL_SECONDS = 0.05
USAGE_EXIT_CODE = 2  # what only the user can mend (a value, a missing file): starting again would not help


def launched() -> bool:
    """Whether this process already is a rank: torchrun, SLURM with torchrun's variables, or run_ranks started it."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_local_ranks(world_size: int, device: str | None) -> None:
    """ValueError for more ranks than this machine should start: one for each GPU; four a core, at least 16.

    device: cpu or cuda; None for cuda where there is one.
    """
    import torch

    cuda = device == "cuda" or (device is None and torch.cuda.is_available())
    cores = os.cpu_count() or 1
    most = torch.cuda.device_count() if cuda else max(16, 4 * cores)
    if world_size > most:
        here = f"{most} GPUs" if cuda else f"{cores} CPU cores"
        raise ValueError(
            f"the layout has {world_size} ranks, which this command would all start on this machine of {here}: start "
            f"it on several with torchrun or SLURM (examples/README.md), shrink the layout, or look at it with "
            f"`tpformer dry-run`"
        )


def record_exception(error: BaseException) -> None:
    """Leave the exception for the launcher, in the file that torchrun and run_ranks name by TORCHELASTIC_ERROR_FILE.

    To be called before the process exits: peers fail only once its connections are closed, so the oldest file of a job
    is the first failure's. Without a launcher it does nothing.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with contextlib.suppress(OSError):  # the launcher is gone, and its directory with it
        get_error_handler().record_exception(error)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _error_file(directory: str, rank: int) -> Path:
    return Path(directory, f"rank-{rank}.json")


def _start(command: Sequence[str], world_size: int, errors: str, processes: list[subprocess.Popen]) -> None:
    shared = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    for rank in range(world_size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(_error_file(errors, rank))}
        processes.append(subprocess.Popen(command, env={**shared, **own}))


def _order(code: int, error_file: Path) -> tuple[int, int]:
    """Sorts failures: the cause first. A rank whose peer is gone raises too, or its native threads abort."""
    if code in (USAGE_EXIT_CODE, HANG_EXIT_CODE) or (code < 0 and code != -signal.SIGABRT):
        return 0, 0
    return (1, error_file.stat().st_mtime_ns) if error_file.exists() else (2, 0)


def _describe(code: int, error_file: Path) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == HANG_EXIT_CODE:
        return "ended the job because a rank hangs (its report is above)"
    try:
        message = json.loads(error_file.read_text())["message"]["message"].splitlines()[0]
    except (OSError, ValueError, LookupError):  # not every program leaves one, and a kill can cut it short
        return f"failed with exit code {code}"
    return f"failed with exit code {code} ({message})"


def _run_once(command: Sequence[str], world_size: int, processes: list[subprocess.Popen]) -> int:
    """One attempt: 0, or the code of the rank that failed first (negative: a signal), which stderr then names."""
    with tempfile.TemporaryDirectory(prefix="tpformer-ranks-") as errors:
        try:
            _start(command, world_size, errors, processes)
            while not any(codes := [process.poll() for process in processes]) and None in codes:
                time.sleep(POLL_SECONDS)
            # asked once more: the rank that died first may have been asked just before it died
            failed = [(rank, code) for rank, process in enumerate(processes) if (code := process.poll())]
            for process in processes:
                process.kill()
            failed.sort(key=lambda each: _order(each[1], _error_file(errors, each[0])))
            for index, (rank, code) in enumerate(failed):
                what = f"rank {rank} of {world_size} {_describe(code, _error_file(errors, rank))}"
                print(f"then {what}" if index else f"{what}; all ranks were stopped", file=sys.stderr, flush=True)
            return failed[0][1] if failed else 0
        finally:
            for process in processes:
                process.kill()
                process.wait()
            processes.clear()


def run_ranks(
    command: Sequence[str], world_size: int, *, max_restarts: int = 0, restart_arguments: Sequence[str] = ()
) -> int:
    """Run `command` once per rank, with torchrun's environment; returns 0, or the exit code of the first to fail.

    SIGTERM and SIGINT are passed on, so that ranks can finish in order; a second one kills them. When a rank fails the
    others are killed at once (they would wait for it), and stderr names it, with the message that it left by
    `record_exception`. Then all ranks are started again, at most max_restarts times, with restart_arguments appended:
    those that make the command continue where it was. Exit code 2 (a user's mistake) and a failure after SIGTERM or
    SIGINT end the job at once.
    """
    processes: list[subprocess.Popen] = []
    received: list[int] = []

    def forward(number: int, _) -> None:
        received.append(number)
        for process in processes:
            process.send_signal(number if len(received) == 1 else signal.SIGKILL)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = _run_once(command, world_size, processes)
        for restart in range(1, max_restarts + 1):
            if code in (0, USAGE_EXIT_CODE) or received:
                break
            print(f"starting all ranks again: restart {restart} of {max_restarts}", file=sys.stderr, flush=True)
            code = _run_once([*command, *restart_arguments], world_size, processes)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
