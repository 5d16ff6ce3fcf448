"""Embedding lookup with the vocabulary sharded over the tensor-parallel group."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.kernels.cross_entropy.reference import VocabSlice
from tpformer.kernels.operands import FLOATS, INTEGERS, require, require_within

from .calls import called
from .sequence import reduce_rows
from .uncompiled import uncompiled


def check_ids(ids: Tensor, entries: int, what: str, ignored: int | None = None) -> None:
    """ValueError, on a CPU, for an id outside the vocabulary that is not `ignored`: no rank would have a row for it.

    On a GPU the check would wait for the device, and a fake tensor (planner.dry_run) has no values: both pass.
    """
    if ignored is not None and ids.device.type == "cpu":
        ids = ids.masked_fill(ids == ignored, 0)
    require_within(what, ids, 0, entries, "the vocabulary ")


def check_slice(what: str, held: int, vocab: VocabSlice, group: ProcessGroup | None) -> None:
    """ValueError unless this is the rank's slice, all ranks' slices are the whole vocabulary, and `held` columns of
    logits or rows of a table can be those of the slice: its entries, and padding up to its width."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    first, width, entries = vocab
    if first != rank * width or width * ranks < entries:
        raise ValueError(
            f"{vocab} on rank {rank} of {ranks}: slices of one width cover the vocabulary in the order of ranks, so "
            f"give a width of at least {-(-entries // ranks)} and first = rank * width"
        )
    if not vocab.valid <= held <= width:
        raise ValueError(
            f"{held} {what}, but {vocab} has {vocab.valid} entries here: give those of this rank alone, all of them, "
            f"and of padding at most as many as make it {width}"
        )


def absent(ids: Tensor, vocab: VocabSlice) -> Tensor:
    """(tokens, 1) bool: which ids lie outside the whole vocabulary."""
    return ((ids < 0) | (ids >= vocab.entries))[:, None]


def padding_entry(padding_idx: int | None, entries: int) -> int | None:
    """The entry of padding, negative ones counted from the vocabulary's end. ValueError for one outside of it."""
    if padding_idx is None:
        return None
    if not -entries <= padding_idx < entries:
        raise ValueError(f"padding_idx={padding_idx} is outside the vocabulary [0, {entries - 1}]")
    return padding_idx % entries


def of_slices(vocab: VocabSlice) -> str:
    """What of a slice is equal on all ranks."""
    return f"{vocab.entries} entries in slices of {vocab.width}"


@uncompiled
def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    vocab: VocabSlice,
    *,
    padding_idx: int | None = None,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> Tensor:
    """The embedding of ids (tokens,) int64, where each rank holds a slice of the vocabulary's table.

    Shapes:  weight (V_local, N), the rows of this rank's entries, maybe followed by padding; ids equal on all ranks;
             result (tokens / t, N) with sequence_parallel, else (tokens, N). The row of padding_idx, negative ones
             from the vocabulary's end, gets no gradient.
    Communication, per rank, B = tokens * N * itemsize: forward reduce-scatter B, backward all-gather B; without
             sequence_parallel forward all-reduce B, backward none.
    Errors:  ValueError for a table that is not this rank's rows (a whole one, say), for a slice that is not this
             rank's, a padding_idx outside the vocabulary, for other shapes and dtypes, and on a CPU for an id outside
             the vocabulary. On a GPU the check would wait for the device: there such an id's row is NaN, or, on one
             rank and beyond the table's padding, torch's own assertion fails.
    Source:  Shoeybi et al. 2019 (arXiv:1909.08053)
    """
    require(
        "vocab_parallel_embedding", weight, ("ids", ids, (ids.numel(),), INTEGERS),
        ("weight", weight, (weight.shape[0], weight.shape[-1]), FLOATS),
    )  # fmt: skip
    check_slice("rows of the table", weight.shape[0], vocab, group)
    check_ids(ids, vocab.entries, "token ids")
    padding_idx = padding_entry(padding_idx, vocab.entries)
    if group is None or group.size() == 1:
        rows = F.embedding(ids, weight, padding_idx)
        return rows.masked_fill(absent(ids, vocab), torch.nan) if ids.is_cuda and vocab.valid < len(weight) else rows
    shape = (len(ids), weight.shape[1])
    called(group, "vocab_parallel_embedding", shape, weight.dtype, True, (), (), of_slices(vocab))
    own = None if padding_idx is None or not 0 <= padding_idx - vocab.first < vocab.valid else padding_idx - vocab.first
    local = ids - vocab.first
    elsewhere = (local < 0) | (local >= vocab.valid)
    table = weight if len(weight) else F.pad(weight, (0, 0, 0, 1))  # torch looks up nothing in an empty table
    rows = F.embedding(local.masked_fill(elsewhere, 0), table, own)
    others = rows.new_zeros(len(ids), 1).masked_fill(absent(ids, vocab), torch.nan)
    return reduce_rows(torch.where(elsewhere[:, None], others, rows), group, sequence_parallel)
