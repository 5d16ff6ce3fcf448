"""Make a token dataset with its sidecar from text files.

Only what makes datasets belongs here. Their format is in indexed.py, the reading of inputs in documents.py, the list of
the default corpus's files in corpus.py.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tpformer.processes.files import file_sha256, in_words, replace_file

from .corpus import split_files, stdlib_files, stdlib_root
from .documents import check_files, find_files, read_documents
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
    n_targets: int | None = None  # tokens that PREFIX.mask marks; None without a mask


def build_dataset(
    inputs: Sequence[Path], prefix: Path, tokenizer_name: str, *, fields: Sequence[str] = ("text",), quiet: bool = False
) -> Summary:
    """Tokenize the inputs into PREFIX.bin, PREFIX.idx and PREFIX.json, and print one line about them.

    Each file is one document. In a .jsonl file each line is one, the string under the key that `fields` names, and in a
    .parquet file each row of that column. A folder stands for all its files but hidden ones and links, sorted by name.
    The end-of-document token follows every document. `tokenizer_name` is "bytes" or the path of a tokenizer.json. On a
    terminal a progress bar is shown, unless quiet.
    fields: one, or those of a prompt and of its completion. A document is then both, each tokenized by itself, and
    PREFIX.mask marks the tokens of the completion and the end-of-document token as targets.

    Raises FileNotFoundError for a missing input or tokenizer, and ValueError when the inputs are empty, a file is no
    text, a line or row lacks a text (the message says which), or the dataset exists already. An error in an input
    leaves no file behind.
    """
    return _build(inputs, prefix, [prefix], tokenizer_name, lambda _: 0, fields, quiet)[0]


def build_split(
    inputs: Sequence[Path],
    prefix: Path,
    tokenizer_name: str,
    valid_fraction: float,
    *,
    fields: Sequence[str] = ("text",),
    quiet: bool = False,
) -> tuple[Summary, Summary]:
    """Build PREFIX_train and PREFIX_valid as build_dataset builds one; about valid_fraction of the documents validate.

    A document's side depends only on its text, so equal documents are never on both. ValueError also unless
    0 < valid_fraction < 1, or when a side gets no document.
    """
    if not 0 < valid_fraction < 1:
        raise ValueError(f"--valid-fraction {valid_fraction} must lie strictly between 0 and 1")
    prefixes = [Path(f"{prefix}_{use}") for use in ("train", "valid")]

    def side(text: bytes) -> int:
        return int(int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64 < valid_fraction)

    train, valid = _build(inputs, prefix, prefixes, tokenizer_name, side, fields, quiet)
    return train, valid


def _build(
    inputs: Sequence[Path],
    prefix: Path,
    prefixes: Sequence[Path],
    tokenizer_name: str,
    side: Callable[[bytes], int],
    fields: Sequence[str],
    quiet: bool,
) -> list[Summary]:
    """Build the datasets of `prefixes`. side: the number of the one that a document goes to."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    found = [find_files(path) for path in inputs]
    files = [file for some, _ in found for file in some]
    links = sum(number for _, number in found)
    n_bytes = sum(file.stat().st_size for file in files)
    left_out = f"{links} symbolic links in folders are left out: give what they point to as inputs" if links else ""
    if n_bytes == 0:
        names = ", ".join(map(str, inputs)) or "no inputs"
        advice = left_out or "give other inputs"
        raise ValueError(f"nothing to tokenize for {prefix}: {names} ({len(files)} files, 0 bytes); {advice}")
    check_files(files, fields)
    tokenizer = load_tokenizer(tokenizer_name)
    digests = [hashlib.sha256() for _ in prefixes]
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty())
    with in_words(prefix, "written"), bar, ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        masked = len(fields) > 1
        writers = [stack.enter_context(IndexedWriter(each, dtype, masked=masked)) for each in prefixes]
        task, counts = bar.add_task(prefix.name, total=n_bytes), [0] * len(prefixes)
        for texts, n_read in read_documents(files, fields):
            chosen = side(b"".join(texts))
            counts[chosen] += 1
            _add_to_digest(digests[chosen], texts)
            parts = [tokenizer.encode(text) for text in texts]
            ids = np.concatenate([*parts, [tokenizer.end_of_document]])
            mask = np.arange(len(ids)) >= len(parts[0]) if masked else None
            writers[chosen].add_document(ids, mask)
            bar.advance(task, n_read)
        if len(prefixes) > 1 and 0 in counts:
            raise ValueError(
                f"{sum(counts)} documents are too few for {prefixes[counts.index(0)]}, which got none: change "
                f"--valid-fraction, or give more documents"
            )
    summaries = []
    for each, digest in zip(prefixes, digests, strict=True):
        summaries.append(_summarize(each, tokenizer_name, tokenizer.vocab_size, digest.hexdigest()))
        _write_sidecar(each, summaries[-1])
    if not quiet:
        for each, summary in zip(prefixes, summaries, strict=True):
            targets = "" if summary.n_targets is None else f"{summary.n_targets:,} targets, "
            print(
                f"{each}: {summary.n_documents:,} documents, {summary.n_tokens:,} tokens, {targets}"
                f"unigram entropy {summary.entropy_nats_per_token:.4f} nats/token"
            )
        if left_out:
            print(left_out)
    return summaries


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


def _add_to_digest(digest: "hashlib._Hash", texts: Sequence[bytes]) -> None:
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))  # so that moving a boundary between texts changes the digest
        digest.update(text)


def _summarize(prefix: Path, tokenizer_name: str, vocab_size: int, documents_sha256: str) -> Summary:
    dataset = IndexedDataset(prefix, masked=True)
    return Summary(
        tokenizer=tokenizer_name,
        vocab_size=vocab_size,
        n_documents=dataset.n_documents,
        n_tokens=dataset.n_tokens,
        entropy_nats_per_token=_unigram_entropy(dataset, vocab_size),
        sha256=file_sha256(dataset.bin_path),
        documents_sha256=documents_sha256,
        n_targets=dataset.n_targets(0, dataset.n_tokens) if dataset.mask_path.exists() else None,
    )


def _write_sidecar(prefix: Path, summary: Summary) -> None:
    replace_file(dataset_paths(prefix).sidecar, json.dumps(asdict(summary), indent=2) + "\n")


def _is_built_from(prefix: Path, files: Sequence[Path]) -> bool:
    """False if no file of the dataset exists, True if it holds these files as bytes. ValueError for anything else."""
    paths = dataset_paths(prefix)
    existing = [path for path in paths if path.exists()]
    if not existing:
        return False
    digest = hashlib.sha256()
    for texts, _ in read_documents(files):
        _add_to_digest(digest, texts)
    sidecar = read_sidecar(prefix) or {}
    expected = ("bytes", digest.hexdigest())
    found = (sidecar.get("tokenizer"), sidecar.get("documents_sha256"))
    complete = existing == [paths.bin, paths.idx, paths.sidecar]
    if not complete or found != expected or sidecar.get("sha256") != file_sha256(paths.bin):
        raise ValueError(
            f"{prefix} does not hold this Python's standard library ({len(files)} files) as bytes: built "
            f"by another Python, changed or incomplete; delete {', '.join(map(str, existing))} and build again"
        )
    return True
