"""Tensors that a backward reads again and autograd does not save, because all layers share them.

Autograd sees when a saved tensor was written in place after the forward. Belongs here: the same for these.
"""

from torch import Tensor

from tpformer.torch_private import version_of


def versions(*tensors: Tensor | None) -> list[int]:
    """How often each tensor has been written in place. For those of inference mode torch counts nothing."""
    return [0 if x is None or x.is_inference() else version_of(x) for x in tensors]


def check_unwritten(what: str, before: list[int], *tensors: Tensor) -> None:
    """RuntimeError if one of the tensors was written since its version was taken."""
    if versions(*tensors) != before:
        raise RuntimeError(
            f"{what} was written in place between the forward and its backward, which reads it again: give the forward "
            f"a copy (clone()), or write after the backward"
        )
