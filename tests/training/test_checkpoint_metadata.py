"""R12: a checkpoint from a stranger runs nothing, whoever reads it."""

import ast
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from tpformer.training.checkpoint import CheckpointError, load_checkpoint, newest_good, saved_tensors
from tpformer.training.checkpoint_files import (
    manifest_entries,
    read_parts,
    read_tensors,
    step_path,
    write_checkpoint,
    write_manifest,
)

ROOT = Path(__file__).parents[2]


class Calls:
    """An object whose unpickling calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def change(path, edit):
    """Replace a checkpoint's .metadata, and sign it."""
    metadata = FileSystemReader(path).read_metadata()
    (path / ".metadata").write_bytes(pickle.dumps(edit(metadata)))
    (path / "manifest.json").unlink()
    write_manifest(path, manifest_entries(path.iterdir()))


def with_fields(**fields):
    return lambda metadata: vars(metadata).update(fields) or metadata


def with_bytes(metadata):
    metadata.state_dict_metadata["model.y"] = BytesStorageMetadata()
    return metadata


def with_another_file(metadata):
    for place in metadata.storage_data.values():
        place.relative_path = "../step-1/__0_0.distcp"
    return metadata


def with_a_longer_tensor(metadata):
    metadata.state_dict_metadata["model.x"].size = torch.Size([8])
    return metadata


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda metadata: Calls(os.mkdir, "ran"), "posix.mkdir"),
        (with_fields(planner_data=Calls(os.mkdir, "ran")), "posix.mkdir"),
        (with_fields(planner_data=Calls(eval, "__import__('os').mkdir('ran')")), "builtins.eval"),
        (with_fields(planner_data=Calls(getattr, Metadata, "__init__")), "builtins.getattr"),
        (with_fields(planner_data=Calls(torch.load, "ran")), "torch.serialization.load"),
        (with_fields(planner_data=print), "builtins.print"),
        (with_bytes, "BytesStorageMetadata"),
        (with_another_file, "../step-1"),
        (with_a_longer_tensor, "do not add up"),
        (with_fields(storage_data={}), "where model.x lies"),
        (lambda metadata: [metadata], ".metadata cannot be used"),
    ],
)
def test_r12_a_metadata_that_is_none_is_named_and_runs_nothing(tmp_path, monkeypatch, edit, words):
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        write_checkpoint(step_path(tmp_path, step), {"x": torch.arange(4.0)}, step)
    path = step_path(tmp_path, 2)
    change(path, edit)
    reports: list[str] = []
    assert newest_good(tmp_path, reports.append) == 1
    assert len(reports) == 1 and words in reports[0] and str(path / ".metadata") in reports[0]
    x = torch.zeros(4)
    for read in (
        lambda: saved_tensors(path, ""),
        lambda: read_tensors(path, {"model.x": x}),
        lambda: read_parts(path, [("model.x", x, (0,))]),
        lambda: load_checkpoint(path, [torch.nn.Linear(2, 2)]),
    ):
        with pytest.raises(CheckpointError):
            read()
    assert not (tmp_path / "ran").exists() and x.eq(0).all()


def test_r12_a_pickle_cannot_change_dcps_classes(tmp_path):
    """It sets an attribute of a class that it may name."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + name + b"(N}X\x06\x00\x00\x00__eq__K\x01stb.")
    with pytest.raises(CheckpointError):
        saved_tensors(tmp_path, "")
    assert MetadataIndex("x") == MetadataIndex("x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_what_is_saved_is_read(tmp_path, dtype):
    values = {"x": torch.arange(6).reshape(2, 3).to(dtype), "scalar": torch.tensor(3).to(dtype)}
    write_checkpoint(step_path(tmp_path, 1), values, 1)
    for name, entry in saved_tensors(step_path(tmp_path, 1), "model.").items():
        assert entry.properties.dtype == dtype and entry.size == values[name].shape
    found = {f"model.{name}": torch.zeros_like(value) for name, value in values.items()}
    read_tensors(step_path(tmp_path, 1), found)
    assert all(torch.equal(found[f"model.{name}"].double(), value.double()) for name, value in values.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_r12_an_object_among_the_tensors_is_not_unpickled(tmp_path):
    """DCP would unpickle it, because it reads what is no tensor with weights_only=False."""
    path = step_path(tmp_path, 1)
    dcp.save(
        {"model.x": torch.zeros(4), "model.y": Calls(os.mkdir, str(tmp_path / "ran"))}, checkpoint_id=path, no_dist=True
    )
    with pytest.raises(CheckpointError, match="BytesStorageMetadata"):
        read_tensors(path, {"model.x": torch.zeros(4)})
    assert not (tmp_path / "ran").exists()


def test_r12_no_other_reader_of_checkpoints():
    """Each call that could read a pickle stands in the file that restricts it."""
    for path in (ROOT / "tpformer").rglob("*.py"):
        called = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {ast.unparse(function) for function in called}
        wrong = {"dcp.FileSystemReader", "FileSystemReader", "pickle.load", "pickle.loads", "torch.load"} & names
        assert not wrong, f"{path} calls {wrong}"
        assert "dcp.load" not in names or path.name == "checkpoint_files.py"
