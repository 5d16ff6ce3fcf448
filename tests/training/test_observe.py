"""A profile of a step is written, and Weights & Biases gets the rows of a run, resumed or not."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from runs import write_run

from tpformer.config import build_config
from tpformer.training.metrics import MetricsLog, read_metrics
from tpformer.training.observe import WandbLog, check_wandb
from tpformer.training.trainer import Trainer, pretrain


def train(values: dict) -> Path:
    trainer = Trainer(build_config(values))
    trainer.run()
    return trainer.directory


def test_a_step_is_profiled(ranks, tiny_values):
    values = {**tiny_values, "train": {**tiny_values["train"], "steps": 2}, "log": {"plot": False, "profile_step": 2}}
    (directory,) = ranks(1).run(train, values)
    events = json.loads((directory / "profile.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events), "a matrix product of the step"


def test_rows_reach_a_wandb_run_that_is_the_same_after_a_resume(tmp_path, monkeypatch):
    """A stand-in takes the place of wandb, which need not be installed."""
    calls: list = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda exit_code: calls.append(exit_code)
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: calls.append(given) or run))
    with pytest.raises(KeyError):
        for steps in ((1,), (2, None)):
            wandb = WandbLog(tmp_path, "gpt", {"train": {"steps": 2}})
            with MetricsLog(tmp_path, first_step=0, steps=2, wandb=wandb) as log:
                for step in steps:
                    log.row(**({"step": step} if step else {}), loss=0.5)
    first, row, code, again, *rest = calls
    assert first == again and (first["project"], first["resume"], first["dir"]) == ("gpt", "allow", str(tmp_path))
    assert len(first["id"]) == 16 and first["config"] == {"train": {"steps": 2}}
    assert (row, code) == ((1, {"loss": 0.5}), 0) and rest == [(2, {"loss": 0.5}), 1], "the second one fails"


def test_without_wandb_one_sentence_names_the_extra(monkeypatch):
    check_wandb("")
    monkeypatch.setattr("tpformer.training.observe.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"log.wandb='gpt' needs the package wandb: pip install 'tpformer\[wandb\]'"):
        check_wandb("gpt")


def refused_by_wandb(values: dict) -> str:
    """What `pretrain` raises where Weights & Biases knows no user."""
    error = type("Error", (Exception,), {})
    refuse = mock.Mock(side_effect=error("No API key configured. Use `wandb login` to log in."))
    with mock.patch.dict(sys.modules, wandb=SimpleNamespace(init=refuse, Error=error)):
        with mock.patch("tpformer.training.observe.find_spec"), pytest.raises(Exception) as failure:
            pretrain(build_config(values))
    return f"{failure.typename}: {failure.value}"


def test_what_wandb_refuses_is_one_sentence(ranks, tiny_values):
    """It was the traceback of a failed step."""
    values = {**tiny_values, "log": {**tiny_values["log"], "wandb": "gpt"}}
    (said,) = ranks(1).run(refused_by_wandb, values)
    assert said == (
        "WandbError: log.wandb='gpt' cannot begin: No API key configured. Use `wandb login` to log in. "
        "(WANDB_MODE=offline keeps the rows in the run directory, and without log.wandb there are none)"
    )


@pytest.mark.skipif(not find_spec("wandb"), reason="wandb is not installed")
def test_wandb_itself_offline(tiny_values, commands, tmp_path):
    values = {**tiny_values, "log": {"interval": 1, "plot": False, "wandb": "tpformer-test"}}
    code, out, err = commands.run("pretrain", write_run(tmp_path, values), WANDB_MODE="offline")
    assert code == 0, out + err
    directory = Path(values["run"]["dir"])
    (stored,) = (directory / "wandb").glob("offline-run-*/run-*.wandb")
    assert (directory / "wandb.id").read_text() in stored.name
    content = stored.read_bytes()
    assert all(name.encode() in content for row in read_metrics(directory / "metrics.jsonl") for name in row)
