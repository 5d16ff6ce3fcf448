"""Tokenizers: text to ids and back, behind one small interface.

Only the mapping between text and ids belongs here. The package `tokenizers` is imported when a JSON file is loaded.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tpformer.weights.family import read_json
from tpformer.words import printable, shown

from .special_tokens import read_tokenizer_files
from .windows import encode_windows

_END_OF_DOCUMENT_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>")
_RARE = "\U000f1234"  # a character for private use, which no text teaches a tokenizer
_STARTS = ("\n", "a", ".", "0")  # texts behind which a completion is tried


class Tokenizer(Protocol):
    """What the rest of the library asks of a tokenizer. A text with half of a surrogate pair is a ValueError."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def end_of_document(self) -> int:
        """The id that follows every document; `encode` never adds it."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The ids that end a generated text: at least one."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts of special tokens by role, such as `eos_token`, for a chat template."""

    @property
    def chat_template(self) -> str | None:
        """How a conversation is written (see chat_template.py); None if the tokenizer does not say."""

    @property
    def unknown(self) -> int | None:
        """The id of text that no token stands for; None if there is none."""

    def dropped(self, text: str) -> int:
        """How many characters of the text, beside whitespace, leave nothing in its ids, not even `unknown`."""

    @property
    def beginning(self) -> tuple[int, ...]:
        """The ids that every document and every prompt begin with, such as <s>; `encode` never adds them."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of the text alone, int64 (n,)."""

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of a long text that comes in pieces, in parts (n,) of int64: together those of the whole text."""

    def encode_prompt(self, text: str) -> np.ndarray:
        """The ids of a text to continue, int64 (n,): `beginning`, then the text's own."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids (n,), without the end-of-document tokens; bytes that are not UTF-8 become U+FFFD."""


class ByteTokenizer:
    """Ids 0..255 are the bytes themselves, and 256 ends a document. It needs no download, and encodes any text."""

    vocab_size = 257
    end_of_document = 256
    stop_tokens = (256,)
    special_tokens: Mapping[str, str] = {}
    chat_template = None
    unknown = None
    beginning: tuple[int, ...] = ()

    def dropped(self, text: str) -> int:
        """None: every byte has an id."""
        return 0

    def encode(self, text: str) -> np.ndarray:
        """The UTF-8 bytes of the text, int64 (n,)."""
        return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.int64)

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of each piece."""
        return map(self.encode, pieces)

    def encode_prompt(self, text: str) -> np.ndarray:
        """The same as `encode`."""
        return self.encode(text)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids (n,). Ids that are no byte, such as end-of-document or a padded vocabulary's, are dropped."""
        array = np.asarray(ids, dtype=np.int64)
        is_byte = (array >= 0) & (array < 256)
        return array[is_byte].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class JsonTokenizer:
    """A Hugging Face `tokenizer.json` file, and what the files beside it say (see special_tokens.py).

    The end-of-document token is tokenizer_config.json's eos_token, or else one of three well-known names. Stop tokens
    are those of generation_config.json, or else the end-of-document token.

    Raises FileNotFoundError when the file is missing, ImportError when the `tokenizers` package is, and ValueError
    when a file cannot be understood, names a token that the vocabulary lacks, or there is no end-of-document token.
    """

    def __init__(self, path: str | Path) -> None:
        name = printable(path)
        if Path(path).is_dir():
            inner = Path(path, "tokenizer.json")
            raise ValueError(
                f"{name} is a folder: give the file {printable(inner)}"
                if inner.is_file()
                else f"{name} is a folder without a tokenizer.json: give the path of such a file, or `bytes`"
            )
        if not Path(path).is_file():
            raise FileNotFoundError(f"{name} does not exist; give the path of a tokenizer.json file, or `bytes`")
        try:
            from tokenizers import AddedToken
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError as error:
            raise ImportError(f"reading {name} needs the tokenizers package: pip install tpformer[hf]") from error
        try:
            self._tokenizer = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception for every parse error
            raise ValueError(
                f"{name} is not a tokenizer.json file that can be read: {printable(error, 200)}"
            ) from error
        # a file may ask for every text to be cut or filled to one length: documents and prompts are wanted whole
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        files = read_tokenizer_files(Path(path))
        self.special_tokens: Mapping[str, str] = files.special_tokens
        self.chat_template = files.chat_template
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"{name} has no tokens: give the tokenizer.json of a trained tokenizer")
        # ids may have gaps, so the count of tokens can be less than the largest id needs
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.end_of_document: int = _end_of_document(path, vocabulary, files.special_tokens.get("eos_token"))
        self.stop_tokens = files.stop_ids or (self.end_of_document,)
        if not all(0 <= each < self.vocab_size for each in self.stop_tokens):
            raise ValueError(
                f"generation_config.json beside {name} stops at {shown(self.stop_tokens)}: the tokenizer's ids are "
                f"below {self.vocab_size}"
            )
        self.beginning = self._beginning(["a", *islice(vocabulary, 100)])
        self.unknown = self._unknown(Path(path), vocabulary)
        self._drops = not len(self.encode(_RARE))
        self._has_ids: dict[str, bool] = {}  # of characters, where some have none
        # a special token is one token wherever it is written, also if tokenizer.json has it among the ordinary ones
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        wanted = (set(files.special_tokens.values()) & vocabulary.keys()) - added
        self._tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in sorted(wanted)]
        )

    def _unknown(self, path: Path, vocabulary: Mapping[str, int]) -> int | None:
        model = self._tokenizer.model
        if type(model).__name__ == "Unigram":
            return read_json(path)["model"].get("unk_id")
        token = getattr(model, "unk_token", None)
        return vocabulary.get(token) if isinstance(token, str) else None

    def dropped(self, text: str) -> int:
        """How many characters, beside whitespace, have no id by themselves."""
        if not self._drops:
            return 0
        letters = set(text)
        for letter in letters - self._has_ids.keys():
            self._has_ids[letter] = letter.isspace() or len(self.encode(letter)) > 0
        return sum(text.count(letter) for letter in letters if not self._has_ids[letter])

    def _beginning(self, words: Iterable[str]) -> tuple[int, ...]:
        """The ids that the post-processor puts before a text. words: some, of which one has a token."""
        for word in words:
            encoding = self._tokenizer.encode(word, add_special_tokens=True)
            if 0 in encoding.special_tokens_mask:
                return tuple(encoding.ids[: encoding.special_tokens_mask.index(0)])
        return ()

    def _encoding(self, text: str) -> Any:
        _utf8(text)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode(self, text: str) -> np.ndarray:
        """The ids of the text without any special tokens of a template, int64 (n,)."""
        return np.array(self._encoding(text).ids, dtype=np.int64)

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of a long text in parts (see windows.py)."""
        return encode_windows(self._encoding, pieces)

    def encode_prompt(self, text: str) -> np.ndarray:
        """The ids of the text behind those that tokenizer.json's post-processor puts before one, int64 (n,).

        What it puts behind a text is left out, as neither a prompt nor a document ends there.
        """
        return np.array([*self.beginning, *self._encoding(text).ids], dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids (n,), special tokens dropped."""
        return self._tokenizer.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=True)


