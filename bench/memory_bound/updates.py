"""The cases of the bench update: an optimizer's step of some layers of a model.

Belongs here: their tensors and bytes, and torch's own step beside ours.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpformer.kernels.update import reference
from tpformer.kernels.update.reference import update_cost
from tpformer.ops.implementation import implementation

from .case import TORCH, Case, Rows, Work, each

ITEMSIZE = 2  # of gradients and copies
LAYER = (3, 1, 4, 4)  # rows of a GPT layer's matrices, in twelfths of all: q, k and v; output; up; down, transposed
ROWS = Rows("GPT 1.3B, 4 layers", 4 * 12 * 2048, 2048)
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    "sgd": {"weight_decay": 0.1, "momentum": 0.9, "nesterov": False},
}
MOMENTS = {"adamw": 2, "sgd": 1}


def sizes(rows: Rows) -> list[tuple[int, ...]]:
    """The tensors: matrices of so many rows together, and a vector for each of them."""
    matrices = [(rows.m * part // sum(LAYER), rows.n) for part in LAYER]
    return [*matrices, *[(rows.n,)] * len(LAYER)]


def update(optimizer: str, rows: Rows, device: str, dtype: torch.dtype) -> Work:
    """Masters in float32, or in float64 if that is asked; gradients and copies of the dtype."""
    wide = torch.promote_types(dtype, torch.float32)

    def drawn(dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(size, device=device, dtype=dtype) for size in sizes(rows)]

    masters, moments = drawn(wide), [each(Tensor.square_, drawn(wide)) for _ in range(MOMENTS[optimizer])]
    steps = [torch.full((), 7.0, device=device) for _ in masters] if optimizer == "adamw" else []
    skipped = torch.zeros((), device=device)
    inputs = (masters, drawn(dtype), moments, each(lambda x: x.to(dtype), masters))

    def stepping(module: Any, masters: list, gradients: list, moments: list, copies: list) -> Any:
        """A step in place by a module of kernels/update. What it counts is not among the results."""
        counts = [[x.clone() for x in steps]] if steps else []
        options = {"lr": 1e-3, "scale": 0.5, "skipped": skipped, **OPTIONS[optimizer]}
        getattr(module, f"{optimizer}_")(masters, gradients, *moments, *counts, copies, **options)
        return masters, moments, copies

    plain = partial(stepping, reference)
    ours = partial(stepping, implementation("update", masters[0]))
    return Work(inputs, ours, lambda *given: plain(*each(Tensor.clone, given)), {TORCH: plain})


def update_cases(quick: bool) -> list[Case]:
    numel = sum(torch.Size(size).numel() for size in sizes(ROWS))
    return [
        Case(name, str(ROWS), update_cost(numel, ITEMSIZE, ITEMSIZE, name).bytes, partial(update, name, ROWS))
        for name in (["adamw"] if quick else OPTIONS)
    ]
