"""Whole runs whose ranks are killed, raise, are stopped, or compute NaN. The job ends or starts again, names the rank,
loses no checkpoint, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from commands import Command, main
from pool import RankFailure

from tpformer.config import build_config, to_toml
from tpformer.processes.watchdog import HANG_EXIT_CODE
from tpformer.training.metrics import read_metrics
from tpformer.training.model import ModelParts
from tpformer.training.trainer import Trainer

TIMEOUT = 8.0  # run.timeout: a first step of four ranks on two busy cores takes a few seconds
INTERVAL = 3  # steps between checkpoints
STEPS_BETWEEN = 8  # steps between faults
TWO = {"pipeline_parallel": 2}
SHARDED = {"tensor_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3}


def faulty(folder: str, faults: list[tuple[int, int, str]], *arguments: str) -> None:
    """Run `tpformer`; in its n-th start one rank raises before or after the gradients of a step. faults[n] = (rank,
    step, when). The ranks are forks of this process, so they have its patch."""
    original, starts = ModelParts.gradients, Counter[str]()

    def gradients(self, batch, **options):
        rank = os.environ["RANK"]
        if not starts[rank]:
            with open(f"{folder}/starts-{rank}", "a+") as file:
                file.write("start\n")
                file.seek(0)
                starts[rank] = len(file.readlines())
        number = starts[rank] - 1
        blamed, at, when = faults[number] if number < len(faults) else (None, None, None)
        is_faulty = options["step"] == at and int(rank) == blamed
        if is_faulty and when == "before":
            raise ValueError(f"injected before the gradients of step {at}")
        loss = original(self, batch, **options)
        if is_faulty:
            raise LookupError(f"injected after the gradients of step {at}")
        return loss

    ModelParts.gradients = gradients
    main(*arguments)


class Job(NamedTuple):
    """A `tpformer pretrain` in the background, and its run directory."""

    command: Command
    run: Path

    @property
    def err(self) -> str:
        return self.command.err

    def wait_for_step(self, step: int) -> None:
        self.command.wait_until(lambda: step <= last_step(self.run), f"step {step}")


def last_step(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("\n") else 0


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(run / "metrics.jsonl")]


def completed(run: Path) -> set[str]:
    return {path.parent.name for path in (run / "checkpoints").glob("step-*/manifest.json")}


def run_values(run: Path, data: Path, layout: dict, steps: int, restarts: int = 0) -> dict[str, dict]:
    return {
        "run": {"dir": str(run), "timeout": TIMEOUT, "max_restarts": restarts},
        "model": {"seq_length": 16, "n_layers": 2, "hidden_size": 32, "n_heads": 4},
        "data": {"train": [str(data)]},
        "parallel": layout,
        "train": {"steps": steps, "global_batch_size": 4},
        "optimizer": {"warmup_steps": 2},
        "checkpoint": {"interval": INTERVAL, "keep": 1000},
        "log": {"interval": 1, "plot": False, "tensorboard": False},
    }


@pytest.fixture
def start(commands, tiny_data, tmp_path) -> Iterator[Callable[..., Job]]:
    """start(layout, steps, restarts=0, faults=None): a job whose run directory is tmp_path/run."""
    jobs = []

    def start(layout: dict, steps: int, restarts: int = 0, faults: list | None = None) -> Job:
        run, toml = tmp_path / "run", tmp_path / "run.toml"
        toml.write_text(to_toml(build_config(run_values(run, tiny_data, layout, steps, restarts))))
        arguments = ("pretrain", str(toml))
        if faults is None:
            command = commands.start(*arguments)
        else:
            command = commands.call(faulty, str(tmp_path), faults, *arguments)
        jobs.append(Job(command, run))
        return jobs[-1]

    yield start
    for job in jobs:
        job.command.close()


def train(values: dict) -> None:
    Trainer(build_config(values)).run()


@pytest.fixture(scope="module")
def undisturbed(ranks, tiny_data, tmp_path_factory) -> Callable[[dict, int], list]:
    """undisturbed(layout, steps): the losses of a run that nothing happens to; made once for all tests."""
    made: dict[str, list] = {}

    def undisturbed(layout: dict, steps: int) -> list:
        if (key := f"{layout} {steps}") not in made:
            run = tmp_path_factory.mktemp("undisturbed")
            ranks(world_size_of(layout)).run(train, run_values(run, tiny_data, layout, steps), timeout=150)
            made[key] = losses(run)
            assert len(made[key]) == steps
        return made[key]

    return undisturbed


def world_size_of(layout: dict) -> int:
    return build_config({"parallel": layout}).parallel.world_size


def disturb(job: Job, number: int, rank: int, step: int) -> float:
    """Send a signal to a rank some moment after a step; return the seconds until its job ends or starts again."""
    job.wait_for_step(step)
    time.sleep(random.Random(step).random() * 0.05)  # so that the signal comes anywhere in a step
    before, pids = completed(job.run), job.command.children()
    os.kill(pids[rank], number)
    began = time.monotonic()
    while job.command.poll() is None and job.command.children() in (pids, []):
        assert time.monotonic() - began < TIMEOUT + 60, job.err
        time.sleep(0.01)
    assert before <= completed(job.run), "a completed checkpoint was lost"
    return time.monotonic() - began


def faults_of(seed: int, count: int, world_size: int) -> list[tuple[int, int]]:
    """(rank, step) of each fault, in the order of the steps."""
    chance = random.Random(seed)
    first = INTERVAL + 1  # the first step after a checkpoint
    return [
        (chance.randrange(world_size), first + STEPS_BETWEEN * number + chance.randrange(STEPS_BETWEEN - 2))
        for number in range(count)
    ]


def test_a_rank_that_raises_is_named_and_the_restarted_job_ends_with_the_same_bits(start, undisturbed):
    """Faults of other kinds, and what is left of their runs, are in checks/faults.py."""
    count, world_size = 2, world_size_of(TWO)
    steps, chance = STEPS_BETWEEN * (count + 1), random.Random(1)
    expected = undisturbed(TWO, steps)
    faults = [(rank, step, chance.choice(["before", "after"])) for rank, step in faults_of(1, count, world_size)]
    job = start(TWO, steps, restarts=count, faults=faults)
    code, _, err = job.command.finish()
    assert code == 0, err
    attempts = err.split("starting all ranks again")
    assert len(attempts) == count + 1
    for (rank, step, when), said in zip(faults, attempts, strict=False):
        assert f"rank {rank} of {world_size} failed with exit code 1 (" in said, said
        assert f"injected {when} the gradients of step {step}" in said.split("; all ranks were stopped")[0], said
        assert f"[rank{rank}]: Traceback (most recent call last)" in said, said
    assert losses(job.run) == expected
    assert completed(job.run) == {f"step-{step}" for step in (*range(INTERVAL, steps, INTERVAL), steps)}


def hang(values: dict) -> None:
    """Train; the last rank hangs in step 3."""
    original = ModelParts.gradients

    def gradients(self, batch, **options):
        if options["step"] == 3 and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(120)
        return original(self, batch, **options)

    ModelParts.gradients = gradients
    train(values)


def test_a_rank_that_hangs_in_a_step_ends_the_run(ranks, tiny_data, tmp_path):
    values = run_values(tmp_path, tiny_data, TWO, steps=10)
    values["run"]["timeout"] = 4.0
    with pytest.raises(RankFailure, match=f"died with exit code {HANG_EXIT_CODE}"):
        ranks(2).run(hang, values)
    blamed = (tmp_path / "ranks" / "hang-report.txt").read_text().splitlines()[1]
    assert blamed.startswith("rank 1: rank 0 waits in collectives for rank 1 (step 3, at "), blamed
    assert f"{__file__}:{hang.__code__.co_firstlineno + 6}" in blamed


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("SIGKILL", 128 + signal.SIGKILL, "rank 2 of 4 was killed by SIGKILL; all ranks were stopped"),
        ("SIGSTOP", 124, "rank 2: no heartbeat from rank 2: "),
    ],
)
def test_without_restarts_the_job_ends(start, kind, code, words):
    job = start(SHARDED, 100_000)
    seconds = disturb(job, getattr(signal, kind), 2, 5)
    ended, _, err = job.command.finish()
    assert ended == code and words in err and seconds < TIMEOUT + 15
    assert "starting all ranks" not in err
    assert (job.run / "ranks" / "hang-report.txt").exists() == (kind == "SIGSTOP")


def nan_gradients(values: dict, steps: tuple[int, ...]) -> tuple[list[dict], list[dict], str]:
    """In these steps rank 1's gradient of one parameter is NaN. Return its metrics, its parameters, and its error."""
    original = ModelParts.gradients

    def gradients(self, batch, **options):
        loss = original(self, batch, **options)
        if options["step"] in steps and dist.get_rank() == 1:
            name, parameter = list(self.parts[0].named_parameters())[4]
            parameter.grad.to_local().view(-1)[-1] = float("nan")
        return loss

    ModelParts.gradients = gradients
    trainer, error = Trainer(build_config(values)), ""
    try:
        trainer.run()
    except FloatingPointError as stop:
        error = str(stop)
    finally:
        ModelParts.gradients = original
    parameters = {n: p.to_local() for part in trainer.model.parts for n, p in part.named_parameters()}
    return read_metrics(Path(values["run"]["dir"]) / "metrics.jsonl"), parameters, error


def nan_values(tiny_values: dict, **train) -> dict:
    values = {**tiny_values, "parallel": {"tensor_parallel": 2}, "train": {**tiny_values["train"], **train}}
    return {**values, "data": {**tiny_values["data"], "valid": []}}


def test_a_nan_on_one_rank_skips_steps_on_all_and_too_many_stop_the_run(ranks, tiny_values):
    values = nan_values(tiny_values, max_skipped_steps=3)
    rows, parameters, errors = zip(*ranks(2).run(nan_gradients, values, (2, 3, 4)), strict=True)
    name = list(parameters[0])[4]
    for error in errors:
        assert "3 steps in a row were skipped, the last one step 4" in error and f"first in {name}" in error
    assert [(row["step"], row.get("skipped", 0)) for row in rows[0]] == [(1, 0), (2, 1), (3, 2)]
    assert [math.isfinite(row["grad_norm"]) for row in rows[0]] == [True, False, False]
    assert all(math.isfinite(row["loss"]) for row in rows[0])
    assert all(parameter.isfinite().all() for part in parameters for parameter in part.values())
