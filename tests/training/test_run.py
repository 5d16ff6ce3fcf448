"""Whole runs through the `tpformer` command: stopped, resumed, damaged, sampled from, drawn; ranks that raise.
checks/faults.py has other faults, at random moments, and what is left of their runs; test_command_ends.py has mistakes.
"""

import json
import shutil
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from commands import main
from testing import on_every_rank
from tiny_runs import flip, losses, write_run

from tpformer.config import build_config, read_toml
from tpformer.processes.watchdog import Watchdog
from tpformer.training.checkpoint import steps
from tpformer.training.model import ModelParts
from tpformer.training.trainer import Trainer


def test_what_a_run_says_when_it_is_started_again(done, refused, tmp_path, tiny_values):
    """Nothing is overwritten. A damaged newest checkpoint is named, and the one before goes on. Without a usable one,
    or without any (R5), it does not begin anew. R19, N7: steps that are done are not taken back."""
    toml, directory = write_run(tmp_path, tiny_values), Path(tiny_values["run"]["dir"])
    assert "M x N x K" not in (out := done("pretrain", toml)), "N9: one rank has no use for the table of its linears"
    assert ", cpu, 4 samples of" in out, out
    files, resume = (directory / "config.toml", directory / "metrics.jsonl"), ("pretrain", toml, "--run.resume", "True")
    before, contents = losses(directory), [file.read_bytes() for file in files]
    for arguments, words in (
        (("pretrain", toml), ["already holds a run", "--run.resume"]),
        ((*resume, "--model.n-layers", "3"), ["model.n_layers: 2 -> 3"]),
        ((*resume, "--train.steps", "1"), ["is at step 6, further than train.steps = 1"]),
        ((*resume, "--optimizer.lr", "1e-3"), ["optimizer.lr: 0.0003 -> 0.001", "--run.changes optimizer.lr"]),
    ):
        err = refused(*arguments)
        assert all(word in err for word in words), err
    assert contents == [file.read_bytes() for file in files]
    out = done(*resume, "--log.interval", "2")
    assert "is finished: it is at step 6 of 6" in out and "log.interval: 1 -> 2" in out, out

    file = next((directory / "checkpoints" / "step-6").glob("*.distcp"))
    flip(file)
    out = done(*resume)
    assert "from step 4" in out and losses(directory) == before
    assert "checkpoint of step 6 is not usable" in out and file.name in out and "SHA-256" in out
    more = (*resume, "--optimizer.lr", "1e-3", "--train.steps", "7")
    out = done(*more, "--run.changes", "optimizer.lr")
    assert "from step 6" in out, "the bad one of step 6 was replaced by a good one"
    assert (
        "train.steps: 6 -> 7, where the schedule" in out and "warm-up" not in out and "optimizer.lr: 0.0003 -> " in out
    ), out
    after = read_toml(directory / "config.toml")
    assert after["optimizer"]["lr"] == 1e-3 and after["run"]["changes"] == [] and after["data"]["train_contents"]

    settings = (directory / "config.toml").rename(directory / "settings.toml")
    assert "its config.toml is gone" in refused(*more)
    settings.rename(directory / "config.toml")

    before, left = losses(directory), steps(directory / "checkpoints")
    assert len(before) == 7 and 7 in left
    for manifest in directory.glob("checkpoints/step-*/manifest.json"):
        manifest.unlink()
    assert f"checkpoints of steps {', '.join(map(str, left))}, and none is usable" in refused(*more)
    shutil.rmtree(directory / "checkpoints")
    err = refused(*more)
    assert "has had checkpoints" in err and "bring them back" in err, err
    for name in ("config.toml", "saved.json"):
        (directory / name).unlink()
    assert "its config.toml is gone" in refused("pretrain", toml) and losses(directory) == before


