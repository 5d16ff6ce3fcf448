"""`tpformer evaluate` finds the trainer's own loss in every layout, counts bytes, refuses data of another model, and
has the precision of a run, also where it answers tasks."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from commands import main
from made import byte_level, sentencepiece_like
from testing import assert_same, on_every_rank
from turns import in_turns

from tpformer.config import build_config, to_toml
from tpformer.inference import generate
from tpformer.inference.evaluate import show
from tpformer.inference.settings import open_evaluation_data
from tpformer.ops.transports.quantized import record_blocks
from tpformer.training.data import IndexedWriter, build_dataset, load_tokenizer
from tpformer.training.metrics import read_metrics
from tpformer.training.resolve import same_tokenizer

LAYOUTS = {
    "tp 1": "--parallel.tensor-parallel 1",
    "tp 2, pp 2": "--parallel.sequence-parallel False --parallel.pipeline-parallel 2 --train.microbatch-size 3",
    "ZeRO": "--parallel.tensor-parallel 1 --parallel.data-parallel-shard 2 --parallel.zero-stage 3",
}


@pytest.fixture(scope="module")
def trained(done, tmp_path_factory) -> Path:
    """A folder with a run in float64 on 2 tensor-parallel ranks, and its two validation datasets."""
    folder = tmp_path_factory.mktemp("evaluated")
    texts = {"code": "def f(x):\n    return x * 2 + 1\n" * 20, "prose": "Grüße, 世界! " * 9}
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
        build_dataset([folder / f"{name}.txt"], folder / name, "bytes", quiet=True)
    values = {
        "run": {"dir": str(folder / "run")},
        "model": {"seq_length": 16, "n_layers": 2, "hidden_size": 32, "n_heads": 4},
        "data": {"train": [str(folder / "code")], "valid": [str(folder / name) for name in texts]},
        "parallel": {"tensor_parallel": 2},
        "train": {"steps": 3, "global_batch_size": 4, "validation_samples": 12, "dtype": "float64"},
        "optimizer": {"warmup_steps": 1, "lr": 0.01},
        "log": {"plot": False, "tensorboard": False},
    }
    (folder / "run.toml").write_text(to_toml(build_config(values)))
    done("pretrain", str(folder / "run.toml"))
    return folder


def evaluated(done, model: Path, *options: str) -> dict:
    """The result of an evaluation, as --json writes it."""
    path = model.parent / "result.json"
    path.unlink(missing_ok=True)
    done("evaluate", str(model), *options, "--json", str(path))
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def asked(done, trained) -> dict:
    """What tasks alone give on the run's own 2 ranks."""
    path = trained / "tasks.jsonl"
    choices = ["x", "é" * 6, "xxxxxxxxxxx!"]
    lines = [{"prompt": "p" * n, "choices": choices, "answer": answer} for n, answer in ((0, 0), (5, 2), (40, 0))]
    lines += [{"prompt": "p", "answer": "Never."}]
    path.write_text("".join(json.dumps(line) + "\r\n" for line in lines))
    return evaluated(done, trained / "run", "--tasks", str(path))


@pytest.mark.parametrize("layout", ["tp 2, pp 2", *in_turns(["tp 1", "ZeRO"], first=0)])
def test_every_layout_finds_the_trainers_validation_and_the_same_answers(done, trained, asked, layout):
    """Where neither data nor tasks are given, the run's own validation data are used."""
    options = ("--data", str(trained / "code"), str(trained / "prose"), "--tasks", str(trained / "tasks.jsonl"))
    given = () if layout == "ZeRO" else options
    found = evaluated(done, trained / "run", *given, "--samples", "12", *LAYOUTS[layout].split())
    logged = [row["val_loss"] for row in read_metrics(trained / "run" / "metrics.jsonl") if "val_loss" in row]
    rows = found["data"]
    assert [(row["data"], row["samples"], row["tokens"]) for row in rows] == [
        (str(trained / "code"), 12, 192), (str(trained / "prose"), 9, 144), ("together", 21, 336),
    ]  # fmt: skip
    assert_same(rows[2]["loss"], logged[-1])
    for row in rows:
        assert_same(row["perplexity"], math.exp(row["loss"]))
        assert_same(row["bits_per_byte"], row["loss"] * row["tokens"] / math.log(2) / row["bytes"])
    if "pp" in layout:
        assert found["notes"].pop(0).startswith("tasks are answered without the pipeline")
    assert not given or (found["tasks"], found["notes"]) == (asked["tasks"], asked["notes"])


