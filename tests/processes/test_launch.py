"""The launcher names the rank that failed first, starts ranks again, and passes signals on. No rank uses torch."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tpformer.processes.launch import _start, check_local_ranks, run_ranks
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


def work(folder: Path, script: str) -> Callable[[int], None]:
    def rank(attempt: int) -> None:
        faulthandler.disable()  # pytest's, which would print the stacks of a rank that aborts
        exec(PRELUDE + script, {"folder": folder, "attempt": attempt})

    return rank


def starts(folder: Path, rank: int) -> list[str]:
    return (folder / str(rank)).read_text().splitlines()


def test_ranks_have_torchruns_environment(tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    script = f"open(f'{{folder}}/env-{{rank}}', 'w').write(' '.join(os.environ[name] for name in {names}))"
    assert run_ranks(work(tmp_path, script), 3) == 0
    values = [(tmp_path / f"env-{rank}").read_text().split() for rank in range(3)]
    assert [value[:5] for value in values] == [[str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)]
    assert len({value[5] for value in values}) == 1


def test_a_failing_rank_ends_the_others_and_is_named(tmp_path, capfd):
    began = time.monotonic()
    assert run_ranks(work(tmp_path, "if rank == 1: sys.exit(7)\ntime.sleep(60)"), 3) == 7
    assert time.monotonic() - began < 20
    assert capfd.readouterr().err == "rank 1 of 3 failed with exit code 7; all ranks were stopped\n"
    assert [len(starts(tmp_path, rank)) for rank in range(3)] == [1, 1, 1]


RAISES = "error('closed'); sys.exit(1)"


@pytest.mark.parametrize(
    ("code", "note", "end", "consequence", "text"),
    [
        # peers of a rank that was killed raise, and so do those of one that raised
        (137, "", "os.kill(os.getpid(), signal.SIGKILL)", RAISES, "was killed by SIGKILL"),
        (1, "KeyError: 3\\n more", "sys.exit(1)", RAISES, "failed with exit code 1 (KeyError: 3)"),
        # native threads abort when a peer is gone
        (1, "KeyError: 3", "sys.exit(1)", "os.abort()", "failed with exit code 1 (KeyError: 3)"),
        (HANG_EXIT_CODE, "", f"sys.exit({HANG_EXIT_CODE})", RAISES, "ended the job because a rank hangs"),
    ],
)
def test_of_several_failures_the_cause_comes_first(tmp_path, capfd, monkeypatch, code, note, end, consequence, text):
    """The launcher first looks when all ranks have ended, so their order must come from how they ended."""

    def start_and_wait(*arguments) -> None:
        _start(*arguments)
        for rank in arguments[-1]:
            rank.join()

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


def test_restart_runs_all_ranks_again_and_tells_them_the_attempt(tmp_path, capfd):
    script = "if rank == 2 and attempt < 2: os.kill(os.getpid(), signal.SIGKILL)\nif attempt < 2: time.sleep(60)"
    assert run_ranks(work(tmp_path, script), 3, max_restarts=2) == 0
    for rank in range(3):
        assert starts(tmp_path, rank) == ["0", "1", "2"]
    killed = "rank 2 of 3 was killed by SIGKILL; all ranks were stopped"
    again = "starting all ranks again: restart {} of 2"
    assert capfd.readouterr().err.splitlines() == [killed, again.format(1), killed, again.format(2)]


def test_restarts_are_used_up(tmp_path, capfd):
    assert run_ranks(work(tmp_path, "sys.exit(4 + attempt)"), 1, max_restarts=2) == 6
    assert len(starts(tmp_path, 0)) == 3 and "exit code 6" in capfd.readouterr().err


def test_a_users_mistake_is_not_tried_again(tmp_path):
    assert run_ranks(work(tmp_path, "sys.exit(2)"), 2, max_restarts=5) == 2
    assert len(starts(tmp_path, 0)) == 1


def launch(folder: Path, script: str) -> None:
    sys.exit(run_ranks(work(folder, script), 2, max_restarts=3))


@pytest.mark.parametrize(("handler", "signals", "code"), [("sys.exit(5)", 1, 5), ("pass", 2, 128 + signal.SIGKILL)])
def test_sigterm_is_passed_on_and_nothing_restarts(commands, tmp_path, handler, signals, code):
    """A first signal lets ranks finish, or fail without a restart; a second one kills them."""
    script = f"""
def stop(number, frame):
    open(f"{{folder}}/seen-{{rank}}", "w")
    {handler}
signal.signal(signal.SIGTERM, stop)
open(f"{{folder}}/ready-{{rank}}", "w")
time.sleep(60)  # the sleep goes on after a handler
"""
    launcher = commands.call(launch, tmp_path, script)

    def all_have(name: str) -> bool:
        return all((tmp_path / f"{name}-{rank}").exists() for rank in range(2))

    launcher.wait_until(lambda: all_have("ready"), "handlers")
    launcher.terminate()
    if signals == 2:
        launcher.wait_until(lambda: all_have("seen"), "signals")
        launcher.terminate()
    ended, _, err = launcher.finish()
    assert ended == code, err
    assert "restart" not in err and len(starts(tmp_path, 0)) == 1


def test_ranks_share_what_the_launcher_has_imported(tmp_path):
    """Nothing is pickled or imported again: a rank sees the launcher's objects."""
    own = []

    def rank(attempt: int) -> None:
        own.append(attempt)
        (tmp_path / os.environ["RANK"]).write_text(f"{own} {os.getppid()}")

    assert run_ranks(rank, 2) == 0 and own == []
    assert {(tmp_path / str(rank)).read_text() for rank in range(2)} == {f"[0] {os.getpid()}"}


def test_a_clusters_layout_is_not_started_on_one_machine():
    check_local_ranks(16, "cpu")
    with pytest.raises(ValueError, match="3072 ranks.*torchrun.*dry-run"):
        check_local_ranks(3072, "cpu")
