"""A job that hangs ends, and the rank that the others wait for is named; a job that moves is left alone."""

import ctypes
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankFailure

from tpformer.processes.watchdog import HANG_EXIT_CODE, Watchdog

TIMEOUT = 2.0


def stop() -> None:
    time.sleep(TIMEOUT / 3)  # in which it writes some heartbeats
    os.kill(os.getpid(), signal.SIGSTOP)


def read_slowly() -> None:
    time.sleep(120)


def hold_the_lock() -> None:
    time.sleep(TIMEOUT / 3)
    ctypes.PyDLL(None).sleep(120)  # unlike CDLL, PyDLL keeps Python's lock


def skip_a_collective() -> None:
    dist.barrier()


def hang(directory: str, how: str, culprit: int) -> None:
    with Watchdog(Path(directory), timeout=TIMEOUT) as watchdog:
        for step in range(1, 10):
            watchdog.progress(step)
            if step == 3 and dist.get_rank() == culprit:
                globals()[how]()
            dist.all_reduce(torch.ones(2))


def line_of(function) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + 1}"


@pytest.mark.parametrize(("how", "culprit", "words"), [
    ("stop", 1, ["no heartbeat from rank 1", line_of(stop)]),
    pytest.param("hold_the_lock", 2, ["no heartbeat from rank 2", "holds Python's lock", line_of(hold_the_lock)],
                 marks=pytest.mark.proof),
    ("read_slowly", 0, ["rank 0 (step 3, at ", line_of(read_slowly), " in read_slowly", "in no collective"]),
    ("skip_a_collective", 1, ["rank 1 (step 3, in barrier, called at", "in all_reduce", "in another order"]),
])  # fmt: skip
def test_a_hang_ends_the_job_and_names_the_culprit(ranks, tmp_path, how, culprit, words):
    ranks(3).run(os.getpid)  # start the ranks
    with pytest.raises(RankFailure) as failure:
        ranks(3).run(hang, str(tmp_path), how, culprit)
    assert f"died with exit code {HANG_EXIT_CODE}" in str(failure.value) and "Error" not in str(failure.value)
    report = (tmp_path / "hang-report.txt").read_text()
    assert report.splitlines()[1].startswith(f"rank {culprit}: "), report
    for word in words:
        assert word in report
    rows = [line.split() for line in report.splitlines()[3:6]]
    assert rows[0][0] == str(culprit) and {row[0] for row in rows} == {"0", "1", "2"}
    first, *_, last = sorted(path.stat().st_mtime for path in tmp_path.iterdir())
    ages = [float(age) for row in rows for age in row if age.replace(".", "").isdigit() and "." in age]
    assert all(age <= last - first + 0.1 for age in ages), "nothing is older than the job, in the digits that it has"


def move(directory: str, seconds: float) -> list[dict]:
    """Take steps of half of the timeout each, which add up to more than it."""
    with Watchdog(Path(directory), timeout=seconds) as watchdog:
        for step in range(1, 4):
            watchdog.progress(step)
            time.sleep(seconds / 2)
            dist.barrier()
    dist.barrier()
    return [json.loads((Path(directory) / f"rank-{rank}.json").read_text()) for rank in range(dist.get_world_size())]


def test_progress_keeps_a_job_alive_and_an_attempt_clears_what_is_left(ranks, tmp_path):
    for name in ("hang-report.txt", "reporter", "rank-0.json", "rank-7.json"):
        (tmp_path / name).write_text("of an earlier attempt")
    states = ranks(2).run(move, str(tmp_path), 1.0)[0]
    assert [(state["rank"], state["step"], state["finished"]) for state in states] == [(0, 3, True), (1, 3, True)]
    assert states[0]["attempt"] == states[1]["attempt"] == (tmp_path / "attempt").read_text()
    assert states[0]["beat"] > 5  # several a step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt", "rank-0.json", "rank-1.json"]


def be_stopped(directory: str, meanwhile: str) -> str:
    """Be stopped for longer than the timeout. meanwhile: a shell command that runs in that time."""
    with Watchdog(Path(directory), timeout=TIMEOUT) as watchdog:
        watchdog.progress(1)
        time.sleep(0.3)
        later = f"sleep 1; {meanwhile}; sleep {1.5 * TIMEOUT - 1}; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", later]):
            stop()
        time.sleep(0.3 * TIMEOUT)  # less than the timeout, as the time of the stop does not count
        watchdog.progress(2)
    return "went on"


def test_a_stop_of_the_whole_job_does_not_count(ranks, tmp_path):
    assert ranks(1).run(be_stopped, str(tmp_path), "true") == ["went on"]
    assert not (tmp_path / "hang-report.txt").exists()


@pytest.mark.parametrize("name", ["hang-report.txt", pytest.param("attempt", marks=pytest.mark.proof)])
def test_a_stopped_rank_that_goes_on_leaves_the_run_of_its_successors(ranks, tmp_path, name):
    """Its job has been reported meanwhile, or another attempt has begun, so it ends."""
    with pytest.raises(RankFailure, match=f"died with exit code {HANG_EXIT_CODE}"):
        ranks(1).run(be_stopped, str(tmp_path), f"echo other > {tmp_path / name}")


def raise_within(directory: str) -> None:
    with Watchdog(Path(directory), timeout=1.0) as watchdog:
        watchdog.progress(1)
        raise LookupError("from the loop")


def test_an_exception_ends_the_watch_and_is_no_finish(ranks, tmp_path):
    with pytest.raises(RankFailure, match="from the loop"):
        ranks(1).run(raise_within, str(tmp_path))
    assert not json.loads((tmp_path / "rank-0.json").read_text())["finished"]
    with pytest.raises(ValueError, match="positive"):
        Watchdog(tmp_path, timeout=0)
