"""The documents of text files, of files of JSON lines and of .parquet files.

Only finding, checking and reading inputs belongs here. build.py turns documents into tokens.
"""

import codecs
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tpformer.processes.files import in_words, kind_of
from tpformer.words import listed, printable, shown

_HEAD = 1 << 16  # bytes of a file that say what it is
_PIECE = 1 << 18  # bytes or characters of a long text that are held at a time
_LONGEST_LINE = 1 << 26  # bytes
_MARK = "\ufeff"  # byte order mark
_LINES = (".jsonl", ".ndjson", ".jsonlines", ".json")
_TABLES = (".csv", ".tsv")
_PARQUET = b"PAR1"
_JSON_VALUE = re.compile(r'\s*(\[\s*)?\{\s*"[^"\n]*"\s*:')  # the beginning of an object, or of a list of them
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"PK\3\4": "zip",
    b"\x04\x22\x4d\x18": "lz4",
    b"7z\xbc\xaf\x27\x1c": "7z",
}


class Source(NamedTuple):
    """A file of documents. kind: "text", "lines" or "parquet". n_bytes, marks: of a text, see Text."""

    path: Path
    kind: str
    n_bytes: int = 0
    marks: int = 0


class Text(NamedTuple):
    """A text in pieces, which can be read more than once. n_bytes: of its UTF-8. marks: byte order marks left out."""

    pieces: Iterable[str]
    n_bytes: int
    marks: int

    @property
    def whole(self) -> str:
        """The text as one string."""
        return "".join(self.pieces)


class Document(NamedTuple):
    """A text for each of the fields, the bytes of input that they took, and "FILE:line" or the like."""

    texts: list[Text]
    n_read: int
    where: str


def find_files(path: Path) -> tuple[list[Path], int]:
    """(files that an input stands for, number of links left out).

    A file stands for itself, and a folder for all its files but hidden ones, sorted by relative name. Symbolic links in
    it are left out, as they may lead out of the folder. FileNotFoundError for an input that does not exist, and
    ValueError for one that is neither a file nor a folder.
    """
    with in_words(path):
        is_file, is_folder = path.is_file(), path.is_dir()
    if is_file:
        return [path], 0
    if not is_folder:
        name = printable(path)
        if path.exists():
            raise ValueError(f"input {name} is {kind_of(path)}, which cannot be read twice: write it to a file first")
        raise FileNotFoundError(
            f"input {name} does not exist; give a text file, one of JSON lines, a .parquet or a folder"
        )
    found, links = [], 0
    for folder, folders, names in os.walk(path, onerror=_unreadable):
        here = Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".")]  # prunes the walk
        entries = [here / name for name in names if not name.startswith(".")]
        links += sum(entry.is_symlink() for entry in (*entries, *(here / name for name in folders)))
        found += [entry for entry in entries if entry.is_file() and not entry.is_symlink()]
    return sorted(found, key=lambda file: file.relative_to(path).as_posix()), links


def _unreadable(error: OSError) -> None:
    raise ValueError(f"{printable(error.filename)} cannot be read: {error.strerror}") from None


def open_sources(files: Sequence[Path], fields: Sequence[str] | None = None) -> list[Source]:
    """Find out what each file holds. ValueError names those that cannot be taken, and what is wrong with the first.

    Texts are read once, whole; of JSON lines only the beginning is looked at. fields: None if nobody asked for any.
    For .parquet: ImportError without pyarrow; ValueError for a file that is none or lacks a column of `fields`.
    ValueError also for fields that no file has, and for several with a text among the files.
    """
    sources: list[Source] = []
    wrong: list[tuple[Path, str]] = []
    for file in files:
        with in_words(file):
            with file.open("rb") as stream:
                head = stream.read(_HEAD)
            try:
                kind = _kind(file, head)
                sources.append(_scan(file) if kind == "text" else Source(file, kind))
            except ValueError as error:
                wrong.append((file, str(error)))
                continue
        if kind == "parquet":
            _open_parquet(file, fields or ("text",))
    if wrong:
        more = f" ({len(wrong) - 1} more files cannot be taken: {listed([file for file, _ in wrong[1:]])})"
        raise ValueError(f"{printable(wrong[0][0])} {wrong[0][1]}{more if wrong[1:] else ''}")
    texts = [source.path for source in sources if source.kind == "text"]
    if fields is not None and len(fields) > 1 and texts:
        raise ValueError(
            f"{printable(texts[0])} has no fields {printable(', '.join(fields), 80)}: give JSON lines or .parquet, or "
            f"leave it out"
        )
    if fields is not None and len(texts) == len(sources) > 0:
        raise ValueError(f"--text-field {printable(fields[0], 80)} has no effect, as no input has fields: leave it out")
    return sources


