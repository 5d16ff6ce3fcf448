"""A damaged checkpoint is named and passed over, and one from a stranger runs nothing, whoever reads it (R12); a save
that fails or is killed costs only itself."""

import ast
import json
import os
import pickle
import shutil
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from commands import ROOT
from lost_ranks import die
from pool import RankFailure
from small_runs import LAYOUTS, build, run_config
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from tpformer.training import checkpoint, checkpoint_files
from tpformer.training.checkpoint import Checkpointer, CheckpointError, load_checkpoint
from tpformer.training.checkpoint_files import check_files, newest_good, read_tensors, saved_tensors, step_path, steps


def make_checkpoint(directory, step, dtype=torch.float32):
    path = step_path(directory, step)
    tensors = {"x": torch.arange(400).to(dtype), "scalar": torch.tensor(3).to(dtype)}
    checkpoint_files.write_checkpoint(path, tensors, step)
    return path


def changed(name, edit=None, sign=False):
    """A damage: a file's content becomes `edit` or edit(content), or the file goes. sign: a new manifest is written."""

    def damage(path):
        file = path / name
        if edit is None:
            file.unlink()
        else:
            file.write_bytes(edit if isinstance(edit, bytes) else edit(file.read_bytes()))
        if sign:
            (path / "manifest.json").unlink()
            checkpoint.write_manifest(path, checkpoint.manifest_entries(path.iterdir()))

    return damage


def entry(name, value):
    """A manifest with another entry."""
    return changed("manifest.json", lambda content: json.dumps(json.loads(content) | {name: value}).encode())


def metadata(edit):
    """A damage: .metadata is the pickle of its object behind edit(object), or of what that returns, and signed."""

    def damage(path):
        found = FileSystemReader(path).read_metadata()
        changed(".metadata", pickle.dumps(edit(found) or found), sign=True)(path)

    return damage


