"""Token files on disk: Megatron's .bin/.idx pair with its mask (reader and writer), and the sidecar's name and reader.

Only bytes and token ids belong here: no text, no tokenizer, no sampling order.

PREFIX.bin is every token of every sequence, end to end. PREFIX.idx, all little-endian, is a header (magic, version,
dtype code, sequence count S, document-index count D), then S int32 sequence lengths, S int64 byte offsets into the
.bin, and D int64 document indices: 0, then one past the last sequence of each document, so D = documents + 1.
PREFIX.mask, which a dataset may lack, is one byte for each token: 1 if it is a target, else 0.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tpformer.processes.files import in_words, is_there, make_folder
from tpformer.weights.family import read_json
from tpformer.words import shown

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPE_NAMES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")  # code = position + 1
_TOKEN_DTYPE_NAMES = ("uint16", "int32")
_CHUNK_TOKENS = 1 << 20
_MOST_IDS = 2**31 - 1  # of a document


class DataError(ValueError):
    """A dataset has tokens that its model cannot have. It may be noticed only when training reaches them."""


class DatasetPaths(NamedTuple):
    """The files that make up one dataset; `sidecar` is absent next to files that Megatron wrote, `mask` from texts."""

    bin: Path
    idx: Path
    sidecar: Path
    mask: Path


def dataset_paths(prefix: str | Path) -> DatasetPaths:
    """The paths PREFIX.bin, PREFIX.idx, PREFIX.json and PREFIX.mask; dots inside the prefix are kept."""
    return DatasetPaths(*(Path(f"{prefix}.{ending}") for ending in ("bin", "idx", "json", "mask")))


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest stored dtype for ids 0 .. vocab_size - 1: uint16 up to 65536 ids, int32 above.

    Raises ValueError when vocab_size is not in 1 .. 2**31.
    """
    if not 1 <= vocab_size <= 2**31:
        raise ValueError(f"vocab_size must be between 1 and 2**31, got {vocab_size}")
    return np.dtype(np.uint16) if vocab_size <= 2**16 else np.dtype(np.int32)


def read_sidecar(prefix: str | Path) -> dict[str, Any] | None:
    """The contents of PREFIX.json, or None where there is none.

    ValueError when it is not a JSON object with a tokenizer's name and the size of its vocabulary.
    """
    path = dataset_paths(prefix).sidecar
    with in_words(path):
        if not is_there(path):
            return None
        try:
            sidecar = read_json(path)
        except ValueError as error:
            raise ValueError(f"{error}; delete it or rebuild the dataset") from None
    tokenizer, size = sidecar.get("tokenizer"), sidecar.get("vocab_size")
    if not isinstance(tokenizer, str) or type(size) is not int or not 1 <= size <= 2**31:
        raise ValueError(
            f"{path} is no sidecar of a dataset: its tokenizer is {shown(tokenizer)} and its vocab_size {shown(size)}, "
            f"where a name and a number up to 2**31 are expected; move it away or rebuild the dataset"
        )
    return sidecar


class _Index(NamedTuple):
    dtype: np.dtype
    lengths: np.ndarray  # (S,) int32, in tokens
    pointers: np.ndarray  # (S,) int64, in bytes
    documents: np.ndarray  # (D,) int64, in sequences


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """The token dtype, the sequence count and the document-index count that the .idx announces."""
    with path.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if header[: len(_MAGIC)] != _MAGIC:
        raise ValueError(
            f"{path} starts with {header[:9]!r}, not {_MAGIC!r}: not a Megatron .idx file; give the prefix of one"
        )
    if len(header) < _HEADER.size:
        raise ValueError(
            f"{path} is truncated: {len(header)} bytes of a {_HEADER.size}-byte header; rebuild or recopy it"
        )
    _, version, code, n_sequences, n_indices = _HEADER.unpack(header)
    if version != _VERSION:
        raise ValueError(f"{path} has format version {version}; only version {_VERSION} can be read; rebuild it")
    name = _DTYPE_NAMES[code - 1] if 1 <= code <= len(_DTYPE_NAMES) else "unknown"
    if name not in _TOKEN_DTYPE_NAMES:
        raise ValueError(f"{path} has dtype code {code} ({name}); tokens must be uint16 (8) or int32 (4); rebuild it")
    return np.dtype(name).newbyteorder("<"), n_sequences, n_indices


