"""Tokenizers: text to ids and back, behind one small interface.

Only the mapping between text and ids belongs here. The package `tokenizers` is imported when a JSON file is loaded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from .special_tokens import read_tokenizer_files

_END_OF_DOCUMENT_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>")


class Tokenizer(Protocol):
    """What the rest of the library asks of a tokenizer. Bytes are read as UTF-8 wherever text is needed."""

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

    def encode(self, text: bytes | str) -> np.ndarray:
        """The ids of the text, as a part of a document, int64 (n,)."""

    def encode_prompt(self, text: str) -> np.ndarray:
        """The ids of a text to continue, int64 (n,): with a beginning-of-text token where the tokenizer adds one."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids (n,), without the end-of-document tokens; bytes that are not UTF-8 become U+FFFD."""


class ByteTokenizer:
    """Ids 0..255 are the bytes themselves, and 256 ends a document. It needs no download, and encodes any text."""

    vocab_size = 257
    end_of_document = 256
    stop_tokens = (256,)
    special_tokens: Mapping[str, str] = {}
    chat_template = None

    def encode(self, text: bytes | str) -> np.ndarray:
        """The bytes of the text (UTF-8 if it is a str), int64 (n,)."""
        data = text.encode("utf-8", errors="replace") if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.int64)

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
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} does not exist; give the path of a tokenizer.json file, or `bytes`")
        try:
            from tokenizers import AddedToken
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError as error:
            raise ImportError(f"reading {path} needs the tokenizers package: pip install tpformer[hf]") from error
        try:
            self._tokenizer = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception for every parse error
            raise ValueError(f"{path} is not a tokenizer.json file that can be read: {error}") from error
        # a file may ask for every text to be cut or filled to one length: documents and prompts are wanted whole
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        files = read_tokenizer_files(Path(path))
        self.special_tokens: Mapping[str, str] = files.special_tokens
        self.chat_template = files.chat_template
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # ids may have gaps, so the count of tokens can be less than the largest id needs
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.end_of_document: int = _end_of_document(path, vocabulary, files.special_tokens.get("eos_token"))
        self.stop_tokens = files.stop_ids or (self.end_of_document,)
        if not all(0 <= each < self.vocab_size for each in self.stop_tokens):
            raise ValueError(
                f"generation_config.json beside {path} stops at {self.stop_tokens}: the tokenizer's ids are below "
                f"{self.vocab_size}"
            )
        # a special token is one token wherever it is written, also if tokenizer.json has it among the ordinary ones
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        wanted = (set(files.special_tokens.values()) & vocabulary.keys()) - added
        self._tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in sorted(wanted)]
        )

    def encode(self, text: bytes | str) -> np.ndarray:
        """The ids of the text without any special tokens of a template, int64 (n,)."""
        string = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
        return np.array(self._tokenizer.encode(string, add_special_tokens=False).ids, dtype=np.int64)

    def encode_prompt(self, text: str) -> np.ndarray:
        """The ids of the text with the special tokens that tokenizer.json's post-processor adds, int64 (n,)."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=True).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids (n,), special tokens dropped."""
        return self._tokenizer.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=True)


def _end_of_document(path: str | Path, vocabulary: Mapping[str, int], eos_token: str | None) -> int:
    if eos_token is not None:
        if eos_token not in vocabulary:
            raise ValueError(
                f"{path} lacks {eos_token}, the eos_token of the files beside it, among its {len(vocabulary)} tokens: "
                f"are they of another tokenizer?"
            )
        return vocabulary[eos_token]
    for token in _END_OF_DOCUMENT_TOKENS:
        if token in vocabulary:
            return vocabulary[token]
    raise ValueError(
        f"{path} has none of the end-of-document tokens {', '.join(_END_OF_DOCUMENT_TOKENS)} among its "
        f"{len(vocabulary)} tokens; name one as eos_token in a tokenizer_config.json beside it"
    )


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text to continue: at least one, as an empty text begins a document."""
    return tokenizer.encode_prompt(text).tolist() or [tokenizer.end_of_document]


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of that name: "bytes", or else the path of a tokenizer.json (see JsonTokenizer for errors)."""
    return ByteTokenizer() if name == "bytes" else JsonTokenizer(name)
