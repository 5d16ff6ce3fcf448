"""Start the ranks of a run on this machine, end them together, and start them again after a failure.

Ranks are forks of the launcher, which has imported what they need: a run of eight ranks imports torch once. The
launcher itself must compute nothing before it forks, because threads and CUDA do not survive a fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from tpformer.launchers import STORE_VARIABLE

from .parent import end_with_parent
from .stops import STOPS, heeded

POLL_SECONDS = 0.05
TOGETHER_SECONDS = 0.1  # `timeout` signals the process, and then its group; a supervisor passes on what it got, too
USAGE_EXIT_CODE = 2  # a mistake that only the user can mend, such as a missing file: starting again would not help
STOPPED_EXIT_CODE = 3  # a signal ended the run before its last step, and a checkpoint was written: it is no failure
HANG_EXIT_CODE = 124  # a watchdog ended the rank; the command `timeout` uses the same code
ORDERLY = (0, STOPPED_EXIT_CODE)  # the other ranks end by themselves


def check_local_ranks(world_size: int, device: str | None) -> None:
    """ValueError for more ranks than this machine should start: one per GPU; on CPUs 16, or four per core. Also for
    CUDA without a GPU.

    device: cpu or cuda. None stands for cuda if there is a GPU.
    """
    # torch asks NVML: if it asked CUDA, CUDA would start in this process, and its forks could not use it
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    cuda = device == "cuda" or (device is None and torch.cuda.is_available())
    cores = os.cpu_count() or 1
    most = torch.cuda.device_count() if cuda else max(16, 4 * cores)
    if cuda and not most:
        raise ValueError('train.device = "cuda", but no CUDA device is visible: set --train.device cpu')
    if world_size > most:
        here = f"{most} GPUs" if cuda else f"{cores} CPU cores"
        raise ValueError(
            f"the layout has {world_size} ranks, too many for this machine of {here}: start them on several machines "
            f"with torchrun or SLURM (examples/README.md), shrink the layout, or look at it with `tpformer dry-run`"
        )


def record_exception(error: BaseException) -> None:
    """Write the exception to the file that torchrun and run_ranks name in TORCHELASTIC_ERROR_FILE.

    Call it before the process exits. Peers fail only when its connections are closed, so the oldest file of a job tells
    the first failure. Without a launcher it does nothing.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with contextlib.suppress(OSError):  # the launcher is gone, and its directory with it
        get_error_handler().record_exception(error)


def say_once(line: str) -> None:
    """Write a line to stderr, unless another rank of run_ranks has written the same.

    A rank that ends has the launcher end the others, so it is not enough to wait for one of them: on a machine that is
    busy it may be late. Who writes has a lock until it has written, and a rank that dies meanwhile gives it up.
    """
    said, data = None, line.encode(errors="backslashreplace")
    with contextlib.ExitStack() as stack:
        if STORE_VARIABLE in os.environ:
            with contextlib.suppress(OSError):
                said = stack.enter_context(open(f"{os.environ[STORE_VARIABLE]}-said", "ab+", buffering=0))
                fcntl.flock(said, fcntl.LOCK_EX)
                said.seek(0)
        if said is not None and data in said:
            return
        sys.stderr.write(line)  # in one piece: other ranks write too
        sys.stderr.flush()
        if said is not None:
            with contextlib.suppress(OSError):  # the disk is full
                said.write(data)


def _error_file(directory: str, rank: int) -> Path:
    return Path(directory, f"rank-{rank}.json")


def _rank(work: Callable[[int], object], attempt: int, launcher: int, environment: dict[str, str]) -> None:
    """Run `work` as a rank. Handlers of signals are first set back to those of a new process."""
    end_with_parent(launcher)
    for number in heeded():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.environ.update(environment)
    work(attempt)


def _start(
    work: Callable[[int], object], attempt: int, world_size: int, private: str, ranks: list[BaseProcess]
) -> None:
    """Fork the ranks, and add each to the list. private: a directory of this attempt that no other user may read."""
    context = multiprocessing.get_context("fork")
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        STORE_VARIABLE: str(Path(private, "store")),
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until each rank has handlers of its own
    try:
        for rank in range(world_size):
            error_file = str(_error_file(private, rank))
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": error_file}
            arguments = (work, attempt, os.getpid(), shared | own)
            process = context.Process(target=_rank, args=arguments, name=f"rank {rank}")
            process.start()
            ranks.append(process)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _order(code: int, error_file: Path) -> tuple[int, int]:
    """A sort key that puts the cause first. Peers of a rank that is gone raise too, or abort in native threads."""
    if code in (USAGE_EXIT_CODE, HANG_EXIT_CODE) or (code < 0 and code != -signal.SIGABRT):
        return 0, 0
    return (1, error_file.stat().st_mtime_ns) if error_file.exists() else (2, 0)


