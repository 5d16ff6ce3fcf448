"""Text that is shown token by token is, joined, the text; no piece has half a character; a stop text ends it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpformer.inference.generate import TextStream
from tpformer.training.data import ByteTokenizer, JsonTokenizer


def pieces(tokenizer, ids, *stops) -> list[str]:
    stream = TextStream(tokenizer, (), stops)
    return [*(stream.push(int(token)) for token in ids), stream.finish()]


# characters of one to four bytes, a space, a line's end, and what stands for half a character
CHARACTERS = "ab \n\x00é漢🙂\ufffd"


@given(st.text(CHARACTERS, max_size=12), st.booleans())
def test_pieces_are_whole_characters_and_join_to_the_text(text, cut):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)[: -1 if cut else None]
    found = pieces(tokenizer, ids)
    assert "".join(found) == tokenizer.decode(ids)
    assert cut or "\ufffd" in text or not any("\ufffd" in piece for piece in found)


def sentencepiece_like(tokenizers):
    """Words begin with a mark, the first space of a text is dropped, unknown characters are written as bytes."""
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "d"), ("o", "g"), ("▁d", "og")]
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {word: index for index, word in enumerate([*words, *("".join(merge) for merge in merges)])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    steps = tokenizers.decoders
    made.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    return made


def byte_level(tokenizers):
    """GPT-2's: every byte has a letter, a word's space is part of it."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.ByteLevel(False), tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the dog and the cat"] * 5, trainer)
    return made


@pytest.mark.parametrize("make", [sentencepiece_like, byte_level])
def test_words_keep_their_spaces_and_an_emoji_is_whole(tmp_path, make):
    """What a decoder does at the start of a text, it must not do at the start of every piece."""
    make(pytest.importorskip("tokenizers")).save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = JsonTokenizer(tmp_path / "tokenizer.json"), "the dog and the 🙂 cat"
    found = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(found) == text and sum(bool(piece) for piece in found) > 5
    assert any("🙂" in piece for piece in found)


@given(st.text("\nUser: x"), st.text("\nUser: y"))
def test_a_stop_text_ends_it_however_it_is_cut(before, after):
    ids, stop = ByteTokenizer().encode(before + after), "\nUser:"
    found = pieces(ByteTokenizer(), ids, stop)
    assert "".join(found) == (before + after).partition(stop)[0]
