"""A damaged checkpoint is named and passed over; a save that fails or is killed costs only itself."""

import json
import os
import pickle
import shutil
import signal

import pytest
import torch
import torch.distributed as dist
from checkpointed import LAYOUTS, PLAIN, build, load_run, save_run
from pool import RankFailure
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tpformer.training import checkpoint as checkpoint_module
from tpformer.training.checkpoint import (
    Checkpointer,
    CheckpointError,
    manifest_entries,
    newest_good,
    steps,
    verify,
    write_manifest,
)
from tpformer.training.checkpoint_files import step_path, write_checkpoint


def make_checkpoint(directory, step):
    path = step_path(directory, step)
    write_checkpoint(path, {"x": torch.arange(400.0)}, step)
    return path


def damage_truncate(path):
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def damage_flip_a_bit(path):
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[1000] ^= 4
    file.write_bytes(content)


def damage_remove_a_file(path):
    (path / ".metadata").unlink()


def damage_manifest(text):
    def damage(path):
        (path / "manifest.json").write_text(text)

    return damage


def damage_and_sign(name, content):
    """A damage that the manifest does not show, because it was written after."""

    def damage(path):
        if content is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        (path / "manifest.json").unlink()
        write_manifest(path, manifest_entries(path.iterdir()))

    return damage


def damage_entry(name, entry):
    """A manifest with another entry."""

    def damage(path):
        manifest = path / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {name: entry}))

    return damage


DAMAGES = [
    (damage_truncate, ["__0_0.distcp", " bytes, and "]),
    (damage_flip_a_bit, ["__0_0.distcp", "corrupted", "SHA-256"]),
    (damage_remove_a_file, [".metadata", "missing"]),
    (damage_manifest("{"), ["manifest.json", "cannot be read"]),
    # R15, R16
    (damage_manifest("[" * 100_000), ["manifest.json", "cannot be read"]),
    (damage_manifest("{}"), ["manifest.json", "malformed", ".metadata, trainer.json"]),
    (damage_manifest("[]"), ["manifest.json", "no JSON object"]),
    (damage_entry("__0_0.distcp", {"bytes": "7", "sha256": ""}), ["manifest.json", "malformed", "__0_0.distcp"]),
    (damage_entry("__0_0.distcp", 7), ["manifest.json", "malformed", "__0_0.distcp"]),
    (damage_entry("../x", {"bytes": 7, "sha256": ""}), ["manifest.json", "malformed", "../x"]),
    (damage_and_sign("trainer.json", "{"), ["trainer.json", "cannot be read"]),
    (damage_and_sign("trainer.json", '{"step": "10", "extra": {}}'), ["trainer.json", "malformed"]),
    (damage_and_sign("trainer.json", '{"step": 10}'), ["trainer.json", "malformed"]),
    (damage_and_sign("trainer.json", '{"step": 9, "extra": {}}'), ["is of step 9", "renamed"]),
    (damage_and_sign("trainer.json", None), ["manifest.json", "has no trainer.json"]),
    (damage_and_sign("__0_0.distcp", None), ["manifest.json", "has no __0_0.distcp, which .metadata names"]),
    (damage_and_sign(".metadata", b"metadata"), [".metadata", "cannot be used"]),
    (damage_and_sign(".metadata", pickle.dumps({"x": 1})), [".metadata", "cannot be used"]),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, damage, words):
    make_checkpoint(tmp_path, 9)
    newest = make_checkpoint(tmp_path, 10)
    verify(newest)
    assert newest_good(tmp_path, print) == 10
    damage(newest)
    with pytest.raises(CheckpointError) as error:
        verify(newest)
    reports: list[str] = []
    assert newest_good(tmp_path, reports.append) == 9
    for word in (*words, "step-10"):
        assert word in str(error.value) and word in reports[0]
    assert steps(tmp_path) == [9, 10], "a bad checkpoint is evidence: it is left where it is"


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


def find_newest(directory):
    reports: list[str] = []
    return Checkpointer(directory).newest(reports.append), reports


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_ranks_share_the_reading_and_agree(ranks, tmp_path, damage, words):
    make_checkpoint(tmp_path, 9)
    damage(make_checkpoint(tmp_path, 10))
    (first, reports), (second, silent) = ranks(2).run(find_newest, tmp_path)
    assert first == second == 9 and silent == []
    for word in (*words, "step-10"):
        assert word in reports[0]


def full_disk(files):
    raise OSError("disk full")


