"""A damaged checkpoint is named and passed over, and one from a stranger runs nothing, whoever reads it (R12); a save
that fails or is killed costs only itself."""

import ast
import json
import os
import pickle
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointed import LAYOUTS, build, run_config
from pool import RankFailure
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from tpformer.training import checkpoint as checkpoint_module
from tpformer.training.checkpoint import (
    Checkpointer,
    CheckpointError,
    load_checkpoint,
    manifest_entries,
    newest_good,
    saved_tensors,
    steps,
    verify,
    write_manifest,
)
from tpformer.training.checkpoint_files import read_parts, read_tensors, step_path, write_checkpoint

ROOT = Path(__file__).parents[2]


def make_checkpoint(directory, step, dtype=torch.float32):
    path = step_path(directory, step)
    write_checkpoint(path, {"x": torch.arange(400).to(dtype), "scalar": torch.tensor(3).to(dtype)}, step)
    return path


def changed(name, edit=None, sign=False):
    """A damage: a file's content becomes edit(content), or the file goes. sign: the manifest is written after it."""

    def damage(path):
        file = path / name
        if edit is None:
            file.unlink()
        else:
            file.write_bytes(edit(file.read_bytes()))
        if sign:
            (path / "manifest.json").unlink()
            write_manifest(path, manifest_entries(path.iterdir()))

    return damage


def manifest_of(text):
    return changed("manifest.json", lambda content: text.encode())


def entry(name, value):
    """A manifest with another entry."""
    return changed("manifest.json", lambda content: json.dumps(json.loads(content) | {name: value}).encode())


def signed(name, content):
    return changed(name, lambda _: content, sign=True)


def metadata(edit):
    """A damage: .metadata is the pickle of edit(its object), and signed."""
    return lambda path: signed(".metadata", pickle.dumps(edit(FileSystemReader(path).read_metadata())))(path)


