"""What may differ between a run and its resumption: every key of the configuration, datasets by content, steps."""

import copy
import dataclasses
import os
import shutil
import typing
from pathlib import Path

import pytest
from tiny_runs import flip

from tpformer.config import RunConfig, build_config, read_toml
from tpformer.training.data import build_dataset, contents
from tpformer.training.resolve import resolve
from tpformer.training.run_directory import CONTINUED, VERDICTS, Start, check_run_directory, read_start, write_run

KEYS = [f"{section}.{key}" for section, keys in dataclasses.asdict(RunConfig()).items() for key in keys]


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_values_in) -> Start:
    """A run that has started, with two training datasets of the same size."""
    folder = tmp_path_factory.mktemp("resumed")
    values = tiny_values_in(folder)
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "text.txt").write_text(f"{name} " * 100)
        build_dataset([folder / name], folder / name / "data", "bytes", quiet=True)
    one, two = (str(folder / name / "data") for name in ("one", "two"))
    values |= {"data": {"train": [one, two], "weights": [0.5, 0.5], "valid": [one]}}
    values["run"]["resume"] = True
    start = found(values)
    Path(start.config.run.dir).mkdir()
    assert check_run_directory(start) == [] and write_run(start) is None
    return start


def found(values: dict, *more: dict, dtype: str = "float32") -> Start:
    return read_start(resolve(build_config(values, *more)), dtype)


def values_of(start: Start, **data) -> dict:
    """The sections that a user has in a file: without what is filled in at the start."""
    values = {section: dict(keys) for section, keys in dataclasses.asdict(start.config).items()}
    values["data"] |= {"train_contents": (), "valid_contents": ()} | data
    return values


def changed(config: RunConfig, key: str) -> RunConfig:
    """The configuration with another value of one key, which need not be one that works."""
    section, name = key.split(".")
    changed_section = copy.copy(getattr(config, section))
    hint, value = typing.get_type_hints(type(changed_section))[name], getattr(changed_section, name)
    new: object = (1.0, 2.0) if key == "data.weights" else ("other",)
    if typing.get_origin(hint) is not tuple:
        other = "ring" if key == "parallel.exchange" else "other"  # a name that is looked up
        new = not value if hint in (bool, bool | None) else other if hint in (str, str | None) else (value or 0) + 1
    object.__setattr__(changed_section, name, new)  # without the section's own checks
    return dataclasses.replace(config, **{section: changed_section})


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_refused_or_continued_and_printed(run, key, tmp_path):
    """R4: label_smoothing, z_loss, dtype, lr and betas were taken without a word. A new key has to be put into the
    table of run_directory.py."""
    assert sorted(VERDICTS) == sorted(KEYS)
    new = changed(run.config, key)
    directory = dataclasses.replace(new.run, dir=run.config.run.dir)  # a moved run says another one in its file
    dtype = "bfloat16" if key == "train.dtype" else run.dtype
    start = Start(dataclasses.replace(new, run=directory), dtype, run.files)
    start = moved(run, tmp_path / "moved") if key == "run.dir" else start
    refusals = {"run.resume": "already holds a run", "run.changes": "run.changes names other, which is no key"}
    if key in refusals or VERDICTS[key] != CONTINUED:
        other = rf"was trained with other settings.* --run.changes {key}$"
        with pytest.raises(ValueError, match=refusals.get(key, other)):
            check_run_directory(start)
    if key in refusals:
        return
    changes = () if VERDICTS[key] == CONTINUED else (key,)
    accepted = dataclasses.replace(start.config.run, changes=changes)
    (line,) = check_run_directory(dataclasses.replace(start, config=dataclasses.replace(start.config, run=accepted)))
    assert line.startswith("changed since the run was stopped: " + ("" if changes else f"{key}: ")) and " -> " in line


