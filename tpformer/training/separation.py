"""The documents of a run's samples: positions that restart, and how evenly context-parallel ranks share what attention
computes of them.

Belongs here: what follows from a batch's ids and the id that ends a document. data/boundaries.py checks datasets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpformer.config import RunConfig
from tpformer.ops.context import own_chunks


def document_positions(ids: Tensor, end_of_document: int) -> Tensor:
    """The position of each token in its document, for GPT.forward: int64 like ids, (batch, seq).

    A document begins with a sample, and after each id end_of_document, which is the last token of its own document. So
    a document that goes on in the next sample is two. No communication; the host waits for nothing.
    """
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, :-1] == end_of_document
    token = torch.arange(ids.shape[1], device=ids.device)
    return token - (begins * token).cummax(1).values


def busiest_pairs(position_ids: Tensor, ranks: int, microbatch_size: int, window: int | None) -> Tensor:
    """(the pairs of a query and a key on each microbatch's busiest context-parallel rank, all pairs): int64 (2,).

    Both are sums over microbatches. The busiest rank may be another in each of them, and the others wait for it at
    every layer. position_ids: (samples, seq), of microbatches one after another. No communication; the host waits for
    nothing.
    """
    samples, seq = position_ids.shape
    keys = (position_ids + 1).clamp(max=window or seq)  # that a query sees, itself among them
    chunks = keys.view(samples // microbatch_size, microbatch_size, 2 * ranks, -1).sum((1, 3))
    own = [own_chunks(ranks, rank) for rank in range(ranks)]
    found = torch.stack([chunks[:, early] + chunks[:, late] for early, late in own], 1)
    return torch.stack([found.amax(1).sum(), found.sum()])


def context_balance(pairs: Sequence[float], ranks: int) -> float:
    """ops.context_balance of a step's microbatches, their mean weighted by their pairs. pairs: busiest_pairs', of all
    data-parallel ranks."""
    busiest, together = pairs
    return busiest * ranks / together


def separation_notice(config: RunConfig) -> str | None:
    """A sentence for the log's first lines, if documents are separated; else None."""
    if not config.data.separate_documents:
        return None
    shared = config.parallel.context_parallel
    waits = f"; context_balance is how much the busiest of {shared} context-parallel ranks has to attend to"
    return (
        f"attention stays within a document, which the id {config.data.end_of_document} ends"
        f"{f'{waits}, over the mean' if shared > 1 else ''}"
    )
