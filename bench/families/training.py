"""A family's model trained for three steps, and how far a run is from another.

Belongs here: what every process does with a model, whether it is whole or parallel, and what is compared. No ranks.

Everything is float64, because then the right model and the wrong one are ten orders of magnitude apart, and because
AdamW makes noise of what float32 leaves of gradients that are truly zero, such as those of key biases. Models of
transformers ask for float32 in places (norms, softmax, rotary embeddings, routers): `in_float64` gives them float64, in
one process and in parallel alike, so that no rounding to float32 hides a difference or makes one. What is left is the
order of float64's sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpformer.distributed.dtensor import full_tensor

STEPS = 3
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}  # eps: what noise of a gradient of zero is divided by
TOLERANCE = 1e-9  # of the largest value of a tensor; a gradient may also miss by NOISE of the largest of all gradients
NOISE = 1e-13


class _Float64(TorchFunctionMode):
    """Reads float64 where a torch function is asked for float32."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


@contextmanager
def in_float64() -> Iterator[None]:
    """Within, float64 is the default dtype, and what a torch function gives when it is asked for float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


class Trained(NamedTuple):
    """A run: its first forward, its first gradients, its parameters after STEPS steps, and the forward with these."""

    first: dict[str, Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    last: dict[str, Tensor]


def whole(x: Tensor) -> Tensor:
    """A copy of a tensor, of all of it."""
    return full_tensor(x.detach()).clone()


def forward(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's own loss, or a weighted sum where it has none, and its first result."""
    out = model(**batch)
    loss = out.get("loss")
    y = out[0 if loss is None else 1]
    if loss is None:
        loss = (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).mean()
    return {"loss": loss, "result": y}


def train(model: nn.Module, batch: Mapping[str, Tensor]) -> Trained:
    """Three steps of AdamW. A user's loop: it knows nothing of ranks, but for reading whole gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    first, gradients = {}, {}
    for step in range(STEPS):
        optimizer.zero_grad()
        out = forward(model, batch)
        out["loss"].backward()
        if step == 0:
            first = {name: whole(x) for name, x in out.items()}
            gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    parameters = {name: whole(p) for name, p in model.named_parameters()}
    with torch.no_grad():
        last = {name: whole(x) for name, x in forward(model, batch).items()}
    return Trained(first, gradients, parameters, last)


class Difference(NamedTuple):
    """The tensor of a run that is furthest from its like; `error`: in units of its largest value."""

    error: float
    what: str

    @property
    def wrong(self) -> bool:
        return not self.error <= TOLERANCE

    def __str__(self) -> str:
        return f"{self.what} is off by {self.error:.1g} times its largest value"


def worst_of(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str, noise: float = 0.0) -> Difference:
    """The worst of all tensors by name. noise: an absolute error that counts as none."""
    if missing := sorted(expected.keys() ^ found.keys()):
        return Difference(float("inf"), f"{what} {missing[0]}")
    worst = Difference(0.0, what)
    for name, value in expected.items():
        if found[name].shape != value.shape:
            return Difference(float("inf"), f"{what} {name}")
        error = float((found[name] - value).abs().max()) if value.numel() else 0.0
        largest = float(value.abs().max()) if value.numel() else 0.0
        relative = 0.0 if error <= noise else error / largest if largest else float("inf")
        if not relative <= worst.error:  # nan, too
            worst = Difference(relative, f"{what} {name}".strip())
    return worst


def compare_runs(found: Trained, expected: Trained) -> list[Difference]:
    """The worst differences of forward, gradients and trained parameters, in this order."""
    noise = NOISE * max(float(g.abs().max()) for g in expected.gradients.values())
    return [
        worst_of(found.first, expected.first, "forward:"),
        worst_of(found.gradients, expected.gradients, "gradient of", noise),
        worst_of(found.parameters, expected.parameters, "after three steps,", TOLERANCE * ADAMW["lr"]),
        worst_of(found.last, expected.last, "after three steps,"),
    ]