def test_tasks_alone_are_answered_without_data(trained, asked):
    """One token is more probable than twelve, in any model that has hardly been trained."""
    assert (asked["data"], asked["notes"]) == ([], ["1 of 4 prompts were cut at the left to fit 16 tokens"])
    acc, acc_bytes, exact = asked["tasks"]
    task = str(trained / "tasks.jsonl")
    assert_same(acc, {"task": task, "metric": "acc", "number": 3, "value": 2 / 3, "stderr": 1 / 3})
    assert (acc_bytes["metric"], acc_bytes["number"]) == ("acc_bytes", 3)
    assert exact == {"task": task, "metric": "exact_match", "number": 1, "value": 0, "stderr": None}


WORDS = ["the other thing that they then thought of"] * 9


@pytest.mark.parametrize("tokenizer", ["bytes", "json"])
@pytest.mark.parametrize("seq_length", [1, 7])
def test_targets_stand_for_all_bytes_but_those_of_the_first_token_and_the_rest(tmp_path, tokenizer, seq_length):
    """Documents are shorter than a sample, or end within one, and characters have several tokens."""
    texts = ["x", "then the 世界 thought\r\n", "", "Grüße " * 9, "other"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    name = tokenizer if tokenizer == "bytes" else str(tmp_path / "tokenizer.json")
    byte_level(tmp_path / "tokenizer.json", WORDS)
    build_dataset([tmp_path / "texts.jsonl"], tmp_path / "data", name, quiet=True)
    (data,) = open_evaluation_data([str(tmp_path / "data")], name, 400, seq_length, None)
    encoded = load_tokenizer(name)
    rest = data.samples.dataset.tokens(1 + data.targets, data.samples.dataset.n_tokens)
    assert (len(rest) > 0) == (seq_length > 1)
    left_out = len("x") + len(encoded.decode(rest).encode())
    assert data.target_bytes(encoded) == sum(len(text.encode()) for text in texts) - left_out


@pytest.mark.parametrize("make", [sentencepiece_like, partial(byte_level, texts=WORDS)])
def test_targets_of_a_mask_stand_for_the_bytes_of_completions(tmp_path, make):
    """A decoder drops the space that a completion begins with, where nothing is before it."""
    pairs = [("the dog", " and the other"), ("", "the dog"), ("the 世界", " 世 dog")]
    lines = (json.dumps({"prompt": prompt, "completion": text}) + "\n" for prompt, text in pairs)
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    make(name := tmp_path / "tokenizer.json")
    build_dataset([tmp_path / "pairs.jsonl"], tmp_path / "data", str(name), fields=["prompt", "completion"], quiet=True)
    (data,) = open_evaluation_data([str(tmp_path / "data")], str(name), 400, 1, None, masked=True)
    assert data.target_bytes(load_tokenizer(name)) == sum(len(text.encode()) for _, text in pairs)


def test_tokenizers_are_the_same_by_what_they_do(tmp_path):
    one, other, changed = (str(tmp_path / f"{name}.json") for name in ("one", "other", "changed"))
    made = byte_level(one, WORDS, first="</s>")
    made.enable_truncation(7)
    made.save(other)
    byte_level(one, WORDS)
    assert Path(one).read_text() != Path(other).read_text() and same_tokenizer(one, other)
    Path(changed).write_text(json.dumps(json.loads(Path(one).read_text()) | {"normalizer": {"type": "Lowercase"}}))
    assert not same_tokenizer(one, changed)
    assert same_tokenizer("bytes", "bytes") and same_tokenizer(one, "bytes") is False
    assert same_tokenizer(one, "absent.json") is None


def test_refused_before_any_rank_starts(commands, trained, tmp_path):
    run, code = str(trained / "run"), str(trained / "code")
    for name, largest in (("beyond", 300), ("other", 2)):
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16)) as writer:
            writer.add_document([1, largest] * 20)
    byte_level(tmp_path / "tokenizer.json", WORDS)
    (tmp_path / "other.json").write_text(json.dumps({"tokenizer": str(tmp_path / "tokenizer.json"), "vocab_size": 10}))
    (tmp_path / "empty.bin").touch()
    (tmp_path / "empty.idx").write_bytes((trained / "code.idx").read_bytes())
    (tmp_path / "kept.json").touch()
    for options, words in {
        f"--data {tmp_path / 'beyond'}": "token ids from 1 to 300, but the model's vocab_size is 257",
        f"--data {tmp_path / 'other'}": "was built with the tokenizer",
        f"--data {tmp_path / 'empty'}": "truncated",
        f"--data {code} --seq-length 17": "more than the model's 16 learned positions",
        f"--data {code} --samples 0": "--samples=0 must be in [1, 1e6]",
        f"--data {code} --json {tmp_path / 'kept.json'}": "give a new file",
        f"--data {code} --json {tmp_path / ('x' * 251)}": "has a name of 251 bytes: give one of at most 250",
        "--model.n-layers 3": "no setting of an evaluation: leave it out",
        "--tasks none.jsonl": "does not exist",
        f"--tasks {trained / 'code.txt'}": "code.txt:1 is not valid JSON",
        "--parallel.tensor-parallel 3": "cannot be split",
        "--parallel.context-parallel 3": "cannot be shared by parallel.context_parallel=3",
        f"--tasks {trained / 'code.txt'} --parallel.context-parallel 2": "prompts and their answers have no common",
    }.items():
        code_, out, err = commands.run("evaluate", run, *options.split())
        assert code_ == 2 and words in err and "Traceback" not in err and err.count("\n") == 1, options + out + err
    assert (tmp_path / "kept.json").read_text() == ""


