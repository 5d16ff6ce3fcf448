"""Runs start from transformers' weights: the first loss is transformers' own, and a layout changes none of them."""

import shutil

import oracle
import pytest
import torch
from testing import assert_same
from transformers import AutoModelForCausalLM
from turns import in_turns

from bench.families.training import in_float64
from tpformer.config import build_config, to_toml
from tpformer.training.data import build_dataset
from tpformer.training.export import export
from tpformer.training.metrics import read_metrics
from tpformer.training.resolve import resolve
from tpformer.training.setup import open_data
from tpformer.training.source import from_source
from tpformer.training.step import batch

LAYOUT = {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel_shard": 2}


def first_loss(model, values) -> float:
    """The loss of a run's first step, computed by transformers in float64."""
    ids = batch(open_data(resolve(build_config(*from_source(values)))).train, 0, 4)
    with in_float64():
        logits = oracle.exact(model)(ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


def losses(run) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row}


@pytest.mark.parametrize("name", in_turns(["qwen3-moe-dense-first", "gpt2"]))
def test_a_run_goes_on_from_theirs(commands, tmp_path, monkeypatch, name):
    """Fewer key-value heads than ranks would like; a tied table on two stages, cut positions. Then resumed without its
    source, and itself a source, in one process, for a shorter run with other padding."""
    kind, fields = oracle.MODELS[name]
    monkeypatch.setitem(oracle.MODELS, "larger", (kind, fields | {"vocab_size": 261}))
    source = tmp_path / "source"
    theirs = oracle.make("larger", source)
    (tmp_path / "text.txt").write_text("".join(f"line {number} of {number * 7}\n" for number in range(600)))
    build_dataset([tmp_path / "text.txt"], tmp_path / "data", "bytes", quiet=True)

    def values(folder, start, parallel, **model):
        return {
            "run": {"dir": str(tmp_path / folder)}, "model": model | {"init_from": str(start)}, "parallel": parallel,
            "train": {"steps": 4, "global_batch_size": 4, "dtype": "float64"}, "checkpoint": {"interval": 2},
            "data": {"train": [str(tmp_path / "data")]}, "optimizer": {"warmup_steps": 1, "lr": 0.003},
            "log": {"interval": 1, "plot": False, "tensorboard": False},
        }  # fmt: skip

    file = tmp_path / "run.toml"

    def pretrain(given):
        file.write_text(to_toml(build_config(*from_source(given))))
        code, _, err = commands.run("pretrain", str(file))
        assert code == 0, err
        return losses(tmp_path / given["run"]["dir"])

    alone = pretrain(values("alone", source, {}, seq_length=24))
    assert_same(alone[1], first_loss(theirs, values("none", source, {}, seq_length=24)))
    split = values("split", source, LAYOUT, seq_length=24)
    assert_same(pretrain(split), alone)
    run = tmp_path / "split"
    shutil.rmtree(run / "checkpoints" / "step-4")
    shutil.rmtree(source)
    code, out, err = commands.run("pretrain", str(file), "--run.resume", "True")
    assert code == 0 and "from step 2" in out, err
    assert_same(losses(run), alone)
    follower = values("follower", run, {}, seq_length=12, vocab_multiple=16)
    started = pretrain(follower)
    export(run, tmp_path / "out", file_format="hf")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert_same(started[1], first_loss(back, follower))
