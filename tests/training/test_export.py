"""`tpformer export` writes a checkpoint's tensors as safetensors, and refuses what it cannot export.
Layouts load one in test_source.py."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from made import save_run
from safetensors import safe_open
from safetensors.torch import load_file
from small_runs import LAYOUTS, MODEL, build, everything, merged, run_config
from testing import assert_identical
from tiny_runs import flip

from tpformer.config import to_toml
from tpformer.kernels.quantize.reference import dequantize_weight, quantize_weight
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import local_part
from tpformer.training.checkpoint import Checkpointer, CheckpointError
from tpformer.training.export import export, new_directory
from tpformer.training.source import open_source


def train(run):
    """Save checkpoints of steps 3 and 12; return the parameters at each."""
    model, optimizers = build(run_config(LAYOUTS["v-schedule"]))
    checkpointer = Checkpointer(run / "checkpoints")
    saved = {}
    for step in (3, 12):
        for parameter in model.parameters():
            local_part(parameter.detach()).mul_(1.5)
        checkpointer.save(step, model.parts, optimizers)
        saved[step] = everything(model.parts, optimizers)
    checkpointer.wait()
    return saved


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """A run directory, and its checkpoints' parameters by step and name."""
    run = tmp_path_factory.mktemp("run")
    (run / "config.toml").write_text(to_toml(run_config({})))
    results = ranks(4).run(train, run)
    return run, {step: merged([result[step] for result in results]) for step in (3, 12)}


def unpadded(tensors):
    return {name: value[:100] if name == "embed_tokens.weight" else value for name, value in tensors.items()}


def test_the_newest_checkpoint_in_one_file_which_one_process_loads(trained, tmp_path):
    run, saved = trained
    assert not dist.is_initialized()
    assert export(run, tmp_path / "out") == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1, "as readable as other files"
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert_identical(load_file(tmp_path / "out" / "model.safetensors"), unpadded(saved[12]))
    assert not saved[12]["embed_tokens.weight"][100:].any(), "what is cut off is zero"
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["step"], written["dtype"], written["vocab_size"]) == (12, "float32", 100)
    assert written["source"] == str(run / "checkpoints" / "step-12")
    source = open_source(tmp_path / "out")
    assert source.architecture == GPTConfig(**MODEL)
    for other, words in (
        ({"n_layers": 5}, "n_layers = 5, there 4"), ({"vocab_size": 90}, "vocab_size = 90, there 100"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"another model: {words}"):
            source.load([GPT(GPTConfig(**MODEL | other))])


def test_several_files_with_an_index_in_bfloat16(trained, tmp_path):
    """Files keep the limit, unless one tensor alone is above it. The index names each tensor's file."""
    (run, saved), limit, out = trained, 4000, tmp_path / "made" / "out"
    assert export(run, out, step=3, dtype="bfloat16", max_shard_bytes=limit) == 3
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in out.glob("*.safetensors")}
    assert sorted(files) == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 3 and index["weight_map"] == {name: file for file in files for name in files[file]}
    for tensors in files.values():
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= limit
    exported = {name: value for tensors in files.values() for name, value in tensors.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in exported.values())
    assert_identical(exported, {name: value.bfloat16() for name, value in unpadded(saved[3]).items()})


def test_refusals_and_what_fails_half_way_write_nothing(trained, tmp_path, monkeypatch):
    run, _ = trained
    full, bare, out = (tmp_path / name for name in ("full", "no-checkpoint", "out"))
    for folder, name, text in ((full, "file", "precious"), (bare, "config.toml", (run / "config.toml").read_text())):
        folder.mkdir()
        (folder / name).write_text(text)
    monkeypatch.setattr("tpformer.training.export.create_file", mock.Mock(side_effect=OSError(28, "disk full")))
    for source, target, options, error, words in (
        (tmp_path / "missing", out, {}, FileNotFoundError, "missing is not a run"),
        (bare, out, {}, FileNotFoundError, "has no checkpoint yet"),
        (run, full, {}, ValueError, "is not an empty directory"),
        (run, full / "file", {}, ValueError, "is not an empty directory"),
        (run, out, {"step": 4}, FileNotFoundError, "no checkpoint of step 4: it has 3, 12"),
        (run, out, {}, OSError, f"disk full: '{out}'"),
    ):
        with pytest.raises(error, match=words):
            export(source, target, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "no-checkpoint"]
    assert (full / "file").read_text() == "precious"
    out.mkdir()
    monkeypatch.chdir(out)  # R18: a shell there would be left in a directory that is gone
    with pytest.raises(ValueError, match="is the current directory: give --out a new one"):
        new_directory(Path()).__enter__()


