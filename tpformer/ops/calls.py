"""What an operation tells the other ranks of its group when it is called, so that calls that differ are named.

Belongs here: which of an operation's arguments must be equal on all ranks. distributed/calls.py compares them.
"""

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.groups import note_call


def called(
    group: ProcessGroup | None,
    operation: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    communicates: bool,
    inputs: Iterable[Tensor | None] = (),
    weights: Iterable[Tensor | None] = (),
    *more: Hashable,
) -> None:
    """RuntimeError if another rank of the group calls another operation now, or this one with other arguments.

    shape, dtype, more: equal on all ranks. communicates: the forward does; otherwise only the backward, if there will
    be one. inputs, weights: whether any of either needs a gradient is equal on all ranks, because that decides what the
    backward communicates.
    """
    if group is None:
        return
    gradients = ""
    if torch.is_grad_enabled():
        of_inputs, of_weights = needs(inputs), needs(weights)
        gradients = GRADIENTS[of_inputs + 2 * of_weights]
    if communicates or gradients:
        note_call(group, (operation, shape, dtype, gradients, *more))


SCATTERED = "sequence parallel"
GRADIENTS = ("", "gradients of inputs", "gradients of weights", "gradients of inputs and weights")


def needs(tensors: Iterable[Tensor | None]) -> bool:
    """Whether any of the tensors needs a gradient."""
    for each in tensors:
        if each is not None and each.requires_grad:
            return True
    return False
