"""Text from a trained model, with a KV cache, on any number of tensor-parallel ranks.

    model, source = load_model(source_config(path))          # all ranks
    for token in generate(model, [ids], max_new_tokens=100):   # the same tokens on all ranks
        print(token.id)

Belongs here: making a model for inference, the loop over steps, and text that comes piece by piece. How a token is
drawn is in sampling.py, what is kept between steps in models/cache.py.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpformer import ops
from tpformer.config import RunConfig, check_config
from tpformer.distributed.agreement import Decides
from tpformer.layers.embedding import padded_vocab
from tpformer.models import GPT, KVCache
from tpformer.training.data import Tokenizer, prompt_ids
from tpformer.training.deciding import decides
from tpformer.training.setup import default_dtype, device_type, group_timeout, join_ranks, run_mesh, tensor_parallel
from tpformer.training.source import Source, open_source

from .sampling import Sampling, draw

GREEDY = Sampling(temperature=0.0)
CONTEXT = 8  # tokens before a new one that decide how it is written


class Token(NamedTuple):
    """A token that was drawn.

    sequence: of which text; prompt i's samples are i * samples, i * samples + 1, ...
    ended: why this is the text's last token, or None: "stop" (it is a stop token, or `ends` said so), "length" (there
    are max_new_tokens) or "context" (the model has no further positions).
    """

    sequence: int
    id: int
    ended: str | None


def load_model(config: RunConfig, *, step: int | None = None, decided: Decides | None = None) -> tuple[GPT, Source]:
    """The model in config.run.dir, in eval mode on tensor-parallel ranks, and where it came from.

    config: that of training.source.source_config. Parameters are in the compute dtype, linears have the precision of
    `train`, and activations are not sharded between layers, so that a single token can be computed. step: of a run's
    checkpoint; unset, the newest good one.
    decided: what all ranks must have alike; unset, the configuration and the weights.
    Collective over the world, which this call enters; communication as open_source says.
    Errors: ValueError for a configuration that cannot run; those of open_source.
    """
    config = replace(config, parallel=replace(config.parallel, sequence_parallel=False, expert_parallel=None))
    check_config(config, trains=False)
    device = device_type(config)
    join_ranks(device, group_timeout(config), decided or decides("a loaded model", config, source=config.run.dir))
    tp = tensor_parallel(run_mesh(config, device), config.parallel, precision=config.train.precision)
    source = open_source(config.run.dir, step=step)
    ops.use_measured_table(config.parallel.transport_table or None)
    model = GPT(source.architecture, tp=tp, device="meta", dtype=default_dtype(config, device))
    model.to_empty(device=device)
    source.load([model])
    return model.eval(), source


@torch.no_grad()
def next_logits(model: GPT, rows: Sequence[Sequence[int]], cache: KVCache) -> Tensor:
    """Logits (batch, vocab_size) of the token after each row, which continues its sample in the cache.

    rows: token ids, of different lengths if need be; they are padded on the right, where no token looks.
    Result: equal on all ranks, in the compute dtype.
    Communication, per tp rank: one all-reduce for the embedding and two for each layer, each of
    batch * longest row * hidden_size elements; one all-gather of batch * padded vocabulary elements.
    """
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    ids = [[*row, *[0] * (longest - len(row))] for row in rows]
    device = next(model.parameters()).device
    logits = model(torch.tensor(ids, device=device), cache=cache, lengths=lengths)[:, 0]
    config = model.config
    assert config.vocab_size is not None
    entries = padded_vocab(config.vocab_size, config.vocab_multiple)
    return ops.gather_columns(logits, entries, model.tp.group)[:, : config.vocab_size]


def _ids(prompt: Sequence[int] | Tensor) -> list[int]:
    ids = torch.as_tensor(prompt)
    if ids.ndim != 1 or (len(ids) and ids.dtype not in (torch.int64, torch.int32)):
        raise ValueError(f"a prompt is {tuple(ids.shape)} {ids.dtype}: give a list of token ids for each")
    return ids.tolist()


def _check(model: GPT, prompts: Sequence[Sequence[int]], max_new_tokens: int, samples: int) -> None:
    """ValueError before any work starts."""
    config = model.config
    assert config.vocab_size is not None
    if max_new_tokens < 0 or samples < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}, samples={samples}: give at least 0 and at least 1")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} has no tokens: give at least one, such as the end-of-document token")
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise ValueError(
                f"prompt {index} has ids from {min(prompt)} to {max(prompt)}, outside the vocabulary "
                f"[0, {config.vocab_size - 1}]: encode it with the model's own tokenizer"
            )


def _room(model: GPT, length: int) -> int | None:
    """How many tokens can follow a text; None for any number. ValueError if the text itself does not fit."""
    if model.config.position != "learned":
        return None
    most = model.config.seq_length
    if length > most:
        raise ValueError(f"a text of {length} tokens, but the model has {most} learned positions: shorten the prompt")
    return most - length + 1  # the last token is drawn, and never read


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int] | Tensor],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    samples: int = 1,
    stop: Collection[int] = (),
    ends: Callable[[Token], bool] | None = None,
    seed: int = 0,
    cache: KVCache | None = None,
) -> Iterator[Token]:
    """Continue each prompt `samples` times; yields each token as it is drawn, step by step, equal on all ranks.

    prompts: token ids, of any lengths. Each is computed once, however many samples follow it.
    stop: ids that end a text. ends: asked about each token whether its text ends with it, alike on all ranks.
    seed: text number i draws with seed + i, so it is the same alone with that seed as in a batch, up to the rounding of
    the logits, which may depend on the number of rows.
    cache: of one earlier text, which the prompt continues. It is left with all tokens but the last one drawn.
    A text ends where a model with learned positions has no further one. RoPE goes on beyond seq_length, where the model
    was not trained.
    All tp ranks call it and take the same number of tokens. Communication: next_logits, once for each step.
    Errors: ValueError, before the first token is computed, for a prompt without tokens, outside the vocabulary or
    beyond learned positions, for max_new_tokens below 0, and for a cache of several texts.
    """
    ids = [_ids(prompt) for prompt in prompts]
    _check(model, ids, max_new_tokens, samples)
    if cache is not None and (len(prompts) * samples != 1 or len(cache.lengths) > 1):
        raise ValueError(f"a cache of {len(cache.lengths)} texts for {len(prompts)} prompts: it serves one text")
    known = sum(cache.lengths) if cache is not None else 0
    rooms = [_room(model, known + len(prompt)) for prompt in ids]
    if not ids or max_new_tokens == 0:
        return iter(())
    limits = [max_new_tokens if room is None else min(room, max_new_tokens) for room in rooms for _ in range(samples)]
    if cache is None:
        longest = max(map(len, ids))
        # texts that go on beyond what the model was trained with are few, and the cache grows
        cache = KVCache(min(longest + max(limits) - 1, max(longest, model.config.seq_length)))
    why = ["length" if limit == max_new_tokens else "context" for limit in limits]
    return _steps(model, ids, cache, sampling, samples, frozenset(stop), ends, seed, limits, why)


def _steps(
    model: GPT,
    prompts: list[list[int]],
    cache: KVCache,
    sampling: Sampling,
    samples: int,
    stop: frozenset[int],
    ends: Callable[[Token], bool] | None,
    seed: int,
    limits: list[int],
    why: list[str],
) -> Iterator[Token]:
    """The loop of generate: one step gives a token to each text that goes on. limits: how many each may get."""
    running = list(range(len(limits)))
    logits = next_logits(model, prompts, cache)
    if samples > 1:
        repeated = [index // samples for index in running]
        cache.select(repeated)
        logits = logits[torch.tensor(repeated, device=logits.device)]
    for index in range(max(limits)):
        drawn = draw(logits, sampling, [seed + sequence for sequence in running], index)
        going = []
        for row, (sequence, token) in enumerate(zip(running, drawn, strict=True)):
            last = why[sequence] if index + 1 == limits[sequence] else None
            found = Token(sequence, token, "stop" if token in stop else last)
            if found.ended != "stop" and ends is not None and ends(found):
                found = found._replace(ended="stop")
            if found.ended is None:
                going.append(row)
            yield found
        if not going:
            return
        if len(going) < len(running):  # what is left of the batch goes on without those that ended
            cache.select(going)
            running, drawn = [running[row] for row in going], [drawn[row] for row in going]
        logits = next_logits(model, [[token] for token in drawn], cache)


@dataclass
class TextStream:
    """The text of tokens that come one by one. What it gives is whole: no part of a character, or of a stop string.

    stops: strings that end the text and do not belong to it. prompt: ids before the first token; some tokenizers write
    a token in another way at the beginning of a text.
    """

    tokenizer: Tokenizer
    prompt: Sequence[int] = ()
    stops: Sequence[str] = ()
    stopped: bool = False
    """Whether a stop string has come. Nothing is given after it."""
    _ids: list[int] = field(default_factory=list, init=False)
    _given: int = field(default=0, init=False)
    _held: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if "" in self.stops:
            raise ValueError("a stop string is empty: it would end every text at once")
        self._keep(list(self.prompt))

    def _keep(self, ids: list[int]) -> None:
        """Hold the last CONTEXT ids, all of them given, and up to 3 more if they begin within a character: of a run of
        bytes with a part of one, tokenizers of SentencePiece's kind decode none."""
        held = [ids[-n:] for n in range(CONTEXT, CONTEXT + 4)]
        self._ids = next((some for some in held if not self.tokenizer.decode(some).startswith("\ufffd")), held[0])
        self._given = len(self._ids)

    def push(self, token: int, last: bool = False) -> str:
        """The text that is whole with this token; with the last token all that is left."""
        self._ids.append(token)
        return self._text(last)

    def finish(self) -> str:
        """What is left, if the text has ended without a further token."""
        return self._text(True)

    def _text(self, last: bool) -> str:
        before, text = (self.tokenizer.decode(self._ids[:n]) for n in (self._given, len(self._ids)))
        if last or not text.endswith("\ufffd"):  # the bytes of a character may come in several tokens
            self._held += text[len(before) :]
            self._keep(self._ids)
        if self.stopped:
            return ""
        found = [position for position in map(self._held.find, self.stops) if position >= 0]
        if found:
            self.stopped, whole, self._held = True, self._held[: min(found)], ""
            return whole
        kept = 0 if last else max((_overlap(self._held, stop) for stop in self.stops), default=0)
        whole, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return whole


