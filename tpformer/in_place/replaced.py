"""What becomes of a parameter when it is cut: the module gets a DTensor, and others may still hold the old one."""

from __future__ import annotations

from typing import Any

from torch import nn

REPLACED_BY = "_replaced_by"  # on a parameter: the DTensor that has taken its place, for modules that are tied


class Replaced(nn.Parameter):
    """What a parameter is when a DTensor has taken its place: it never gets a gradient, and says so when it is asked.

    An optimizer that was made before, or a list of parameters to clip, would go on without a word.
    """

    @property
    def grad(self) -> Any:
        """ValueError."""
        raise ValueError(
            f"the model no longer has this parameter of {tuple(self.shape)}, because it has been cut over ranks: make "
            f"optimizers, and lists of parameters, after parallelize"
        )
