"""Embedding lookup with the vocabulary sharded over the tensor-parallel group."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from .sequence import reduce_rows
from .uncompiled import uncompiled


@uncompiled
def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    first: int = 0,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> Tensor:
    """Rows of the whole vocabulary's table for ids (tokens,) int64, from each rank's slice of it.

    Shapes:  weight (V_local, N), the entries first ... first + V_local - 1; ids equal on all ranks; result
             (tokens / t, N) with sequence_parallel, else (tokens, N).
    Communication, per rank, B = tokens * N * itemsize: forward reduce-scatter B, backward all-gather B; without
             sequence_parallel forward all-reduce B, backward none.
    Source:  Shoeybi et al. 2019 (arXiv:1909.08053)
    """
    if group is None or group.size() == 1:
        return F.embedding(ids, weight)
    local = ids - first
    elsewhere = (local < 0) | (local >= len(weight))
    rows = F.embedding(local.masked_fill(elsewhere, 0), weight)
    return reduce_rows(torch.where(elsewhere[:, None], 0, rows), group, sequence_parallel)