def _read_index(path: Path) -> _Index:
    dtype, n_sequences, n_indices = _read_header(path)
    expected = _HEADER.size + 12 * n_sequences + 8 * n_indices
    size = path.stat().st_size
    if size != expected:
        raise ValueError(
            f"{path} has {size} bytes, but its header announces {n_sequences} sequences and {n_indices} document "
            f"indices, {expected} bytes: it is truncated or carries multimodal sequence modes; rebuild or recopy it"
        )
    raw = np.memmap(path, mode="r")
    lengths = np.frombuffer(raw, "<i4", n_sequences, offset=_HEADER.size)
    pointers = np.frombuffer(raw, "<i8", n_sequences, offset=_HEADER.size + 4 * n_sequences)
    documents = np.frombuffer(raw, "<i8", n_indices, offset=_HEADER.size + 12 * n_sequences)
    return _Index(dtype, lengths, pointers, documents)


def _check_index(path: Path, index: _Index) -> None:
    """ValueError unless the sequences lie end to end from byte 0, which makes the .bin one token stream."""
    if len(index.documents) == 0 or index.documents[0] != 0:
        raise ValueError(f"{path} has document indices {index.documents[:3].tolist()}...; they must start with 0")
    if (least := index.lengths.min(initial=0)) < 0:
        raise ValueError(f"{path} has a sequence of {least} tokens; rebuild or recopy it")
    ends = np.cumsum(index.lengths, dtype=np.int64) * index.dtype.itemsize
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
    wrong = np.flatnonzero(index.pointers != starts)
    if len(wrong) > 0:
        i = int(wrong[0])
        raise ValueError(
            f"{path}: sequence {i} starts at byte {index.pointers[i]} but the sequences before it end at byte "
            f"{starts[i]}; only contiguous files can be read; merge or rebuild the dataset"
        )