def test_other_steps_say_what_becomes_of_a_warm_up_that_is_unset(run, tmp_path):
    """The learning rate may fall and rise once more: at step 60 of 200 it is at its peak, and of 2000 it is not."""
    values = values_of(run)
    values["run"] |= {"dir": str(tmp_path)}
    values["optimizer"] |= {"warmup_steps": None}
    write_run(found(values))
    values["train"] |= {"steps": 2000}
    (line,) = check_run_directory(found(values))
    assert line.endswith("ends from now on, and its warm-up takes 100 steps in place of 0 (optimizer.warmup_steps)")


def moved(run: Start, target: Path) -> Start:
    shutil.copytree(run.config.run.dir, target)
    config = dataclasses.replace(run.config, run=dataclasses.replace(run.config.run, dir=str(target)))
    return dataclasses.replace(run, config=config)


def test_moved_data_continues_and_changed_data_is_named(run, tmp_path):
    """R4: changed data went on without a word, of the same size too, and moved data was refused."""
    one, two = run.config.data.train
    assert check_run_directory(found(values_of(run))) == []
    with pytest.raises(ValueError, match="train.dtype: 'float32' -> 'bfloat16'"):  # unset, on another device
        check_run_directory(found(values_of(run), dtype="bfloat16"))
    copies = [shutil.copytree(Path(each).parent, tmp_path / Path(each).parent.name) / "data" for each in (one, two)]
    values = values_of(run, train=list(map(str, copies)))
    (line,) = check_run_directory(found(values))
    assert "data.train: " in line and str(copies[1]) in line
    flip(Path(f"{copies[1]}.bin"))  # of the same size, and below with the same time
    Path(f"{copies[1]}.json").unlink()  # else it says that these are not its tokens
    times = os.stat(f"{two}.bin")
    os.utime(f"{copies[1]}.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    for other, words in (
        (values, rf"{copies[1]}: uint16, 802 bytes, SHA-256 \w{{12}} -> uint16, 802 bytes, SHA"),
        (values_of(run, train=[two, one]), "data.train: the same 2 datasets in another order"),
        (values_of(run, train=[one], weights=(), valid=[two]),
         rf"data.train\[1\]: uint16.* -> nothing.* {two}: uint16.* -> uint16"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            check_run_directory(found(other))
    for valid in ([], [one]):
        check_run_directory(found(values_of(run, valid=valid)))
    stated = values_of(run, train=[two, one], train_contents=run.config.data.train_contents)
    with pytest.raises(ValueError, match="does not hold what data.train_contents states .* or leave data.train_con"):
        found(stated)


def test_a_dataset_is_read_again_only_when_its_file_was_touched(run, monkeypatch):
    read, digest = [], contents.file_sha256
    monkeypatch.setattr(contents, "file_sha256", lambda path: read.append(path.name) or digest(path))
    assert found(values_of(run)).config == run.config and read == []
    path = Path(f"{run.config.data.train[1]}.bin")
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))  # no time but the change's
    found(values_of(run))
    assert read == ["data.bin"]
    record = Path(run.config.run.dir, "start.json")
    kept = record.read_text()
    for bad in ("{", '{"files": 3}', '{"files": {"a": ["b", 1]}}', "[]"):
        record.write_text(bad)
        found(values_of(run))
    record.write_text(kept)
    assert len(read) == 1 + 4 * 2


def test_a_run_of_an_earlier_version_goes_on_with_data_of_the_same_name(run, tmp_path):
    """It has neither contents nor start.json; the first resumption writes them."""
    old = moved(run, tmp_path / "old")
    path = Path(old.config.run.dir)
    (path / "start.json").unlink()
    lines = (path / "config.toml").read_text().splitlines()
    (path / "config.toml").write_text("\n".join(line for line in lines if "_contents" not in line))
    assert [line.split(": ")[1] for line in check_run_directory(old)] == ["run.dir"]
    one, two = old.config.data.train
    with pytest.raises(ValueError, match="other settings.* --run.changes data.train$"):
        check_run_directory(found(values_of(old, train=[two, one])))
    write_run(old)
    assert build_config(read_toml(path / "config.toml")).data.train_contents == run.config.data.train_contents
