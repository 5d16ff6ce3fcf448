"""Dropout without a stored mask, as an operation of its own, and where its random bits come from."""

import torch
from torch import Tensor

from tpformer.config import check_range
from tpformer.kernels.finish import Dropout
from tpformer.torch_private import Function

from .first_derivative import first_derivative
from .implementation import implementation
from .uncompiled import uncompiled
from .unsaved import check_unwritten, versions


def dropout_starts(sample_index: Tensor, seq_length: int, hidden: int, rows: slice) -> Tensor:
    """Dropout.start of some rows of a batch: the global index of each row's first element, the same in every layout.

    sample_index (batch,) int64: the global index of each sample. rows: a slice of the batch's flattened tokens; each
    token is a row of `hidden` elements. Result int64, one for each of the rows.
    """
    token = torch.arange(*rows.indices(len(sample_index) * seq_length), device=sample_index.device)
    return (sample_index[token // seq_length] * seq_length + token % seq_length) * hidden


def check_starts(site: Dropout | None, before: list[int] | None) -> None:
    """RuntimeError if the starts were written since the forward, whose `versions` of them are `before`: the mask would
    be another one."""
    if site is not None and before is not None:
        check_unwritten("dropout's start", before, site.start)


def told(site: Dropout | None) -> tuple[str, float, int] | None:
    """What ranks tell one another of a dropout (calls.py): its probability, and the remainder of its key. Every layer
    and step has another key, and whole ones would make a text each. Keys that differ have one remainder in 1 of 31
    calls."""
    return None if site is None else ("dropout", site.p, site.key % 31)


class DropoutFunction(Function):
    """y = mask * x / (1 - p) for x, y (tokens, hidden), mask drawn from (key, element index) with probability 1 - p.

    forward   y = mask * x / (1 - p)
    backward  dx = mask * dy / (1 - p), with the mask drawn again
    """

    @staticmethod
    def forward(ctx, x, site: Dropout):
        ctx.site, ctx.versions = site, versions(site.start)
        return implementation("dropout", x).dropout_apply(x, *site)

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        check_starts(ctx.site, ctx.versions)
        return implementation("dropout", dy).dropout_apply(dy, *ctx.site), None


@uncompiled
def dropout(x: Tensor, site: Dropout | None) -> Tensor:
    """Dropout of rows x (tokens, hidden), or x itself if site is None. Saves nothing; no communication.

    Errors: ValueError for a probability outside [0, 1). RuntimeError in the backward if `start` was written since.
    """
    if site is None:
        return x
    check_range("model.dropout", site.p, "dropout")
    return DropoutFunction.apply(x, site)
