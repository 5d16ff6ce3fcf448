"""`tpformer evaluate` finds the trainer's own loss in every layout, counts bytes, and refuses data of another model."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tpformer.config import build_config, to_toml
from tpformer.inference.settings import open_evaluation_data
from tpformer.training.data import IndexedDataset, IndexedWriter, TokenSamples, build_dataset, load_tokenizer
from tpformer.training.metrics import read_metrics
from tpformer.training.resolve import same_tokenizer

LAYOUTS = {
    "tp 1": "--parallel.tensor-parallel 1",
    "the run's own, tp 2": "--parallel.sequence-parallel False",
    "pp 2": "--parallel.tensor-parallel 1 --parallel.pipeline-parallel 2 --train.microbatch-size 3",
    "dp 2, ZeRO-3": "--parallel.tensor-parallel 1 --parallel.data-parallel-shard 2 --parallel.zero-stage 3",
}
ALL_AXES = (
    "--parallel.pipeline-parallel 2 --parallel.data-parallel-shard 2 --train.dtype float64 --train.microbatch-size 4"
)


@pytest.fixture(scope="module")
def trained(commands, tmp_path_factory) -> Path:
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
    code, out, err = commands.run("pretrain", str(folder / "run.toml"))
    assert code == 0, out + err
    return folder


def evaluated(commands, model: Path, *options: str) -> dict:
    """The result of an evaluation, as --json writes it."""
    path = model.parent / "result.json"
    path.unlink(missing_ok=True)
    code, out, err = commands.run("evaluate", str(model), *options, "--json", str(path))
    assert code == 0, out + err
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    "layout", [*LAYOUTS.values(), pytest.param(ALL_AXES, marks=pytest.mark.proof)], ids=[*LAYOUTS, "tp 2, pp 2, dp 2"]
)
def test_evaluate_equals_the_trainers_validation(commands, trained, layout):
    logged = [row["val_loss"] for row in read_metrics(trained / "run" / "metrics.jsonl") if "val_loss" in row]
    found = evaluated(commands, trained / "run", "--samples", "12", *layout.split())
    rows = found["data"]
    assert [(row["data"], row["samples"], row["tokens"]) for row in rows] == [
        (str(trained / "code"), 12, 192),
        (str(trained / "prose"), 9, 144),
        ("together", 21, 336),
    ]
    assert abs(rows[2]["loss"] - logged[-1]) <= 1e-12
    for row in rows:
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]), rel=1e-15)
        assert row["bits_per_byte"] == pytest.approx(
            row["loss"] * row["tokens"] / math.log(2) / row["bytes"], rel=1e-15
        )


def byte_level(path: Path, template: bool = False) -> str:
    """A tokenizer.json whose tokens are bytes, some pairs of them and the end of a document, as GPT-2's are."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tpformer[hf]")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.ByteLevel(False), tokenizers.decoders.ByteLevel()
    options = {"vocab_size": 300, "special_tokens": ["</s>"], "show_progress": False}
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    made.train_from_iterator(["the other thing that they then thought of"] * 9, trainer)
    if template:
        made.post_processor = tokenizers.processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
        made.enable_truncation(7)
    made.save(str(path))
    return str(path)


