"""What the memory-bound benches time: a case, the tensors and providers that it is built into, a model's activations.

Belongs here: what the operations' files share. Shapes, bytes and providers are in the file of their operation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpformer.kernels.philox.reference import philox_key, random_words

from ..shapes import MODELS

Function = Callable[..., Any]  # of the case's inputs; its tensors may be nested in tuples, with None between them
ITEMSIZE = 2
P, EPS = 0.1, 1e-5
COMPILED, LIGER = "torch.compile", "Liger-Kernel"
KEY = philox_key("bench")


class Work(NamedTuple):
    """A case's tensors (None: absent) and functions of *inputs that give the same results in the same order.

    plain: the formula in torch; of float64 inputs it is the oracle. rivals: by name; None where one has no such
    operation. mutated: which inputs a provider may overwrite. random: the rivals draw other random numbers than ours,
    so that only distributions agree.
    """

    inputs: Sequence[Tensor | None]
    ours: Function
    plain: Function
    rivals: Mapping[str, Function | None]
    mutated: tuple[int, ...] = ()
    random: bool = False


@dataclass(frozen=True)
class Case:
    """name: operation and direction. nbytes: what must cross main memory; None where GEMMs are what takes the time."""

    name: str
    shape: str
    nbytes: int | None
    build: Callable[[str, torch.dtype], Work]
    flops: int = 0


def each(function: Callable[[Tensor], Tensor], tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Of what is there."""
    return [None if x is None else function(x) for x in tensors]


def flat(result: Any) -> list[Tensor]:
    """The tensors of a provider's result."""
    if isinstance(result, Tensor):
        return [result]
    return [] if result is None else [tensor for part in result for tensor in flat(part)]


def starts(m: int, n: int, device: str) -> Tensor:
    return torch.arange(m, device=device) * n


def kept(start: Tensor, n: int) -> Tensor:
    """The mask (M, N) that dropout of these rows has: what plain torch would have stored."""
    return random_words(KEY, start, n) >= round(P * 2**32)


class Rows(NamedTuple):
    """A model's activations: m tokens of n features."""

    model: str
    m: int
    n: int

    def __str__(self) -> str:
        return f"{self.model} {self.m}x{self.n}"

    def random(self, count: int, device: str, dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(self.m, self.n, device=device, dtype=dtype) for _ in range(count)]

    def random_vectors(self, count: int, device: str, dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(self.n, device=device, dtype=dtype) for _ in range(count)]


def hidden_rows(quick: bool) -> list[Rows]:
    rows = [Rows(name, m, MODELS[name].hidden_size) for name, m in (("8B", 8192), ("70B", 8192), ("405B", 4096))]
    return rows[:1] if quick else rows