class Calls:
    """An object whose unpickling calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def with_fields(**fields):
    return metadata(lambda found: vars(found).update(fields) or found)


def with_bytes(found):
    found.state_dict_metadata["model.y"] = BytesStorageMetadata()
    return found


def with_another_file(found):
    for place in found.storage_data.values():
        place.relative_path = "../step-9/__0_0.distcp"
    return found


def with_a_longer_tensor(found):
    found.state_dict_metadata["model.x"].size = torch.Size([800])
    return found


DATA = "__0_0.distcp"
flip_a_bit = changed(DATA, lambda content: content[:1000] + bytes([content[1000] ^ 4]) + content[1001:])
DAMAGES = [
    (changed(DATA, lambda content: content[:-1]), [DATA, " bytes, and "]),
    (flip_a_bit, [DATA, "corrupted", "SHA-256"]),
    (changed(".metadata"), [".metadata", "missing"]),
    (manifest_of("{"), ["manifest.json", "cannot be read"]),
    # R15, R16
    (manifest_of("[" * 100_000), ["manifest.json", "cannot be read"]),
    (manifest_of("{}"), ["manifest.json", "malformed", ".metadata, trainer.json"]),
    (manifest_of("[]"), ["manifest.json", "no JSON object"]),
    (entry(DATA, {"bytes": "7", "sha256": ""}), ["manifest.json", "malformed", DATA]),
    (entry(DATA, 7), ["manifest.json", "malformed", DATA]),
    (entry("../x", {"bytes": 7, "sha256": ""}), ["manifest.json", "malformed", "../x"]),
    (signed("trainer.json", b"{"), ["trainer.json", "cannot be read"]),
    (signed("trainer.json", b'{"step": "10", "extra": {}}'), ["trainer.json", "malformed"]),
    (signed("trainer.json", b'{"step": 10}'), ["trainer.json", "malformed"]),
    (signed("trainer.json", b'{"step": 9, "extra": {}}'), ["is of step 9", "renamed"]),
    (changed("trainer.json", sign=True), ["manifest.json", "has no trainer.json"]),
    (changed(DATA, sign=True), ["manifest.json", "has no __0_0.distcp, which .metadata names"]),
    (signed(".metadata", b"metadata"), [".metadata", "cannot be used"]),
    (signed(".metadata", pickle.dumps({"x": 1})), [".metadata", "cannot be used"]),
    (metadata(lambda found: [found]), [".metadata", "cannot be used"]),
    # R12
    (metadata(lambda found: Calls(os.mkdir, "ran")), [".metadata", "posix.mkdir"]),
    (with_fields(planner_data=Calls(os.mkdir, "ran")), [".metadata", "posix.mkdir"]),
    (with_fields(planner_data=Calls(eval, "__import__('os').mkdir('ran')")), [".metadata", "builtins.eval"]),
    (with_fields(planner_data=Calls(getattr, Metadata, "__init__")), [".metadata", "builtins.getattr"]),
    (with_fields(planner_data=Calls(torch.load, "ran")), [".metadata", "torch.serialization.load"]),
    (with_fields(planner_data=print), [".metadata", "builtins.print"]),
    (metadata(with_bytes), [".metadata", "BytesStorageMetadata"]),
    (metadata(with_another_file), [".metadata", "../step-9"]),
    (metadata(with_a_longer_tensor), [".metadata", "do not add up"]),
    (with_fields(storage_data={}), [".metadata", "lies"]),
]


def find_newest(directories):
    found = []
    for directory in directories:
        reports: list[str] = []
        found.append((Checkpointer(directory).newest(reports.append), reports))
    return found


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(ranks, tmp_path, monkeypatch):
    """By one process, and by ranks, which share the reading and agree. R12: what a stranger wrote runs nothing."""
    monkeypatch.chdir(tmp_path)
    folders = [tmp_path / str(number) for number in range(len(DAMAGES))]
    for folder, (damage, words) in zip(folders, DAMAGES, strict=True):
        make_checkpoint(folder, 9)
        newest = make_checkpoint(folder, 10)
        verify(newest)
        assert newest_good(folder, print) == 10
        damage(newest)
        with pytest.raises(CheckpointError) as error:
            verify(newest)
        reports: list[str] = []
        assert newest_good(folder, reports.append) == 9 and len(reports) == 1, words
        for word in (*words, "step-10"):
            assert word in str(error.value) and word in reports[0]
        assert steps(folder) == [9, 10], "a bad checkpoint is evidence: it is left where it is"
        x = torch.zeros(400)
        readers = (
            lambda path: saved_tensors(path, ""),
            lambda path: read_tensors(path, {"model.x": x}),  # noqa: B023
            lambda path: read_parts(path, [("model.x", x, (0,))]),  # noqa: B023
            lambda path: load_checkpoint(path, [torch.nn.Linear(2, 2)]),
        )
        for read in readers if words[0] == ".metadata" else ():
            with pytest.raises(CheckpointError):
                read(newest)
        assert not (tmp_path / "ran").exists() and not x.any()
    for (_, words), one, other in zip(DAMAGES, *ranks(2).run(find_newest, folders), strict=True):
        (first, reports), (second, silent) = one, other
        assert first == second == 9 and silent == [], words
        for word in (*words, "step-10"):
            assert word in reports[0]


def test_a_flipped_bit_of_the_manifest_names_the_manifest(tmp_path):
    path = make_checkpoint(tmp_path, 10)
    manifest = path / "manifest.json"
    content = manifest.read_bytes()
    for index in range(len(content)):
        manifest.write_bytes(content[:index] + bytes([content[index] ^ 1 << index % 8]) + content[index + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            verify(path)
    manifest.write_bytes(content)
    verify(path)


def on_another_disk(files):
    return {"__1_0.elsewhere": {"bytes": 1, "sha256": ""}}


def fails_on_one_rank(directory):
    """At step 2 rank 1 lists other files. Return the message of the next wait, and the steps that are left."""
    model, optimizers = build(run_config(LAYOUTS["offload"]))
    checkpointer = Checkpointer(directory, keep=1)
    checkpointer.save(1, model.parts, optimizers)
    checkpointer.wait()
    broken = on_another_disk if dist.get_rank() == 1 else manifest_entries
    with mock.patch.object(checkpoint_module, "manifest_entries", broken):
        checkpointer.save(2, model.parts, optimizers)
        with pytest.raises(RuntimeError) as error:
            checkpointer.wait()
        checkpointer.wait()
    left = steps(directory)
    verify(directory / "step-1")
    return str(error.value), left


def test_a_failed_save_is_raised_once_on_all_ranks_and_leaves_the_previous_one(ranks, tmp_path):
    for message, left in ranks(2).run(fails_on_one_rank, tmp_path):
        assert str(tmp_path / "step-2") in message and "rank 0 does not see __1_0.elsewhere" in message
        assert left == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"], "what the failed save has written is gone"


def killed_while_saving(directory):
    model, optimizers = build(run_config(LAYOUTS["offload"]))
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, model.parts, optimizers)
    checkpointer.wait()
    if dist.get_rank() == 1:
        write = FileSystemWriter.write_data

        def write_and_die(*arguments):
            write(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        FileSystemWriter.write_data = write_and_die
    checkpointer.save(2, model.parts, optimizers)
    checkpointer.wait()


def test_a_rank_killed_while_saving_costs_only_that_save(ranks, tmp_path):
    with pytest.raises(RankFailure, match="rank 1 of 2 died with exit code -9"):
        ranks(2).run(killed_while_saving, tmp_path)
    # rank 0 may live long enough to remove what was half written
    assert {path.name for path in tmp_path.iterdir()} - {".saving-2"} == {"step-1"}
    assert newest_good(tmp_path, print) == 1


def cannot_write(directory):
    checkpointer = Checkpointer(directory)
    model, optimizers = build(run_config({}))
    checkpointer.save(1, model.parts, optimizers)
    assert checkpointer.failed
    with pytest.raises(RuntimeError, match=r"file/checkpoints/step-1.*\[Errno 20\] Not a directory"):
        checkpointer.wait()


def test_a_directory_that_cannot_be_made_is_named(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    ranks(1).run(cannot_write, tmp_path / "file" / "checkpoints")


def save_beside_others(directory):
    model, optimizers = build(run_config({}))
    checkpointer = Checkpointer(directory, keep=1)
    checkpointer.save(5, model.parts, optimizers)
    checkpointer.wait()


def test_what_is_no_good_checkpoint_is_neither_resumed_from_nor_newer_than_a_save(ranks, tmp_path):
    """A run that resumes at 4, because 6 is damaged, saves and keeps 5. R17: names that no save gives are no
    checkpoints; they end neither a resume nor the pruning, and are left where they are."""
    assert newest_good(tmp_path / "nothing", print) is None
    others = ["step-0005", "step-3.keep", "step-", "step-\u0663"]
    for name in others:
        (tmp_path / name).mkdir()
    make_checkpoint(tmp_path, 4)
    flip_a_bit(make_checkpoint(tmp_path, 6))
    shutil.copytree(tmp_path / "step-4", tmp_path / ".saving-7")
    assert steps(tmp_path) == [4, 6] and newest_good(tmp_path, lambda _: None) == 4
    ranks(1).run(save_beside_others, tmp_path)
    assert steps(tmp_path) == [5, 6] and newest_good(tmp_path, lambda _: None) == 5
    assert {path.name for path in tmp_path.iterdir()} == {"step-5", "step-6", *others}, "what was half saved is gone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_what_is_saved_is_read(tmp_path, dtype):
    path = make_checkpoint(tmp_path, 1, dtype)
    found = {"model.x": torch.zeros(400, dtype=dtype), "model.scalar": torch.zeros((), dtype=dtype)}
    for name, entry in saved_tensors(path, "model.").items():
        assert entry.properties.dtype == dtype and entry.size == found[f"model.{name}"].shape
    read_tensors(path, found)
    assert torch.equal(found["model.x"].double(), torch.arange(400).to(dtype).double())
    assert found["model.scalar"] == torch.tensor(3).to(dtype)


def test_r12_a_pickle_cannot_change_dcps_classes(tmp_path):
    """It sets an attribute of a class that it may name."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + name + b"(N}X\x06\x00\x00\x00__eq__K\x01stb.")
    with pytest.raises(CheckpointError):
        saved_tensors(tmp_path, "")
    assert MetadataIndex("x") == MetadataIndex("x")


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