def _kind(file: Path, head: bytes) -> str:
    """What a file holds, by its first bytes and its name. ValueError says why it cannot be taken."""
    ending = file.suffix.lower()
    if ending == ".parquet" or head.startswith(_PARQUET):
        return "parquet"
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise ValueError(f"is compressed ({name}): decompress it first")
    if (position := head.find(b"\0")) >= 0:
        raise ValueError(f"is binary or UTF-16 (byte {position} is 0): leave it out, or convert it to UTF-8")
    if ending in _TABLES:
        raise ValueError("is a table: write its column of texts as JSON lines or .parquet, or leave it out")
    text = head.decode("utf-8-sig", "ignore")
    lines = _has_lines(text, cut=len(head) == _HEAD)
    if not lines and (_JSON_VALUE.match(text) or (ending == ".json" and re.match(r"\s*[\[{]", text))):
        raise ValueError("is one JSON value: write each document as an object on a line of its own (jq -c '.[]')")
    return "lines" if lines or ending in _LINES else "text"


def _has_lines(text: str, *, cut: bool) -> bool:
    """Whether the first line is a JSON object, or most lines are. cut: the last line may go on."""
    lines = [line for line in text.split("\n") if line.strip(_MARK).strip()]
    if cut and len(lines) == 1:
        return re.match(r'\s*\{\s*"', lines[0]) is not None
    lines = lines[:-1] if cut else lines
    return any(map(_is_object, lines[:1])) or sum(map(_is_object, lines)) * 2 > len(lines)


def _is_object(line: str) -> bool:
    line = line.strip(_MARK).strip()
    if not (line.startswith("{") and line.endswith("}")):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _scan(file: Path) -> Source:
    """Read a text once, whole. ValueError if it is no UTF-8 text."""
    n_bytes = marks = 0
    for piece in _decoded(file):
        found = piece.count(_MARK)
        marks += found
        n_bytes += len(piece.encode()) - 3 * found
    return Source(file, "text", n_bytes, marks)


def _decoded(file: Path) -> Iterator[str]:
    """A file's text in pieces. ValueError, without the file's name, for what is no UTF-8 text."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    with file.open("rb") as stream:
        while True:
            data = stream.read(_PIECE)
            if (position := data.find(b"\0")) >= 0:
                raise ValueError(f"is binary (byte {read + position} is 0): leave it out")
            held = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                at = read - held + error.start
                raise ValueError(
                    f"is not UTF-8 (byte {at} is 0x{error.object[error.start]:02x}): convert it (iconv -f ITS-ENCODING "
                    f"-t UTF-8), or leave it out"
                ) from None
            if not data:
                return
            read += len(data)
            yield text


@dataclass(frozen=True)
class _FileText:
    """The text of a file without byte order marks. A piece at a time is in memory."""

    path: Path

    def __iter__(self) -> Iterator[str]:
        with in_words(self.path):
            try:
                for piece in _decoded(self.path):
                    yield piece.replace(_MARK, "")
            except ValueError as error:
                raise ValueError(f"{printable(self.path)} {error}") from None


def read_documents(sources: Sequence[Source], fields: Sequence[str] = ("text",)) -> Iterator[Document]:
    """The documents of files: a text file is one, and each JSON line and each row of a .parquet is one.

    ValueError names the file, and the line or row, that lacks a text under one of `fields`.
    """
    for source in sources:
        with in_words(source.path):
            if source.kind == "lines":
                yield from _line_documents(source.path, fields)
            elif source.kind == "parquet":
                yield from _parquet_documents(source.path, fields)
            else:
                text = Text(_FileText(source.path), source.n_bytes, source.marks)
                yield Document([text], source.path.stat().st_size, printable(source.path))


def _record_text(where: str, field: str, value: str) -> Text:
    """A text of a line or row. ValueError if it cannot be written as UTF-8."""
    marks = value.count(_MARK)
    value = value.replace(_MARK, "")
    try:
        n_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        half = shown(value[error.start])
        raise ValueError(
            f"{where} has {half} at character {error.start} of {shown(field)}: half of a surrogate pair is no "
            f"character, so mend the text or leave it out"
        ) from None
    return Text([value[at : at + _PIECE] for at in range(0, len(value), _PIECE)], n_bytes, marks)


def _options(fields: Sequence[str]) -> str:
    """The options that name the fields."""
    return "--text-field" if len(fields) == 1 else "--prompt-field and --completion-field"


def _no_text(where: str, record: Any, field: str, fields: Sequence[str]) -> ValueError:
    """What is wrong with a record that has no string under a field."""
    if not isinstance(record, dict):
        return ValueError(f"{where} is not a JSON object but {shown(record)}: write an object with a text in each line")
    if field in record:
        return ValueError(f"{where} has {shown(record[field])} under {shown(field)}, where a text is expected")
    return ValueError(f"{where} has no {shown(field)}; its keys are {listed(record)}: give {_options(fields)}")


class _Object(dict):
    """A JSON object. twice: the keys that it has more than once, of which a dict keeps the last one."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        number = {} if len(pairs) == len(self) else Counter(key for key, _ in pairs)
        self.twice = {key for key in number if number[key] > 1}


