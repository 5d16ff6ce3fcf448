"""Tensors that a backward reads again and autograd does not save, because all layers share them, or hooks keep them.

Autograd sees when a saved tensor was written in place after the forward. Belongs here: the same for these.
"""

from typing import Any, NamedTuple, Self

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


class Whole(NamedTuple):
    """A saved tensor that pack hooks keep as it is: autograd leaves it to them to find that it was written to."""

    x: Any
    """The tensor, detached, or what hooks around these made of it: a result that its own graph keeps is never freed."""
    version: int

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """A tensor around which there are no other hooks."""
        return cls(x if x.grad_fn is None else x.detach(), versions(x)[0])

    def unpacked(self) -> Tensor:
        """The tensor. RuntimeError if it was written to."""
        check_saved(self.x, versions(self.x)[0], self.version)
        return self.x


def check_saved(x: Tensor, now: int, version: int) -> None:
    """RuntimeError, in autograd's words, if a tensor that was saved at a version has another one now."""
    if now != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{list(x.shape)} of {x.dtype} is at version {now}, and was saved at {version}"
        )
