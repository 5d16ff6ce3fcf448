"""The documents of text files, .jsonl files and .parquet files.

Only finding, checking and reading inputs belongs here. build.py turns documents into tokens.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tpformer.processes.files import in_words

_HEAD = 1 << 16  # bytes of a file that are looked at before anything is written
_INVALID = 0.01  # share of bytes that are no UTF-8, above which a file is not taken for text
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh91AY&SY": "bzip2",
    b"PK\3\4": "zip",
}


def find_files(path: Path) -> tuple[list[Path], int]:
    """(files that an input stands for, number of links left out).

    A file stands for itself, and a folder for all its files but hidden ones, sorted by relative name. Symbolic links in
    it are left out, as they may lead out of the folder. FileNotFoundError for an input that does not exist.
    """
    if path.is_file():
        return [path], 0
    if not path.is_dir():
        raise FileNotFoundError(f"input {path} does not exist; give a text file, a .jsonl, a .parquet or a folder")
    found, links = [], 0
    for folder, folders, names in os.walk(path, onerror=_unreadable):
        here = Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".")]  # prunes the walk
        entries = [here / name for name in names if not name.startswith(".")]
        links += sum(entry.is_symlink() for entry in (*entries, *(here / name for name in folders)))
        found += [entry for entry in entries if entry.is_file() and not entry.is_symlink()]
    return sorted(found, key=lambda file: file.relative_to(path).as_posix()), links


def check_files(files: Sequence[Path], fields: Sequence[str]) -> None:
    """Look at the beginning of every file. ValueError names those that are no text, and what is wrong with the first.

    For .parquet: ImportError without pyarrow; ValueError for a file that is none or lacks a column of `fields`.
    With several fields: ValueError for a file that is neither .jsonl nor .parquet.
    """
    wrong: list[tuple[Path, str]] = []
    for file in files:
        if file.suffix == ".parquet":
            _open_parquet(file, fields)
            continue
        if len(fields) > 1 and file.suffix != ".jsonl":
            raise ValueError(f"{file} has no fields {', '.join(fields)}: give .jsonl or .parquet, or leave it out")
        with in_words(file), file.open("rb") as stream:
            head = stream.read(_HEAD)
        if why := _why_no_text(head, lines=file.suffix == ".jsonl"):
            wrong.append((file, why))
    if wrong:
        others = ", ".join(str(file) for file, _ in wrong[1:4]) + (", ..." if len(wrong) > 4 else "")
        more = f" ({len(wrong) - 1} more files are no text: {others})" if others else ""
        raise ValueError(f"{wrong[0][0]} {wrong[0][1]}{more}")


def read_documents(files: Sequence[Path], fields: Sequence[str] = ("text",)) -> Iterator[tuple[list[bytes], int]]:
    """(UTF-8 texts, bytes of input that they took) of each document: a text for each of `fields`.

    Each file is one, but a .jsonl file has one in each line, under the keys `fields`, and a .parquet file one in
    each row of these columns. ValueError names the file, and the line or row, that lacks one.
    """
    for file in files:
        with in_words(file):
            if file.suffix == ".jsonl":
                yield from _jsonl_documents(file, fields)
            elif file.suffix == ".parquet":
                yield from _parquet_documents(file, fields)
            else:
                text = file.read_bytes()
                if why := _why_no_text(text):
                    raise ValueError(f"{file} {why}")
                yield [text], len(text)


def _unreadable(error: OSError) -> None:
    raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from None


def _why_no_text(data: bytes, *, lines: bool = False) -> str | None:
    """Why these bytes are no text, and what to do; None if they are. lines: leave bad UTF-8 to the lines' reader."""
    for magic, name in _COMPRESSED.items():
        if data.startswith(magic):
            return f"is compressed ({name}): decompress it first"
    if (position := data.find(b"\0")) >= 0:
        return f"is binary or UTF-16 (byte {position} is 0): leave it out, or convert it to UTF-8"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        invalid = len(data) - len(data.decode("utf-8", "ignore").encode())
        if not lines and invalid > max(3, _INVALID * len(data)):
            return (
                f"is binary or not UTF-8 ({invalid} of {len(data)} bytes are invalid, the first at {error.start}): "
                f"leave it out, or convert it to UTF-8"
            )
    return None


def _options(fields: Sequence[str]) -> str:
    """The options that name the fields."""
    return "--text-field" if len(fields) == 1 else "--prompt-field and --completion-field"


def _jsonl_documents(file: Path, fields: Sequence[str]) -> Iterator[tuple[list[bytes], int]]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}:{number} is not valid JSON: {error}") from error
            for field in fields:
                if not isinstance(record, dict) or not isinstance(record.get(field), str):
                    given = isinstance(record, dict)
                    keys = f"; its keys are {', '.join(record)}: give {_options(fields)}" if given else ""
                    raise ValueError(f'{file}:{number} is not a JSON object with a string under "{field}"{keys}')
            yield [record[field].encode("utf-8", errors="replace") for field in fields], len(line)


def _open_parquet(file: Path, fields: Sequence[str]) -> Any:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError(f"reading {file} needs the pyarrow package: pip install tpformer[parquet]") from error
    try:
        with in_words(file):
            parquet = ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file} is not a .parquet file that can be read: {error}") from None
    names = parquet.schema_arrow.names
    if missing := [field for field in fields if field not in names]:
        raise ValueError(f"{file} has no column {missing[0]!r} but {', '.join(names)}: give {_options(fields)}")
    return parquet


def _parquet_documents(file: Path, fields: Sequence[str]) -> Iterator[tuple[list[bytes], int]]:
    import pyarrow

    parquet = _open_parquet(file, fields)
    size, row = file.stat().st_size // max(1, parquet.metadata.num_rows), 0
    batches = parquet.iter_batches(batch_size=1024, columns=list(fields))
    while True:
        try:
            batch = next(batches, None)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{file} is damaged after row {row}: {error}") from None
        if batch is None:
            return
        for texts in zip(*(batch.column(field).to_pylist() for field in fields), strict=True):
            row += 1
            for field, text in zip(fields, texts, strict=True):
                if not isinstance(text, str):
                    raise ValueError(f"{file}: row {row} has {text!r} under {field!r}, where a text is expected")
            yield [text.encode("utf-8", errors="replace") for text in texts], size
