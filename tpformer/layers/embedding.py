"""Token embedding with a sharded vocabulary, learned positions, and the output head over the same shards."""

from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops
from tpformer.config import check_positive
from tpformer.distributed.dtensor import is_dtensor
from tpformer.ops.cross_entropy import IGNORE_INDEX
from tpformer.ops.embedding import padding_entry
from tpformer.ops.sequence import flat_rows
from tpformer.torch_private import (
    WEIGHT_NORMS,
    backward_hooks,
    forward_hooks,
    forward_pre_hooks,
    is_own_parameter,
)

from .children import keeps, others_hook
from .module import Normal, ParallelModule, check_plain
from .positions import Positions, positions_of
from .tensor_parallel import TensorParallel


def padded_vocab(vocab_size: int, multiple: int) -> int:
    """Rows of a vocabulary table: vocab_size rounded up to `multiple`, whatever the layout."""
    return -(-vocab_size // multiple) * multiple


def _divides_by_rows(table: nn.Module) -> bool:
    """Whether torch's weight_norm, as parametrization or hook, divides each row of a table's weight by its norm."""
    found: list = [*table.modules(), *forward_pre_hooks(table).values()]
    return any(type(each).__name__ in WEIGHT_NORMS and each.dim == 0 for each in found)


def check_lookup(embedding: nn.Embedding) -> None:
    """ValueError for options of an nn.Embedding that a sharded table lacks."""
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, option):
            raise ValueError(
                f"an nn.Embedding with {option}={getattr(embedding, option)} cannot be sharded: build it without "
                f"{option}"
            )


class _VocabParallel(ParallelModule):
    """A table (padded vocabulary, hidden), Shard(0) on the tp axis; rows from vocab_size on are zero."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        vocab_multiple: int = 128,
        init_std: float = 0.02,
        zero_row: int | None = None,
        weight: bool = True,
        tp: TensorParallel | DeviceMesh | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(tp)
        check_positive(vocab_size=vocab_size, hidden_size=hidden_size, vocab_multiple=vocab_multiple)
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.rows = padded_vocab(vocab_size, vocab_multiple)
        self.width = -(-self.rows // self.tp.size)  # table rows of a rank, fewer on the last
        if weight:
            initial = Normal(init_std, vocab_size, zero_row)
            self.add_parameter("weight", (self.rows, hidden_size), initial, shard=0, device=device, dtype=dtype)
            self.reset_parameters()
        else:
            self.register_parameter("weight", None)

    def local(self, name: str, partial: bool = False) -> Tensor | None:
        if not is_own_parameter(self, name) and self.rows > self.vocab_size and _divides_by_rows(self):
            raise ValueError(
                f"weight_norm divides each row by its norm, which is 0 in the {self.rows - self.vocab_size} rows that "
                f"pad this table of vocab_size={self.vocab_size}: build it with a vocab_multiple that divides "
                f"{self.vocab_size}, such as 1"
            )
        return super().local(name, partial)

    def vocab_slice(self) -> ops.VocabSlice:
        """Which entries of the vocabulary this rank holds."""
        return ops.VocabSlice(self.tp.rank * self.width, self.width, self.vocab_size)


class VocabParallelEmbedding(_VocabParallel):
    """nn.Embedding with the vocabulary sharded.

    Layout:  weight (vocab_size rounded up to vocab_multiple, hidden_size) is Shard(0) on the tp axis, padding rows
             zero; ids (...) int64, equal on all ranks; result (tokens / t, hidden_size) with sequence_parallel, else
             (..., hidden_size), equal on all ranks.
    Communication, per rank, B = tokens * hidden_size * itemsize: forward reduce-scatter B, backward all-gather B;
             without sequence_parallel forward all-reduce B, backward none.
    padding_idx: as in nn.Embedding, an entry whose row starts at zero and gets no gradient. Negative ones count from
             the end.
    Errors:  ValueError for a padding_idx outside the vocabulary; for ids, those of ops.vocab_parallel_embedding.
    """

    def __init__(self, vocab_size: int, hidden_size: int, padding_idx: int | None = None, **options: Any) -> None:
        self.padding_idx = padding_entry(padding_idx, vocab_size)
        super().__init__(vocab_size, hidden_size, zero_row=self.padding_idx, **options)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, tp: TensorParallel | DeviceMesh | None = None, **options: Any
    ) -> Self:
        """A layer with a copy of an nn.Embedding's table, which all ranks hold whole, without rows of padding.

        options: the constructor's. No communication. Errors: TypeError for a module with a forward of its own,
        ValueError for max_norm, scale_grad_by_freq and sparse.
        """
        check_plain(embedding, nn.Embedding)
        check_lookup(embedding)
        options = {"device": "meta", "dtype": embedding.weight.dtype, **options}
        sizes = embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx
        return cls(*sizes, vocab_multiple=1, tp=tp, **options).filled_from(embedding)

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ids (...): (tokens / t, hidden_size) with sequence_parallel, else (..., hidden_size)."""
        rows = ops.vocab_parallel_embedding(
            ids.reshape(-1),
            self.local("weight"),
            self.vocab_slice(),
            padding_idx=self.padding_idx,
            group=self.tp.group,
            sequence_parallel=self.tp.sequence_parallel,
        )
        return rows if self.tp.sharded else rows.view(*ids.shape, rows.shape[-1])


