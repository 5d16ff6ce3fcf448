"""The launcher names the rank that failed first, starts ranks again, and passes signals on. No rank uses torch."""

import faulthandler
import fcntl
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from commands import Command

from tpformer.cli.guard import guarded
from tpformer.launchers import STORE_VARIABLE
from tpformer.processes.launch import (
    STOPPED_EXIT_CODE,
    TOGETHER_SECONDS,
    _start,
    check_local_ranks,
    run_ranks,
    say_once,
)
from tpformer.processes.watchdog import HANG_EXIT_CODE

# every rank notes its start and waits for the others; `error` leaves a message as record_exception does
PRELUDE = """
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
with open(f"{folder}/{rank}", "a") as file:
    print(attempt, file=file)
def starts(rank):
    path = f"{folder}/{rank}"
    return len(open(path).readlines()) if os.path.exists(path) else 0

while any(starts(other) <= attempt for other in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)

def error(text):
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": text}}, file)
"""
AGAIN = "starting all ranks again: restart {} of 2"
FAILED = "rank {} of {} failed with exit code {}; all ranks were stopped"
KILLED = "rank 2 of 3 was killed by SIGKILL; all ranks were stopped"
READY = 'open(f"{folder}/ready-{rank}", "w").close()\n'
RAISES = "error('closed'); sys.exit(1)"


def work(folder: Path, script: str) -> Callable[[int], None]:
    def rank(attempt: int) -> None:
        faulthandler.disable()  # pytest's, which would print the stacks of a rank that aborts
        exec(PRELUDE + script, {"folder": folder, "attempt": attempt})

    return rank


def test_ranks_have_torchruns_numbers_and_a_private_file_in_place_of_a_port(tmp_path):
    """R13, R14: nothing listens at the launcher, and the file is gone with the job. Nothing is pickled or imported
    again: a rank sees the launcher's objects."""
    own: list[int] = []

    def rank(attempt: int) -> None:
        own.append(attempt)
        numbers = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
        folder = os.path.dirname(os.environ[STORE_VARIABLE])
        shared = [os.environ[STORE_VARIABLE], os.stat(folder).st_mode & 0o777, own, os.getppid()]
        (tmp_path / numbers[0]).write_text(json.dumps([numbers, shared]))

    assert run_ranks(rank, 3) == 0 and own == []
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [numbers for numbers, _ in found] == [[str(rank), str(rank), "3", "3"] for rank in range(3)]
    store = found[0][1][0]
    assert [shared for _, shared in found] == [[store, 0o700, [0], os.getpid()]] * 3
    assert not Path(store).parent.exists()


@pytest.mark.parametrize(("ranks", "script", "restarts", "code", "said"), [
    # the others are ended
    (3, "sys.exit(7) if rank == 1 else time.sleep(60)", 0, 7, [FAILED.format(1, 3, 7)]),
    # restarts are used up
    (1, "sys.exit(4 + attempt)", 2, 6,
     [FAILED.format(0, 1, 4), AGAIN.format(1), FAILED.format(0, 1, 5), AGAIN.format(2), FAILED.format(0, 1, 6)]),
    # all are started again, and know the attempt
    (3, "if attempt < 2: os.kill(os.getpid(), signal.SIGKILL) if rank == 2 else time.sleep(60)", 2, 0,
     [KILLED, AGAIN.format(1), KILLED, AGAIN.format(2)]),
    # a user's mistake is not tried again
    (1, "sys.exit(2)", 5, 2, [FAILED.format(0, 1, 2)]),
])  # fmt: skip
def test_a_failing_rank_is_named_and_all_are_started_again(tmp_path, capfd, ranks, script, restarts, code, said):
    assert run_ranks(work(tmp_path, script), ranks, max_restarts=restarts) == code
    assert capfd.readouterr().err.splitlines() == said
    attempts = "".join(f"{attempt}\n" for attempt in range(1 + sum("again" in line for line in said)))
    assert [(tmp_path / str(rank)).read_text() for rank in range(ranks)] == [attempts] * ranks


def start_and_wait(*arguments) -> None:
    """_start, for a launcher that first looks when all ranks have ended: it takes what happened from how they ended."""
    _start(*arguments)
    for rank in arguments[-1]:
        rank.join()


def test_ranks_of_a_busy_machine_say_a_mistake_once(capfd, monkeypatch):
    """No rank is early enough to have the others ended before they report. Another mistake is reported, too."""

    def rank(_: int) -> None:
        number = os.environ["RANK"]
        guarded(partial(int, "\udcff" if number == "3" else "no number"))

    monkeypatch.setattr("tpformer.processes.launch._start", start_and_wait)
    monkeypatch.setattr("tpformer.cli.guard.PEER_SECONDS", 0.0)
    assert run_ranks(rank, 4) == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and all("invalid literal for int" in line for line in {*said}), said