class Calls:
    """An object whose unpickling calls a function."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def with_fields(**fields):
    return metadata(lambda found: vars(found).update(fields))


def first_place(found):
    return next(iter(found.storage_data.values()))


DATA, MANIFEST, METADATA, TRAINER = "__0_0.distcp", "manifest.json", ".metadata", "trainer.json"
INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
SETS_AN_ATTRIBUTE = b"\x80\x02" + INDEX + b"(N}X\x06\x00\x00\x00__eq__K\x01stb."  # of a class that it may name
flip_a_bit = changed(DATA, lambda content: content[:1000] + bytes([content[1000] ^ 4]) + content[1001:])
UNUSABLE = [METADATA, "cannot be used"]
DAMAGES = [
    (changed(DATA, lambda content: content[:-1]), [DATA, " bytes, and "]), (flip_a_bit, [DATA, "corrupted", "SHA-256"]),
    (changed(METADATA), [METADATA, "missing"]), (changed(TRAINER, b'{"step": 10}', sign=True), [TRAINER, "malformed"]),
    (changed(MANIFEST, b"{"), [MANIFEST, "cannot be read"]), (changed(MANIFEST, b"[]"), [MANIFEST, "no JSON object"]),
    (changed(MANIFEST, b"[" * 100_000), [MANIFEST, "cannot be read"]),  # R15, R16
    (changed(MANIFEST, b"{}"), [MANIFEST, "malformed", ".metadata, trainer.json"]),
    (entry(DATA, {"bytes": "7", "sha256": ""}), [MANIFEST, "malformed", DATA]),
    (entry(DATA, 7), [MANIFEST, "malformed", DATA]), (changed(METADATA, pickle.dumps({"x": 1}), sign=True), UNUSABLE),
    (entry("../x", {"bytes": 7, "sha256": ""}), [MANIFEST, "malformed", "../x"]),
    (changed(TRAINER, b"{", sign=True), [TRAINER, "cannot be read"]), (metadata(lambda found: [found]), UNUSABLE),
    (changed(TRAINER, b'{"step": "10", "extra": {}}', sign=True), [TRAINER, "malformed"]),
    (changed(TRAINER, b'{"step": 9, "extra": {}}', sign=True), ["is of step 9", "renamed"]),
    (changed(TRAINER, sign=True), [MANIFEST, "has no trainer.json"]),
    (changed(DATA, sign=True), [MANIFEST, "has no __0_0.distcp, which .metadata names"]),
    (changed(METADATA, b"metadata", sign=True), UNUSABLE), (changed(METADATA, SETS_AN_ATTRIBUTE, sign=True), UNUSABLE),
    # R12
    (metadata(lambda found: Calls(os.mkdir, "ran")), [METADATA, "posix.mkdir"]),
    (with_fields(planner_data=Calls(os.mkdir, "ran")), [METADATA, "posix.mkdir"]),
    (with_fields(planner_data=Calls(eval, "__import__('os').mkdir('ran')")), [METADATA, "builtins.eval"]),
    (with_fields(planner_data=Calls(getattr, Metadata, "__init__")), [METADATA, "builtins.getattr"]),
    (with_fields(planner_data=Calls(torch.load, "ran")), [METADATA, "torch.serialization.load"]),
    (with_fields(planner_data=print), [METADATA, "builtins.print"]),
    # DCP reads what is no tensor with weights_only=False
    (metadata(lambda found: found.state_dict_metadata.update({"model.y": BytesStorageMetadata()})),
     [METADATA, "BytesStorageMetadata"]),
    (metadata(lambda found: vars(first_place(found)).update(relative_path="../step-9/x")), [METADATA, "../step-9"]),
    (metadata(lambda found: vars(first_place(found)).update(length=-1)), [METADATA, "bytes 0 to -1"]),
    (metadata(lambda found: vars(found.state_dict_metadata["model.x"]).update(size=torch.Size([800]))),
     [METADATA, "do not add up"]),
    (with_fields(storage_data={}), [METADATA, "lies"]),
]  # fmt: skip


def find_newest(directories):
    found = []
    for directory in directories:
        reports: list[str] = []
        found.append((Checkpointer(directory).newest(reports.append), reports))
    return found


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(ranks, tmp_path, monkeypatch):
    """By one process, and by ranks, which share the reading and agree. R12: what a stranger wrote runs nothing, and
    changes none of DCP's classes."""
    monkeypatch.chdir(tmp_path)
    whole = tmp_path / "whole"
    for step in (9, 10):
        check_files(make_checkpoint(whole, step))
    assert newest_good(whole, print) == 10
    folders = [tmp_path / str(number) for number in range(len(DAMAGES))]
    for folder, (damage, words) in zip(folders, DAMAGES, strict=True):
        newest = shutil.copytree(whole, folder) / "step-10"
        damage(newest)
        with pytest.raises(CheckpointError) as error:
            check_files(newest)
        reports: list[str] = []
        assert newest_good(folder, reports.append) == 9 and len(reports) == 1, words
        assert all(word in str(error.value) and word in reports[0] for word in (*words, "step-10"))
        assert "CheckpointError" not in str(error.value)
        assert steps(folder) == [9, 10], "a bad checkpoint is evidence: it is left where it is"
        x = torch.zeros(400)
        readers = (
            lambda path: saved_tensors(path, ""),
            lambda path: read_tensors(path, {"model.x": x}),  # noqa: B023
            lambda path: checkpoint_files.read_parts(path, [("model.x", x, (0,))]),  # noqa: B023
            lambda path: load_checkpoint(path, [torch.nn.Linear(2, 2)]),
        )
        for read in readers if words[0] == ".metadata" else ():
            with pytest.raises(CheckpointError):
                read(newest)
        assert not (tmp_path / "ran").exists() and not x.any() and MetadataIndex("x") == MetadataIndex("x")
    for (_, words), (first, reports), other in zip(DAMAGES, *ranks(2).run(find_newest, folders), strict=True):
        assert first == 9 and other == (9, []), words
        assert all(word in reports[0] for word in (*words, "step-10"))


