"""The named tuples that kernels take: what belongs together is one argument.

Belongs here: groups of pointers and sizes that several kernels share, and groups of what the compiler must know (their
parameters are written in capitals). A member may be None, which the compiler knows. Triton treats each integer of a
group like an argument: 1 becomes a constant, and a multiple of 16 is known to be one. Two things therefore stay
arguments of their own: integers that change from call to call or differ between ranks, as each kind of value would
compile another binary, and TMA descriptors, which Triton's launcher does not look for in tuples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .launch import Tile


MAXIMUM_WEIGHTS = 3  # of a launch: q, k, v


class Rows(NamedTuple):
    """A matrix whose rows may lie apart, their elements side by side."""

    pointer: Any
    """The first element."""
    stride: Any
    """Elements from one row to the next."""


class Mask(NamedTuple):
    """Dropout as kernels draw it, but for the key, which is new in every call."""

    start: Any
    """int64 (rows,): the global index of each row's first element."""
    threshold: Any
    """An element is kept if its 32-bit word is at least this."""
    scale: Any
    """What a kept element is multiplied by, 1 / (1 - p)."""


class Addends(NamedTuple):
    """What a kernel makes of a sum: residual + dropout(sum + bias). None leaves a part out."""

    bias: Any
    """(columns,)."""
    residual: Rows | None
    """(rows, columns), like the sum."""
    mask: Mask | None


class Weight(NamedTuple):
    """What belongs to one weight of a launch beside the matrix: its bias and its output.

    All members of one that a launch lacks are None: triton 3.6 cannot ask whether a tuple with a None in it is None.
    """

    n: Any = None
    """Columns of the output."""
    stride: Any = None
    """Elements from one row of the weight to the next."""
    bias: Any = None
    """(n,) or None."""
    out: Any = None
    """(rows, n), without gaps; None with a Derivative."""


class Derivative(NamedTuple):
    """Operands of an epilogue that takes a gradient back through an activation, each (rows, n) without gaps; all None
    in a launch without one."""

    x: Any = None
    """What the activation was applied to, or what its value was multiplied by if there is a gate."""
    gate: Any = None
    """What the activation was applied to, or None."""
    dx: Any = None
    dgate: Any = None
    """None without a gate."""
    rebuilt: Any = None
    """The activation's value, times x if there is a gate."""


class Linears(NamedTuple):
    """A @ weight.T for up to three weights, with their epilogues: sizes in elements, and outputs."""

    k: Any
    a_stride: Any
    """From one row of A to the next."""
    weights: tuple[Weight, Weight, Weight]
    derivative: Derivative
    slot_rows: Any = None
    """Rows between two virtual ranks' gathered copies of A, if A is gathered."""


class LinearForm(NamedTuple):
    """What the compiler must know of Linears."""

    tile: Tile
    activation: str
    """As in tile.activate."""
    a_transposed: bool = False
    """A is stored as (k, rows)."""
    b_transposed: bool = False
    """Weights are stored as (k, n)."""
    world: int = 1
    """Chunks that a rank's output consists of."""


class Pair(NamedTuple):
    """Sizes of one product of a sum of products, in elements."""

    k: Any
    a_stride: Any
    b_stride: Any


class Reduction(NamedTuple):
    """addends(sum over ranks of the sum of up to three products A_i @ B_i.T)."""

    n: Any
    """Columns of the result."""
    pairs: tuple[Pair, Pair | None, Pair | None]
    addends: Addends
    out: Any
    """The result's rows of this rank, without gaps."""


class ReductionForm(NamedTuple):
    """What the compiler must know of a Reduction."""

    tile: Tile
    b_transposed: bool
    """Each B is stored as (k, n)."""
    world: int
    partial: Any
    """Triton's dtype of the partial sums on the link."""
    step: int
    """Rows that a program finishes at a time."""
    aligned: bool
    """As in random_tile."""
    producers: int = 0
    """Programs that multiply, if others do the rest; 0: every program does all in turn."""
    reducers: int = 0
    """Of the others, those that add; the rest, if any, copy what has been added."""
    one_shot: bool = False
    """Of an all-reduce: everybody adds everything."""


def three(values: Any, missing: Any = None) -> tuple:
    """Kernels take MAXIMUM_WEIGHTS of what a launch has one or more of."""
    return (*values, *[missing] * (MAXIMUM_WEIGHTS - len(values)))
