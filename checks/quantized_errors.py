"""How far FP8 is from float64 on a trained model's own numbers, beside bfloat16: a table of `bench layouts --fp8`.

Belongs here: the model, its short training, the errors of its GEMMs and of its gradient at fixed weights, and what is
allowed. How large an error is depends on how much a sum cancels, so on the model; the two precisions' errors cancel
alike. e4m3 keeps four significant bits where bfloat16 keeps eight, so 16 times bfloat16's error is expected. Queries,
keys and values are one linear's, and what is rounded is added up exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

from harness.runner import columns
from tpformer.config import GPTConfig, OptimizerSection
from tpformer.kernels.quantize.reference import dequantize, dequantize_weight, quantize_rows, quantize_weight
from tpformer.layers import TensorParallel
from tpformer.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpformer.models import GPT
from tpformer.training.data import IndexedDataset
from tpformer.training.schedules import learning_rate

CONFIG = GPTConfig(
    vocab_size=257,
    seq_length=64,
    n_layers=2,
    hidden_size=128,
    n_heads=2,
    norm="rmsnorm",
    bias=False,
    tie_embeddings=False,
)
TRAINED, BATCH = 120, 16  # steps before anything is measured; samples of each
OPTIMIZER = OptimizerSection(lr=3e-3, warmup_steps=30)
NAMES = ("forward", "gradient of the input", "gradient of the weight", "whole gradient")
# the most of bfloat16's error: the bars over its errors in the recipe's study, of a byte GPT of this size
MOST = (1.6e-2 / 9.3e-4, 1.7e-2 / 9.4e-4, 1.9e-2 / 1.1e-3)


class Operands(NamedTuple):
    """What a linear multiplies, in float64: x (M, K), weight (N, K), and its result's gradient dy (M, N)."""

    x: Tensor
    weight: Tensor
    dy: Tensor


def samples(text: Path, step: int) -> Tensor:
    """A step's samples from anywhere in a dataset of bytes, (BATCH, seq_length + 1) int64."""
    data, size = IndexedDataset(text), CONFIG.seq_length + 1
    starts = torch.randint(data.n_tokens - size, (BATCH,), generator=torch.Generator().manual_seed(step)).tolist()
    return torch.stack([torch.from_numpy(data.tokens(start, start + size)) for start in starts])


def loss_of(model: GPT, batch: Tensor) -> Tensor:
    """The mean loss, 0-dim."""
    return model(batch[:, :-1], targets=batch[:, 1:]) / batch[:, 1:].numel()


def trained(text: Path) -> dict[str, Any]:
    """The state of a model after its short training in float32."""
    model = GPT(CONFIG, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), weight_decay=0.1)
    for step in range(TRAINED):
        optimizer.param_groups[0]["lr"] = learning_rate(step + 1, TRAINED, OPTIMIZER)
        optimizer.zero_grad()
        loss_of(model, samples(text, step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm)
        optimizer.step()
    return model.state_dict()


def gradient(state: Mapping[str, Any], batch: Tensor, dtype: torch.dtype, precision: str) -> Tensor:
    """All gradients of a batch in a row, float64."""
    model = GPT(CONFIG, tp=TensorParallel(precision=precision), dtype=dtype)
    model.load_state_dict(state)
    loss_of(model, batch).backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def operands(state: Mapping[str, Any], batch: Tensor) -> list[Operands]:
    """What the linears of all blocks multiply. Hooks see it: a linear that has some is called with what it multiplies.
    Those with one input are one."""
    model, found = GPT(CONFIG, dtype=torch.float64), dict[int, list[Operands]]()
    model.load_state_dict(state)

    def kept(layer: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        (x,), weight = inputs, layer.weight.detach()
        y.register_hook(lambda dy: found.setdefault(x.data_ptr(), []).append(Operands(x.detach(), weight, dy)))

    for each in model.modules():
        if isinstance(each, ColumnParallelLinear | RowParallelLinear):
            each.register_forward_hook(kept)
    loss_of(model, batch).backward()
    return [
        Operands(some[0].x, torch.cat([each.weight for each in some]), torch.cat([each.dy for each in some], 1))
        for some in found.values()
    ]


def results(x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    """The three GEMMs of a linear."""
    return [x @ weight.t(), dy @ weight, dy.t() @ x]


def rounded(each: Operands) -> list[Tensor]:
    """The GEMMs in bfloat16, exactly added up."""
    return results(*(part.bfloat16().double() for part in each))


def quantised(each: Operands) -> list[Tensor]:
    """The GEMMs in FP8, exactly added up."""
    x, dy = (dequantize(quantize_rows(part), part.dtype) for part in (each.x, each.dy))
    return results(x, dequantize_weight(quantize_weight(each.weight), x.dtype), dy)


def relative(y: Tensor, exact: Tensor) -> float:
    """|y - exact| / |exact|, of Euclidean lengths."""
    return ((y - exact).norm() / exact.norm()).item()


def precision_errors(text: Path) -> dict[str, list[float]]:
    """The errors by precision: of each GEMM the mean over the linears, and of the whole gradient."""
    state, batch = trained(text), samples(text, TRAINED)
    linears, exact = operands(state, batch), gradient(state, batch, torch.float64, "16")
    found = {}
    for name, recipe, dtype, precision in (
        ("bfloat16", rounded, torch.bfloat16, "16"),
        ("FP8", quantised, torch.float64, "fp8"),
    ):
        pairs = [zip(recipe(each), results(*each), strict=True) for each in linears]
        of_linears = torch.tensor([[relative(*pair) for pair in of_linear] for of_linear in pairs])
        of_gradient = relative(gradient(state, batch, dtype, precision), exact)
        found[name] = [*of_linears.mean(0).tolist(), of_gradient]
    return found


def errors_table(found: Mapping[str, list[float]]) -> Table:
    """A line for each precision, one for how many times as large FP8's are, and one for what is allowed of it."""
    table = columns(["relative error on a trained model"], NAMES)
    for name, row in found.items():
        table.add_row(name, *(f"{value:.2e}" for value in row))
    table.add_row("FP8 / bfloat16", *(f"{ratio:.1f}" for ratio in ratios(found)))
    table.add_row("at most", *(f"{most:.1f}" for most in MOST), "-")
    return table


def ratios(found: Mapping[str, list[float]]) -> list[float]:
    """FP8's errors over bfloat16's. The last, of the whole gradient, is of all that each precision rounds."""
    return [fp8 / bfloat16 for fp8, bfloat16 in zip(found["FP8"], found["bfloat16"], strict=True)]


def beyond(found: Mapping[str, list[float]]) -> list[str]:
    """The GEMMs whose error in FP8 is more than is allowed."""
    return [
        f"FP8's error, {name}, is {ratio:.1f} times bfloat16's, of at most {most:.1f}"
        for name, ratio, most in zip(NAMES, ratios(found), MOST, strict=False)
        if not ratio <= most
    ]