class IndexedDataset:
    """The token stream of PREFIX.bin and PREFIX.idx, memory-mapped. Sequences follow one another without boundaries.

    vocab_size: that of the model which reads the stream; `tokens` then refuses ids outside of it.
    masked: whether PREFIX.mask counts; without that file every token is a target.
    Raises FileNotFoundError when .bin or .idx is missing, and ValueError when one cannot be read, when the .idx is not
    a contiguous version-1 index of uint16 or int32 tokens, or when the .bin or a .mask that counts does not have
    exactly the size that the .idx implies.
    """

    def __init__(self, prefix: str | Path, vocab_size: int | None = None, *, masked: bool = False) -> None:
        self.bin_path, self.idx_path, _, self.mask_path = dataset_paths(prefix)
        self._vocab_size = vocab_size
        for path in (self.bin_path, self.idx_path):
            with in_words(path):
                if not is_there(path):
                    raise FileNotFoundError(f"{path} does not exist; {_remedy(str(prefix))}")
        with in_words(self.idx_path):
            index = _read_index(self.idx_path)
        _check_index(self.idx_path, index)
        n_tokens = int(index.lengths.sum(dtype=np.int64))
        size, expected = self.bin_path.stat().st_size, n_tokens * index.dtype.itemsize
        if size != expected:
            state = "truncated" if size < expected else "too long"
            raise ValueError(
                f"{self.bin_path} is {state}: {size} bytes, but {self.idx_path} describes {n_tokens} {index.dtype} "
                f"tokens, {expected} bytes; recopy or rebuild both files"
            )
        if n_tokens == 0:
            raise ValueError(f"{self.bin_path} holds no tokens; rebuild it from an input that has some")
        self.index = index
        with in_words(self.bin_path):
            self._tokens = np.memmap(self.bin_path, dtype=index.dtype, mode="r")
        self._mask = self._open_mask() if masked and is_there(self.mask_path) else None

    def _open_mask(self) -> np.ndarray:
        with in_words(self.mask_path):
            size = self.mask_path.stat().st_size
            if size != self.n_tokens:
                raise ValueError(
                    f"{self.mask_path} has {size} bytes, but {self.bin_path} has {self.n_tokens} tokens, with one byte "
                    f"of mask each; recopy or rebuild the dataset"
                )
            return np.memmap(self.mask_path, dtype=np.uint8, mode="r")

    @property
    def n_tokens(self) -> int:
        """The length of the token stream."""
        return len(self._tokens)

    @property
    def n_documents(self) -> int:
        """The number of documents that the stream was made of."""
        return len(self.index.documents) - 1

    @property
    def dtype(self) -> np.dtype:
        """The stored dtype, uint16 or int32."""
        return self._tokens.dtype

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1 of the stream, a new int64 array (stop - start,): ids, and -1 - id for no targets.

        Raises ValueError unless 0 <= start <= stop <= n_tokens, and DataError for an id outside of the vocabulary,
        with its position in the stream.
        """
        if not 0 <= start <= stop <= self.n_tokens:
            raise ValueError(f"tokens [{start}, {stop}) asked of {self.bin_path}, which has {self.n_tokens}")
        ids = self._tokens[start:stop].astype(np.int64)
        size = self._vocab_size
        if size is not None and len(ids) and not 0 <= ids.min() <= ids.max() < size:
            wrong = int(np.flatnonzero((ids < 0) | (ids >= size))[0])
            raise DataError(
                f"{self.bin_path} has the id {ids[wrong]} at token {start + wrong}, but the model's ids are 0 to "
                f"{size - 1}: the file is damaged, or its .json is another dataset's; rebuild it with the model's "
                f"tokenizer"
            )
        return ids if self._mask is None else np.where(self._mask[start:stop], ids, ~ids)

    def n_targets(self, start: int, stop: int) -> int:
        """How many of the tokens start .. stop - 1 are targets."""
        return stop - start if self._mask is None else int(np.count_nonzero(self._mask[start:stop]))

    def check_mask(self, n_targets: int | None) -> None:
        """Raise ValueError unless the mask has only bytes 0 and 1, and a 1; one pass over the file, if there is one.

        n_targets: the targets that the sidecar states; None where it states none.
        """
        if self._mask is None and n_targets is not None:
            raise ValueError(
                f"{self.mask_path} does not exist, but the dataset was built with a mask of {n_targets} targets; "
                f"recopy or rebuild the dataset"
            )
        if self._mask is None:
            return
        for start in range(0, self.n_tokens, _CHUNK_TOKENS):
            wrong = np.flatnonzero(self._mask[start : start + _CHUNK_TOKENS] > 1)
            if len(wrong) > 0:
                at = start + int(wrong[0])
                raise ValueError(f"{self.mask_path} has the byte {self._mask[at]} at token {at}: it must be 0 or 1")
        found = self.n_targets(0, self.n_tokens)
        if found == 0 or n_targets not in (None, found):
            stated = "" if n_targets is None else f", where the dataset was built with {n_targets}"
            raise ValueError(f"{self.mask_path} marks {found} targets{stated}; recopy or rebuild the dataset")

    def chunks(self) -> Iterator[np.ndarray]:
        """The whole stream as consecutive arrays (at most 2**20,) in the stored dtype. One of them is in memory."""
        with self.bin_path.open("rb") as stream:  # pages of a memory map would stay in memory
            while len(chunk := np.fromfile(stream, self.dtype, _CHUNK_TOKENS)):
                yield chunk


def _remedy(prefix: str) -> str:
    """What to do about a dataset that does not exist."""
    stem, dot, ending = prefix.rpartition(".")
    if dot and ending in DatasetPaths._fields:
        return f"a dataset is named by its prefix, so write {stem} without .{ending}"
    path = Path(prefix)
    if path.name in ("stdlib_train", "stdlib_valid"):
        return f"make it with `tpformer data stdlib --out {path.parent}`"
    return "a dataset is PREFIX.bin and PREFIX.idx, give the PREFIX (`tpformer data build` makes one)"


class IndexedWriter:
    """Context manager that writes PREFIX.bin and PREFIX.idx, one sequence per document, and PREFIX.mask if masked.

    The files get their names only when the `with` block ends without an error. After an error nothing is left behind.
    Raises ValueError for a dtype other than uint16 and int32, when a file of the dataset already exists, or when no
    token was added.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype, *, masked: bool = False) -> None:
        if dtype.name not in _TOKEN_DTYPE_NAMES:
            raise ValueError(f"tokens are stored as uint16 or int32, got {dtype}; use token_dtype(vocab_size)")
        self._paths = dataset_paths(prefix)
        self._temporary_bin, self._temporary_idx, _, self._temporary_mask = (Path(f"{x}.tmp") for x in self._paths)
        self._dtype = dtype
        self._largest = int(np.iinfo(dtype).max)
        self._masked, self._published = masked, False
        self._lengths = array("i")
        self._length = 0  # of the document that is being added
        self.n_tokens = self.n_targets = 0
        self._stream: BinaryIO
        self._mask_stream: BinaryIO | None = None
        self._own = False  # whether the temporary files are this writer's, or would be

    def __enter__(self) -> "IndexedWriter":
        make_folder(self._paths.bin.parent)
        self._own = not self._temporary_bin.exists()
        try:
            # exclusive creation makes the temporary a lock: two builds of one prefix cannot mix their tokens
            self._stream = self._temporary_bin.open("xb")
            self._own = True
            # a stale sidecar counts too: it would describe tokens that are no longer there
            if existing := [str(path) for path in self._paths if path.exists()]:
                raise ValueError(f"{', '.join(existing)} already exists; choose another --out or delete it first")
            if self._masked:
                self._mask_stream = self._temporary_mask.open("wb")
        except FileExistsError:
            self._own = False
            why = "another build of this dataset is running, or one was killed; delete the file if none is running"
            raise ValueError(f"{self._temporary_bin} exists: {why}") from None
        except BaseException:  # a signal, too, which may come as soon as the file is there
            self._discard()
            raise
        return self

    def add_document(self, ids: Sequence[int] | np.ndarray, mask: Sequence[bool] | np.ndarray | None = None) -> None:
        """Append one document, as `add` does, and end it."""
        self.add(ids, mask)
        self.end_document()

    def add(self, ids: Sequence[int] | np.ndarray, mask: Sequence[bool] | np.ndarray | None = None) -> None:
        """Append ids (n,) of integers to the document; ValueError when one does not fit the dtype or it has 2**31 ids.

        mask: (n,), whether each token is a target; ValueError unless a masked writer gets one and another none.
        """
        values = np.asarray(ids, dtype=np.int64)
        self._length += values.size
        if values.ndim != 1 or self._length > _MOST_IDS:
            raise ValueError(
                f"a document is a flat list of fewer than 2**31 ids, got shape {values.shape} and {self._length} ids: "
                f"split it"
            )
        if len(values) > 0 and not 0 <= values.min() <= values.max() <= self._largest:
            raise ValueError(
                f"document {len(self._lengths)} of {self._paths.bin} has ids from {values.min()} to {values.max()}, "
                f"outside 0..{self._largest} of {self._dtype}; choose the dtype with token_dtype(vocab_size)"
            )
        targets = np.zeros(0, np.bool_) if mask is None else np.asarray(mask, dtype=np.bool_)
        if (mask is not None) != self._masked or (mask is not None and targets.shape != values.shape):
            raise ValueError(
                f"document {len(self._lengths)} of {self._paths.bin} has {len(values)} ids and a mask of shape "
                f"{targets.shape}: with masked=True every document has a mask of its ids' number, else none has one"
            )
        if self._mask_stream is not None:
            self._mask_stream.write(targets.tobytes())
            self.n_targets += int(np.count_nonzero(targets))
        self._stream.write(values.astype(self._dtype.newbyteorder("<")).tobytes())
        self.n_tokens += len(values)

    @property
    def n_documents(self) -> int:
        """The number of documents that have ended."""
        return len(self._lengths)

    def end_document(self) -> None:
        """End the document that ids were added to."""
        self._lengths.append(self._length)
        self._length = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self._discard()

    def _publish(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32)
        if not lengths.any():
            raise ValueError(f"no tokens were added to {self._paths.bin}; give an input that has some")
        code = _DTYPE_NAMES.index(self._dtype.name) + 1
        with self._temporary_idx.open("wb") as stream:
            stream.write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1))
            stream.write(lengths.astype("<i4").tobytes())
            begin = 0
            for start in range(0, len(lengths), _CHUNK_TOKENS):
                part = lengths[start : start + _CHUNK_TOKENS]
                ends = begin + np.cumsum(part, dtype=np.int64)
                stream.write(((ends - part) * self._dtype.itemsize).astype("<i8").tobytes())
                begin = ends[-1]
            for start in range(0, len(lengths) + 1, _CHUNK_TOKENS):
                stream.write(np.arange(start, min(start + _CHUNK_TOKENS, len(lengths) + 1), dtype="<i8").tobytes())
        self._published = True
        if self._mask_stream is not None:  # first, because without it the other two are a dataset, too
            self._mask_stream.close()
            self._temporary_mask.rename(self._paths.mask)
        self._stream.close()
        self._temporary_bin.rename(self._paths.bin)
        self._temporary_idx.rename(self._paths.idx)

    def withdraw(self) -> None:
        """Remove the dataset, if this writer has published it."""
        for path in self._paths if self._published else ():
            path.unlink(missing_ok=True)

    def _discard(self) -> None:
        for stream in filter(None, (getattr(self, "_stream", None), self._mask_stream)):
            with suppress(OSError):  # what is still to be written may not fit on the disk
                stream.close()
        for path in (self._temporary_bin, self._temporary_idx, self._temporary_mask) if self._own else ():
            path.unlink(missing_ok=True)