def _line_documents(file: Path, fields: Sequence[str]) -> Iterator[Document]:
    name, number, marks = printable(file), 0, 0
    with file.open("rb") as stream:
        while line := stream.readline(_LONGEST_LINE + 1):
            number += 1
            where = f"{name}:{number}"
            if len(line) > _LONGEST_LINE:
                raise ValueError(
                    f"{where} has more than {_LONGEST_LINE} bytes: write each document on a line of its own"
                )
            content = line
            while content.startswith(codecs.BOM_UTF8):  # json would leave one out without a word
                content, marks = content.removeprefix(codecs.BOM_UTF8), marks + 1
            if not content.strip():
                continue
            try:
                record = json.loads(content, object_pairs_hook=_Object)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is not valid JSON: {printable(error, 100)}") from None
            texts = []
            for field in fields:
                if not isinstance(record, _Object) or not isinstance(record.get(field), str):
                    raise _no_text(where, record, field, fields)
                if field in record.twice:
                    raise ValueError(f"{where} has {shown(field)} twice: leave one of them out")
                texts.append(_record_text(where, field, record[field]))
            texts[0], marks = texts[0]._replace(marks=texts[0].marks + marks), 0
            yield Document(texts, len(line), where)


def _open_parquet(file: Path, fields: Sequence[str]) -> Any:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError(
            f"reading {printable(file)} needs the pyarrow package: pip install tpformer[parquet]"
        ) from error
    try:
        with in_words(file):
            parquet = ParquetFile(file, buffer_size=_PIECE, pre_buffer=False)  # else it reads a whole row group
            names = parquet.schema_arrow.names
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"{printable(file)} is not a .parquet file that can be read: {printable(error, 200)}"
        ) from None
    for field in fields:
        if field not in names:
            raise ValueError(
                f"{printable(file)} has no column {shown(field)} but {listed(names)}: give {_options(fields)}"
            )
        if names.count(field) > 1:
            raise ValueError(f"{printable(file)} has {names.count(field)} columns {shown(field)}: rename all but one")
    return parquet


def _parquet_documents(file: Path, fields: Sequence[str]) -> Iterator[Document]:
    import pyarrow

    parquet, row = _open_parquet(file, fields), 0
    metadata = parquet.metadata
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    # a batch is as many rows as are likely to have a few MiB
    heaviest = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=1)
    size = file.stat().st_size // max(1, metadata.num_rows)
    rows = int(min(1024, max(1, (_PIECE << 4) / max(1, heaviest))))
    batches = parquet.iter_batches(batch_size=rows, columns=list(fields))
    while True:
        try:
            batch = next(batches, None)
            columns = [] if batch is None else [batch.column(field).to_pylist() for field in fields]
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            raise ValueError(f"{printable(file)} is damaged after row {row}: {printable(error, 200)}") from None
        if batch is None:
            return
        for values in zip(*columns, strict=True):
            row += 1
            where, texts = f"{printable(file)}: row {row}", []
            for field, value in zip(fields, values, strict=True):
                if not isinstance(value, str):
                    raise _no_text(where, {field: value}, field, fields)
                texts.append(_record_text(where, field, value))
            yield Document(texts, size, where)
