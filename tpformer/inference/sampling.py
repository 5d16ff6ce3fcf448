"""How a token is drawn from logits: greedy, temperature, top-k, top-p, min-p.

Belongs here: what is done with the logits of one step. The draw is a function of the logits, a seed and the index of
the token in its text, so it depends neither on other samples nor on the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpformer.kernels.philox.reference import philox_key

LEAST = 1e-6  # of temperatures above 0


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The tokens from which one is drawn. Order and definitions are those of Hugging Face transformers.

    temperature: logits are divided by it; 0 takes the most likely token, and nothing else matters then.
    top_k: only the k most likely tokens, and those that equal the last of them.
    top_p: only the most likely tokens whose probabilities sum to top_p, with the one that reaches it
    (Holtzman et al. 2020, arXiv:1904.09751).
    min_p: only tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024, arXiv:2407.01082).
    ValueError for a value out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be at least 0 (0: always the most likely token)")
        if 0 < self.temperature < LEAST:  # what it divides would be infinite
            raise ValueError(f"temperature={self.temperature} must be at least {LEAST}, or 0: the most likely token")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1; leave it out to draw from all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1 (1: all tokens)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be from 0 (all tokens) to 1")


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits (batch, vocab) divided by the temperature, which is not 0; -inf for tokens that must not be drawn."""
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ascending, order = logits.sort()
        left_out = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        left_out[:, -1] = False  # the most likely token stays
        logits = logits.masked_fill(left_out.scatter(1, order, left_out), -torch.inf)
    if sampling.min_p > 0:
        probabilities = logits.softmax(-1)
        least = sampling.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, -torch.inf)
    return logits


def draw(logits: Tensor, sampling: Sampling, seeds: Sequence[int], index: int) -> list[int]:
    """A token for each row of logits (batch, vocab), which have no columns of padding.

    seeds: one for each row. index: how many tokens were drawn for these texts before. A row's token is where its
    cumulative probability passes a uniform number of 53 bits that (seed, index) gives.
    Communication: none; ranks with equal logits draw equal tokens. Waits for the device.
    Errors: FloatingPointError for logits that are not finite.
    """
    logits = logits.float() if logits.dtype != torch.float64 else logits
    if not bool(logits.amax(-1).isfinite().all()):
        raise FloatingPointError(
            "the logits are not finite, so no token can be drawn: the weights are damaged, or too large for this dtype "
            "(try float32)"
        )
    if sampling.temperature == 0:
        return logits.argmax(-1).tolist()
    cumulative = filtered(logits, sampling).softmax(-1).cumsum(-1, dtype=torch.float64)
    # a hash, as one number a row is all that is needed, and Philox would take a hundred operations for it
    uniform = [(philox_key("draw", seed, index) >> 11) / 2**53 for seed in seeds]
    reached = torch.tensor(uniform, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, reached, right=True)[:, 0].tolist()
