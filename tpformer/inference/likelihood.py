"""Exact log-likelihoods of token sequences under a GPT, on any number of tensor-parallel ranks.

Only the scoring of ids belongs here. Which ids a text has is tasks.py's.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpformer import ops
from tpformer.distributed.collectives import all_gather
from tpformer.models import GPT
from tpformer.ops.cross_entropy import IGNORE_INDEX

from .tasks import Pair


class Likelihood(NamedTuple):
    """log_probability: of a continuation after its context, in nats. greedy: whether each of its tokens is the most
    probable one."""

    log_probability: float
    greedy: bool


def cut(pair: Pair, longest: int) -> Pair:
    """The pair without the first tokens of its context that are too many for a model of `longest` inputs.

    ValueError for a continuation of more than `longest` tokens: each of them needs a token before it.
    """
    if len(pair.continuation) > longest:
        raise ValueError(f"a continuation has {len(pair.continuation)} tokens, more than the model's {longest}")
    excess = len(pair.context) + len(pair.continuation) - (longest + 1)
    return pair if excess <= 0 else Pair(pair.context[excess:], pair.continuation)


def _most_probable(logits: Tensor, model: GPT) -> Tensor:
    """The most probable ids (tokens,) int64, of equal ones the lowest, from this rank's logits (tokens, V_local).

    Communication: one all-gather of 2 numbers per token and rank.
    """
    logits = logits.double()
    if logits.shape[1] == 0:  # this rank holds only padding
        logits = logits.new_full((len(logits), 1), -torch.inf)
    value, index = logits.max(dim=1)
    mine = torch.stack([value, (index + model.vocab.first).double()])
    values, indices = all_gather(mine[None], model.tp.group).unbind(1)
    best = values.max(dim=0).values
    return indices.masked_fill(values < best, torch.inf).min(dim=0).values.long()


def _batches(pairs: Sequence[Pair], size: int) -> Iterator[list[int]]:
    """Indices of at most `size` pairs of similar length, the longest first."""
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i].context) - len(pairs[i].continuation))
    for first in range(0, len(order), size):
        yield order[first : first + size]


@torch.no_grad()
def log_likelihoods(model: GPT, pairs: Sequence[Pair], *, longest: int, batch_size: int) -> list[Likelihood]:
    """The likelihood of each pair's continuation after its context, equal on all tensor-parallel ranks.

    model: in evaluation mode, with pairs equal on all ranks. longest: inputs of a forward; longer contexts are cut at
    the left. batch_size: pairs of a forward, padded at the right, where causal attention does not look.
    Numerics: logits in the model's dtype, each token's loss in at least float32 from the log-sum-exp over the whole
    vocabulary, sums in float64. Communication: the model's, and 5 numbers per scored token and rank: logits are not
    gathered. ValueError as `cut`.
    """
    pairs = [cut(pair, longest) for pair in pairs]
    device = next(model.parameters()).device
    results: dict[int, Likelihood] = {}
    for rows in _batches(pairs, batch_size):
        length = max(len(pairs[i].context) + len(pairs[i].continuation) for i in rows) - 1
        ids, targets = torch.zeros(len(rows), length + 1, dtype=torch.int64), torch.full((len(rows), length), -100)
        for row, i in enumerate(rows):
            context, continuation = pairs[i]
            whole = torch.tensor([*context, *continuation])
            ids[row, : len(whole)] = whole
            targets[row, len(context) - 1 : len(whole) - 1] = whole[len(context) :]
        targets = targets.to(device)
        logits = model(ids[:, :-1].to(device))
        scored = targets != IGNORE_INDEX
        wanted, logits = targets[scored], logits[scored]
        losses = ops.vocab_parallel_cross_entropy(logits, wanted, model.vocab, group=model.tp.group)
        right = _most_probable(logits, model) == wanted
        counts = scored.sum(dim=1).tolist()
        sums = (-part.double().sum() for part in losses.split(counts))
        for i, total, greedy in zip(rows, sums, right.split(counts), strict=True):
            results[i] = Likelihood(float(total), bool(greedy.all()))
    return [results[i] for i in range(len(pairs))]
