"""Self-attention with heads sharded over tensor-parallel ranks: MHA, GQA and MQA, RoPE, QK-norm, packed documents."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops
from tpformer.config import check_heads, check_rope_scaling
from tpformer.kernels.rope.reference import RopeScaling
from tpformer.ops.attention import check_window
from tpformer.ops.sequence import flat_rows

from .cache import LayerCache
from .children import Features, call_heads, enter, leave
from .linear import ColumnParallelLinear, RowParallelLinear
from .module import ParallelModule
from .norm import RMSNorm
from .positions import Positions, positions_of
from .tensor_parallel import TensorParallel


class SelfAttention(ParallelModule):
    """Self-attention: one gather, q/k/v projections for this rank's heads, attention, output projection.

    Layout:  x and result (tokens / t, hidden_size) with sequence_parallel, else (tokens, hidden_size), equal on all
             ranks; leading dims are flattened, batch first. With sequence_parallel x may also be
             (batch, seq / t, hidden_size), a slice of every sample; q, k, v and the result are then copied into the
             order of samples and back. q_proj, k_proj, v_proj are Shard(0) by heads, o_proj is Shard(1).
             If t does not divide n_kv_heads, k_proj and v_proj are Replicate: each rank computes the key and value
             heads that its queries need, and their gradients are partial sums over the tp axis. In FP8 they are added
             up before they are quantised, which is an all-reduce of keys' and values' gradients in the backward.
             On context-parallel ranks `tokens` are the own ones (Positions.own_tokens), and `positions` is needed.
    Communication, per rank: one ops.column_linear (one gather for q, k and v) and one ops.row_linear; that of
             ops.context_attention on context-parallel ranks.
    is_causal=False: every token attends to all of its sample or document, as in BERT.
    head_dim: features of a head; unset, hidden_size / n_heads. q_proj is (n_heads * head_dim, hidden_size), o_proj the
             other way round.
    qk_norm: q_norm and k_norm, RMSNorms with weights (head_dim,), norm each head's queries and keys before RoPE, as in
             Qwen 3. The weights are Replicate, and their gradients always partial sums over the tp axis: ranks have
             different heads. Queries and keys before the norm are then kept for the backward, too, which is
             2 (n_heads + n_kv_heads) head_dim / t bytes for each token in 16 bits. norm_eps is theirs.
    qkv_bias: biases of q_proj, k_proj and v_proj; unset, `bias`, as o_proj has.
    rope_scaling: lower frequencies for long texts, as in Llama 3.1.
    sliding_window: a token attends to itself and the sliding_window - 1 tokens before it, as in Mistral. A CPU then
             makes a mask of seq^2 elements in every call, and keeps it for the backward.
    Errors:  ValueError if heads cannot be split over ranks or key-value heads, if `positions` does not fit x, and for a
             window below 1 or without is_causal, or an impossible rope_scaling, or one without rope_base.
    """

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
        is_causal: bool = True,
        sliding_window: int | None = None,
        rope_base: float | None = None,
        rope_interleaved: bool = False,
        rope_scaling: RopeScaling | None = None,
        bias: bool = True,
        qkv_bias: bool | None = None,
        init_std: float | None = None,
        output_init_std: float | None = None,
        tp: TensorParallel | DeviceMesh | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(tp)
        self.n_heads, self.n_kv_heads = n_heads, n_heads if n_kv_heads is None else n_kv_heads
        self.is_causal, self.sliding_window = is_causal, sliding_window
        self.rope_base, self.rope_interleaved, self.rope_scaling = rope_base, rope_interleaved, rope_scaling
        check_window(sliding_window, is_causal)
        if not is_causal and self.tp.shares_tokens is not None:
            raise ValueError(f"is_causal=False on {self.tp}: context parallelism is for causal attention, so leave it")
        if rope_base is not None and not rope_base > 0:
            raise ValueError(f"rope_base={rope_base}: its powers are wavelengths, so give a number above 0")
        if rope_scaling is not None:
            check_rope_scaling(*rope_scaling)
            if rope_base is None:
                raise ValueError(f"{rope_scaling} without rope_base would scale nothing: give rope_base, too")
        rope = rope_base is not None
        check_heads(hidden_size, n_heads, self.n_kv_heads, self.tp.size, rope=rope, head_dim=head_dim)
        self.head_dim = head_dim or hidden_size // n_heads
        place: dict = {"tp": self.tp, "device": device, "dtype": dtype}
        bias_in = bias if qkv_bias is None else qkv_bias
        column = partial(
            ColumnParallelLinear, hidden_size, bias=bias_in, init_std=init_std, tp=self.tp, device=device, dtype=dtype
        )
        self._features = self._own_features()
        self._kv_uses = self._own_kv_uses()
        keys, used, most, lower = self._features[1], None, None, self.kv_heads_needed(self.tp.rank - 1)[1]
        if self.n_kv_heads % self.tp.size:
            needed = (self.kv_heads_needed(rank) for rank in range(self.tp.size))
            used, most = keys.used, max(last - first for first, last in needed) * self.head_dim
        self.shares_gather = ("q_proj", "k_proj", "v_proj")
        self.q_proj = column(self._features[0].total)
        of_keys = partial(column, keys.total, used_rows=used, most_rows=most, lower_rows=lower * self.head_dim)
        self.k_proj, self.v_proj = of_keys(), of_keys()
        norms = (RMSNorm(self.head_dim, norm_eps, of_heads=True, **place) if qk_norm else None for _ in range(2))
        self.q_norm, self.k_norm = norms
        self.o_proj = RowParallelLinear(
            n_heads * self.head_dim, hidden_size, bias=bias, init_std=output_init_std, **place
        )

    def kv_heads_needed(self, rank: int) -> tuple[int, int]:
        """The key-value heads [first, last) that a tp rank's query heads attend with."""
        queries, group = self.n_heads // self.tp.size, self.n_heads // self.n_kv_heads
        first = rank * queries
        return first // group, (first + queries - 1) // group + 1

    def _own_kv_uses(self) -> list[int] | None:
        """How many own query heads in a row each key-value head serves that the rank needs.

        None if they serve equally many: SDPA then pairs them by itself.
        """
        queries, group = self.n_heads // self.tp.size, self.n_heads // self.n_kv_heads
        first, last = self.kv_heads_needed(self.tp.rank)
        served_by = [(self.tp.rank * queries + q) // group for q in range(queries)]
        uses = [served_by.count(head) for head in range(first, last)]
        return None if len(set(uses)) == 1 else uses

    @property
    def attended_heads(self) -> int:
        """Key-value heads that this rank's query heads see, repeated ones included."""
        first, last = self.kv_heads_needed(self.tp.rank)
        return last - first if self._kv_uses is None else sum(self._kv_uses)

    def _spread(self, kv: Tensor) -> Tensor:
        """Key or value heads, repeated where needed, so that each serves equally many query heads in a row.

        By views: the host would wait for a GPU that is sent an index.
        """
        if self._kv_uses is None:
            return kv
        heads = zip(kv.split(1, 2), self._kv_uses, strict=True)
        return torch.cat([head.expand(-1, -1, uses, -1) for head, uses in heads], 2)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Positions | None = None,
        key_padding_mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attention of x, laid out as the class says; result like x.

        positions: needed for packed documents, and if x has no batch dim. key_padding_mask: (batch, seq) bool, equal on
        all ranks, as Positions takes it. If several layers need it, give it to one Positions for all.
        cache: x continues the samples whose keys and values it has, and adds its own. positions.offset says how many
        tokens each sample has there. Only for causal attention without sequence shards and gradients (LayerCache).
        """
        positions = positions_of(x, positions, self.tp, key_padding_mask)
        y, _ = self.branch(flat_rows(x), positions, cache=cache)
        return y.view(x.shape)

    def branch(
        self,
        rows: Tensor,
        positions: Positions,
        norm: nn.Module | None = None,
        *,
        residual: bool = False,
        dropout: ops.Dropout | None = None,
        next_norm: nn.Module | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, ops.Normed | None]:
        """(dropout(attention(norm(rows))), next_norm of that); `residual` adds rows to the first.

        The second result is None without next_norm, or if it could not be made in the same pass.
        """
        queries, keys = self._features
        columns = [(self.q_proj, queries), (self.k_proj, keys), (self.v_proj, keys)]
        (q, k, v), carried, _ = enter(rows, norm, columns, self.tp, carry=residual)
        batch, seq, d = positions.batch, positions.seq_length, self.head_dim
        q, k, v = (positions.to_samples(y).reshape(batch, seq, y.shape[1] // d, d) for y in (q, k, v))
        q, k = self._norm_heads(q, k)
        if self.rope_base is not None:
            table, ids = positions.rope(d, self.rope_base, q.device, q.dtype, self.rope_scaling)
            q, k = ops.rope(q, k, table, ids, self.rope_interleaved)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast norms are float32
        y = self._attend(q, self._spread(k), self._spread(v), positions, cache)
        heads = positions.to_rows(y.reshape(batch * seq, q.shape[2] * d))
        return leave(
            heads,
            self.o_proj,
            self.tp,
            self.n_heads * d,
            residual=carried if residual else None,
            dropout=dropout,
            next_norm=next_norm,
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Positions, cache: LayerCache | None) -> Tensor:
        """Attention of q over k and v, or over those of the cache, to which k and v are added."""
        if cache is not None:
            if not self.is_causal or self.tp.sharded or positions.context is not None:
                raise ValueError(
                    f"a cache needs causal attention without sequence_parallel, but is_causal={self.is_causal} on "
                    f"{self.tp}: build the layers with TensorParallel(mesh, sequence_parallel=False)"
                )
            cache.extend(k, v, positions)
            if positions.offset:  # samples that begin are seen as without a cache
                first, mask = positions.visible(self.sliding_window, q.device)
                return ops.cached_attention(q, *cache.seen(first), mask)
        if (context := positions.context) is not None:
            documents = positions.segments()
            return ops.context_attention(q, k, v, documents, self.sliding_window, group=context.group)
        return ops.attention(q, k, v, positions.documents(q.device), self.is_causal, self.sliding_window)

    def _own_features(self) -> tuple[Features, Features]:
        """This rank's features of the queries, and of the keys and values."""
        d, queries = self.head_dim, self.n_heads // self.tp.size
        first, last = self.kv_heads_needed(self.tp.rank)
        q = slice(self.tp.rank * queries * d, (self.tp.rank + 1) * queries * d)
        return Features(q, self.n_heads * d), Features(slice(first * d, last * d), self.n_kv_heads * d)

    def _norm_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q_norm of the queries and k_norm of the keys, where there are such norms."""
        queries, keys = self._features
        if self.q_norm is not None:
            q = call_heads(self.q_norm, q, self.tp, queries, queries.used.start)
        if self.k_norm is not None:
            _, lower = self.kv_heads_needed(self.tp.rank - 1)  # lower ranks use heads [0, lower), before rank 0 none
            k = call_heads(self.k_norm, k, self.tp, keys, max(keys.used.start, lower * self.head_dim))
        return q, k