@pytest.mark.parametrize("tokenizer", ["bytes", "json"])
@pytest.mark.parametrize("seq_length", [1, 7])
def test_targets_stand_for_all_bytes_but_those_of_the_first_token_and_the_rest(tmp_path, tokenizer, seq_length):
    """Documents are shorter than a sample, or end within one, and characters have several tokens."""
    texts = ["x", "then the 世界 thought\r\n", "", "Grüße " * 9, "other"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    name = tokenizer if tokenizer == "bytes" else byte_level(tmp_path / "tokenizer.json")
    build_dataset([tmp_path / "texts.jsonl"], tmp_path / "data", name, quiet=True)
    (data,) = open_evaluation_data([str(tmp_path / "data")], name, 400, seq_length, None)
    encoded = load_tokenizer(name)
    rest = data.samples.dataset.tokens(1 + data.targets, data.samples.dataset.n_tokens)
    assert (len(rest) > 0) == (seq_length > 1)
    left_out = len("x") + len(encoded.decode(rest).encode())
    assert data.target_bytes(encoded) == sum(len(text.encode()) for text in texts) - left_out


def test_tokenizers_are_the_same_by_what_they_do(tmp_path):
    one, other = byte_level(tmp_path / "one.json"), byte_level(tmp_path / "other.json", template=True)
    assert Path(one).read_text() != Path(other).read_text() and same_tokenizer(one, other)
    changed = json.loads(Path(one).read_text())
    changed["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "changed.json").write_text(json.dumps(changed))
    assert not same_tokenizer(one, str(tmp_path / "changed.json"))
    assert same_tokenizer("bytes", "bytes") and same_tokenizer(one, "bytes") is False
    assert same_tokenizer(one, "absent.json") is None


def test_refused_before_any_rank_starts(commands, trained, tmp_path):
    run, code = str(trained / "run"), str(trained / "code")
    with IndexedWriter(tmp_path / "beyond", np.dtype(np.uint16)) as writer:
        writer.add_document([1, 300] * 20)
    sidecar = {"tokenizer": byte_level(tmp_path / "tokenizer.json"), "vocab_size": 10}
    with IndexedWriter(tmp_path / "other", np.dtype(np.uint16)) as writer:
        writer.add_document([1, 2] * 20)
    (tmp_path / "other.json").write_text(json.dumps(sidecar))
    (tmp_path / "empty.bin").touch()
    (tmp_path / "empty.idx").write_bytes((trained / "code.idx").read_bytes())
    (tmp_path / "kept.json").touch()
    for options, words in {
        f"--data {tmp_path / 'beyond'}": "token ids from 1 to 300, but the model's vocab_size is 257",
        f"--data {tmp_path / 'other'}": "was built with the tokenizer",
        f"--data {tmp_path / 'empty'}": "truncated",
        f"--data {code} --seq-length 17": "more than the model's 16 learned positions",
        f"--data {code} --samples 0": "at least 1",
        f"--data {code} --json {tmp_path / 'kept.json'}": "give a new file",
        "--model.n-layers 3": "no setting of an evaluation",
        "--tasks none.jsonl": "does not exist",
        f"--tasks {trained / 'code.txt'}": "code.txt:1 is not valid JSON",
        "--parallel.tensor-parallel 3": "cannot be split",
    }.items():
        code_, out, err = commands.run("evaluate", run, *options.split())
        assert code_ == 2 and words in err and "Traceback" not in err and err.count("\n") == 1, options + out + err
    assert (tmp_path / "kept.json").read_text() == ""


def test_tasks_are_answered_alike_in_every_layout(commands, trained):
    """One token is more probable than twelve, in any model that has hardly been trained."""
    choices = ["x", "é" * 6, "xxxxxxxxxxx!"]
    lines = [{"prompt": "p" * n, "choices": choices, "answer": answer} for n, answer in ((0, 0), (5, 2), (40, 0))]
    lines += [{"prompt": "p", "answer": "Never."}]
    (trained / "tasks.jsonl").write_text("".join(json.dumps(line) + "\r\n" for line in lines))
    options = ("--tasks", str(trained / "tasks.jsonl"), "--parallel.tensor-parallel")
    shared, staged = ("2", "--parallel.data-parallel-shard", "2"), ("2", "--parallel.pipeline-parallel", "2")
    layouts = (("1",), ("2",), shared, staged)
    one, two, four, pipeline = (evaluated(commands, trained / "run", *options, *layout) for layout in layouts)
    assert pipeline["notes"].pop(0).startswith("tasks are answered without the pipeline")
    assert one == two == four == pipeline and one["data"] == []
    assert one["notes"] == ["1 of 4 prompts were cut at the left to fit 16 tokens"]
    acc, acc_bytes, exact = one["tasks"]
    assert acc == {
        "task": str(trained / "tasks.jsonl"),
        "metric": "acc",
        "number": 3,
        "value": 2 / 3,
        "stderr": pytest.approx(1 / 3),
    }
    assert (acc_bytes["metric"], acc_bytes["number"]) == ("acc_bytes", 3)
    assert (exact["metric"], exact["number"], exact["value"], exact["stderr"]) == ("exact_match", 1, 0, None)


def hugging_face(folder: Path, family: str):
    """A tiny random model of transformers in float64, saved to the folder."""
    transformers = pytest.importorskip("transformers", reason="needs tpformer[hf]")
    torch.manual_seed(0)
    sizes = {"vocab_size": 261, "max_position_embeddings": 32, "hidden_size": 32, "num_hidden_layers": 2}
    if family != "gpt2":
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
        sizes |= {"num_local_experts": 4} if family == "mixtral" else {}
        options = {"initializer_range": 0.2, "tie_word_embeddings": False}
        config = transformers.AutoConfig.for_model(family, **sizes, **options)
    else:
        config = transformers.GPT2Config(**sizes, num_attention_heads=4, initializer_range=0.2)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    model.save_pretrained(folder)
    return model


def loss_in_transformers(model, trained: Path) -> float:
    """The loss over the first 9 samples of the code, by transformers."""
    windows = TokenSamples(IndexedDataset(trained / "code"), 16, shuffle=False)
    ids = torch.stack([torch.from_numpy(windows.sample(i)) for i in range(9)])
    model.config._experts_implementation = "eager"  # the others take no float64
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


NINE = ("--seq-length", "16", "--samples", "9", "--train.dtype", "float64")


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["--parallel.tensor-parallel 2", "--parallel.pipeline-parallel 2"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_a_hugging_face_model_has_transformers_own_loss(commands, trained, tmp_path, family, layout):
    model = hugging_face(tmp_path / "weights", family)
    found = evaluated(commands, tmp_path / "weights", "--data", str(trained / "code"), *NINE, *layout.split())["data"][
        0
    ]
    wanted = loss_in_transformers(model, trained)
    assert found["loss"] == pytest.approx(wanted, rel=1e-6) and found["bytes"] == found["tokens"] == 144


@pytest.mark.proof
def test_an_exported_run_has_the_same_loss_everywhere(commands, trained, tmp_path):
    """The export's tokenizer.json is the run's byte tokenizer, so the export is evaluated on the run's own data."""
    transformers = pytest.importorskip("transformers", reason="needs tpformer[hf]")
    code, out, err = commands.run("export", str(trained / "run"), "--out", str(tmp_path / "hf"), "--format", "hf")
    assert code == 0, out + err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64).eval()
    wanted = loss_in_transformers(model, trained)
    for source in (trained / "run", tmp_path / "hf"):
        found = evaluated(commands, source, "--data", str(trained / "code"), *NINE)["data"][0]
        assert found["loss"] == pytest.approx(wanted, rel=1e-6) and found["bytes"] == 144