def _overlap(text: str, stop: str) -> int:
    """How many letters at the end of the text may be the beginning of a stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def generate_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    stops: Sequence[str] = (),
    samples: int = 1,
    report: Callable[[str], None] = print,
    **options: Any,
) -> Iterator[tuple[int, str]]:
    """(text number, next piece of its text) for what follows each prompt; numbers and options are those of generate.

    A text ends before a stop token of the tokenizer, and before the first of the strings `stops`. An empty prompt
    begins a document. report: told if texts may leave the positions that the model was trained with.
    """
    ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    streams = [TextStream(tokenizer, prompt, stops) for prompt in ids for _ in range(samples)]
    pieces: list[str] = [""] * len(streams)

    def ends(token: Token) -> bool:
        pieces[token.sequence] = streams[token.sequence].push(token.id, token.ended is not None)
        return streams[token.sequence].stopped

    def piece(token: Token) -> tuple[int, str]:
        stopped = token.ended == "stop" and not streams[token.sequence].stopped
        return token.sequence, streams[token.sequence].finish() if stopped else pieces[token.sequence]

    options |= {"max_new_tokens": max_new_tokens, "samples": samples}
    tokens = generate(model, ids, stop=tokenizer.stop_tokens, ends=ends, **options)
    # the last token is not read
    reach, trained = max(map(len, ids), default=0) + max_new_tokens - 1, model.config.seq_length
    if reach > trained:
        then = "end there" if model.config.position == "learned" else "are likely to be worse beyond them"
        report(f"texts may need {reach} positions, but the model was trained with {trained}: they {then}")
    return map(piece, tokens)
