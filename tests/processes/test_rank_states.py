"""A rank's state says what it is doing, and a report blames the rank that the others wait for."""

import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from testing import on_every_rank

from tpformer.distributed import all_gather, all_reduce, close, use_backend
from tpformer.processes import rank_states
from tpformer.processes.rank_states import Position, RankState, find_culprits, position_of_thread, report

READING, COMPUTING = {"collective": None, "at": "data.py:9"}, {"collective": None}
MINE, OTHER = "step 7, in all_reduce, called at step.py:3", "step 8, in barrier, called at step.py:3"


def calls(backend: str) -> dict:
    """Each call blocks rank 0 until rank 1 comes, which is late."""
    group, x = dist.group.WORLD, torch.ones(2)
    ours = {"all_reduce ": lambda: all_reduce(x, group), "all_gather": lambda: all_gather(x, group)}
    if backend == "shared":
        return ours
    return ours | {
        "all_reduce": lambda: dist.all_reduce(x),
        "barrier": lambda: dist.barrier(),
        "recv": lambda: dist.recv(x, 1) if dist.get_rank() == 0 else dist.send(x, 0),
        "all_gather_object": lambda: dist.all_gather_object([None, None], 1),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], src=1),
        "wait_tensor": lambda: functional.wait_tensor(functional.all_reduce(x, "sum", group)),
        "barrier ": lambda: ThreadPoolExecutor(1).submit(dist.barrier).result(),
    }


def position_of_a_wait(thread: int) -> Position:
    """Where a thread is once it has stayed in one place of a collective, or after ten seconds anywhere."""
    before, deadline = None, time.monotonic() + 10
    while (now := position_of_thread(thread)).collective is None or now != before:
        if time.monotonic() > deadline:
            break
        before = now
        time.sleep(0.05)
    return now


@pytest.mark.parametrize("backend", ["gloo", "shared"])
@on_every_rank(2)
def test_a_waiting_rank_is_in_the_collective_that_its_caller_knows(tmp_path, backend):
    """Rank 0 waits in each call for rank 1, which comes when it is known what rank 0 does."""
    use_backend(dist.group.WORLD, backend)
    thread, found = threading.get_ident(), {}
    for name, call in calls(backend).items():
        call()  # the first call of a kind imports and allocates
        dist.barrier()

        def watch(name=name) -> None:
            found[name] = position_of_a_wait(thread)
            (tmp_path / name).touch()

        while dist.get_rank() == 1 and not (tmp_path / name).exists():
            time.sleep(0.01)
        with ThreadPoolExecutor(1) as executor:
            if dist.get_rank() == 0:
                executor.submit(watch)
            call()
    close(dist.group.WORLD)
    assert len(found) == ((9 if backend == "gloo" else 2) if dist.get_rank() == 0 else 0)
    for name, position in found.items():
        assert position.collective == name.strip(), (name, position)
        assert position.at.startswith(f"{__file__}:"), (name, position)


def sleep(_: threading.Event) -> None:
    time.sleep(0.3)


def compute(done: threading.Event) -> None:
    linear, x = torch.nn.Linear(256, 256), torch.ones(256, 256)
    while not done.is_set():
        linear(x)


@pytest.mark.parametrize(("work", "lines"), [(sleep, [1]), (compute, [2, 3])])
def test_a_rank_that_sleeps_or_computes_is_in_no_collective(work, lines):
    done = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        thread = executor.submit(threading.get_ident).result()
        executor.submit(work, done)
        time.sleep(0.1)
        position = position_of_thread(thread)
        done.set()
    places = [f"{__file__}:{work.__code__.co_firstlineno + line}" for line in lines]
    assert position.collective is None and position.at in places
    assert f"{position.at} in {work.__name__}" in position.stack
    assert position_of_thread(-1).collective is None, "a thread that has ended"


def state(rank: int, collective: str | None = "all_reduce", step: int = 7, at: str = "step.py:3", **other) -> RankState:
    values = {"attempt": "a", "beat": 1, "doing": "", "step_seconds": 5.0, "at_seconds": 4.0}
    return RankState(rank=rank, step=step, collective=collective, at=at, **{**values, **other})