class PositionEmbedding(ParallelModule):
    """Learned absolute positions, added to this rank's rows.

    Layout:  weight (seq_length, hidden_size) is Replicate on the tp axis; x as for SelfAttention.
             No communication; with sequence_parallel the gradient is partial.
    Errors:  ValueError if `positions` does not fit x, or has a position for which the table has no row.
    """

    def __init__(
        self,
        seq_length: int,
        hidden_size: int,
        *,
        init_std: float = 0.02,
        tp: TensorParallel | DeviceMesh | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(tp)
        check_positive(seq_length=seq_length, hidden_size=hidden_size)
        initial = Normal(init_std)
        self.add_parameter("weight", (seq_length, hidden_size), initial, shard=None, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """x plus, for each token, the table's row of the token's position; result like x."""
        weight: Tensor = self.local("weight", partial=self.tp.sequence_parallel)
        positions = positions_of(x, positions, self.tp)
        beyond = positions.reach > len(weight)
        if beyond and (needed := positions.needed(x.device)) > len(weight):
            raise ValueError(
                f"tokens stand at positions up to {needed - 1}, but this PositionEmbedding has {len(weight)} of them: "
                f"shorten the samples, or build it with seq_length={needed}"
            )
        plain = positions.ids is None and positions.context is None and not positions.offset
        if plain and not self.tp.sharded and not beyond:
            samples = x.reshape(positions.batch, positions.seq_length, x.shape[-1])
            return (samples + weight[: positions.seq_length]).view(x.shape)
        ids = positions.to_rows(positions.flat_ids(x.device))
        if self.tp.sharded:
            ids = ids.chunk(self.tp.size)[self.tp.rank]
        return x + F.embedding(ids.clamp(max=len(weight) - 1) if beyond else ids, weight).view(x.shape)


class LMHead(_VocabParallel):
    """The output projection onto a sharded vocabulary, preceded by the final norm.

    Layout:  weight as in VocabParallelEmbedding; with `weight=False` there is none, and each call gives a `tied` one.
             x (tokens / t, hidden_size) with sequence_parallel, else (..., hidden_size).
             Without targets the result is this rank's logits (..., V_local), without columns of padding: V_local is
             vocab_slice().valid, which is 0 on a rank that holds only padding.
             With targets (...) it is the loss, a scalar that is equal on all ranks. ignore_index, reduction,
             label_smoothing and z_loss are those of ops.linear_cross_entropy.
    Communication, per rank: that of ops.column_linear for logits, carried by `tp.transport`; that of
             ops.linear_cross_entropy for the loss.
    Errors:  those of ops.linear_cross_entropy; ValueError for a table that is missing or is not this rank's rows, and
             for a sequence shard with more than two dims.
    `chunk_tokens`: as in ops.linear_cross_entropy, equal on all ranks; None takes its default.
    """

    chunk_tokens: int | None = None

    def forward(
        self,
        x: Tensor,
        *,
        norm: ops.Norm | None = None,
        targets: Tensor | None = None,
        tied: Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
        reduction: str = "sum",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Logits of norm(x), or with targets their loss. tied: this rank's rows of a table to use instead of weight."""
        if x.ndim != 2 and self.tp.sharded:
            raise ValueError(
                f"x is {tuple(x.shape)}, but with sequence_parallel a rank has a slice of the flattened tokens: give "
                f"x.reshape(-1, {x.shape[-1]}) where it is such a slice, or build the layers without sequence_parallel"
            )
        weight, rows = self._table(tied), flat_rows(x)
        if targets is None:
            # the table's padding rows take part, because they keep the GEMM aligned
            transport = self.tp.in_16_bits.column_transport(rows, self.width)
            (logits,) = ops.column_linear(rows, [weight], norm=norm, transport=transport)
            logits = logits[:, : self.vocab_slice().valid]
            return logits if x.ndim == 2 else logits.view(*x.shape[:-1], logits.shape[1])
        terms: dict = {"label_smoothing": label_smoothing, "z_loss": z_loss, "chunk_tokens": self.chunk_tokens}
        terms |= {"ignore_index": ignore_index, "reduction": reduction}
        terms |= {"norm": norm, "group": self.tp.group, "sequence_parallel": self.tp.sequence_parallel}
        if x.ndim != 2 and targets.shape == x.shape[:-1]:
            targets = targets.reshape(-1)
        return ops.linear_cross_entropy(rows, weight, targets, self.vocab_slice(), **terms)

    def _table(self, tied: Tensor | None) -> Tensor:
        weight = self.local("weight") if tied is None else tied
        if weight is None:
            raise ValueError(
                "this LMHead has no table of its own (weight=False): give each call one, tied=..., or build it with "
                "weight=True (a GPT: tie_embeddings=False)"
            )
        shape = (min(self.width, self.rows - self.vocab_slice().first), self.hidden_size)
        if is_dtensor(weight) or weight.shape != shape:
            raise ValueError(
                f"the output table is a {type(weight).__name__} {tuple(weight.shape)}, but has to be this rank's plain "
                f"{shape}: if FSDP2 shards it, call unshard() of its module first"
            )
        return weight


def makes_loss(head: nn.Module) -> bool:
    """Whether a GPT's lm_head may make the loss itself, without ever making all logits.

    It may if it is an LMHead, nobody has replaced its forward, and no hook sees its output.
    """
    hooked = others_hook(forward_hooks(head)) or backward_hooks(head)
    return keeps(head, LMHead, "forward") and not hooked
