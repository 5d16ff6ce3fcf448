"""Text that is shown token by token is, joined, the text; no piece has half a character; a stop text ends it. A
transcript gives the tokens of a conversation, and forgets the oldest turns when they have no more room."""

import json
import resource
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import byte_level, sentencepiece_like

from tpformer.inference.generate import TextStream
from tpformer.inference.transcript import Transcript
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


@pytest.mark.parametrize("make", [sentencepiece_like, partial(byte_level, texts=["the dog and the cat"] * 5)])
def test_words_keep_their_spaces_and_an_emoji_is_whole(tmp_path, make):
    """What a decoder does at the start of a text, it must not do at the start of every piece."""
    make(tmp_path / "tokenizer.json")
    # of a run of bytes that begins within a character, ByteFallback would decode none
    tokenizer, text = JsonTokenizer(tmp_path / "tokenizer.json"), "the dog and the 🙂漢é漢🙂 cat"
    ids = tokenizer.encode(text).tolist()
    found = pieces(tokenizer, ids)
    assert "".join(found) == text and sum(bool(piece) for piece in found) > 5
    assert any("🙂" in piece for piece in found)
    for begun in (2, len(tokenizer.encode(text[:-5]))):  # the second prompt ends within the run of bytes
        stream = TextStream(tokenizer, prompt=ids[:begun])
        rest = [*map(stream.push, ids[begun:]), stream.finish()]
        assert tokenizer.decode(ids[:begun]) + "".join(rest) == text, "what follows a prompt keeps its space, too"


@given(st.text("\nUser: x"), st.text("\nUser: y"))
def test_a_stop_text_ends_it_however_it_is_cut(before, after):
    ids, stop = ByteTokenizer().encode(before + after), "\nUser:"
    found = pieces(ByteTokenizer(), ids, stop)
    assert "".join(found) == (before + after).partition(stop)[0]


def test_a_piece_comes_as_soon_as_it_may():
    """With its last byte if it is a character that the prompt has not begun, and once no stop text can begin in it."""
    stream = TextStream(ByteTokenizer(), prompt=[97, 195, 169])
    text = "aé漢🙂z"
    assert [stream.push(byte) for byte in text.encode()] == ["a", "", "é", "", "", "漢", "", "", "", "🙂", "z"]
    assert stream.push(0xFF) == "" and stream.finish() == "\ufffd"
    cut = TextStream(ByteTokenizer())
    assert [cut.push(0xC3), cut.push(0xC3, last=True)] == ["", "\ufffd\ufffd"]
    stopped = TextStream(ByteTokenizer(), stops=["\nUser:", "END"])
    found = [stopped.push(byte) for byte in b"a\nb EN\nUse\nUser: x"]
    assert found[:4] == ["a", "", "\nb", " "] and "".join(found) == "a\nb EN\nUse" and stopped.stopped
    assert pieces(ByteTokenizer(), b"xEN", "END") == ["x", "", "", "EN"]
    with pytest.raises(ValueError, match="a stop string is empty"):
        TextStream(ByteTokenizer(), stops=[""])


STRICT = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"


def test_the_oldest_turns_are_forgotten_and_the_system_message_is_not(tmp_path):
    talk = Transcript(ByteTokenizer(), context=101, answer=20, system="Be kind.")
    for number in range(4):
        ids = talk.ask(f"question {number}")
        assert len(ids) <= 81
        talk.reply(f" answer {number}")
    assert bytes(ids).decode() == (
        "System: Be kind.\nUser: question 2\nAssistant: answer 2\nUser: question 3\nAssistant:"
    ) and talk.forgotten == 4  # fmt: skip
    with pytest.raises(ValueError, match="takes 1016 tokens by itself, and the context of 101 has room for 81"):
        talk.ask("x" * 982)
    assert talk.forgotten == 4 and len(talk.turns) == 8, "nor is what was refused said"
    talk.save(tmp_path / "talk.json")
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", *["user", "assistant"] * 4], "all is saved"
    with pytest.raises(FileExistsError):
        talk.save(tmp_path / "talk.json")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            talk.save(tmp_path / "full.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "full.json").exists(), "the next try may have the name"
    talk.reset()
    assert bytes(talk.ask("again")) == b"System: Be kind.\nUser: again\nAssistant:"


def test_a_system_message_that_the_template_refuses_is_not_kept():
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = STRICT
    with pytest.raises(ValueError, match="no system"):
        Transcript(tokenizer, context=100, answer=20, system="Be kind.")
    talk = Transcript(tokenizer, context=100, answer=20)
    with pytest.raises(ValueError, match="no system"):
        talk.set_system("Be kind.")
    assert talk.system is None and talk.stops == ()
