"""Files that survive a kill: they are written whole or not at all, and a digest shows whether they changed since.

Importing this file does not import torch.
"""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME_BYTES = 255  # that a file system allows in a name: ext4, XFS, ZFS, APFS, Lustre


def longest_name(suffix: str = "") -> int:
    """The bytes that a name may have before a suffix, where whole_file writes a file of both."""
    return _NAME_BYTES - len(os.fsencode(_hidden(suffix)))


def _hidden(name: str) -> str:
    return f".{name}.tmp"


def replace_file(path: Path, text: str, to_disk: bool = False) -> None:
    """Write a file as UTF-8 by whole_file."""
    with whole_file(path, to_disk) as temporary:
        temporary.write_text(text, encoding="utf-8")


def fsync(path: Path) -> None:
    """Return when a file's or a directory's content is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, unless it is there. NotADirectoryError, in words, for a file in its way, and for
    a home that no shell has put into the path: a folder named ~ would be made."""
    if (first := path.parts[:1]) and first[0].startswith("~") and not Path(first[0]).exists():
        raise NotADirectoryError(errno.ENOTDIR, f"{first[0]} is no folder here, write the whole path", str(path))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        way = next((each for each in (path, *path.parents) if os.path.lexists(each)), path)
        raise NotADirectoryError(errno.ENOTDIR, f"{way} is no folder", str(path)) from None


@contextmanager
def whole_file(path: Path, to_disk: bool = False) -> Iterator[Path]:
    """Yield the path of a hidden file beside `path` that takes its place at the end, or is removed after an error.

    Readers find the old content or the new one, never a part; to_disk: also after a loss of power, at the price of
    waiting for the disk. Only one process may write a path at a time. OSError, which names the path, where writing
    fails.
    """
    temporary = path.with_name(_hidden(path.name))
    with naming(path, hidden=temporary):
        remove(temporary)  # whatever has its name, such as a pipe, which nobody would read
        try:
            yield temporary
            if to_disk:  # a name may reach the disk before what it names
                fsync(temporary)
            temporary.replace(path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def is_there(path: Path) -> bool:
    """Whether there is a file at a path, or behind a link there. To be asked before a file of a user is opened.

    ValueError for anything else that is there, because reading or writing a pipe waits for ever, and a device may have
    no end.
    """
    if not os.path.lexists(path):
        return False
    if not path.is_file():
        raise ValueError(f"{path} is {kind_of(path)}, where a file is expected: put one in its place, or move it away")
    return True


def kind_of(path: Path) -> str:
    """What there is at a path that is no file, in words."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "a link that leads nowhere" if os.path.lexists(path) else "missing"
    kinds = {
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
        stat.S_ISDIR: "a folder",
    }
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "no file")


def remove(path: Path) -> None:
    """Remove whatever is at a path: a folder with all that is in it, and a link without what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def what_failed(error: OSError) -> str:
    """What is wrong with a file, in the order of a sentence. An OSError that no system call has caused has words of its
    own, and neither a number nor a path."""
    if error.filename is None or not error.strerror:
        return str(error)
    return f"{error.filename} cannot be used: {error.strerror}"


@contextmanager
def in_words(path: Path, action: str = "read") -> Iterator[None]:
    """Say in words that the block's action on `path` fails: ValueError for any OSError.

    That a file does not exist passes as it is, because callers know what to advise.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be {action}: {error.strerror or error}") from None


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal. OSError where the file cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def naming(path: Path, hidden: Path | None = None) -> Iterator[None]:
    """Within, an exception that an OSError has caused becomes that OSError, with the path unless it has one already.

    hidden: a file that the path stands for, too, because no user knows of it.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        if cause is None or cause.errno is None:  # none of the operating system's: it says itself what is wrong
            raise
        known = cause.filename if cause.filename != str(hidden) else None
        raise OSError(cause.errno, cause.strerror or str(cause), known or str(path)) from error