def test_overrides_reach_the_run_and_generate_prints_several_texts_of_it(done, commands, tmp_path, tiny_values):
    toml, directory = write_run(tmp_path, tiny_values), tmp_path / "other"
    options = "--model.n-layers 3 --model.seq-length 8 --parallel.tensor-parallel 2 --train.steps=2".split()
    assert "M x N x K" in done("pretrain", toml, *options, "--run.dir", str(directory), COLUMNS="0")
    found = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    keys = {"step", "loss", "step_loss", "grad_norm", "lr", "tokens", "tokens_per_second"}
    assert [set(row) for row in found] == [keys, keys, {"step", "val_loss"}]
    assert found[1]["tokens"] == 2 * 4 * 8
    stored = (directory / "config.toml").read_text()
    assert "n_layers = 3" in stored and "vocab_size = 257" in stored and "ffn_hidden_size" not in stored
    (tmp_path / "prompt.txt").write_text("class\n")
    options = f"--prompt import --prompt if --prompt-file {tmp_path}/prompt.txt --samples 2 --max-new-tokens 20".split()
    options += "--top-k 9 --top-p 0.9 --min-p 0.01 --stop e".split()
    code, out, err = commands.run("generate", str(directory), *options)
    texts = out.split("--- prompt ")[1:]
    assert code == 0 and [text[:11] for text in texts] == [f"{p}, sample {s}" for p in (1, 2, 3) for s in (1, 2)], err
    assert texts[0][12:].startswith("import") and texts[5][12:].startswith("class\n")
    assert all("e" not in text[12:] for text in texts[:4])
    assert "texts may need 25 positions, but the model was trained with 8" in err


def test_a_recorded_pipeline_step_is_drawn(done, tmp_path, tiny_values):
    parallel = {"pipeline_parallel": 2, "pipeline_schedule": "Interleaved1F1B", "data_parallel_shard": 2}
    more = {"model": {"n_layers": 4}, "log": {"timeline_step": 2}, "data": {"valid": []}, "train": {"steps": 2}}
    directory = tmp_path / "run"
    assert "tpformer timeline" in done("pretrain", write_run(tmp_path, tiny_values, parallel=parallel, **more))
    done("timeline", str(directory))
    trace = json.loads((directory / "plots" / "pipeline.json").read_text())
    computed = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"][0] in "FB"]
    assert len(computed) == 2 * 2 * 2 * 2, "forward and backward of 2 microbatches in 2 stages on 2 ranks"
    assert "Interleaved1F1B" in (directory / "plots" / "pipeline.svg").read_text()


def raising(*arguments: str) -> None:
    """Run `tpformer`, whose rank 1 raises in step 3. The ranks are forks of this process, so they have its patch."""
    original = ModelParts.gradients

    def gradients(self, batch, *, first_sample, **options):
        if first_sample == 2 * 4 and dist.get_rank() == 1:  # after two steps
            raise ValueError("injected")
        return original(self, batch, first_sample=first_sample, **options)

    ModelParts.gradients = gradients
    main(*arguments)


def test_a_rank_that_raises_is_named(commands, tmp_path, tiny_values):
    toml = write_run(tmp_path, tiny_values, parallel={"pipeline_parallel": 2}, data={"valid": []})
    code, _, err = commands.call(raising, "pretrain", toml).finish()
    said = "rank 1 of 2 failed with exit code 1 (RuntimeError: step 3 failed: injected); all ranks were stopped"
    assert code == 1 and "[rank1]: Traceback (most recent call last)" in err and said in err, err


@on_every_rank(1)
def test_a_run_is_watched_with_its_own_timeout(tiny_values):
    """tests/processes/test_watchdog.py has what follows when a rank hangs."""
    with mock.patch.object(Watchdog, "progress") as progress:
        trainer = Trainer(build_config(tiny_values, {"run": {"timeout": 77.0}, "data": {"valid": []}}))
        trainer.run()
    begun = [call.args for call in progress.call_args_list if len(call.args) == 1]
    assert trainer.watchdog.timeout == 77.0 and begun == [(step,) for step in range(1, 7)]
