"""A conversation with a model in a terminal, on any number of tensor-parallel ranks.

Rank 0 has the terminal and the transcript. It sends the tokens of each question to the other ranks, which only compute.
"""

import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from tpformer.config import RunConfig
from tpformer.models import GPT, KVCache
from tpformer.training.data import load_tokenizer
from tpformer.training.deciding import decides
from tpformer.training.resolve import tokenizer_name
from tpformer.words import harmless, message

from .generate import TextStream, generate, load_model
from .sampling import Sampling
from .transcript import Transcript

HELP = (
    "/reset forgets what was said; /system TEXT sets the system message, /system alone removes it; /save FILE writes "
    "the conversation; /quit or Ctrl-D ends it. Ctrl-C stops an answer"
)


class Terminal:
    """Standard input and output. Lines are edited, and a prompt is shown, only where input is a terminal.

    Notes go to standard error, so that the output of a pipe is the answers alone.
    """

    def __init__(self) -> None:
        # a forked rank has another sys.stdin, but the command's input is still open under its number; the tokenizer
        # refuses a line with bytes that are not UTF-8
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
        self.interactive = sys.stdin.isatty()
        self.stopped = self._typing = False
        self.closed: BrokenPipeError | None = None  # nobody reads the output any more
        self._console = Console(stderr=True, soft_wrap=True)
        signal.signal(signal.SIGINT, self._stop)
        if self.interactive:
            import readline  # noqa: F401  gives input() an editable line and a history

    def _stop(self, *_: object) -> None:
        self.stopped = True
        if self._typing:
            self._typing = False  # one interrupt for one line, however often the key is pressed
            raise KeyboardInterrupt

    def lines(self) -> Iterator[str]:
        """The lines that are typed, until the input ends. Ctrl-C in a line drops that line."""
        while True:
            try:
                self._typing = True
                line = input("> " if self.interactive else "")
            except (KeyboardInterrupt, SystemError) as error:
                # where an interrupt meets another one, readline's input() makes a SystemError of it
                if not isinstance(error.__cause__ or error, KeyboardInterrupt):
                    raise
                print(flush=True)
                continue
            except EOFError:
                return
            finally:
                self._typing = False
            self.stopped = False
            yield line

    def write(self, text: str) -> None:
        """Show a piece of an answer at once."""
        try:
            sys.stdout.write(harmless(text))
            sys.stdout.flush()
        except BrokenPipeError as error:
            self.closed, self.stopped = error, True

    def note(self, text: str) -> None:
        """Show a sentence that is no part of an answer."""
        self._console.print(message(text), style="dim", markup=False, highlight=False)


class Ranks:
    """What rank 0 says to the others. They wait for it as long as somebody thinks about what to type.

    Collective over the world: every rank constructs it and calls `send` and `agree` in the same order. Communication:
    gloo, on the CPU: a list of tokens for each question, and 8 bytes for each token of an answer. One rank alone sends
    nothing.
    """

    def __init__(self) -> None:
        self.leads, self._others = dist.get_rank() == 0, dist.get_world_size() > 1
        # the timeout of other groups is for ranks that hang; here a wait of days is nothing wrong
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=365)) if self._others else None

    def send(self, ids: list[int] | None) -> list[int] | None:
        """Rank 0's ids, on all ranks; None is the end of the conversation."""
        box = [ids]
        if self._others:
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def agree(self, go_on: bool) -> bool:
        """Rank 0's wish, on all ranks."""
        wish = torch.tensor([go_on], dtype=torch.int64)
        if self._others:
            dist.broadcast(wish, src=0, group=self._group)
        return bool(wish)


class Speaker:
    """A model that answers, with the keys and values of what it has read and said.

    A question's tokens begin with the conversation so far. As many of them as the cache holds already, token for token,
    are not computed again: a template may write an answer in another way than the model did, or leave out old turns.
    Every rank has one; answers are collective.
    """

    def __init__(
        self, model: GPT, *, stop: Collection[int], max_new_tokens: int, sampling: Sampling, seed: int = 0
    ) -> None:
        self.model, self.stop, self.max_new_tokens = model, stop, max_new_tokens
        self.sampling, self.seed = sampling, seed
        self._cache = KVCache()
        self._held: list[int] = []  # the tokens in the cache

    def answer(self, ids: list[int], go_on: Callable[[int], bool]) -> str:
        """Answer the conversation `ids`; returns why the answer ended, "stop", "length" or "context".

        go_on: is called with each token but a stop token, on all ranks; the answer ends where it says False, on all
        alike. An answer stays within the model's seq_length, which `ids` must leave room in.
        """
        kept = min(_common(self._held, ids), len(ids) - 1)  # the last one is read again, for what follows it
        if self._held:
            self._cache.truncate([kept])
        room = self.model.config.seq_length - len(ids)
        said, ended = [], "stop"
        for token in generate(
            self.model,
            [ids[kept:]],
            max_new_tokens=min(self.max_new_tokens, room),
            sampling=self.sampling,
            stop=self.stop,
            ends=lambda token: not go_on(token.id),
            seed=self.seed,
            cache=self._cache,
        ):
            said.append(token.id)
            ended = token.ended or ended
        self._held = [*ids, *said][: self._cache.lengths[0]]
        self.seed += 1  # the same question may get another answer
        return "context" if ended == "length" and room <= self.max_new_tokens else ended


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    different = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))