def on_another_disk(files):
    return {"__1_0.elsewhere": {"bytes": 1, "sha256": ""}}


def fails_on_one_rank(directory, broken):
    """At step 2 rank 1 lists its files by `broken`. Return the messages of the next two waits, and what is left."""
    parts, optimizers = build(LAYOUTS["offload"], seed=1)
    checkpointer = Checkpointer(directory, keep=1)
    checkpointer.save(1, parts, optimizers)
    checkpointer.wait()
    original = checkpoint_module.manifest_entries
    messages = []
    try:
        if dist.get_rank() == 1:
            checkpoint_module.manifest_entries = broken
        checkpointer.save(2, parts, optimizers)
        for _ in range(2):
            try:
                checkpointer.wait()
            except RuntimeError as error:
                messages.append(str(error))
    finally:
        checkpoint_module.manifest_entries = original
    left = steps(directory)
    verify(directory / "step-1")
    dist.barrier()
    checkpointer.save(3, parts, optimizers)
    checkpointer.wait()
    return messages, left, sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    "broken, words", [(full_disk, "disk full"), (on_another_disk, "rank 0 does not see __1_0.elsewhere")]
)
def test_a_failed_save_is_raised_once_on_all_ranks_and_leaves_the_previous_one(ranks, tmp_path, broken, words):
    for messages, left, names in ranks(2).run(fails_on_one_rank, tmp_path, broken):
        (message,) = messages
        assert str(tmp_path / "step-2") in message and words in message
        assert left == [1]
        assert names == ["step-3"], "keep=1 drops the older one, and what the failed save left behind is gone"


def killed_while_saving(directory):
    parts, optimizers = build(LAYOUTS["tp2-pp2"], seed=1)
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, parts, optimizers)
    checkpointer.wait()
    if dist.get_rank() == 3:
        write = FileSystemWriter.write_data

        def write_and_die(*arguments):
            write(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        FileSystemWriter.write_data = write_and_die
    checkpointer.save(2, parts, optimizers)
    checkpointer.wait()


def test_a_rank_killed_while_saving_costs_only_that_save(ranks, tmp_path):
    with pytest.raises(RankFailure, match="rank 3 of 4 died with exit code -9"):
        ranks(4).run(killed_while_saving, tmp_path)
    # rank 0 may live long enough to remove what was half written
    assert {path.name for path in tmp_path.iterdir()} - {".saving-2"} == {"step-1"}
    assert newest_good(tmp_path, print) == 1
    for step, _, _ in ranks(1).run(load_run, tmp_path, PLAIN):
        assert step == 1
    ranks(1).run(save_run, tmp_path, PLAIN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def cannot_write(directory):
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, *build(PLAIN, seed=1))
    assert checkpointer.failed
    try:
        checkpointer.wait()
    except RuntimeError as error:
        return str(error)
    return None


def test_a_directory_that_cannot_be_made_is_named(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    (message,) = ranks(1).run(cannot_write, tmp_path / "file" / "checkpoints")
    assert "file/checkpoints/step-1" in message and "[Errno 20] Not a directory" in message


def save_before_bad_ones(directory):
    parts, optimizers = build(PLAIN, seed=1)
    checkpointer = Checkpointer(directory, keep=1)
    checkpointer.save(5, parts, optimizers)
    checkpointer.wait()


def test_bad_checkpoints_of_later_steps_do_not_count_as_newer(ranks, tmp_path):
    """A run that resumes at 4, because 6 is damaged, saves and keeps 5."""
    for step in (4, 6):
        damage_flip_a_bit(make_checkpoint(tmp_path, step))
    ranks(1).run(save_before_bad_ones, tmp_path)
    assert steps(tmp_path) == [5, 6] and newest_good(tmp_path, lambda _: None) == 5


def test_r17_names_that_no_save_gives_are_no_checkpoints(ranks, tmp_path):
    """They end neither a resume nor the pruning, and are left where they are."""
    others = ["step-0005", "step-3.keep", "step-", "step-\u0663"]
    for name in others:
        (tmp_path / name).mkdir()
    make_checkpoint(tmp_path, 4)
    ranks(1).run(save_before_bad_ones, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-5", *others}


def test_no_checkpoint_is_no_error(tmp_path):
    assert newest_good(tmp_path / "nothing", print) is None
    make_checkpoint(tmp_path, 3)
    shutil.copytree(tmp_path / "step-3", tmp_path / ".saving-4")
    assert steps(tmp_path) == [3]
