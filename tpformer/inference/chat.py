"""A conversation with a model in a terminal, on any number of tensor-parallel ranks.

Rank 0 has the terminal and the transcript. It sends the tokens of each question to the other ranks, which only compute.
"""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from .generate import next_token_logits
from .streaming import TextStream
from .transcript import Transcript

HELP = (
    "/reset forgets what was said; /system TEXT sets the system message, /system alone removes it; /save FILE writes "
    "the conversation; /quit or Ctrl-D ends it. Ctrl-C stops an answer"
)
# control characters could do anything to a terminal; a new line and a tab may stay
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminal:
    """Standard input and output. Lines are edited, and a prompt is shown, only where input is a terminal.

    Notes go to standard error, so that the output of a pipe is the answers alone.
    """

    def __init__(self) -> None:
        # a forked rank has another sys.stdin, but the command's input is still open under its number
        sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
        self.interactive = sys.stdin.isatty()
        self.stopped = False
        self._console = Console(stderr=True, soft_wrap=True)
        signal.signal(signal.SIGINT, self._stop)
        if self.interactive:
            import readline  # noqa: F401  gives input() an editable line and a history

    def _stop(self, *_: object) -> None:
        self.stopped = True

    def lines(self) -> Iterator[str]:
        """The lines that are typed, until the input ends. Ctrl-C in a line drops that line."""
        while True:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                line = input("> " if self.interactive else "")
            except KeyboardInterrupt:
                print(flush=True)
                continue
            except EOFError:
                return
            finally:
                signal.signal(signal.SIGINT, self._stop)
            self.stopped = False
            yield line

    def write(self, text: str) -> None:
        """Show a piece of an answer at once."""
        sys.stdout.write(CONTROL.sub("\ufffd", text))
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Show a sentence that is no part of an answer."""
        self._console.print(text, style="dim", markup=False, highlight=False)


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


# what a rank does with the tokens of a question: it calls the function with each token of the answer, on rank 0 to show
# it, and stops when that says False
Answer = Callable[[list[int], Callable[[int], bool]], None]


def follow(ranks: Ranks, answer: Answer) -> None:
    """What ranks other than 0 do: compute each answer with it, until it ends the conversation."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all ranks, and rank 0 deals with it
    while (ids := ranks.send(None)) is not None:
        answer(ids, lambda _: ranks.agree(True))


def lead(ranks: Ranks, answer: Answer, transcript: Transcript, terminal: Terminal) -> None:
    """What rank 0 does: read lines, answer them or do what they command, until the input or the conversation ends."""
    for line in terminal.lines():
        if line.startswith("/"):
            word, _, rest = line.partition(" ")
            if word == "/quit":
                break
            try:
                terminal.note(command(transcript, word, rest.strip()))
            except (ValueError, OSError) as error:
                terminal.note(str(error))
        elif line.strip():
            speak(ranks, answer, transcript, terminal, line.strip())
    ranks.send(None)


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
        path = Path(rest).expanduser()
        if path.exists():
            raise ValueError(f"{path} exists, and nothing is overwritten: give another name")
        transcript.save(path)
        return f"{len(transcript.turns)} messages are in {path}"
    return HELP if word == "/help" else f"{word} is no command. {HELP}"


def speak(ranks: Ranks, answer: Answer, transcript: Transcript, terminal: Terminal, line: str) -> None:
    """Answer a line, and show the answer while it is made."""
    before = transcript.forgotten
    try:
        ids = transcript.ask(line)
    except ValueError as error:
        terminal.note(str(error))
        return
    if transcript.forgotten > before:
        terminal.note(f"the context of {transcript.context} tokens is full: the oldest turns are forgotten")
    stream, text, n_tokens = TextStream(transcript.tokenizer, transcript.stop), "", 0

    def show(token: int) -> bool:
        nonlocal text, n_tokens
        piece = stream.add(token)
        n_tokens += 1
        # models of plain text begin with a space, which is no part of what they say
        terminal.write(piece if text.strip() else piece.lstrip())
        text += piece
        return ranks.agree(not terminal.stopped and not stream.stopped)

    answer(ranks.send(ids), show)  # type: ignore[arg-type]
    piece = stream.end()
    terminal.write((piece if text.strip() else piece.lstrip()) + "\n")
    transcript.reply(text + piece)
    if terminal.stopped:
        terminal.note("the answer was stopped")
    elif len(ids) + n_tokens >= transcript.context:
        terminal.note(f"the answer ends here because the context of {transcript.context} tokens is full")
    elif not n_tokens:
        terminal.note("the model has nothing to say")


def chat(config, *, max_new_tokens: int, temperature: float, seed: int, system: str | None = None) -> None:
    """INTERIM"""
    from tpformer.config import check_config
    from tpformer.training.data import load_tokenizer
    from tpformer.training.resolve import tokenizer_name
    from tpformer.training.setup import build_model, device_type, group_timeout, join_ranks, run_mesh
    from tpformer.training.source import open_source

    check_config(config, trains=False)
    tokenizer = load_tokenizer(tokenizer_name(config))
    device = device_type(config)
    join_ranks(device, group_timeout(config))
    mesh = run_mesh(config, device)
    source = open_source(config.run.dir)
    (model,) = build_model(config, mesh).parts
    source.load([model])
    model.eval()
    generator = torch.Generator().manual_seed(seed)

    def answer(ids, go_on):
        for _ in range(min(max_new_tokens, config.model.seq_length - len(ids))):
            logits = next_token_logits(model, torch.tensor(ids))
            if temperature == 0:
                token = int(logits.argmax())
            else:
                token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
            if token in tokenizer.stop_tokens or not go_on(token):
                return
            ids = [*ids, token]

    ranks = Ranks()
    if not ranks.leads:
        follow(ranks, answer)
        return
    context = config.model.seq_length
    room = min(max_new_tokens, context // 2)
    transcript = Transcript(tokenizer, context=context, answer=room, system=system)
    terminal = Terminal()
    if tokenizer.chat_template is None:
        terminal.note(
            "the tokenizer has no chat template, so the conversation is plain text of lines that begin with User: and "
            "Assistant:"
        )
    lead(ranks, answer, transcript, terminal)
