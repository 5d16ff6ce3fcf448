"""A file is replaced whole, a digest is that of the content, and a run directory belongs to one job at a time (R9)."""

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from tpformer.processes import files
from tpformer.processes.files import is_there, remove, replace_file, what_failed
from tpformer.processes.ownership import LOCK, owned


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    for text in ("first", "", "ünd"):
        replace_file(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]

    def cut(self: Path, text: str, **options: str) -> None:
        with self.open("w") as file:
            file.write(text[:1])
        raise OSError(28, "disk full")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match=f"disk full: '{path}'"):
        replace_file(path, "new")
    assert path.read_text(encoding="utf-8") == "ünd" and list(tmp_path.iterdir()) == [path]


def test_content_is_on_disk_before_it_has_its_name(tmp_path):
    """As a loss of power may keep a name without what was written just before it."""
    path, done = tmp_path / "config.toml", []

    def synced(descriptor: int) -> None:
        done.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))

    with mock.patch.object(os, "fsync", synced):
        replace_file(path, "new", to_disk=True)
    assert done == [(str(tmp_path / ".config.toml.tmp"), False)] and path.read_text() == "new"


def test_a_refusal_that_an_error_of_a_file_led_to_stays_one(tmp_path):
    asked = pytest.raises(ValueError, match="cannot be read: it is closed")
    with asked, files.naming(tmp_path), files.in_words(tmp_path):
        raise OSError(5, "it is closed")


def test_what_failed_has_a_path_that_the_user_knows_or_the_errors_own_words(tmp_path):
    folder, missing = tmp_path / "start.json", tmp_path / "none"
    folder.mkdir()
    with pytest.raises(OSError) as hidden:
        replace_file(folder, "text")
    with pytest.raises(OSError) as system:
        missing.read_bytes()
    assert what_failed(hidden.value) == f"{folder} cannot be used: Is a directory"
    assert what_failed(system.value) == f"{missing} cannot be used: No such file or directory"
    for own in (FileNotFoundError(f"no configuration file {missing}"), OSError("it is not seekable")):
        assert what_failed(own) == str(own)


def test_only_a_file_is_there_and_anything_else_in_its_place_is_named(tmp_path):
    path, file = tmp_path / "start.json", tmp_path / "file"
    file.touch()
    assert is_there(file) and not is_there(path)
    others: dict[str, Callable[[], object]] = {
        "a pipe": lambda: os.mkfifo(path),
        "a folder": path.mkdir,
        "a device": lambda: path.symlink_to("/dev/zero"),
        "a link that leads nowhere": lambda: path.symlink_to("nowhere"),
    }
    for kind, make in others.items():
        make()
        with pytest.raises(ValueError, match=f"{path} is {kind}, where a file is expected"):
            is_there(path)
        remove(path)
    path.symlink_to(file)
    assert is_there(path)
    remove(path)
    assert file.exists() and not path.is_symlink()


def test_no_folder_is_made_whose_name_is_that_of_a_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"run.dir ~/runs/a cannot be written \(.*: ~ is no folder here"):
        owned(Path("~/runs/a")).__enter__()
    assert not list(tmp_path.iterdir())
    Path("~").mkdir()  # whoever has one may have more in it
    files.make_folder(Path("~"))


def test_a_pipe_beside_a_file_does_not_keep_it_from_being_written(tmp_path):
    os.mkfifo(tmp_path / ".config.toml.tmp")
    replace_file(tmp_path / "config.toml", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(ValueError, match=f"{LOCK} is a pipe"):
        owned(tmp_path).__enter__()


def test_the_digest_is_sha256_of_the_content(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    assert files.file_sha256(tmp_path / "abc") == expected


def own_until_killed(directory: str) -> None:
    with owned(Path(directory)):
        Path(directory, "ready").touch()
        signal.pause()


def test_a_second_job_is_refused_with_the_number_of_the_first_and_a_dead_one_is_no_obstacle(commands, tmp_path):
    first = commands.call(own_until_killed, str(tmp_path))
    first.wait_until((tmp_path / "ready").exists, "ownership")
    with pytest.raises(ValueError, match=f"is in use by process {first.pid} on .*run.dir"), owned(tmp_path):
        pass
    os.kill(first.pid, signal.SIGKILL)
    first.process.join()
    assert str(first.pid) in (tmp_path / LOCK).read_text()
    with owned(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert (tmp_path / LOCK).read_text() == ""


def test_a_directory_that_cannot_be_written_or_locked_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="run.dir .*/file/run cannot be written .*: set another"):
        owned(tmp_path / "file" / "run").__enter__()
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(38, "Function not implemented")))
    with owned(tmp_path):
        assert (tmp_path / LOCK).exists()
    assert "cannot be locked (Function not implemented)" in capsys.readouterr().err
