"""What a training costs: FLOPs, device-years, days and money; and what courses count for a parameter, beside ours.

Belongs here: arithmetic on a model, its tokens and the speed of a machine. What the speed is, the time model says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from tpformer.models import GPTConfig
from tpformer.parallel import Layout

from .bubbles import bubble_ratio
from .states import Precision, elements, model_states, most_at_once

HOUR, DAY, YEAR = 3600.0, 86400.0, 365 * 86400.0  # seconds
BFLOAT16 = Precision(torch.float32, torch.bfloat16, torch.float32)


def flops_by_rule(parameters: float, tokens: float, *, recompute: bool = False) -> float:
    """FLOPs of a training by the rule of thumb: 6 for each parameter and token, or 8 if forwards are computed twice.

    Attention's products over the sequence are left out. Sources: 6, arXiv:2001.08361, section 2.1; 8, arXiv:2104.04473,
    section 5.1. GPTConfig.flops_per_token is exact.
    """
    return (8 if recompute else 6) * parameters * tokens


def model_flops_utilization(config: GPTConfig, tokens: float, seconds: float, devices: int, peak: float) -> float:
    """MFU: the share of the devices' peak FLOP/s that tokens in so many seconds need, recomputation not counted.

    Source: arXiv:2204.02311, appendix B; FLOPs as in arXiv:2205.05198, appendix A.
    """
    return config.flops_per_token * tokens / (seconds * devices * peak)


class Cost(NamedTuple):
    """A training. flops: of all devices. seconds: how long it takes. price_per_hour: dollars, of one device."""

    flops: float
    devices: int
    seconds: float
    price_per_hour: float | None

    @property
    def days(self) -> float:
        """How long it takes."""
        return self.seconds / DAY

    @property
    def device_years(self) -> float:
        """Years that one device would take."""
        return self.devices * self.seconds / YEAR

    @property
    def price(self) -> float | None:
        """Dollars. None without a price_per_hour."""
        return None if self.price_per_hour is None else self.devices * self.seconds / HOUR * self.price_per_hour


def training_cost(flops: float, devices: int, flops_per_second: float, price_per_hour: float | None = None) -> Cost:
    """What a training of so many FLOPs costs.

    flops_per_second: what each device achieves, which is its peak times MFU if flops are the model's. price_per_hour:
    dollars for one device. ValueError unless devices and flops_per_second are positive.
    """
    if devices < 1 or flops_per_second <= 0:
        raise ValueError(f"{devices} devices of {flops_per_second:g} FLOP/s never finish: give positive numbers")
    return Cost(flops, devices, flops / (devices * flops_per_second), price_per_hour)


def cost_lines(cost: Cost) -> Iterator[str]:
    """The cost in words. It is a prediction unless its speed was measured."""
    speed = cost.flops / cost.devices / cost.seconds / 1e12
    yield f"{cost.flops:.3g} FLOPs on {cost.devices} devices, {speed:.1f} TFLOP/s each"
    days, years = (f"{each:,.1f}" if each >= 1 else f"{each:.2g}" for each in (cost.days, cost.device_years))
    yield f"predicted: {days} days, {years} device-years"
    if cost.price is not None:
        yield f"predicted: ${cost.price:,.0f} at ${cost.price_per_hour:.2f} an hour for each"


def pipeline_speedup(ranks: int, n_microbatches: int) -> float:
    """How many times as fast as one device a pipeline is, without communication: m p / (m + p - 1) for 1F1B and GPipe.

    ValueError for fewer microbatches than ranks. Source: the bubble of arXiv:2104.04473, section 2.2.1.
    """
    ratio = bubble_ratio("1F1B", ranks, n_microbatches, 1)
    if ratio is None:
        raise ValueError(
            f"{n_microbatches} microbatches leave some of {ranks} ranks idle throughout: give at least {ranks}"
        )
    return ranks / (1 + ratio)


class Arithmetic(NamedTuple):
    """Bytes that a parameter takes while training, as somebody counts them. Activations are counted in `other` only."""

    name: str
    parameters: float
    gradients: float
    optimizer: float
    other: float
    source: str

    def nbytes(self, stage: int, shards: int) -> float:
        """Bytes of one parameter on a rank, where a ZeRO stage divides what it shares by `shards`."""
        parts = ((self.parameters, 3), (self.gradients, 2), (self.optimizer, 1))
        return self.other + sum(part / (shards if stage >= first else 1) for part, first in parts)


ARITHMETIC = (
    Arithmetic("float32, Adam", 4, 4, 8, 0, "float32 weights, gradients and two moments"),
    Arithmetic("float32, Adam, temporaries", 4, 4, 8, 8, "the same, and 8 M for activations and temporaries"),
    Arithmetic("16 bits: 2M + 2M + 12M", 2, 2, 12, 0, "arXiv:1910.02054, section 3.1"),
    Arithmetic("16 bits: 2M + 2M + 16M", 2, 2, 16, 0, "the same with float32 gradients kept"),
)
"""How papers and courses count."""


def our_bytes(config: GPTConfig, stage: int, shards: int) -> float:
    """Bytes of model states of one parameter on a rank at their peak, in bfloat16 with several microbatches.

    By the formulas of states.py, which `python -m bench zero` compares with counted bytes. shards: data-parallel ranks.
    """
    size = elements(config, [range(config.n_layers)], 1)
    shard, replicate = (shards, 1) if stage else (1, shards)
    layout = Layout(zero_stage=stage, data_parallel_shard=shard, data_parallel_replicate=replicate)
    return most_at_once(model_states(size, layout, BFLOAT16, accumulates=True)) / size.total


def arithmetic_table(config: GPTConfig, shards: int) -> Mapping[str, list[float]]:
    """{who counts: bytes of a parameter on a rank in ZeRO stages 0, 1, 2 and 3}. The last row is ours."""
    rows = {each.name: [each.nbytes(stage, shards) for stage in range(4)] for each in ARITHMETIC}
    return {**rows, "tpformer, bfloat16": [our_bytes(config, stage, shards) for stage in range(4)]}
