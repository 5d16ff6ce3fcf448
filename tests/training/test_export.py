"""`tpformer export` writes a checkpoint's tensors as safetensors, and refuses what it cannot export.
Layouts load one in test_source.py."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from small_runs import LAYOUTS, MODEL, build, everything, merged, run_config
from testing import assert_identical
from tiny_runs import flip

from tpformer.config import to_toml
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
