"""Advice on learning rate, warm-up, batch and tokens, each number with where it comes from. Advice, not a prediction.

Belongs here: published rules, and what they say of a model or of a change of the batch. docs/learning_rate.md has a
study of those for a change of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tpformer.models import GPTConfig
from tpformer.training.metrics import read_metrics


class Advice(NamedTuple):
    """A number of some unit, what it is for, and its source."""

    what: str
    value: float
    unit: str
    source: str

    def __str__(self) -> str:
        number = f"{self.value:,.0f}" if self.value >= 100 else f"{self.value:.3g}"
        return f"{self.what}: {number}{self.unit and ' ' + self.unit}  [{self.source}]"


GPT3_RATES = {
    125e6: 6e-4,
    350e6: 3e-4,
    760e6: 2.5e-4,
    1.3e9: 2e-4,
    2.7e9: 1.6e-4,
    6.7e9: 1.2e-4,
    13e9: 1e-4,
    175e9: 0.6e-4,
}
"""Parameters and peak learning rate of GPT-3's eight sizes: arXiv:2005.14165, table 2.1."""


def gpt3_learning_rate(parameters: float) -> Advice:
    """The peak learning rate between the two nearest of GPT-3's sizes, on a logarithmic scale, or the last one's.

    Source: arXiv:2005.14165, table 2.1, for AdamW with batches of 0.5M to 3.2M tokens.
    """
    sizes = sorted(GPT3_RATES)
    n = min(max(parameters, sizes[0]), sizes[-1])
    above = next(size for size in sizes[1:] if n <= size)
    below = sizes[sizes.index(above) - 1]
    part = math.log(n / below) / math.log(above / below)
    rate = GPT3_RATES[below] * (GPT3_RATES[above] / GPT3_RATES[below]) ** part
    return Advice("peak learning rate, GPT-3", rate, "", "arXiv:2005.14165, table 2.1, interpolated")


def gpt3_warmup() -> Advice:
    """Tokens over which the learning rate rises linearly. Source: arXiv:2005.14165, appendix B."""
    return Advice("warm-up, GPT-3", 375e6, "tokens", "arXiv:2005.14165, appendix B")


def deepseek(config: GPTConfig, tokens: float) -> tuple[Advice, Advice]:
    """(peak learning rate, batch in tokens) for a training's FLOPs, without those of embeddings and head.

    0.3118 C**-0.125 and 0.2920 C**0.3271, fitted up to 2e19 FLOPs and used for 7B and 67B parameters. Source:
    arXiv:2401.02954, section 3.1.
    """
    flops = sum(map(config.layer_flops_per_token, range(config.n_layers))) * tokens
    source = "arXiv:2401.02954, section 3.1"
    return (
        Advice("peak learning rate, DeepSeek LLM", 0.3118 * flops**-0.125, "", source),
        Advice("batch, DeepSeek LLM", 0.2920 * flops**0.3271, "tokens", source),
    )


def step_law(config: GPTConfig, tokens: float) -> tuple[Advice, Advice]:
    """(peak learning rate, batch in tokens) for N parameters without the embeddings, and D tokens.

    1.79 N**-0.713 D**0.307 and 0.58 D**0.571, fitted on models of up to 1B parameters and 100B tokens with a last
    learning rate of 1e-5. Source: arXiv:2503.04715.
    """
    parameters = sum(map(config.layer_parameters, range(config.n_layers)))
    return (
        Advice("peak learning rate, Step Law", 1.79 * parameters**-0.713 * tokens**0.307, "", "arXiv:2503.04715"),
        Advice("batch, Step Law", 0.58 * tokens**0.571, "tokens", "arXiv:2503.04715"),
    )


TOKENS_PER_PARAMETER = 20


def chinchilla_tokens(parameters: float) -> Advice:
    """Training tokens with which a model of this size is the best that its FLOPs can buy: about 20 for each parameter.

    A model that will be used much is trained on more. Source: arXiv:2203.15556, table 3.
    """
    source = "arXiv:2203.15556, table 3"
    return Advice("tokens for the least loss by FLOPs", TOKENS_PER_PARAMETER * parameters, "tokens", source)


def scaled_learning_rates(rate: float, batch: int, other: int, noise_scale: float | None = None) -> list[Advice]:
    """A learning rate that was good for `batch` samples, for `other` samples: by the linear and the square-root rule.

    linear: rate * k for k = other / batch, with a warm-up (arXiv:1706.02677, section 2.1, for SGD). square root:
    rate * k**0.5 (arXiv:1404.5997; for Adam arXiv:2205.10287). noise_scale: samples; then also
    (1 + noise_scale / batch) / (1 + noise_scale / other), which is linear far below the noise scale and stays below a
    limit beyond it (arXiv:1812.06162, section 2.2, for SGD). ValueError unless all are positive.
    """
    if min(rate, batch, other) <= 0 or (noise_scale is not None and noise_scale <= 0):
        raise ValueError(f"rate {rate}, batches {batch} and {other}, noise scale {noise_scale}: all must be positive")
    k, name = other / batch, f"learning rate for a batch of {other}"
    rules = [
        Advice(f"{name}, linear", rate * k, "", "arXiv:1706.02677, section 2.1, with a warm-up"),
        Advice(f"{name}, square root", rate * k**0.5, "", "arXiv:1404.5997; for Adam arXiv:2205.10287"),
    ]
    if noise_scale is not None:
        factor = (1 + noise_scale / batch) / (1 + noise_scale / other)
        rules.append(Advice(f"{name}, by the noise scale", rate * factor, "", "arXiv:1812.06162, section 2.2"))
    return rules


def logged_noise_scale(run_dir: Path) -> float:
    """The last gradient noise scale in a run's norms.jsonl, in samples (log.noise_interval).

    ValueError for a run that has logged none that is finite.
    """
    path = run_dir / "norms.jsonl"
    found = [row["noise_scale"] for row in read_metrics(path) if math.isfinite(row.get("noise_scale", math.nan))]
    if not found:
        raise ValueError(f"{path} has no noise scale: train with --log.noise-interval N, the steps between estimates")
    return found[-1]


def critical_batch(noise_scale: float, batch: int) -> list[Advice]:
    """The critical batch of a gradient noise scale, and what a batch needs compared with the least possible.

    In steps 1 + noise_scale / batch times as many as batches without limit, in samples 1 + batch / noise_scale times as
    many as single samples. At the critical batch both are 2. The scale grows as the loss falls. All in samples. Source:
    arXiv:1812.06162, section 2.3; the log's value: tpformer.training.norms.NoiseScale.
    """
    source = "arXiv:1812.06162, section 2.3"
    return [
        Advice("critical batch, the logged noise scale", noise_scale, "samples", source),
        Advice(f"steps with a batch of {batch}", 1 + noise_scale / batch, "times the fewest", source),
        Advice(f"samples with a batch of {batch}", 1 + batch / noise_scale, "times the fewest", source),
    ]


def advice(config: GPTConfig, tokens: float | None = None) -> Iterator[Advice]:
    """All advice for a model and its training tokens, which are chinchilla_tokens if None.

    Rules that were found on dense models take the parameters that a token uses. Step Law's takes all: it was tried on
    mixtures of experts, too.
    """
    recommended = chinchilla_tokens(config.n_active_parameters)
    tokens = recommended.value if tokens is None else tokens
    yield recommended
    yield gpt3_learning_rate(config.n_active_parameters)
    yield from deepseek(config, tokens)
    yield from step_law(config, tokens)
    yield gpt3_warmup()