def test_a_rank_waits_for_another_that_reports(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "store"))
    rank = multiprocessing.get_context("fork").Process(target=say_once, args=("a mistake\n",))
    with open(tmp_path / "store-said", "ab", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        rank.start()
        rank.join(0.5)
        other.write(b"a mistake\n")
        fcntl.flock(other, fcntl.LOCK_UN)  # the fork has the file open, too
    rank.join()
    assert rank.exitcode == 0 and capfd.readouterr().err == ""


@pytest.mark.parametrize(("code", "note", "end", "consequence", "text"), [
    # peers of a rank that was killed raise, and so do those of one that raised
    (137, "", "os.kill(os.getpid(), signal.SIGKILL)", RAISES, "was killed by SIGKILL"),
    (1, "KeyError: 3\\n more", "sys.exit(1)", RAISES, "failed with exit code 1 (KeyError: 3)"),
    # native threads abort when a peer is gone
    (1, "KeyError: 3", "sys.exit(1)", "os.abort()", "failed with exit code 1 (KeyError: 3)"),
    (HANG_EXIT_CODE, "", f"sys.exit({HANG_EXIT_CODE})", RAISES, "ended the job because a rank hangs"),
])  # fmt: skip
def test_of_several_failures_the_cause_comes_first(tmp_path, capfd, monkeypatch, code, note, end, consequence, text):
    monkeypatch.setattr("tpformer.processes.launch._start", start_and_wait)
    script = f"""
if rank == 1:
    if "{note}":
        error("{note}")
    open(f"{{folder}}/first", "w").close()
    {end}
while not os.path.exists(f"{{folder}}/first"):
    time.sleep(0.01)
{consequence}
"""
    assert run_ranks(work(tmp_path, script), 2) == code
    first, then = capfd.readouterr().err.splitlines()
    assert first.startswith(f"rank 1 of 2 {text}") and first.endswith("; all ranks were stopped")
    assert then.startswith("then rank 0 of 2 ")


def test_ranks_that_stopped_in_order_are_waited_for_and_not_started_again(tmp_path, capfd):
    script = f"time.sleep(rank / 3)\nopen(f'{{folder}}/end-{{rank}}', 'w')\nsys.exit({STOPPED_EXIT_CODE})"
    assert run_ranks(work(tmp_path, script), 2, max_restarts=3) == STOPPED_EXIT_CODE
    assert (tmp_path / "end-1").exists() and (tmp_path / "0").read_text() == "0\n" and not capfd.readouterr().err


def launch(folder: Path, script: str, ignored: int | None = None, platform: str = sys.platform) -> None:
    sys.platform = platform
    if ignored is not None:
        signal.signal(ignored, signal.SIG_IGN)
    sys.exit(run_ranks(work(folder, script), 2, max_restarts=3))


def all_have(folder: Path, name: str) -> bool:
    return all((folder / f"{name}-{rank}").exists() for rank in range(2))


def launched(commands, folder: Path, script: str, *options: object) -> Command:
    """A launcher of two ranks, both of which have come to READY in the script."""
    launcher = commands.call(launch, folder, script, *options)
    launcher.wait_until(lambda: all_have(folder, "ready"), "ranks")
    return launcher


@pytest.mark.parametrize(("handler", "signals", "code"), [
    ("sys.exit(5)", [signal.SIGTERM], 5),
    ("sys.exit(5)", [signal.SIGHUP], 5),
    # when a terminal closes, its shell and the kernel both say so
    ("ends.append(time.monotonic() + 0.3)", [signal.SIGHUP] * 2, 5),
    ("pass", [signal.SIGTERM] * 2, 128 + signal.SIGKILL),
    # `timeout` signals the process and its group; Ctrl-C reaches a supervisor, which passes it on, and the process
    ("ends.append(time.monotonic() + 0.3)", [signal.SIGTERM, 0, signal.SIGTERM], 5),
    ("ends.append(time.monotonic() + 0.3)", [signal.SIGINT, 0, signal.SIGINT], 5),
    ("pass", [signal.SIGINT] * 2, 128 + signal.SIGKILL),
])  # fmt: skip
def test_signals_are_passed_on_and_nothing_restarts(commands, tmp_path, handler, signals, code):
    """A first signal lets ranks finish, or fail without a restart; a second one kills them, but for SIGHUP (R19)."""
    script = f"""
ends = []
def stop(number, frame):
    open(f"{{folder}}/seen-{{rank}}", "w")
    {handler}
signal.signal({signals[0]:d}, stop)
{READY}
while not ends or time.monotonic() < ends[0]:
    time.sleep(0.05)
sys.exit(5)
"""
    launcher = launched(commands, tmp_path, script)
    os.kill(launcher.pid, signals[0])
    if signals[1:] and 0 not in signals:
        launcher.wait_until(lambda: all_have(tmp_path, "seen"), "signals")
        time.sleep(TOGETHER_SECONDS)
    for number in signals[1:]:
        os.kill(launcher.pid, number)
    ended, _, err = launcher.finish()
    assert ended == code, err
    assert "restart" not in err and (tmp_path / "0").read_text() == "0\n"


def test_a_sighup_that_nohup_ignores_stays_ignored(commands, tmp_path):
    waiting = 'while not os.path.exists(f"{folder}/end"): time.sleep(0.05)'
    script = f"{READY}os.kill(os.getpid(), signal.SIGHUP)\n{waiting}"
    launcher = launched(commands, tmp_path, script, signal.SIGHUP)
    os.kill(launcher.pid, signal.SIGHUP)
    (tmp_path / "end").touch()
    assert launcher.finish()[0] == 0


def test_signals_that_end_the_ranks_at_once_take_one_line(commands, tmp_path):
    """N6: Ctrl-C before training begins."""
    launcher = launched(commands, tmp_path, READY + "time.sleep(60)")
    os.kill(launcher.pid, signal.SIGINT)
    code, _, err = launcher.finish()
    assert (code, err) == (128 + signal.SIGINT, "SIGINT ended the ranks\n")


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_ranks_end_with_a_launcher_that_is_killed(commands, tmp_path, platform):
    """R11. Without the kernel's help, a thread of each rank notices."""
    launcher = launched(commands, tmp_path, READY + "time.sleep(120)", None, platform)
    ranks = launcher.children()
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.process.join()
    deadline = time.monotonic() + 30
    while any(running(pid) for pid in ranks):
        assert time.monotonic() < deadline, "ranks outlive their launcher"
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_clusters_layout_is_not_started_on_one_machine():
    check_local_ranks(16, "cpu")
    with pytest.raises(ValueError, match="3072 ranks.*torchrun.*dry-run"):
        check_local_ranks(3072, "cpu")
