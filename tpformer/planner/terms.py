"""What the time model of a layer is made of: its linears, and seconds by kind of work in a microbatch's three passes.

Belongs here: types alone. Which linears and kinds there are, layer_time.py says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Terms(dict[str, float]):
    """Seconds by kind of work; 0 for kinds that are not there."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def __add__(self, other: Mapping[str, float]) -> Terms:
        return Terms({name: self[name] + other.get(name, 0.0) for name in {**self, **other}})

    @property
    def seconds(self) -> float:
        """Seconds of all kinds together."""
        return sum(self.values())


class PassSeconds(NamedTuple):
    """Seconds of one microbatch in a layer or a stage: the forward, the input gradients and the weight gradients."""

    forward: Terms
    inputs: Terms
    weights: Terms

    def __add__(self, other: PassSeconds) -> PassSeconds:  # type: ignore[override]
        return PassSeconds(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def times(self, n: float) -> PassSeconds:
        """n times this."""
        return PassSeconds(*(Terms({name: n * seconds for name, seconds in terms.items()}) for terms in self))

    def without(self, names: frozenset[str]) -> PassSeconds:
        """All but the terms of these names."""
        if not names:
            return self
        return PassSeconds(*(Terms({n: s for n, s in terms.items() if n not in names}) for terms in self))


class Linear(NamedTuple):
    """A linear on one rank: n output and k input features; column-parallel, or else row-parallel.

    experts: so many linears with rows of their own, a rank's experts; `rows` of each. None: it is one of no experts.
    weights: so many make its output features, side by side, with one input.
    silent: it has no tensor-parallel collectives. They are another linear's, or its rows come by an exchange.
    bias, dropout: of a row-parallel one, what is done to its sums. normed: they and the residual go to one norm alone.
    """

    name: str
    n: int
    k: int
    column: bool
    rows: int
    weights: int = 1
    experts: int | None = None
    silent: bool = False
    bias: bool = False
    dropout: bool = False
    normed: bool = False