def on_a_full_disk(*arguments: str) -> None:
    """Run `tpformer`, which cannot write the result."""
    full = mock.Mock(side_effect=OSError(28, "No space left on device", "result.json"))
    with mock.patch("tpformer.inference.evaluate.write_result", full):
        main(*arguments)


def test_what_cannot_be_written_is_shown(commands, trained, tmp_path):
    """A full disk at the end of an evaluation lost it."""
    options = ("--samples", "2", "--parallel.tensor-parallel", "1", "--json", str(tmp_path / "result.json"))
    code, out, err = commands.call(on_a_full_disk, "evaluate", str(trained / "run"), *options).finish()
    assert code == 2 and "result.json cannot be used: No space left on device" in err
    assert "perplexity" in out and "together" in out, out  # a path may be broken over two lines


WIDE = {"vocab_size": 100, "seq_length": 8, "n_layers": 1, "hidden_size": 128, "n_heads": 2, "head_dim": 128}


@on_every_rank(2)
def test_a_loaded_model_has_the_precision_that_is_asked_for() -> None:
    """Two linears' inputs and weights in attention, two in the MLP: four inputs and six weights, or nothing."""
    for precision, blocks in (("16", 0), ("fp8", 10)):
        train = {"precision": precision, "dtype": "float64", "device": "cpu"}
        sections: dict[str, Any] = {"model": WIDE, "train": train, "parallel": {"tensor_parallel": 2}}
        config = build_config(sections)
        source = SimpleNamespace(architecture=config.model.architecture, load=lambda parts: parts[0].reset_parameters())
        with mock.patch.object(generate, "open_source", return_value=source):
            model, _ = generate.load_model(config)
        with torch.no_grad(), record_blocks() as made:
            model(torch.zeros(1, 3, dtype=torch.long))
        assert len(made) == blocks, precision


def test_a_result_says_that_its_linears_were_quantised() -> None:
    for precision, words in (("16", "float64, 8 tokens"), ("fp8", "float64, linears in FP8, 8 tokens")):
        console = mock.Mock()
        found = {"model": "run", "dtype": "float64", "precision": precision, "seq_length": 8}
        show({**found, "data": [], "tasks": [], "notes": []}, console)
        assert words in console.print.call_args_list[0].args[0]