def test_a_damaged_checkpoint_is_passed_over_or_refused(trained, tmp_path):
    run, _ = trained
    copy = shutil.copytree(run, tmp_path / "run")
    file = max((copy / "checkpoints" / "step-12").glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(file)
    reports: list[str] = []
    assert export(copy, tmp_path / "out", report=reports.append) == 3
    assert "step 12 is not usable" in reports[0] and file.name in reports[0]
    with pytest.raises(CheckpointError, match="SHA-256"):
        export(copy, tmp_path / "other", step=12)
    (copy / "checkpoints" / "step-3" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        export(copy, tmp_path / "other", report=reports.append)
    assert not (tmp_path / "other").exists()


def test_two_commands_at_once_leave_one_directory_and_a_third_is_refused(commands, refused, trained, tmp_path):
    arguments = ("export", str(trained[0]), "--out", str(tmp_path / "out"), "--dtype", "bfloat16")
    started = [commands.start(*arguments) for _ in range(2)]
    codes, said, errors = zip(*(command.finish() for command in started), strict=True)
    assert sorted(codes) in ([0, 0], [0, 2]) and all("Traceback" not in error for error in errors), errors
    first = codes.index(0)
    assert "step 12" in said[first] and errors[first] == "", errors
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert len(exported) == len(open_source(tmp_path / "out").tensors.shapes)
    assert exported["norm.weight"].dtype == torch.bfloat16
    assert "is not an empty directory" in refused(*arguments)


WIDE = {"vocab_size": 100, "seq_length": 12, "n_layers": 2, "hidden_size": 128, "n_heads": 2, "head_dim": 128}
WIDE |= {"n_kv_heads": 1, "ffn_hidden_size": 256, "tie_embeddings": False, "bias": False}
LLAMA = WIDE | {"norm": "rmsnorm", "activation": "swiglu", "position": "rope"}


def save(run: Path, model: dict) -> Path:
    """A run with a checkpoint of first weights."""
    save_run(run, run_config({}, model), GPT(GPTConfig(**model), seed=3))
    return run


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("most", [10**9, 10**5], ids=["one file", "several files"])
def test_weights_in_fp8_are_those_of_training_and_transformers_reads_them(dtype, most, tmp_path):
    """A file of its own for a weight has its scales in another one."""
    run = save(tmp_path / "run", LLAMA)
    plain, blocks = tmp_path / "plain", tmp_path / "blocks"
    options = {"dtype": dtype, "file_format": "hf", "max_shard_bytes": most, "report": lambda _: None}
    export(run, plain, **options)
    export(run, blocks, weights="fp8", **options)
    wanted, found = (
        {n: x for f in out.glob("*.safetensors") for n, x in load_file(f).items()} for out in (plain, blocks)
    )
    linears = {name for name in wanted if name.endswith("_proj.weight")}
    assert len(linears) == 2 * 7 and found.keys() - wanted.keys() == {f"{name}_scale_inv" for name in linears}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        blocks, quantization_config=transformers.FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    ).state_dict()
    for name, weight in wanted.items():
        if name in linears:
            assert found[name].dtype == torch.float8_e4m3fn and found[f"{name}_scale_inv"].dtype == torch.float32
            weight = dequantize_weight(quantize_weight(weight), torch.float32)
        assert torch.equal(loaded[name], weight.float()), name
    settings = json.loads((blocks / "config.json").read_text())
    assert settings.pop("quantization_config")["weight_block_size"] == [128, 128]
    assert settings == json.loads((plain / "config.json").read_text())
    with pytest.raises(ValueError, match="quantized weights are not read: export the model in 16 or 32 bits"):
        open_source(blocks)


EXPERTS = {"n_experts": 4, "expert_ffn_size": 128}


@pytest.mark.parametrize("model, file_format, words", [
    (LLAMA, "tpformer", "weights in FP8 are of --format hf"),
    (LLAMA | EXPERTS, "hf", "weights in FP8 of a model with experts are not written yet"),
    (WIDE | {"head_dim": None, "n_kv_heads": 2, "bias": True, "tie_embeddings": True, "ffn_hidden_size": None}, "hf",
     "files of gpt2 have no matrices of single linears"),
    (LLAMA | {"ffn_hidden_size": 192}, "hf", "layers.0.mlp.gate_proj.weight's rows=192: 128 features share a scale"),
])  # fmt: skip
def test_weights_that_cannot_be_in_fp8_leave_nothing(model, file_format, words, tmp_path):
    run = save(tmp_path / "run", model)
    with pytest.raises(ValueError, match=words):
        export(run, tmp_path / "out", file_format=file_format, weights="fp8", report=lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
