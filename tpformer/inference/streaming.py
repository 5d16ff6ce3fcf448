"""Tokens that arrive one by one, as text that can be shown at once.

Only the way from tokens to text belongs here: whole characters, and an end where a text says so.
"""

from tpformer.training.data import Tokenizer

UNFINISHED = "\ufffd"  # what stands for a character of which only the first bytes have come


class TextStream:
    """Turns tokens into pieces of text. Joined, the pieces are the decoded text, up to `stop` where that occurs.

    A piece ends with a whole character, so one that is split over tokens comes with its last token. What may be the
    beginning of `stop` is held back until it is clear. Once `stop` has come, `stopped` is True and no text follows.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | None = None) -> None:
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self._shown = 0  # ids of which the text has been given out
        self._context = 0  # first id to decode: a tokenizer may write a token in another way at the start of a text
        self._held = ""

    def add(self, token: int) -> str:
        """The text that this token completes; "" if it completes none."""
        self._ids.append(token)
        text = self._decoded_since_shown()
        if self.stopped or not text or text.endswith(UNFINISHED):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return self._until_stop(text)

    def end(self) -> str:
        """The rest: what was held back, and a U+FFFD for bytes that never became a character."""
        text = "" if self.stopped else self._until_stop(self._decoded_since_shown()) + self._held
        self._held, self._shown = "", len(self._ids)
        return text

    def _decoded_since_shown(self) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._shown])
        return self._tokenizer.decode(self._ids[self._context :])[len(before) :]

    def _until_stop(self, text: str) -> str:
        text = self._held + text
        if self._stop is None:
            return text
        text, found, _ = text.partition(self._stop)
        self.stopped = bool(found)
        n_held = 0 if found else max(n for n in range(len(self._stop)) if text.endswith(self._stop[:n]))
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]
