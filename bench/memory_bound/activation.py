"""Cases of `activation`: plain and gated ones; backwards also rebuild the activation, for the weight's gradient."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpformer.kernels.activation.reference import activation_cost
from tpformer.ops.implementation import implementation

from ..shapes import MODELS, RANKS
from . import formulas, liger
from .case import COMPILED, ITEMSIZE, LIGER, Case, Rows, Work
from .formulas import Tensors, compiled

KEPT = f"{LIGER}, a kept"  # its gradients alone: the activation was stored in the forward


def activation_forward(name: str, gated: bool, rows: Rows, device: str, dtype: torch.dtype) -> Work:
    inputs = rows.random(2 if gated else 1, device, dtype)
    op = implementation("activation", inputs[0]).activation_forward

    def ours(x: Tensor, gate: Tensor | None = None) -> Any:
        return op(x, name, gate)

    def plain(x: Tensor, gate: Tensor | None = None) -> Tensors:
        return formulas.activation_forward(x, gate, name)

    return Work(inputs, ours, plain, {COMPILED: compiled(plain), LIGER: liger.activation_forward(name, gated)})


def activation_backward(name: str, gated: bool, rows: Rows, device: str, dtype: torch.dtype) -> Work:
    da, *inputs = rows.random(3 if gated else 2, device, dtype)
    op = implementation("activation", da).activation_backward

    def ours(da: Tensor, x: Tensor, gate: Tensor | None = None) -> Any:
        return op(da, x, name, gate)

    def plain(da: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensors:
        return formulas.activation_backward(da, x, gate, name)

    rivals = {
        COMPILED: compiled(plain),
        LIGER: liger.activation_backward(name, True, *inputs),
        KEPT: liger.activation_backward(name, False, *inputs),
    }
    return Work([da, *inputs], ours, plain, rivals, mutated=tuple(range(1 + len(inputs))))


def activation_cases(quick: bool) -> list[Case]:
    def features(name: str, m: int, ranks: int) -> Rows:
        model = name if ranks == 1 else f"{name}/{ranks}"
        return Rows(model, m, MODELS[name].ffn_size // ranks)

    llama = [features("8B", 32768, RANKS), features("8B", 8192, 1), features("70B", 16384, RANKS)]
    gpt = [features("GPT-3", 8192, RANKS), features("GPT-3", 2048, 1)]
    listed = [
        *(("silu", True, rows) for rows in llama),
        *(("gelu_tanh", False, rows) for rows in gpt),
        *((name, gated, llama[1]) for name, gated in (("gelu_tanh", True), ("gelu", False), ("relu2", False))),
    ]
    cases = []
    for name, gated, rows in listed[:1] if quick else listed:
        for backward, build in ((False, activation_forward), (True, activation_backward)):
            nbytes = activation_cost(rows.m, rows.n, ITEMSIZE, gated, backward).bytes
            direction = "backward" if backward else "forward"
            label = f"{'gated ' if gated else ''}{name} {direction}"
            cases.append(Case(label, str(rows), nbytes, partial(build, name, gated, rows)))
    return cases
