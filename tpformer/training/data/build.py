"""Make a token dataset with its sidecar from text files.

Only what makes datasets belongs here. Their format is in indexed.py, the list of the default corpus's files in
corpus.py.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tpformer.processes.files import file_sha256, replace_file

from .corpus import split_files, stdlib_files, stdlib_root
from .indexed import IndexedDataset, IndexedWriter, dataset_paths, read_sidecar, token_dtype
from .tokenizer import load_tokenizer


@dataclass(frozen=True)
class Summary:
    """What a build made. The sidecar PREFIX.json has exactly these values."""

    tokenizer: str
    vocab_size: int
    n_documents: int
    n_tokens: int
    entropy_nats_per_token: float  # entropy of single tokens: the loss of the best model that ignores context
    sha256: str  # of PREFIX.bin
    documents_sha256: str  # of the documents' texts in order, before tokenization


def build_dataset(inputs: Sequence[Path], prefix: Path, tokenizer_name: str, *, quiet: bool = False) -> Summary:
    """Tokenize the inputs into PREFIX.bin, PREFIX.idx and PREFIX.json, and print one line about them.

    Each file is one document. In a .jsonl file each line is one: the string under its "text" key. A folder stands for
    all its files but hidden ones, sorted by name. The end-of-document token follows every document.
    `tokenizer_name` is "bytes" or the path of a tokenizer.json. On a terminal a progress bar is shown, unless quiet.

    Raises FileNotFoundError for a missing input or tokenizer, and ValueError when the inputs are empty, a .jsonl line
    has no text (the message says path:line), or the dataset exists already. An error in an input leaves no file behind.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    files = [file for path in inputs for file in _files_under(path)]
    n_bytes = sum(file.stat().st_size for file in files)
    if n_bytes == 0:
        names = ", ".join(map(str, inputs)) or "no inputs"
        raise ValueError(f"nothing to tokenize for {prefix}: {names} ({len(files)} files, 0 bytes); give other inputs")
    tokenizer = load_tokenizer(tokenizer_name)
    documents_digest = hashlib.sha256()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty())
    with bar, IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        task = bar.add_task(prefix.name, total=n_bytes)
        for text, n_read in _documents(files):
            _add_to_digest(documents_digest, text)
            writer.add_document(np.append(tokenizer.encode(text), tokenizer.end_of_document))
            bar.advance(task, n_read)
    summary = _summarize(prefix, tokenizer_name, tokenizer.vocab_size, documents_digest.hexdigest())
    _write_sidecar(prefix, summary)
    if not quiet:
        print(
            f"{prefix}: {summary.n_documents:,} documents, {summary.n_tokens:,} tokens, "
            f"unigram entropy {summary.entropy_nats_per_token:.4f} nats/token"
        )
    return summary


def build_stdlib(out_dir: Path, *, quiet: bool = False) -> tuple[Path, Path]:
    """Build the default corpus as bytes. Returns the prefixes out_dir/stdlib_train and out_dir/stdlib_valid.

    A dataset that was built from the same texts is reused. Call it in one process, before others read the datasets.
    Raises ValueError when a dataset of that name has other contents, as after an upgrade of Python.
    """
    train, valid = Path(out_dir, "stdlib_train"), Path(out_dir, "stdlib_valid")
    parts = list(zip((train, valid), split_files(stdlib_files(), root=stdlib_root()), strict=True))
    reusable = [_is_built_from(prefix, files) for prefix, files in parts]  # both are checked before either is built
    for (prefix, files), reuse in zip(parts, reusable, strict=True):
        if not reuse:
            build_dataset(files, prefix, "bytes", quiet=quiet)
        elif not quiet:
            print(f"{prefix}: reused, its {len(files):,} documents are unchanged")
    return train, valid


def _unigram_entropy(dataset: IndexedDataset, vocab_size: int) -> float:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for chunk in dataset.chunks():
        counts += np.bincount(chunk, minlength=vocab_size)
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def _files_under(path: Path) -> list[Path]:
    """The file itself, or the folder's files sorted by relative name."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"input {path} does not exist; give a text file, a .jsonl file or a folder")
    found = []
    for file in path.rglob("*"):
        relative = file.relative_to(path)
        if file.is_file() and not any(part.startswith(".") for part in relative.parts):
            found.append((relative.as_posix(), file))
    return [file for _, file in sorted(found)]


def _documents(files: Sequence[Path]) -> Iterator[tuple[bytes, int]]:
    """(UTF-8 text, bytes of input that it took) of each document."""
    for file in files:
        if file.suffix == ".jsonl":
            yield from _jsonl_documents(file)
        else:
            text = file.read_bytes()
            yield text, len(text)


def _jsonl_documents(file: Path) -> Iterator[tuple[bytes, int]]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}:{number} is not valid JSON: {error}") from error
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise ValueError(f'{file}:{number} is not a JSON object with a string under "text"')
            yield record["text"].encode("utf-8", errors="replace"), len(line)


def _add_to_digest(digest: "hashlib._Hash", text: bytes) -> None:
    digest.update(len(text).to_bytes(8, "little"))  # so that moving a boundary between documents changes the digest
    digest.update(text)


def _summarize(prefix: Path, tokenizer_name: str, vocab_size: int, documents_sha256: str) -> Summary:
    dataset = IndexedDataset(prefix)
    return Summary(
        tokenizer=tokenizer_name,
        vocab_size=vocab_size,
        n_documents=dataset.n_documents,
        n_tokens=dataset.n_tokens,
        entropy_nats_per_token=_unigram_entropy(dataset, vocab_size),
        sha256=file_sha256(dataset.bin_path),
        documents_sha256=documents_sha256,
    )


def _write_sidecar(prefix: Path, summary: Summary) -> None:
    replace_file(dataset_paths(prefix).sidecar, json.dumps(asdict(summary), indent=2) + "\n")


def _is_built_from(prefix: Path, files: Sequence[Path]) -> bool:
    """False if no file of the dataset exists, True if it holds these files as bytes. ValueError for anything else."""
    paths = dataset_paths(prefix)
    existing = [str(path) for path in paths if path.exists()]
    if not existing:
        return False
    digest = hashlib.sha256()
    for text, _ in _documents(files):
        _add_to_digest(digest, text)
    sidecar = read_sidecar(prefix) or {}
    expected = ("bytes", digest.hexdigest())
    found = (sidecar.get("tokenizer"), sidecar.get("documents_sha256"))
    if len(existing) < len(paths) or found != expected or sidecar.get("sha256") != file_sha256(paths.bin):
        raise ValueError(
            f"{prefix} does not hold this Python's standard library ({len(files)} files) as bytes: built "
            f"by another Python, changed or incomplete; delete {', '.join(existing)} and build again"
        )
    return True
