"""Tokenizers round-trip text and know the end of a document; what cannot be loaded is named with the remedy."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpformer.training.data import ByteTokenizer, JsonTokenizer, load_tokenizer


def word_level_json(path: Path, end_of_document: str, end_id: int = 7) -> Path:
    """A tokenizer.json of four words and one special token whose id leaves a gap."""
    vocabulary = {"[UNK]": 0, "red": 1, "green": 2, "blue": 3, end_of_document: end_id}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": end_id, "content": end_of_document, **special}],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    path.write_text(json.dumps(content))
    return path


@settings(deadline=None)
@given(st.text())
def test_byte_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_that_are_no_text() -> None:
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer) and (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.encode(bytes(range(256))).tolist() == list(range(256))
    assert tokenizer.encode("a\ud800b").tolist() == list(b"a?b"), "a lone surrogate does not stop a build"
    assert tokenizer.decode([104, 256, 105, 260, -1]) == "hi" and tokenizer.decode([104, 0xFF]) == "h\ufffd"


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.json does not exist.*`bytes`"):
        load_tokenizer(tmp_path / "absent.json")
    path = word_level_json(tmp_path / "tokenizer.json", "</s>")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install tpformer\[hf\]"):
        JsonTokenizer(path)


@pytest.mark.parametrize("end_of_document", ["<|endoftext|>", "</s>", "<|end_of_text|>"])
def test_json_tokenizer(tmp_path: Path, end_of_document: str) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = load_tokenizer(str(word_level_json(tmp_path / "tokenizer.json", end_of_document)))
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (8, 7)
    ids = tokenizer.encode(b"blue red mauve")
    assert ids.dtype == np.int64 and ids.tolist() == [3, 1, 0]
    assert tokenizer.encode("").dtype == np.int64
    assert tokenizer.decode(np.array([3, 1, 7])) == "blue red"


def test_json_tokenizer_refusals(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"a\.json has none of the end-of-document tokens .* 5 tokens"):
        JsonTokenizer(word_level_json(tmp_path / "a.json", "<stop>"))
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ValueError, match=r"b\.json is not a tokenizer\.json"):
        JsonTokenizer(tmp_path / "b.json")
