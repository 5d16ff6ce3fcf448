"""Context-parallel attention on several GPUs, whose keys and values come in parts or at once: rows of bench nvlink.

Belongs here: shapes, providers, what they must agree with, and what the planner's model says of them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from harness.accuracy import require_accurate
from harness.ratios import Row, compared
from harness.timing import Seconds
from tpformer import ops
from tpformer.config import build_config
from tpformer.kernels.cost import Machine
from tpformer.ops.context import PARTS
from tpformer.planner.devices import load_device
from tpformer.planner.layer_time import LayerModel
from tpformer.planner.software import ours

from .predict import DEVICES
from .shapes import MODELS

CASE = "context attention, forward and backward"
IN_PARTS, AT_ONCE, PREDICTED, ALONE = "keys in parts", "keys at once", "predicted", "predicted, nothing sent"
TOKENS = (8192, 32768, 131072)  # of a sample
# tokens of the sample by which results are compared: the scores of 131,072 would take float64 4.4 TB
CHECKED = 1024


class Sample(NamedTuple):
    """One sample of a model, whose tokens n ranks share."""

    model: str
    tokens: int
    n: int

    def __str__(self) -> str:
        return f"{self.model} {self.tokens} tokens, cp {self.n}"


def samples(n: int, quick: bool = False) -> list[Sample]:
    """The 8B model has all of its heads on each rank, so it sends the most beside what it computes."""
    return [Sample("8B", tokens, n) for tokens in TOKENS[: 1 if quick else None]]


def whole(sample: Sample, device: str) -> list[Tensor]:
    """q, k, v and the result's gradient, all tokens of them, equal on all ranks."""
    config, generator = MODELS[sample.model], torch.Generator(device).manual_seed(0)
    heads = (config.n_heads, config.kv_heads, config.kv_heads, config.n_heads)
    shapes = [(1, sample.tokens, each, config.head_size) for each in heads]
    return [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes]


def with_gradients(attention: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    *operands, dy = inputs
    leaves = [x.detach().requires_grad_() for x in operands]
    y = attention(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def providers(sample: Sample, group: ProcessGroup, device: str) -> dict[str, Callable[[], list[Tensor]]]:
    """A rank's forward and backward, each result with its gradients."""
    own = ops.own_tokens(sample.tokens, sample.n, group.rank(), torch.device(device))
    inputs = [x[:, own] for x in whole(sample, device)]

    def in_parts() -> list[Tensor]:
        return with_gradients(lambda *x: ops.context_attention(*x, group=group), inputs)

    def at_once() -> list[Tensor]:
        with mock.patch.dict(PARTS, dict.fromkeys(PARTS, 1)):
            return in_parts()

    return {AT_ONCE: at_once, IN_PARTS: in_parts}


def check(n: int, group: ProcessGroup, device: str, tokens: int = CHECKED) -> str | None:
    """What is wrong on this rank, beside whole samples in float64; None if all is right."""
    sample = Sample("8B", tokens, n)
    inputs, own = whole(sample, device), ops.own_tokens(tokens, n, group.rank(), torch.device(device))
    oracle, baseline = (
        with_gradients(lambda q, k, v: ops.attention(q, k, v, is_causal=True), [x.to(dtype) for x in inputs])
        for dtype in (torch.float64, torch.bfloat16)
    )
    for provider, call in providers(sample, group, device).items():
        for name, x, exact, plain in zip(("y", "dq", "dk", "dv"), call(), oracle, baseline, strict=True):
            try:
                require_accurate(f"rank {group.rank()} {sample} {provider} {name}", x, exact[:, own], plain[:, own])
            except AssertionError as error:
                return str(error)
    return None


def predict(sample: Sample, machine: Machine) -> tuple[float, float]:
    """Seconds by the planner's model, in which nothing is hidden: of attention with what is sent, and without."""
    device = load_device(DEVICES[machine.name])
    config = MODELS[sample.model]
    values: dict[str, dict[str, object]] = {
        "model": {"preset": "llama3-8b", "seq_length": sample.tokens, "vocab_size": config.vocab_size},
        "parallel": {"context_parallel": sample.n},
        "train": {"global_batch_size": 1, "microbatch_size": 1, "dtype": "bfloat16", "device": "cuda"},
    }
    run = build_config(values)
    layer = LayerModel(run, device, ours(run.parallel, device))
    alone = layer.attention(False).seconds + layer.attention(True).seconds
    gather, exchange = layer.keys_and_values()
    return alone + 2 * gather + exchange, alone


def predicted_rows(found: Sequence[Sample], machine: Machine) -> list[Row]:
    rows: list[Row] = []
    for sample in found:
        total, alone = predict(sample, machine)
        seconds = {PREDICTED: [total], ALONE: [alone]}
        rows += compared(f"prediction: {CASE}, {sample.n} {machine.name}", sample, seconds, [(PREDICTED, ALONE)])
    return rows


def rows_of(sample: Sample, seconds: Seconds, predicted: float) -> list[Row]:
    """Keys in parts beside keys at once, which hide nothing, and both beside the prediction."""
    times = {**seconds, PREDICTED: [predicted] * len(seconds[AT_ONCE])}
    return compared(CASE, sample, times, [(IN_PARTS, AT_ONCE), (IN_PARTS, PREDICTED), (AT_ONCE, PREDICTED)])
