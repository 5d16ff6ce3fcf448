"""Make a token dataset with its sidecar from text files.

Only what makes datasets belongs here. Their format is in indexed.py, the reading of inputs in documents.py, the list of
the default corpus's files in corpus.py.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tpformer.processes.files import file_sha256, in_words, longest_name, replace_file
from tpformer.words import listed, printable

from .corpus import split_files, stdlib_files, stdlib_root
from .documents import Document, find_files, open_sources, read_documents
from .indexed import IndexedWriter, dataset_paths, read_sidecar, token_dtype
from .tokenizer import Tokenizer, encode_pair, load_tokenizer


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
    inputs: Sequence[Path],
    prefix: Path,
    tokenizer_name: str,
    *,
    fields: Sequence[str] | None = None,
    quiet: bool = False,
) -> Summary:
    """Tokenize the inputs into PREFIX.bin, PREFIX.idx and PREFIX.json, and print one line about them.

    A file of JSON lines has a document in each line, the string under the key that `fields` names ("text" unless it is
    given), and a .parquet file one in each row of that column. Any other file is one document. A folder stands for all
    its files but hidden ones and links, sorted by name. A document is the tokenizer's beginning (such as <s>, where
    tokenizer.json's post-processor has one), the text without byte order marks, and the end-of-document token.
    `tokenizer_name` is "bytes" or the path of a tokenizer.json. On a terminal a progress bar is shown, unless quiet.
    fields: one, or those of a prompt and of its completion. A document is then both, tokenized as encode_pair says, and
    PREFIX.mask marks the tokens of the completion and the end-of-document token as targets.
    Memory does not grow with the files, but by 4 bytes a document.

    Raises FileNotFoundError for a missing input or tokenizer, and ValueError when the inputs are empty, a file is no
    UTF-8 text, a line or row lacks a text (the message says which), fields are given for texts alone, or the dataset
    exists already. An error in an input leaves no file behind.
    """
    return _build(inputs, prefix, [prefix], tokenizer_name, lambda _: 0, fields, quiet)[0]


def build_split(
    inputs: Sequence[Path],
    prefix: Path,
    tokenizer_name: str,
    valid_fraction: float,
    *,
    fields: Sequence[str] | None = None,
    quiet: bool = False,
) -> tuple[Summary, Summary]:
    """Build PREFIX_train and PREFIX_valid as build_dataset builds one; about valid_fraction of the documents validate.

    A document's side depends only on its text, so equal documents are never on both. ValueError also unless
    0 < valid_fraction < 1, or when a side gets no document.
    """
    if not 0 < valid_fraction < 1:
        raise ValueError(f"--valid-fraction {valid_fraction} must lie strictly between 0 and 1")
    prefixes = [Path(f"{prefix}_{use}") for use in ("train", "valid")]

    def side(document: Document) -> int:
        digest = hashlib.sha256()
        for text in document.texts:
            for piece in text.pieces:
                digest.update(piece.encode())
        return int(int.from_bytes(digest.digest()[:8], "big") / 2**64 < valid_fraction)

    train, valid = _build(inputs, prefix, prefixes, tokenizer_name, side, fields, quiet)
    return train, valid


class _Part:
    """A dataset that is being written: its tokens, and what its sidecar says of them."""

    def __init__(self, prefix: Path, tokenizer: Tokenizer, masked: bool) -> None:
        if (size := len(os.fsencode(prefix.name))) > (longest := longest_name(".json")):
            raise ValueError(f"{prefix} has a name of {size} bytes: give a prefix of at most {longest}")
        self.prefix, self.tokenizer, self.masked = prefix, tokenizer, masked
        self.writer = IndexedWriter(prefix, token_dtype(tokenizer.vocab_size), masked=masked)
        self.digest, self.marks, self.dropped = hashlib.sha256(), 0, 0
        self.counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)

    def add(self, document: Document) -> None:
        """Tokenize and write a document."""
        self.marks += sum(text.marks for text in document.texts)
        self.dropped += sum(map(self.tokenizer.dropped, _digested(self.digest, document)))
        beginning, end = self.tokenizer.beginning, [self.tokenizer.end_of_document]
        if self.masked:
            prompt, completion = (text.whole for text in document.texts)
            try:
                before, after = encode_pair(self.tokenizer, prompt, completion)
            except ValueError as error:
                raise ValueError(f"{document.where}: {error}") from None
            ids = np.concatenate([beginning, before, after, end])
            self._write(ids, np.arange(len(ids)) >= len(beginning) + len(before))
        else:
            held: list[np.ndarray | Sequence[int]] = [beginning]
            for part in self.tokenizer.encode_pieces(document.texts[0].pieces):
                held.append(part)
                if len(held) > 2:  # a short document is written at once
                    self._write(np.concatenate(held), None)
                    held = []
            self._write(np.concatenate([*held, end]), None)
        self.writer.end_document()

    def _write(self, ids: np.ndarray, mask: np.ndarray | None) -> None:
        ids = ids.astype(np.int64, copy=False)  # no ids at all are floats
        self.writer.add(ids, mask)
        if len(ids) > len(self.counts) // 8:
            self.counts += np.bincount(ids, minlength=len(self.counts))
        else:
            np.add.at(self.counts, ids, 1)

    def finish(self, tokenizer_name: str) -> None:
        """Write the sidecar of the dataset, whose other files are there."""
        frequencies = self.counts[self.counts > 0] / self.counts.sum()
        paths = dataset_paths(self.prefix)
        self.summary = Summary(
            tokenizer=tokenizer_name,
            vocab_size=self.tokenizer.vocab_size,
            n_documents=self.writer.n_documents,
            n_tokens=self.writer.n_tokens,
            entropy_nats_per_token=float(-(frequencies * np.log(frequencies)).sum()),
            sha256=file_sha256(paths.bin),
            documents_sha256=self.digest.hexdigest(),
            n_targets=self.writer.n_targets if self.masked else None,
        )
        replace_file(paths.sidecar, json.dumps(asdict(self.summary), indent=2) + "\n")

    @property
    def n_unknown(self) -> int:
        """Tokens that stand for text that no token stands for."""
        unknown = self.tokenizer.unknown
        return 0 if unknown is None else int(self.counts[unknown])


@contextmanager
def _written(parts: Sequence[_Part], tokenizer_name: str) -> Iterator[None]:
    """Within, documents are added. At the end all datasets get all of their files, or after an error none."""
    try:
        with ExitStack() as stack:
            for part in parts:
                stack.push(part.writer)  # first: a signal may come as soon as the files are there
                part.writer.__enter__()
            yield
        for part in parts:
            part.finish(tokenizer_name)
    except BaseException:
        for part in parts:
            part.writer.withdraw()
        raise


def _build(
    inputs: Sequence[Path],
    prefix: Path,
    prefixes: Sequence[Path],
    tokenizer_name: str,
    side: Callable[[Document], int],
    fields: Sequence[str] | None,
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
        names = listed(inputs) or "no inputs"
        advice = left_out or "give other inputs"
        raise ValueError(f"nothing to tokenize for {prefix}: {names} ({len(files)} files, 0 bytes); {advice}")
    tokenizer = load_tokenizer(tokenizer_name)
    sources = open_sources(files, fields)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty())
    parts = [_Part(each, tokenizer, fields is not None and len(fields) > 1) for each in prefixes]
    with in_words(prefix, "written"), bar, _written(parts, tokenizer_name):
        task = bar.add_task(printable(prefix.name), total=n_bytes)
        for document in read_documents(sources, fields or ("text",)):
            parts[side(document)].add(document)
            bar.advance(task, document.n_read)
        counts = [part.writer.n_documents for part in parts]
        if len(parts) > 1 and 0 in counts:
            raise ValueError(
                f"{sum(counts)} documents are too few for {prefixes[counts.index(0)]}, which got none: change "
                f"--valid-fraction, or give more documents"
            )
    summaries = [part.summary for part in parts]
    if not quiet:
        _say(parts, summaries)
        if left_out:
            print(left_out)
    return summaries


def _say(parts: Sequence[_Part], summaries: Sequence[Summary]) -> None:
    """Print a line for each dataset, and one for each thing that its texts have lost."""
    for part, summary in zip(parts, summaries, strict=True):
        targets = "" if summary.n_targets is None else f"{summary.n_targets:,} targets, "
        print(
            f"{part.prefix}: {summary.n_documents:,} documents, {summary.n_tokens:,} tokens, {targets}"
            f"unigram entropy {summary.entropy_nats_per_token:.4f} nats/token"
        )
    if marks := sum(part.marks for part in parts):
        print(f"{marks:,} byte order marks (U+FEFF) are left out of the texts")
    if unknown := sum(part.n_unknown for part in parts):
        total = sum(summary.n_tokens for summary in summaries)
        print(f"{unknown:,} of {total:,} tokens stand for text that the tokenizer does not know")
    if dropped := sum(part.dropped for part in parts):
        print(f"{dropped:,} characters that the tokenizer does not know are left out of the texts")


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


def _digested(digest: "hashlib._Hash", document: Document) -> Iterator[str]:
    """The pieces of a document's texts; each is added to the digest on the way."""
    for text in document.texts:
        digest.update(text.n_bytes.to_bytes(8, "little"))  # so that moving a boundary between texts changes the digest
        for piece in text.pieces:
            digest.update(piece.encode())
            yield piece


def _is_built_from(prefix: Path, files: Sequence[Path]) -> bool:
    """False if no file of the dataset exists, True if it holds these files as bytes. ValueError for anything else."""
    paths = dataset_paths(prefix)
    existing = [path for path in paths if path.exists()]
    if not existing:
        return False
    digest = hashlib.sha256()
    for document in read_documents(open_sources(files)):
        for _ in _digested(digest, document):
            pass
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
