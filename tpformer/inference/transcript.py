"""What was said in a conversation, as the tokens of the next question, and as a file.

Only messages belong here: no model and no terminal. Rank 0 alone has a transcript.
"""

import json
from pathlib import Path

from tpformer.training.data import PLAIN_STOP, Message, Tokenizer, chat_ids


class Transcript:
    """The messages of a conversation: perhaps a system message, then a user's and an assistant's in turn.

    context: how many tokens the model reads at most. answer: how many of them are kept free for an answer.
    """

    def __init__(self, tokenizer: Tokenizer, *, context: int, answer: int, system: str | None = None) -> None:
        self.tokenizer, self.context, self.answer = tokenizer, context, answer
        self.turns: list[Message] = []
        self.forgotten = 0  # messages, the oldest ones, that the model no longer sees
        self.system: str | None = None
        self.set_system(system)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer, where no token does: plain text has no token for it."""
        return (PLAIN_STOP,) if self.tokenizer.chat_template is None else ()

    def set_system(self, text: str | None) -> None:
        """Give the conversation another system message, or none. ValueError if the template refuses it."""
        previous, self.system = self.system, text or None
        try:
            chat_ids(self.tokenizer, self._seen([_message("user", "?")]))
        except ValueError:
            self.system = previous
            raise

    def ask(self, text: str) -> list[int]:
        """Add a user's message; returns the tokens that the model reads. The oldest turns are forgotten to make room.

        ValueError if the template refuses the message or it has no room by itself; then it is not added.
        """
        question, forgotten = _message("user", text), self.forgotten
        while True:
            ids = chat_ids(self.tokenizer, self._seen([*self.turns[forgotten:], question])).tolist()
            if len(ids) <= self.context - self.answer:
                break
            if forgotten == len(self.turns):
                raise ValueError(
                    f"this message takes {len(ids)} tokens by itself, and the context of {self.context} has room for "
                    f"{self.context - self.answer} before an answer: shorten it"
                )
            forgotten += 2  # a question and its answer
        self.turns.append(question)
        self.forgotten = forgotten
        return ids

    def reply(self, text: str) -> None:
        """Add the assistant's answer."""
        self.turns.append(_message("assistant", text))

    def reset(self) -> None:
        """Forget all that was said. The system message stays."""
        self.turns, self.forgotten = [], 0

    def save(self, path: Path) -> None:
        """Write all messages as one line of JSON, {"messages": [...]}. FileExistsError if there is such a file. An
        OSError, as of a full disk, leaves none."""
        file = path.open("x", encoding="utf-8")
        try:
            with file:
                file.write(json.dumps({"messages": self._seen(self.turns)}, ensure_ascii=False) + "\n")
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _seen(self, turns: list[Message]) -> list[Message]:
        return [_message("system", self.system), *turns] if self.system else turns


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