def follow(ranks: Ranks, speaker: Speaker) -> None:
    """What ranks other than 0 do: compute each answer with it, until it ends the conversation."""
    while (ids := ranks.send(None)) is not None:
        speaker.answer(ids, lambda _: ranks.agree(True))


def lead(ranks: Ranks, speaker: Speaker, transcript: Transcript, terminal: Terminal) -> None:
    """What rank 0 does: read lines, answer them or do what they command, until the input or the conversation ends.

    BrokenPipeError if the reader of the output has gone.
    """
    for line in terminal.lines():
        if line.startswith("/"):
            word, _, rest = line.strip().partition(" ")
            if word == "/quit":
                break
            try:
                terminal.note(command(transcript, word, rest.strip()))
            except (ValueError, OSError) as error:
                terminal.note(str(error))
        elif line.strip():
            speak(ranks, speaker, transcript, terminal, line.strip())
        if terminal.closed is not None:
            break
    ranks.send(None)  # first, so that the others end in order
    if terminal.closed is not None:
        raise terminal.closed


def command(transcript: Transcript, word: str, rest: str) -> str:
    """Do what a line that begins with "/" says; returns a sentence about it. ValueError or OSError if it cannot."""
    if word == "/reset":
        transcript.reset()
        return "what was said is forgotten" + (", the system message is not" if transcript.system else "")
    if word == "/system":
        transcript.set_system(rest)
        return "the system message is set" if rest else "there is no system message now"
    if word == "/save":
        if not rest:
            raise ValueError("/save needs the name of a file")
        try:
            path = Path(rest).expanduser()
        except RuntimeError:
            raise ValueError(f"{rest} begins with the home of nobody here: write the whole path") from None
        if path.exists():
            raise ValueError(f"{path} exists, and nothing is overwritten: give another name")
        transcript.save(path)
        return f"{len(transcript.turns)} messages are in {path}"
    return HELP if word == "/help" else f"{word} is no command. {HELP}"


def speak(ranks: Ranks, speaker: Speaker, transcript: Transcript, terminal: Terminal, line: str) -> None:
    """Answer a line, and show the answer while it is made."""
    before = transcript.forgotten
    try:
        ids = transcript.ask(line)
    except ValueError as error:
        terminal.note(str(error))
        return
    if transcript.forgotten > before:
        terminal.note(f"the context of {transcript.context} tokens is full: the oldest turns are forgotten")
    stream = TextStream(transcript.tokenizer, ids, transcript.stops)
    text = ""

    def show(piece: str) -> None:
        nonlocal text
        # many answers begin with a space, which belongs to the template's last word
        terminal.write(piece if text.strip() else piece.lstrip())
        text += piece

    def go_on(token: int) -> bool:
        show(stream.push(token))
        return ranks.agree(not terminal.stopped and not stream.stopped)

    ranks.send(ids)
    ended = speaker.answer(ids, go_on)
    show(stream.finish())
    terminal.write("\n")
    transcript.reply(text)
    if terminal.stopped:
        terminal.note("the answer was stopped")
    elif ended == "context":
        terminal.note(f"the answer ends here, because the context of {transcript.context} tokens is full")
    elif ended == "length":
        terminal.note(f"the answer ends here, after {speaker.max_new_tokens} tokens (--max-new-tokens)")
    elif not text.strip():
        terminal.note("the model ended its answer at once")


def chat(config: RunConfig, *, system: str | None, max_new_tokens: int, sampling: Sampling, seed: int) -> None:
    """Talk with the model in config.run.dir on all ranks, until the input ends. Collective over the world.

    config: that of source_config. system: the first system message. Errors: ValueError, before the model is loaded, if
    no answer could be given, the tokenizer is not known, or the template refuses the system message; load_model's.
    """
    context = config.model.seq_length
    if max_new_tokens < 1 or context < 2:
        raise ValueError(f"max_new_tokens={max_new_tokens}, seq_length={context}: an answer needs at least one token")
    tokenizer = load_tokenizer(tokenizer_name(config))
    transcript = Transcript(tokenizer, context=context, answer=min(max_new_tokens, context // 2), system=system)
    # a terminal sends Ctrl-C to all ranks. While the model is loaded it ends them; then it is rank 0's alone
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    settings = {"system": system, "max_new_tokens": max_new_tokens, "sampling": sampling, "seed": seed}
    model, _ = load_model(config, decided=decides("chat", config, source=config.run.dir, beside=settings))
    ranks = Ranks()
    speaker = Speaker(model, stop=tokenizer.stop_tokens, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    if not ranks.leads:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        follow(ranks, speaker)
        return
    terminal = Terminal()
    if tokenizer.chat_template is None:
        terminal.note(
            "the tokenizer has no chat template, so the conversation is plain text, of lines that begin with User: "
            "and Assistant:"
        )
    lead(ranks, speaker, transcript, terminal)