def _end_of_document(path: str | Path, vocabulary: Mapping[str, int], eos_token: str | None) -> int:
    if eos_token is not None:
        if eos_token not in vocabulary:
            raise ValueError(
                f"{printable(path)} lacks {printable(eos_token, 80)}, the eos_token of the files beside it, among its "
                f"{len(vocabulary)} tokens: are they of another tokenizer?"
            )
        return vocabulary[eos_token]
    for token in _END_OF_DOCUMENT_TOKENS:
        if token in vocabulary:
            return vocabulary[token]
    raise ValueError(
        f"{printable(path)} has none of the end-of-document tokens {', '.join(_END_OF_DOCUMENT_TOKENS)} among its "
        f"{len(vocabulary)} tokens; name one as eos_token in a tokenizer_config.json beside it"
    )


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text to continue: at least one, as an empty text begins a document."""
    return tokenizer.encode_prompt(text).tolist() or [tokenizer.end_of_document]


def encode_pair(tokenizer: Tokenizer, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a prompt, without the beginning, and of the completion as it goes on, each int64 (n,).

    Together they say what prompt + completion says. Many tokenizers begin every text with a space or a new word, and
    a completion is not the beginning of one. ValueError if no tokens say it.
    """
    before, together = tokenizer.encode(prompt), tokenizer.encode(prompt + completion)
    said = tokenizer.decode(together)
    for after in _continuations(tokenizer, prompt, completion, together):
        if tokenizer.decode(np.concatenate([before, after])) == said:
            return before, after
    raise ValueError(
        f"the completion {shown(completion)} cannot be tokenized as what follows {shown(prompt[-20:])}: begin it with "
        f"a space, or move the border to where a word begins"
    )


def _continuations(tokenizer: Tokenizer, prompt: str, completion: str, together: np.ndarray) -> Iterator[np.ndarray]:
    """What may be the ids of a text that goes on: those of itself, or of another one with the other's taken away."""
    yield tokenizer.encode(completion)
    for start, whole in ((prompt, together), *((start, None) for start in _STARTS)):
        ids = tokenizer.encode(start)
        whole = tokenizer.encode(start + completion) if whole is None else whole
        if np.array_equal(whole[: len(ids)], ids):
            yield whole[len(ids) :]


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = shown(text[error.start])
        raise ValueError(
            f"a text has {half} at character {error.start}: half of a surrogate pair, or a byte that is not UTF-8"
        ) from None


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of that name: "bytes", or else the path of a tokenizer.json (see JsonTokenizer for errors)."""
    return ByteTokenizer() if name == "bytes" else JsonTokenizer(name)