def test_a_flipped_bit_of_the_manifest_names_the_manifest(tmp_path):
    path = make_checkpoint(tmp_path, 10)
    manifest = path / "manifest.json"
    for index, byte in enumerate(content := manifest.read_bytes()):
        manifest.write_bytes(content[:index] + bytes([byte ^ 1 << index % 8]) + content[index + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            check_files(path)


def fails_and_is_killed(directory):
    """At step 2 rank 1 lists other files, which the next wait raises, and at step 3 it is killed."""
    model, optimizers = build(run_config(LAYOUTS["offload"]))
    checkpointer = Checkpointer(directory, keep=1)
    checkpointer.save(1, model.parts, optimizers)
    checkpointer.wait()
    on_another_disk = mock.Mock(return_value={"__1_0.elsewhere": {"bytes": 1, "sha256": ""}})
    entries = on_another_disk if dist.get_rank() == 1 else checkpoint.manifest_entries
    with mock.patch.object(checkpoint, "manifest_entries", entries):
        checkpointer.save(2, model.parts, optimizers)
        with pytest.raises(RuntimeError, match=rf"{directory}/step-2.*rank 0 does not see __1_0\.elsewhere"):
            checkpointer.wait()
        checkpointer.wait()
    dist.barrier()  # each rank removes its part
    assert [path.name for path in directory.iterdir()] == ["step-1"], "what the failed save has written is gone"
    check_files(directory / "step-1")
    dist.barrier()
    write = FileSystemWriter.write_data
    if dist.get_rank() == 1:
        FileSystemWriter.write_data = lambda *arguments: (write(*arguments), die())
    checkpointer.save(3, model.parts, optimizers)
    checkpointer.wait()


def test_a_save_that_fails_is_raised_once_on_all_ranks_and_a_killed_rank_costs_only_its_save(ranks, tmp_path):
    with pytest.raises(RankFailure, match="rank 1 of 2 died with exit code -9"):
        ranks(2).run(fails_and_is_killed, tmp_path)
    # rank 0 may live long enough to remove what was half written
    assert {path.name for path in tmp_path.iterdir()} - {".saving-3"} == {"step-1"}
    assert newest_good(tmp_path, print) == 1


def save_here_and_there(directory):
    """Save in the directory, and where a file is in the way."""
    model, optimizers = build(run_config({}))
    (directory / "file").write_text("")
    here, there = Checkpointer(directory, keep=1), Checkpointer(directory / "file" / "checkpoints")
    for checkpointer in (here, there):
        checkpointer.save(5, model.parts, optimizers)
    here.wait()
    assert there.failed
    with pytest.raises(RuntimeError, match=r"file/checkpoints/step-5.*\[Errno 20\] Not a directory"):
        there.wait()


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
    os.mkfifo(tmp_path / ".removing-step-2")
    (tmp_path / "step-5").symlink_to("an archive that is no longer there")
    assert steps(tmp_path) == [4, 6] and newest_good(tmp_path, lambda _: None) == 4
    ranks(1).run(save_here_and_there, tmp_path)
    assert steps(tmp_path) == [5, 6] and newest_good(tmp_path, lambda _: None) == 5
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step-5", "step-6", "file", *others}, "what was half saved is gone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_what_is_saved_is_read(tmp_path, dtype):
    path = make_checkpoint(tmp_path, 1, dtype)
    found = {"model.x": torch.zeros(400, dtype=dtype), "model.scalar": torch.zeros((), dtype=dtype)}
    for name, entry in saved_tensors(path, "model.").items():
        assert entry.properties.dtype == dtype and entry.size == found[f"model.{name}"].shape
    read_tensors(path, found)
    assert torch.equal(found["model.x"].double(), torch.arange(400).to(dtype).double())
    assert found["model.scalar"] == torch.tensor(3).to(dtype)


def test_a_checkpoint_that_its_run_removes_meanwhile_is_said_to_be_gone(tmp_path):
    path = make_checkpoint(tmp_path, 1)
    (path / DATA).unlink()
    with pytest.raises(CheckpointError, match=f"{DATA} is gone since .* try again, or raise its checkpoint.keep"):
        checkpoint_files.read_parts(path, [("model.x", torch.zeros(400), (0,))])


def test_r12_no_other_reader_of_checkpoints():
    """Each call that could read a pickle stands in the file that restricts it."""
    for path in (ROOT / "tpformer").rglob("*.py"):
        called = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {ast.unparse(function) for function in called}
        wrong = {"dcp.FileSystemReader", "FileSystemReader", "pickle.load", "pickle.loads", "torch.load"} & names
        assert not wrong, f"{path} calls {wrong}"
        assert "dcp.load" not in names or path.name == "checkpoint_files.py"
