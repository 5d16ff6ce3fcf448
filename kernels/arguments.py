"""The named tuples that kernels take: what belongs together is one argument.

Belongs here: groups of pointers and sizes that several kernels share, and groups of constants of the compiler, whose
parameters have names in capitals. The compiler sees which members are None. Two things stay arguments of their own.
Integers that change from call to call or differ between ranks do: Triton compiles one binary for 1, one for multiples
of 16 and one for other integers, and a member of a tuple cannot be exempt. TMA descriptors do, because Triton's
launcher does not look for them in tuples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .launch import Tile


MAXIMUM_WEIGHTS = 3  # of a launch: q, k, v


class Rows(NamedTuple):
    """A matrix whose rows may lie apart; the elements of a row lie side by side."""

    pointer: Any
    """The first element."""
    stride: Any
    """Elements from one row to the next."""


class Mask(NamedTuple):
    """Dropout without its key, which is an argument of its own because it is new in every call."""

    start: Any
    """int64 (rows,): the global index of each row's first element."""
    threshold: Any
    """An element is kept if its 32-bit Philox word is at least this."""
    scale: Any
    """1 / (1 - p), the factor of the elements that are kept."""


class Addends(NamedTuple):
    """What is added to a sum: residual + dropout(sum + bias). A part that is None is left out."""

    bias: Any
    """(columns,)."""
    residual: Rows | None
    """(rows, columns), like the sum."""
    mask: Mask | None


class Weight(NamedTuple):
    """The sizes, the bias and the output of one weight of a launch. The matrix is an argument of its own.

    If a launch has fewer weights, all members of the missing ones are None: in triton 3.6 a kernel cannot ask
    `x is None` of a tuple that may hold a None.
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
    """The activation's input, or with a gate the factor of the activation's value."""
    gate: Any = None
    """The activation's input if there is a gate, else None."""
    dx: Any = None
    dgate: Any = None
    """None without a gate."""
    rebuilt: Any = None
    """The activation's value, times x if there is a gate."""


class Linears(NamedTuple):
    """A @ weight.T for up to three weights, with their epilogues: sizes in elements, and outputs."""

    k: Any
    a_stride: Any
    """Elements from one row of A to the next."""
    weights: tuple[Weight, Weight, Weight]
    derivative: Derivative
    slot_rows: Any = None
    """Rows, if A is gathered, from one virtual rank's copy of A to the next one's."""


class LinearForm(NamedTuple):
    """What the compiler must know of Linears."""

    tile: Tile
    activation: str
    """Its name, as in tile.activate."""
    a_transposed: bool = False
    """A is stored as (k, rows)."""
    b_transposed: bool = False
    """Weights are stored as (k, n)."""
    world: int = 1
    """How many chunks a rank's output consists of."""
    piece: int = 16
    """Columns that the epilogue of a Derivative takes at a time."""


class Pair(NamedTuple):
    """Sizes of one product of a sum of products, in elements."""

    k: Any
    a_stride: Any
    b_stride: Any


class BlocksPair(NamedTuple):
    """The inner dim and the exponents of one product of matrices in blocks of e4m3, whose values have no gaps."""

    k: Any
    a_exponents: Any
    """(k / 128, rows of A)."""
    b_exponents: Any
    """(n / 128, k / 128)."""


class Reduction(NamedTuple):
    """addends(sum over ranks of the sum of up to three products A_i @ B_i.T)."""

    n: Any
    """Columns of the result."""
    pairs: tuple
    """Three, of which the missing ones are None: all of them Pairs, or all BlocksPairs."""
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
    """Whether n is a multiple of 4, as in random_tile."""
    producers: int = 0
    """How many programs only multiply. 0: every program does everything in turn."""
    one_shot: bool = False
    """Whether every rank of an all-reduce adds all rows, instead of its share."""
    band: int = 0
    """All-reduce: rows of a tile that a program waits for and publishes at once, and adds, `step` of them at a time."""
    copied: int = 0
    """All-reduce: rows that a program copies at a time."""
    blocks: bool = False
    """Whether matrices are in blocks of e4m3."""


def three(values: Any, missing: Any = None) -> tuple:
    """`values`, filled up with `missing` to MAXIMUM_WEIGHTS of them."""
    return (*values, *[missing] * (MAXIMUM_WEIGHTS - len(values)))
