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


def find_newest(directories):
    found = []
    for directory in directories:
        reports: list[str] = []
        found.append((Checkpointer(directory).newest(reports.append), reports))
    return found


def test_ranks_share_the_reading_and_agree(ranks, tmp_path):
    folders = [tmp_path / str(number) for number in range(len(DAMAGES))]
    for folder, (damage, _) in zip(folders, DAMAGES, strict=True):
        make_checkpoint(folder, 9)
        damage(make_checkpoint(folder, 10))
    for (_, words), one, other in zip(DAMAGES, *ranks(2).run(find_newest, folders), strict=True):
        (first, reports), (second, silent) = one, other
        assert first == second == 9 and silent == [], words
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
    parts, optimizers = build(LAYOUTS["offload"], seed=1)
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, parts, optimizers)
    checkpointer.wait()
    if dist.get_rank() == 1:
        write = FileSystemWriter.write_data

        def write_and_die(*arguments):
            write(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        FileSystemWriter.write_data = write_and_die
    checkpointer.save(2, parts, optimizers)
    checkpointer.wait()


def test_a_rank_killed_while_saving_costs_only_that_save(ranks, tmp_path):
    with pytest.raises(RankFailure, match="rank 1 of 2 died with exit code -9"):
        ranks(2).run(killed_while_saving, tmp_path)
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
        flip_a_bit(make_checkpoint(tmp_path, step))
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
