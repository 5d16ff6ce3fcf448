"""Dropout without a stored mask: where its random bits come from, and the stand-alone operation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tpformer.kernels.dropout.reference import dropout_apply


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """One dropout site in one step, the same bits in every layout.

    p: probability of zeroing; key: 64 bits from philox_key(seed, step, layer, site); sample_index (batch,) int64: the
    global index of each sample in the batch; seq_length: tokens per sample; first_token: index, among the batch's
    flattened tokens, of this rank's first row (0 unless the rows are a sequence shard).
    """

    p: float
    key: int
    sample_index: Tensor
    seq_length: int
    first_token: int = 0

    def starts(self, rows: int, hidden: int, device: torch.device) -> Tensor:
        """(rows,) int64: the global index of the first element of each of this rank's rows."""
        token = torch.arange(self.first_token, self.first_token + rows, device=device)
        sample = self.sample_index.to(device)[token // self.seq_length]
        return (sample * self.seq_length + token % self.seq_length) * hidden

    def apply(self, x: Tensor) -> Tensor:
        """Dropout of rows x (tokens, hidden); also its backward (the map is linear and diagonal)."""
        return dropout_apply(x, self.starts(len(x), x.shape[-1], x.device), self.key, self.p)


class DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, site):
        ctx.site = site
        return site.apply(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.site.apply(dy), None


def dropout(x: Tensor, site: Dropout | None) -> Tensor:
    """Dropout of rows x (tokens, hidden), or x itself for None. Saves nothing; no communication."""
    return x if site is None else DropoutFunction.apply(x, site)
