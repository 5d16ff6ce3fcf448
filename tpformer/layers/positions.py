"""Positions: where each token of a batch is in its sample or document, for attention and position embeddings."""

import copy
import math
from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from tpformer.config import check_context_length
from tpformer.kernels.rope.reference import RopeScaling, rope_table
from tpformer.ops.context import Context, RankSegments, own_tokens

from .tensor_parallel import TensorParallel


class Positions:
    """A batch's shape, and the positions of its tokens. It is made once in a forward and shared by all layers.

    batch, seq_length: the flattened tokens are (batch * seq_length,), one sample after another.
    ids: (batch, seq_length) int64, the position of each token in its document. They count up by 1, and start again at 0
    where a packed document begins. None: every sample is one document.
    offset: without ids, the position of each sample's first token, if the sample continues a longer text. One number,
    or one for each sample.
    key_padding_mask: (batch, seq_length) bool, True where a token is padding, left or right of a sample's real tokens.
    It takes the place of ids: the real tokens are one document, and each run of padding is another, so that attention
    needs no mask. Results at padding are finite, but not those of torch.nn; do not read them.
    unread: how many tokens at the end of every sample are padding that no real token attends to. Their positions may
    lie beyond a position table.
    tables: where RoPE's tables are kept. Positions that share one, such as the steps of a generation, make them once.
    sequence_shards: 1 if the rows of layers are the flattened tokens; t if each rank holds (batch, seq_length / t), so
    that rows gathered from all ranks are in the order (shard, batch, seq_length / t). Layers set it by the shape of x.
    context: the ranks that share every sample's tokens, which `shared` sets. seq_length then counts the own tokens of a
    sample, sample_length all of them; ids stay those of whole samples, and key_padding_mask is that of own tokens.
    Errors: ValueError for ids that do not count like that, have another shape or come with an offset; for padding
    between real tokens; for a negative batch, seq_length or offset. On a GPU the check waits for the device, once.
    """

    def __init__(
        self,
        batch: int,
        seq_length: int,
        ids: Tensor | None = None,
        offset: int | Sequence[int] = 0,
        *,
        key_padding_mask: Tensor | None = None,
        unread: int = 0,
        tables: dict[tuple, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        offset, furthest = _same_offset(offset, batch)
        if min(batch, seq_length, furthest) < 0:
            raise ValueError(f"batch={batch}, seq_length={seq_length}, offset={offset}: none may be negative")
        if key_padding_mask is not None:
            if ids is not None:
                raise ValueError("key_padding_mask beside ids: let ids restart at 0 where padding begins and ends")
            ids = padded_ids(key_padding_mask, batch, seq_length)
        elif ids is not None:
            if tuple(ids.shape) != (batch, seq_length):
                raise ValueError(
                    f"position ids of shape {tuple(ids.shape)} are not (batch, seq_length) = ({batch}, {seq_length}): "
                    f"give one for each token"
                )
            follows = (ids[:, 1:] == ids[:, :-1] + 1) | (ids[:, 1:] == 0)
            if bool((ids[:, :1] != 0).any()) or not bool(follows.all()):
                raise ValueError(
                    "position_ids must start at 0 in every sample and count up by 1 until the next document's 0: "
                    "a document cannot span two samples"
                )
        if ids is not None and offset:
            raise ValueError(f"offset={offset} is where whole samples begin: with ids, every document begins at 0")
        self.batch, self.seq_length, self.ids, self.offset = batch, seq_length, ids, offset
        self.reach = furthest + seq_length  # one more than the last position, without ids
        self.key_padding_mask, self.unread = key_padding_mask, unread
        self._flat_ids: dict[tuple, Tensor] = {}
        self._tables = {} if tables is None else tables
        self._slots: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._visible: dict[tuple, tuple[int, Tensor | None]] = {}
        self._documents: tuple[Tensor, int] | None = None
        self.sequence_shards = 1
        self._sharded: Positions | None = None
        self.context: Context | None = None
        self.sample_length = seq_length
        self._shared: Positions | None = None
        self._segments: RankSegments | None = None

    def shared(self, context: Context | None) -> "Positions":
        """The positions of this rank's tokens, of samples that context-parallel ranks share; made once for all layers.

        Errors: ValueError for samples that continue longer texts, and for a length that 2 * ranks does not divide.
        """
        if context is None or context == self.context:
            return self
        if self.context is not None:
            raise ValueError(
                f"positions of rank {self.context.rank} of {self.context.size} context-parallel ranks for other ranks, "
                f"{context.size} of them: make them of one mesh, or give whole samples' positions"
            )
        if self._shared is None or self._shared.context != context:
            if self.offset:
                raise ValueError(
                    f"offset={self.offset} on {context.size} context-parallel ranks: give whole samples, which begin "
                    f"at position 0"
                )
            check_context_length(self.seq_length, context.size)
            own = copy.copy(self)
            own.context, own.seq_length = context, self.seq_length // context.size
            if self.key_padding_mask is not None:
                own.key_padding_mask = own.own(self.key_padding_mask)
            self._shared = own
        return self._shared

    def own_tokens(self, device: torch.device | None = None) -> Tensor:
        """(seq_length,) int64: which tokens of every sample are this rank's, in the order of its rows."""
        if self.context is None:
            return torch.arange(self.sample_length, device=device)
        return own_tokens(self.sample_length, self.context.size, self.context.rank, device)

    def own(self, tokens: Tensor) -> Tensor:
        """This rank's of what whole samples have for each token, (batch, sample_length) -> (batch, seq_length)."""
        return tokens if self.context is None else tokens[:, self.own_tokens(tokens.device)]

    def segments(self) -> RankSegments | None:
        """This rank's segments of the documents of whole samples, made once for all layers; None without ids. The host
        waits for a GPU's ids, once."""
        if self.context is not None and self.ids is not None and self._segments is None:
            starts = [row.nonzero()[:, 0].tolist() for row in (self.ids == 0).cpu()]
            self._segments = RankSegments(starts, self.sample_length, self.context.size, self.context.rank)
        return self._segments

    def sequence_sharded(self, shards: int) -> "Positions":
        """The same positions for rows that come in `shards` shards of each sample; made once for all layers."""
        if self.batch < 2 or shards == self.sequence_shards:
            return self  # shards of one sample are slices of the flattened tokens
        if self._sharded is None or self._sharded.sequence_shards != shards:
            sharded = copy.copy(self)
            sharded.sequence_shards, self._sharded = shards, sharded
        return self._sharded

    def to_samples(self, rows: Tensor) -> Tensor:
        """All rows (tokens, ...) of the batch, one sample after another; a copy if there are several shards."""
        if self.sequence_shards == 1:
            return rows
        return rearrange(rows, "(t b s) ... -> (b t s) ...", t=self.sequence_shards, b=self.batch)

    def to_rows(self, tokens: Tensor) -> Tensor:
        """The rows in the layers' order again: undoes to_samples."""
        if self.sequence_shards == 1:
            return tokens
        return rearrange(tokens, "(b t s) ... -> (t b s) ...", t=self.sequence_shards, b=self.batch)

    def flat_ids(self, device: torch.device) -> Tensor:
        """(tokens,) int64 positions, one sample after another, in one storage for all layers."""
        key = (device, self.context)
        if key not in self._flat_ids:
            with torch.inference_mode(False):  # the tensor is kept, and may be used in training; so below
                if self.ids is not None:
                    flat = self.ids.reshape(-1).to(device)
                    flat = flat.clone() if flat.is_inference() else flat
                elif isinstance(self.offset, int):
                    flat = torch.arange(self.offset, self.reach, device=device).repeat(self.batch)
                else:
                    first = torch.tensor(self.offset, device=device)
                    flat = (first[:, None] + torch.arange(self.seq_length, device=device)).reshape(-1)
                if self.context is not None:
                    flat = self.own(flat.view(self.batch, self.sample_length)).reshape(-1)
            self._flat_ids[key] = flat
        return self._flat_ids[key]

    def slots(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The index (sample, position) of each token in a cache, (batch, 1) and (batch, seq_length) int64."""
        if device not in self._slots:
            samples = torch.arange(self.batch, device=device)[:, None]
            self._slots[device] = samples, self.flat_ids(device).view(self.batch, self.seq_length)
        return self._slots[device]

    def documents(self, device: torch.device) -> tuple[Tensor, int] | None:
        """(boundaries (n + 1,) int32, length of the longest) of the n documents of whole samples; None without ids, or
        without tokens."""
        if self.ids is None or not self.ids.numel():
            return None
        if self._documents is None:
            ids = self.ids.reshape(-1).to(device)
            with torch.inference_mode(False):
                starts = (ids == 0).nonzero()[:, 0]
                end = torch.tensor([ids.numel()], device=device)
                boundaries = torch.cat([starts, end]).to(torch.int32)
            self._documents = boundaries, int(boundaries.diff().max())
        return self._documents

    def needed(self, device: torch.device) -> int:
        """How many positions a table must have for all tokens that are read. Waits for the GPU if ids are on one."""
        documents = self.documents(device)
        return self.reach - self.unread if documents is None else documents[1]

    def rope(
        self,
        head_dim: int,
        base: float,
        device: torch.device,
        dtype: torch.dtype,
        scaling: RopeScaling | None = None,
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """((cos, sin), ids) for ops.rope: a table (positions, head_dim / 2) each, made once, and flat_ids."""
        key = (head_dim, base, device, dtype, scaling)
        held = len(self._tables[key][0]) if key in self._tables else -1
        if held < self.reach:
            with torch.inference_mode(False):
                length = max(self.reach, 2 * held)  # doubled, so that a long generation seldom makes it anew
                self._tables[key] = rope_table(length, head_dim, base, dtype, device, scaling)
        return self._tables[key], self.flat_ids(device)

    def visible(self, window: int | None, device: torch.device) -> tuple[int, Tensor | None]:
        """(first, mask): which of the positions from `first` to `reach` each token sees; made once for all layers.

        mask: (batch, seq_length, reach - first) bool, or (1, ...) if all samples have one offset. None: each token sees
        all of them.
        """
        key = (window, device)
        if key not in self._visible:
            lowest = self.offset if isinstance(self.offset, int) else min(self.offset)
            first, mask = 0 if window is None else max(0, lowest + 1 - window), None
            if self.seq_length > 1 or not isinstance(self.offset, int):
                own = self.flat_ids(device).view(self.batch, self.seq_length)[..., None]
                own = own[:1] if isinstance(self.offset, int) else own
                position = torch.arange(first, self.reach, device=device)
                mask = position <= own if window is None else (position <= own) & (position > own - window)
            self._visible[key] = first, mask
        return self._visible[key]


def _same_offset(offset: int | Sequence[int], batch: int) -> tuple[int | tuple[int, ...], int]:
    """(the offset, one number if all samples have the same; the largest, or the smallest if one is negative)."""
    if isinstance(offset, int):
        return offset, offset
    offsets = tuple(offset)
    if len(offsets) != batch:
        raise ValueError(f"offset has {len(offsets)} numbers for batch={batch}: give one for each sample")
    if len(set(offsets)) == 1:
        return offsets[0], offsets[0]
    return offsets, min(offsets) if min(offsets, default=0) < 0 else max(offsets, default=0)


def padded_ids(padding: Tensor, batch: int, seq_length: int) -> Tensor:
    """Position ids (batch, seq_length) int64 of a key_padding_mask. In a sample the real tokens are one document, and
    each run of padding is another."""
    if tuple(padding.shape) != (batch, seq_length) or padding.dtype != torch.bool:
        raise ValueError(
            f"key_padding_mask is {tuple(padding.shape)} {padding.dtype}: give (batch, seq_length) = "
            f"({batch}, {seq_length}) bool, True where a token is padding"
        )
    begins = torch.ones_like(padding)
    begins[:, 1:] = padding[:, 1:] != padding[:, :-1]
    if bool(((begins & ~padding).sum(1) > 1).any()):
        raise ValueError("key_padding_mask has padding between real tokens of a sample: move it to their left or right")
    token = torch.arange(seq_length, device=padding.device)
    return token - (begins * token).cummax(1).values


def positions_of(
    x: Tensor, positions: Positions | None, tp: TensorParallel, key_padding_mask: Tensor | None = None
) -> Positions:
    """The positions of x's tokens, in the order of its rows.

    Without `positions` they follow from the shape of x, which is (batch, seq, hidden), or (batch, seq / t, hidden) with
    sequence parallelism, and from the key_padding_mask. On context-parallel ranks `positions` are those of whole
    samples, or `shared` ones, and the result is `shared`.
    Errors: ValueError if x does not tell its batch and length, does not fit the positions, or comes with both positions
    and key_padding_mask; on context-parallel ranks without positions.
    """
    t, shape, context = tp.size if tp.sharded else 1, tuple(x.shape[:-1]), tp.shares_tokens
    if context is not None:
        if positions is None:
            raise ValueError(
                f"x of shape {tuple(x.shape)} on {context.size} context-parallel ranks does not tell whether it is a "
                f"rank's tokens: pass positions=Positions(batch, seq_length) of whole samples"
            )
        positions = positions.shared(context)
    elif positions is not None and positions.context is not None:
        raise ValueError(
            f"positions of one of {positions.context.size} context-parallel ranks for a layer on {tp}: build the layer "
            f"with a TensorParallel of that context"
        )
    if positions is None:
        if x.ndim != 3:
            raise ValueError(
                f"x of shape {tuple(x.shape)} does not tell batch from sequence here: pass positions=Positions(batch, "
                f"seq_length), or x as (batch, seq, hidden)"
            )
        positions = Positions(shape[0], shape[1] * t, key_padding_mask=key_padding_mask)
    elif key_padding_mask is not None:
        raise ValueError("key_padding_mask beside positions: give it once, as Positions(..., key_padding_mask=...)")
    batch, seq = positions.batch, positions.seq_length
    if t > 1 and x.ndim == 3 and (shape[0], shape[1] * t) == (batch, seq):
        return positions.sequence_sharded(t)
    whole = (shape[0] * t, *shape[1:]) if shape else (t,)  # all ranks' x, if it is a slice of the flattened tokens
    if x.ndim == 3:
        fits = whole == (batch, seq)
    else:
        fits = math.prod(whole) == batch * seq and (t == 1 or x.ndim < 3)
    if fits:
        return positions
    fitting = f"({batch}, {seq}, hidden) or ({batch * seq}, hidden)"
    if t > 1:
        fitting = (
            f"({batch}, {seq} / {t}, hidden), ({batch} / {t}, {seq}, hidden) or ({batch * seq} / {t}, hidden) to each "
            f"of {t} tensor-parallel ranks"
        )
    of = "" if positions.context is None else f", the own part of {positions.sample_length} tokens"
    raise ValueError(
        f"x of shape {tuple(x.shape)} has {math.prod(shape)} rows that are not those of "
        f"Positions(batch={batch}, seq_length={seq}){of}: give {fitting}"
    )