def _end_in_words(code: int, error_file: Path) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == HANG_EXIT_CODE:
        return "ended the job because a rank hangs (its report is above)"
    try:
        message = json.loads(error_file.read_text())["message"]["message"].splitlines()[0]
    except (OSError, ValueError, LookupError):  # the program wrote no file, or was killed while it wrote
        return f"failed with exit code {code}"
    return f"failed with exit code {code} ({message})"


def _report(failed: list[tuple[int, int]], world_size: int, private: str, received: list[int]) -> None:
    """Say on stderr which ranks failed, given as (rank, code), the cause first."""
    ends = {code for _, code in failed}
    if ends <= {-number for number in received}:
        names = " and ".join(signal.Signals(-code).name for code in sorted(ends))
        print(f"{names} ended the ranks", file=sys.stderr, flush=True)
        return
    first, code = failed[0]
    if code == USAGE_EXIT_CODE and _error_file(private, first).exists():
        return  # the rank has said it, and it is not this rank's alone
    for index, (rank, code) in enumerate(failed):
        what = f"rank {rank} of {world_size} {_end_in_words(code, _error_file(private, rank))}"
        print(f"then {what}" if index else f"{what}; all ranks were stopped", file=sys.stderr, flush=True)


def _run_once(
    work: Callable[[int], object], attempt: int, world_size: int, ranks: list[BaseProcess], received: list[int]
) -> int:
    """Make one attempt. Returns 0, STOPPED_EXIT_CODE, or the code of the rank that failed first, named on stderr.

    A negative code is the number of the signal that ended the rank. received: signals that the launcher got.
    """
    with tempfile.TemporaryDirectory(prefix="tpformer-ranks-") as private:
        try:
            _start(work, attempt, world_size, private, ranks)
            while None in (codes := [rank.exitcode for rank in ranks]) and {*codes} <= {None, *ORDERLY}:
                time.sleep(POLL_SECONDS)
            # all are asked once more, because the rank that died first may have been asked just before it died
            codes = [process.exitcode for process in ranks]
            failed = [(rank, code) for rank, code in enumerate(codes) if code is not None and code not in ORDERLY]
            if not failed:
                return max(code or 0 for code in codes)
            for process in ranks:
                process.kill()
            failed.sort(key=lambda each: _order(each[1], _error_file(private, each[0])))
            _report(failed, world_size, private, received)
            return failed[0][1]
        finally:
            for process in ranks:
                process.kill()
                process.join()
            ranks.clear()


def run_ranks(
    work: Callable[[int], object], world_size: int, *, max_restarts: int = 0, interactive: bool = False
) -> int:
    """Call `work(attempt)` in a process per rank. The ranks find one another by a file, and their launcher by no port.

    Each has RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them, and what
    `tpformer.distributed.initialize` needs to join the others without a socket that another machine could reach.
    Returns 0, STOPPED_EXIT_CODE if ranks ended with it, or the exit code of the first rank to fail (128 + N if signal N
    killed it). SIGTERM, SIGINT and, unless it is ignored, SIGHUP are passed on, so that ranks can finish in order; a
    second SIGTERM or SIGINT kills them, unless it comes with the first, as `timeout` and a supervisor in the same
    terminal send it. Ranks die with the launcher. When a rank fails, the others are killed at once, because they would
    wait for it. stderr names the rank and the message that it left by `record_exception`; a rank that ends with code 2
    prints that itself. Then all ranks are started again, at most max_restarts times. `attempt` is 0 at first, and one
    more after each restart. The job is not restarted after it was stopped, after exit code 2 (a user's mistake), after
    SIGPIPE (nobody reads the output), or when a rank fails after one of those signals.
    interactive: SIGINT is left to the ranks, which a terminal's Ctrl-C reaches too.
    """
    ranks: list[BaseProcess] = []
    received: list[int] = []
    last: dict[int, float] = {}

    def forward(number: int, _) -> None:
        now, before = time.monotonic(), last.get(number, float("-inf"))
        last[number] = now
        if now - before < TOGETHER_SECONDS:
            return
        # a shell and the kernel both send SIGHUP when a terminal closes, so a second one means no hurry
        kills = number != signal.SIGHUP and {*received} & {signal.SIGTERM, signal.SIGINT}
        received.append(number)
        for process in ranks:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, signal.SIGKILL if kills else number)

    previous = {number: signal.signal(number, forward) for number in heeded()}
    if interactive:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = _run_once(work, 0, world_size, ranks, received)
        for attempt in range(1, max_restarts + 1):
            if code in (*ORDERLY, USAGE_EXIT_CODE, -signal.SIGPIPE) or received:
                break
            print(f"starting all ranks again: restart {attempt} of {max_restarts}", file=sys.stderr, flush=True)
            code = _run_once(work, attempt, world_size, ranks, received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
