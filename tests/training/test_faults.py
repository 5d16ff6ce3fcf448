"""Whole runs whose ranks are killed, raise, are stopped, or compute NaN. The job ends or starts again, names the rank,
loses no checkpoint, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from commands import main
from pool import RankFailure

from tpformer.config import build_config, to_toml
from tpformer.processes.watchdog import HANG_EXIT_CODE
from tpformer.training.metrics import read_metrics
from tpformer.training.model import ModelParts
from tpformer.training.trainer import Trainer

TIMEOUT = 8.0  # run.timeout: a first step of four ranks on two busy cores takes a few seconds
INTERVAL = 2  # steps between checkpoints
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


def write_toml(folder: Path, values: dict) -> str:
    (folder / "run.toml").write_text(to_toml(build_config(values)))
    return str(folder / "run.toml")


def train(values: dict) -> None:
    Trainer(build_config(values)).run()


def test_a_rank_that_raises_is_named_and_the_restarted_job_ends_with_the_same_bits(
    ranks, commands, tiny_data, tmp_path
):
    """Faults of other kinds, and what is left of their runs, are in checks/faults.py."""
    faults, steps, run = [(0, 4, "after"), (1, 5, "before")], 7, tmp_path / "run"
    ranks(2).run(train, run_values(tmp_path / "undisturbed", tiny_data, TWO, steps), timeout=150)
    toml = write_toml(tmp_path, run_values(run, tiny_data, TWO, steps, restarts=len(faults)))
    code, _, err = commands.call(faulty, str(tmp_path), faults, "pretrain", toml).finish()
    assert code == 0, err
    attempts = err.split("starting all ranks again")
    assert len(attempts) == len(faults) + 1
    for (rank, step, when), said in zip(faults, attempts, strict=False):
        assert f"rank {rank} of 2 failed with exit code 1 (" in said, said
        assert f"injected {when} the gradients of step {step}" in said.split("; all ranks were stopped")[0], said
        assert f"[rank{rank}]: Traceback (most recent call last)" in said, said
    assert losses(run) == losses(tmp_path / "undisturbed") and len(losses(run)) == steps
    assert completed(run) == {f"step-{step}" for step in (*range(INTERVAL, steps, INTERVAL), steps)}


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


def test_a_rank_that_hangs_in_a_step_ends_the_run(ranks, tiny_data, tmp_path):
    with pytest.raises(RankFailure, match=f"died with exit code {HANG_EXIT_CODE}"):
        ranks(2).run(hang, run_values(tmp_path, tiny_data, TWO, steps=10))
    blamed = (tmp_path / "ranks" / "hang-report.txt").read_text().splitlines()[1]
    assert blamed.startswith("rank 1: rank 0 waits in collectives for rank 1 (step 3, at "), blamed
    assert f"{__file__}:{hang.__code__.co_firstlineno + 10}" in blamed


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("SIGKILL", 128 + signal.SIGKILL, "rank 2 of 4 was killed by SIGKILL; all ranks were stopped"),
        ("SIGSTOP", 124, "rank 2: no heartbeat from rank 2: "),
    ],
)
def test_without_restarts_the_job_ends(commands, tiny_data, tmp_path, kind, code, words):
    run = tmp_path / "run"
    job = commands.start("pretrain", write_toml(tmp_path, run_values(run, tiny_data, SHARDED, 100_000)))
    job.wait_until(lambda: last_step(run) >= 5, "step 5")
    before = completed(run)
    os.kill(job.children()[2], getattr(signal, kind))
    ended, _, err = job.finish()
    assert ended == code and words in err and "starting all ranks" not in err, err
    assert before <= completed(run), "a completed checkpoint was lost"
    assert (run / "ranks" / "hang-report.txt").exists() == (kind == "SIGSTOP")


def nan_gradients(values: dict, steps: tuple[int, ...]) -> tuple[list[dict], list[dict], str]:
    """In these steps rank 1's gradient of one parameter is NaN. Return its metrics, its parameters, and its error."""
    original = ModelParts.gradients

    def gradients(self, batch, **options):
        loss = original(self, batch, **options)
        if options["step"] in steps and dist.get_rank() == 1:
            name, parameter = list(self.parts[0].named_parameters())[4]
            parameter.grad.to_local().view(-1)[-1] = float("nan")
        return loss

    with mock.patch.object(ModelParts, "gradients", gradients):
        trainer, error = Trainer(build_config(values)), ""
        try:
            trainer.run()
        except FloatingPointError as stop:
            error = str(stop)
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
