"""A transcript gives the tokens of a conversation, and forgets the oldest turns when they have no more room."""

import json

import pytest

from tpformer.inference.transcript import Transcript
from tpformer.training.data import ByteTokenizer

STRICT = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"


def transcript(**options) -> Transcript:
    return Transcript(ByteTokenizer(), **{"context": 100, "answer": 20, **options})


def said(ids) -> str:
    return bytes(ids).decode()


def test_the_oldest_turns_are_forgotten_and_the_system_message_is_not(tmp_path):
    talk = transcript(system="Be kind.", context=101)
    for number in range(4):
        ids = talk.ask(f"question {number}")
        assert len(ids) <= 81
        talk.reply(f" answer {number}")
    assert said(ids) == (
        "System: Be kind.\nUser: question 2\nAssistant: answer 2\nUser: question 3\nAssistant:"
    ) and talk.forgotten == 4  # fmt: skip
    talk.save(tmp_path / "talk.json")
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", *["user", "assistant"] * 4], "all is saved"
    with pytest.raises(FileExistsError):
        talk.save(tmp_path / "talk.json")
    talk.reset()
    assert said(talk.ask("again")) == "System: Be kind.\nUser: again\nAssistant:"


def test_a_message_without_room_is_refused_and_not_said():
    talk = transcript()
    talk.ask("hello")
    talk.reply("hi")
    with pytest.raises(ValueError, match=r"takes 1016 tokens by itself, and the context of 100 has room for 80"):
        talk.ask("x" * 999)
    assert talk.forgotten == 0 and len(talk.turns) == 2
    assert said(talk.ask("and")) == "User: hello\nAssistant: hi\nUser: and\nAssistant:"


def test_a_system_message_that_the_template_refuses_is_not_kept():
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = STRICT
    with pytest.raises(ValueError, match="no system"):
        Transcript(tokenizer, context=100, answer=20, system="Be kind.")
    talk = Transcript(tokenizer, context=100, answer=20)
    with pytest.raises(ValueError, match="no system"):
        talk.set_system("Be kind.")
    assert talk.system is None and talk.stops == ()
