"""Tokenizers: text to ids and back, behind one small interface.

Only the mapping between text and ids belongs here. The package `tokenizers` is imported when a JSON file is loaded.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

_END_OF_DOCUMENT_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>")


class Tokenizer(Protocol):
    """What the rest of the library asks of a tokenizer. Bytes are read as UTF-8 wherever text is needed."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def end_of_document(self) -> int:
        """The id that follows every document; `encode` never adds it."""

    def encode(self, text: bytes | str) -> np.ndarray:
        """The ids of the text, int64 (n,)."""

    def encode_prompt(self, text: str) -> np.ndarray:
        """The ids of a text to continue, int64 (n,): with a beginning-of-text token where the tokenizer adds one."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids (n,), without the end-of-document tokens; bytes that are not UTF-8 become U+FFFD."""


class ByteTokenizer:
    """Ids 0..255 are the bytes themselves, and 256 ends a document. It needs no download, and encodes any text."""

    vocab_size = 257
    end_of_document = 256

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
    """A Hugging Face `tokenizer.json` file.

    Raises FileNotFoundError when the file is missing, ImportError when the `tokenizers` package is, and ValueError
    when the file cannot be parsed or its vocabulary has no end-of-document token.
    """

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} does not exist; give the path of a tokenizer.json file, or `bytes`")
        try:
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError as error:
            raise ImportError(f"reading {path} needs the tokenizers package: pip install tpformer[hf]") from error
        try:
            self._tokenizer = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception for every parse error
            raise ValueError(f"{path} is not a tokenizer.json file that can be read: {error}") from error
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        found = [vocabulary[token] for token in _END_OF_DOCUMENT_TOKENS if token in vocabulary]
        if not found:
            raise ValueError(
                f"{path} has none of the end-of-document tokens {', '.join(_END_OF_DOCUMENT_TOKENS)} among its "
                f"{len(vocabulary)} tokens; add one to its added_tokens"
            )
        self.end_of_document: int = found[0]
        # ids may have gaps, so the count of tokens can be less than the largest id needs
        self.vocab_size: int = max(vocabulary.values()) + 1

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


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of that name: "bytes", or else the path of a tokenizer.json (see JsonTokenizer for errors)."""
    return ByteTokenizer() if name == "bytes" else JsonTokenizer(name)
