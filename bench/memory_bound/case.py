"""What the memory-bound benches time: a case, the tensors and providers that it is built into, a model's activations.

Belongs here: what all operations share. Their shapes, bytes and providers are in cases.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Function = Callable[..., Any]  # of a case's inputs; tensors may be nested in tuples, beside other things
COMPILED, TORCH = "torch.compile", "torch"


class Work(NamedTuple):
    """A case's inputs, and functions of *inputs that give the same tensors in the same order.

    plain: the formula in torch; of float64 inputs it is the oracle. rivals: by name. Any of them may overwrite inputs.
    random: the rivals draw other random numbers than we do, so that only distributions agree.
    """

    inputs: tuple
    ours: Function
    plain: Function
    rivals: Mapping[str, Function]
    random: bool = False


@dataclass(frozen=True)
class Case:
    """name: operation and direction. nbytes: what must cross main memory; None where GEMMs are what takes the time.
    share: of the speed of a copy of as many bytes, what is required."""

    name: str
    shape: str
    nbytes: int | None
    build: Callable[[str, torch.dtype], Work]
    flops: int = 0
    share: float = 0.9


class Rows(NamedTuple):
    """A model's activations: m tokens of n features."""

    model: str
    m: int
    n: int

    def __str__(self) -> str:
        return f"{self.model} {self.m}x{self.n}"

    def random(self, count: int, device: str, dtype: torch.dtype) -> list[Tensor]:
        """Tensors of this size."""
        return [torch.randn(self.m, self.n, device=device, dtype=dtype) for _ in range(count)]

    def random_vectors(self, count: int, device: str, dtype: torch.dtype) -> list[Tensor]:
        """Vectors of as many features."""
        return [torch.randn(self.n, device=device, dtype=dtype) for _ in range(count)]


def each(function: Callable[[Tensor], Tensor], inputs: Any) -> Any:
    """The same nest with the function's result for every tensor."""
    return tree_map_only(Tensor, function, inputs)


def flat(result: Any) -> list[Tensor]:
    """The tensors of a nest."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def compiled(function: Function) -> Function:
    """One graph for these shapes, in torch.compile's default mode. Forgets what was compiled before."""
    torch.compiler.reset()  # otherwise torch refuses to compile a function for a ninth shape
    return torch.compile(function, fullgraph=True, dynamic=False)