@pytest.mark.parametrize(("states", "silent", "ranks", "words"), [
    # a rank without a heartbeat is blamed before any other, and one that never wrote before those
    ([{}, {}, READING, {}], {1, 3}, [1, 3], f"no heartbeat from ranks 1, 3: *rank 1 ({MINE})*"),
    ([{}, None, None, {}], {1, 2, 3}, [1, 2], "ranks 1-2 wrote nothing here*all machines share*"),
    ([{}, {}, READING, {"collective": "recv"}], (), [2],
     "ranks 0-1, 3 wait in collectives for rank 2 (step 7, at data.py:9, in no collective)"),
    # it is right that a rank that has finished has no heartbeat any more
    ([{}, {}, {}, {"collective": None, "finished": True}], {3}, [3],
     "ranks 0-2 wait in collectives for rank 3 (finished after step 7)"),
    ([{}, {"collective": "barrier", "step": 8}, {}, {}], (), [1],
     f"rank 1 ({OTHER}) against rank 0 ({MINE})*they may have called collectives in another order"),
    # of two in different steps, the one that is behind
    ([{}, {"step": 8}], (), [0], "rank 0 (step 7, *"),
    # on a device all ranks wait outside of collectives
    ([COMPUTING, COMPUTING, READING, COMPUTING], (), [2], "*the others may wait for their devices"),
    ([COMPUTING] * 4, (), [], "*"),
])  # fmt: skip
def test_the_rank_that_the_others_wait_for_is_blamed(states, silent, ranks, words):
    written = {rank: state(rank, **values) for rank, values in enumerate(states) if values is not None}
    blamed, why = find_culprits(len(states), written, set(range(len(states))) - set(silent))
    assert blamed == ranks and fnmatchcase(why, words), why


def test_what_is_no_frame_ends_a_stack_and_not_the_watchdog():
    """Seen once in some hundred runs on a busy machine: the caller of a frame whose thread ran on was a list."""
    code = types.SimpleNamespace(co_filename="train.py", co_name="step")
    found = rank_states.position(types.SimpleNamespace(f_code=code, f_lineno=3, f_back=[]))
    assert found == Position(None, "train.py:3", ("train.py:3 in step",))


def test_report():
    """The rank that is blamed comes first, with its stack; of many ranks some rows are left out. Neighbours join."""
    assert rank_states.names([3]) == "rank 3" and rank_states.names([7, 0, 1, 2, 9, 10]) == "ranks 0-2, 7, 9-10"
    states = {
        0: state(0, host="a", pid=10),
        1: state(1, None, at="data.py:9", host="b", pid=11, stack=("train.py:5 in main", "data.py:9 in read")),
        2: state(2, None, step=0, doing="validation", host="b", pid=12, finished=True),
    }
    culprit, _, *rows = report(3, states, {0: 0.0, 1: 31.25, 2: 40.0}, alive={0}).splitlines()
    assert culprit.startswith("rank 1: no heartbeat from rank 1: its process is dead, stopped, or in native code")
    assert [row.split(", ")[0].strip() for row in rows[:3]] == ["1 on b", "0 on a", "2 on b"]
    assert all(words in rows[0] for words in ("31.2 s ago", "no collective", "data.py:9"))
    assert "0 validation" in rows[2] and "finished" in rows[2]
    assert rows[3:] == ["Python stack of rank 1 at its last heartbeat:", "  train.py:5 in main", "  data.py:9 in read"]
    assert "  1     " in report(2, {0: states[0]}, {0: 0.0}, alive={0})
    many = {rank: state(rank) for rank in range(200)} | {199: state(199, None)}
    lines = report(200, many, {}, set(many)).splitlines()
    assert lines[2].startswith("  199 on ")
    assert lines[2 + rank_states.ROWS] == f"  and {200 - rank_states.ROWS} more ranks"


def test_files_of_other_attempts_and_damaged_ones_are_not_read(tmp_path: Path):
    rank_states.write_state(tmp_path, state(0, stack=("a.py:1 in f",)))
    rank_states.write_state(tmp_path, state(1, attempt="b"))
    (tmp_path / "rank-2.json").write_text("")
    (tmp_path / "rank-3.json").write_text('{"rank": 3}')
    assert rank_states.read_states(tmp_path, 5, "a") == {0: state(0, stack=("a.py:1 in f",))}
