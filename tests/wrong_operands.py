"""Calls with one operand made wrong, in each way, for tests that they are refused or right.

Belongs here: how operands are made wrong, and how a refusal looks. No tests.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def changed(x: Any) -> Iterator[Any]:
    """An operand, made wrong in each way: one more and one less along each dim, one alone, dtypes, another device."""
    if isinstance(x, str):
        yield "telepathy"
    elif isinstance(x, Tensor):
        for dim in range(x.dim()):
            yield torch.cat([x, x.narrow(dim, 0, 1)], dim)
            yield x.narrow(dim, 0, x.shape[dim] - 1)
            yield x.narrow(dim, 0, 1)
        yield x[None]
        yield from (x.to(dtype) for dtype in (torch.float16, torch.int16, torch.int64) if dtype != x.dtype)
        yield x.to("meta")


def variants(row: Callable[[], tuple], change: Callable[[Any], Iterator[Any]]) -> Iterator[tuple[int, Callable]]:
    """(number of an operand, what makes the row with this operand changed), in all ways that there are.

    row: makes (arguments, options), new ones in each call; operands may be in tuples and lists.
    """
    leaves, spec = tree_flatten(row())

    def make(index: int, way: int) -> tuple:
        fresh = tree_flatten(row())[0]
        fresh[index] = list(change(fresh[index]))[way]
        return tree_unflatten(fresh, spec)

    for index, leaf in enumerate(leaves):
        for way in range(sum(1 for _ in change(leaf))):
            yield index, partial(make, index, way)


def call(function: Callable, given: tuple) -> list[Tensor] | None:
    """The tensors that the function gives, or updates; None if it refuses the call in one sentence."""
    arguments, options = given
    try:
        found = function(*arguments, **options)
    except ValueError as error:
        assert "\n" not in str(error)
        return None
    return [x for x in tree_flatten(arguments if found is None else found)[0] if isinstance(x, Tensor)]
