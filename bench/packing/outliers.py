"""A made distribution with outlier channels, as pretrained models have them, in the form that ships and in others.

Belongs here: how it is made, and which rules for a base are tried on it. Counting is in forms.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .forms import Form, Row, compared, grouped, tallied

SHARE, FACTOR = 0.001, 1000.0  # of a tensor's channels, and what they are multiplied by
ROWS, HIDDEN = 2048, 4096  # of the Gaussian tensor
RULES = [Form(headroom=headroom) for headroom in (None, 3, 4, 5, 6, 7, 8)]  # None: the base is the largest exponent
MADE, DENSER = "GPT, outliers", "GPT, denser outliers"
GAUSSIAN, OUTLIERS = "Gaussian", "Gaussian, outliers"


def with_outliers(x: Tensor, seed: int = 0) -> Tensor:
    """x (rows, channels) with SHARE of its channels, at least one, multiplied by FACTOR; drawn by the seed."""
    count = max(1, round(SHARE * x.shape[1]))
    channels = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))[:count]
    made = x.clone()
    made[:, channels] *= FACTOR
    return made


def distributions(trained: Sequence[Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    """The kinds of tensors that are made. trained: for each name one (tokens, channels) bfloat16 for each layer.

    MADE has the layers' tensors of a name side by side, so that there are enough channels for one in a thousand. DENSER
    has an outlier channel in each of them.
    """
    wide = [torch.cat(list(of_name), 1) for of_name in trained]
    narrow = [x for of_name in trained for x in of_name]
    gaussian = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    return {
        MADE: [with_outliers(x, seed) for seed, x in enumerate(wide)],
        DENSER: [with_outliers(x, seed) for seed, x in enumerate(narrow)],
        GAUSSIAN: [gaussian],
        OUTLIERS: [with_outliers(gaussian)],
    }


def measure(trained: Sequence[Sequence[Tensor]]) -> dict[str, list[Row]]:
    """A row for each distribution and rule for the base, group, or form. trained: as for distributions."""
    tried = {"rules": RULES, "groups": grouped(), "forms": compared()}
    found: dict[str, list[Row]] = {name: [] for name in tried}
    for kind, tensors in distributions(trained).items():
        for name, forms in tried.items():
            found[name] += [{"distribution": kind, **row} for row in tallied(tensors, forms)]
    return found
