"""Whole runs whose ranks raise or hang. The job names the rank, starts again or ends, and ends with the bits of an
undisturbed run. checks/faults.py has other faults, at random moments, and what is left of their runs."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from commands import main
from pool import RankFailure
from runs import losses, values_with, write_run

from tpformer.config import build_config
from tpformer.processes.watchdog import HANG_EXIT_CODE
from tpformer.training.model import ModelParts
from tpformer.training.trainer import Trainer

TIMEOUT = 8.0  # run.timeout: a first step on two busy cores takes a few seconds
INTERVAL = 2  # steps between checkpoints


def run_values(values: dict, steps: int, **run: object) -> dict:
    return values_with(
        values,
        run={"timeout": TIMEOUT, **run},
        parallel={"pipeline_parallel": 2},
        data={"valid": []},
        train={"steps": steps},
        checkpoint={"interval": INTERVAL, "keep": 1000},
    )


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


def train(values: dict) -> None:
    Trainer(build_config(values)).run()


def test_a_rank_that_raises_is_named_and_the_restarted_job_ends_with_the_same_bits(
    ranks, commands, tiny_values, tmp_path
):
    faults, steps, run = [(0, 4, "after"), (1, 5, "before")], 7, tmp_path / "run"
    ranks(2).run(train, run_values(tiny_values, steps, dir=str(tmp_path / "undisturbed")), timeout=150)
    toml = write_run(tmp_path, run_values(tiny_values, steps, max_restarts=len(faults)))
    code, _, err = commands.call(faulty, str(tmp_path), faults, "pretrain", toml).finish()
    assert code == 0, err
    attempts = err.split("starting all ranks again")
    assert len(attempts) == len(faults) + 1
    for (rank, step, when), said in zip(faults, attempts, strict=False):
        assert f"rank {rank} of 2 failed with exit code 1 (" in said, said
        assert f"injected {when} the gradients of step {step}" in said.split("; all ranks were stopped")[0], said
        assert f"[rank{rank}]: Traceback (most recent call last)" in said, said
    assert losses(run) == losses(tmp_path / "undisturbed") and len(losses(run)) == steps
    completed = {path.parent.name for path in (run / "checkpoints").glob("step-*/manifest.json")}
    assert completed == {f"step-{step}" for step in (*range(INTERVAL, steps, INTERVAL), steps)}


def hang(values: dict) -> None:
    """Train; rank 1 hangs in step 3. Rank 0 follows it there, and then has patience for a second."""
    trainer, original = Trainer(build_config(values)), ModelParts.gradients
    watchdog, asleep = trainer.watchdog, Path(values["run"]["dir"], "asleep")
    assert watchdog.timeout == TIMEOUT
    watchdog.interval = 0.1

    def gradients(self, batch, **options):
        if options["step"] == 3 and dist.get_rank() == 1:
            asleep.touch()
            time.sleep(120)
        if options["step"] == 3:
            while not asleep.exists():
                time.sleep(0.01)
            watchdog.progress(3)
            watchdog.timeout = 1.0
        return original(self, batch, **options)

    ModelParts.gradients = gradients
    trainer.run()


def test_a_rank_that_hangs_in_a_step_ends_the_run(ranks, tiny_values):
    with pytest.raises(RankFailure, match=f"died with exit code {HANG_EXIT_CODE}"):
        ranks(2).run(hang, run_values(tiny_values, steps=10))
    blamed = Path(tiny_values["run"]["dir"], "ranks", "hang-report.txt").read_text().splitlines()[1]
    assert blamed.startswith("rank 1: rank 0 waits in collectives for rank 1 (step 3, at "), blamed
    assert f"{__file__}:{hang.__code__.co_firstlineno + 10}" in blamed
