"""GPT: token embedding, transformer blocks and output head. One module serves every preset and layout."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops
from tpformer.config import GPTConfig, check_context_length
from tpformer.layers import (
    DropoutKey,
    LMHead,
    ParallelModule,
    PositionEmbedding,
    Positions,
    TensorParallel,
    TransformerBlock,
    VocabParallelEmbedding,
    explain,
    init_weights,
)
from tpformer.layers.cache import require_cache
from tpformer.layers.children import Features, call_column, call_rows, fusable, fusable_norm, keeps
from tpformer.layers.embedding import makes_loss
from tpformer.layers.keep import KeepLayers
from tpformer.layers.keep_block import said_by_keep
from tpformer.layers.norm import NORMS
from tpformer.ops.cross_entropy import IGNORE_INDEX
from tpformer.ops.sequence import flat_rows

from .balance import BalanceLoss, over_context
from .blocks import transformer_blocks
from .cache import KVCache


def _check_batch(ids: Tensor, targets: Tensor | None) -> None:
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"token ids are {tuple(ids.shape)} {ids.dtype}: give an int64 tensor (batch, seq)")
    if targets is not None and targets.shape != ids.shape:
        raise ValueError(
            f"targets are {tuple(targets.shape)} for token ids {tuple(ids.shape)}: give one target for each id, "
            f"{IGNORE_INDEX} where no loss is wanted"
        )


class GPT(ParallelModule):
    """A decoder-only transformer.

    tp: the tensor-parallel mesh, of t ranks, with activations as sequence shards; or a TensorParallel, which can say
    otherwise. With a mesh, parameters are DTensors on its axis; with None they are plain tensors. Their global shapes
    and initial values are the same in both cases.
    Between layers, activations are rows of tokens: (batch * seq / t, hidden_size) with sequence_parallel.
    label_smoothing, z_loss: terms of the loss in training mode (ops.vocab_parallel_cross_entropy). Evaluation leaves
    them out.
    balance_loss: the coefficient of the layers' balance losses (ops.Balance), which are terms of the loss, too. A part
    that is not the last adds their gradients itself: set `balance.scale` before its forward.
    part: build only these consecutive layers, a pipeline stage. Layers are named by their global index. The first part
    has the embeddings; the last one has norm, lm_head and its own copy of a tied embed_tokens.
    seed: of the initial values and the dropout.
    device, dtype: unset, torch's defaults. If torch's default device is the CPU, the mesh's kind of device is taken.
    device="meta" builds without memory: then shard, call `to_empty(device=...)` and `init_weights()`.
    lm_head may be replaced, wrapped or hooked. It is then called for all logits, from which the loss is computed. A
    replacement that is not tensor-parallel computes all vocab_size features on every tp rank.
    What layers keep for the backward, `layers.keep` says: recomputation, packing, offload.
    Errors: ValueError for an unset vocabulary, and for heads that the layout cannot split. Nothing has been allocated
    by then.
    """

    recompute, pack_activations = said_by_keep("recompute"), said_by_keep("pack_activations")
    offload, regions = said_by_keep("offload_activations"), said_by_keep("recompute_interval")

    def __init__(
        self,
        config: GPTConfig,
        *,
        tp: TensorParallel | DeviceMesh | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        balance_loss: float = 0.0,
        part: range | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp, sequence_parallel=True)
        if config.vocab_size is None:
            raise ValueError("GPTConfig.vocab_size is unset: give it, or let a run take it from its data")
        config.check_ranks(self.tp.size, None if self.tp.experts is None else self.tp.experts.size())
        self.config, self.seed = config, seed
        self.keep = KeepLayers()  # how the layers run: layers.keep sets it
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.balance = BalanceLoss(balance_loss, self.tp)
        part = range(config.n_layers) if part is None else part
        self.is_first, self.is_last = part.start == 0, part.stop == config.n_layers
        tied, std = config.tie_embeddings, config.init_std
        # built on meta: init_weights makes the values, so that nothing is initialized twice
        place: dict = {"tp": self.tp, "device": "meta", "dtype": dtype}
        table: dict = {"vocab_multiple": config.vocab_multiple, "init_std": std, **place}
        self.embed_tokens: Any = None
        self.embed_positions: Any = None
        self.norm: Any = None
        self.lm_head: Any = None
        if self.is_first or (self.is_last and tied):
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, **table)
        if self.is_first and config.position == "learned":
            self.embed_positions = PositionEmbedding(config.seq_length, config.hidden_size, init_std=std, **place)
        self.layers = transformer_blocks(config, part, balance=balance_loss, **place)
        if self.is_last:
            self.norm = NORMS[config.norm](config.hidden_size, eps=config.norm_eps, **place)
            self.lm_head = LMHead(config.vocab_size, config.hidden_size, weight=not tied, **table)
            self.vocab = self.lm_head.vocab_slice()  # a head that replaces this one has the same slice
        device = self.device_for(device)
        if torch.device(device).type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Do what nn.Module does; a model that was saved before there was `keep` has its options as attributes."""
        super().__setstate__(state)
        found, offload = (self.__dict__.pop(name, None) for name in ("regions", "offload"))
        if "keep" not in self.__dict__:
            self.keep = KeepLayers(found or {}, offload)

    def init_weights(self) -> None:
        """Fill the parameters from (seed, name, global index), the same values in every layout."""
        init_weights(self, self.seed)

    def explain(self, tokens: int | None = None, dtype: torch.dtype | None = None) -> str:
        """The table of layers.explain: each linear's transport and the reason. All ranks call it.

        tokens: how many one forward has. Unset: those of one sample.
        """
        return explain(self, tokens or self.config.seq_length, dtype, seq_length=self.config.seq_length)

    def _pad(
        self, ids: Tensor, targets: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Pad the sequence at its end until the ranks can share the tokens. Causal attention never looks there.

        ValueError in training mode.
        """
        batch, seq = ids.shape
        multiple = self._multiple(batch)
        if seq % multiple == 0:
            return ids, targets, position_ids
        context = self.tp.shares_tokens
        if context is not None and (self.training or targets is None):
            check_context_length(seq, context.size)
            raise ValueError(
                f"{batch} samples of {seq} tokens cannot be shared by {self.tp}: make the length a multiple of "
                f"{multiple}"
            )
        if self.training:
            raise ValueError(
                f"batch * seq_length = {batch} * {seq} = {batch * seq} tokens cannot be split over "
                f"tensor_parallel={self.tp.size} ranks: make it a multiple of {self.tp.size}"
            )
        extra = -seq % multiple
        if position_ids is not None:
            position_ids = F.pad(position_ids, (0, extra), value=0)  # each one begins a document
        if targets is not None:
            targets = F.pad(targets, (0, extra), value=IGNORE_INDEX)
        return F.pad(ids, (0, extra)), targets, position_ids

    def _multiple(self, batch: int) -> int:
        """What must divide the tokens of a sample, so that ranks can share those of `batch` samples."""
        context, t = self.tp.shares_tokens, self.tp.size if self.tp.sharded else 1
        own = t // math.gcd(batch, t)
        return own if context is None else math.lcm(2 * context.size, context.size * own)

    def forward(
        self,
        inputs: Tensor,
        *,
        targets: Tensor | None = None,
        position_ids: Tensor | None = None,
        sample_index: Tensor | None = None,
        step: int | None = None,
        reduction: str = "sum",
        cache: KVCache | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Logits, or the loss when targets are given. A part that is not the last returns its rows.

        inputs: token ids (batch, seq) int64, equal on all tp ranks. A part that is not the first takes the rows of the
        part before: (batch * seq / t, hidden_size) with sequence_parallel, else (batch * seq, hidden_size).
        targets: (batch, seq) int64, equal on all tp ranks, -100 where no loss is wanted.
        position_ids: (batch, seq) int64, equal on all tp ranks; they restart at 0 where a packed document begins.
        sample_index, step: the samples' global indices (batch,) int64 and a number; together they fix the dropout in
        training. Without both, one rank draws it from torch's generator. Parts after the first need sample_index.
        cache: the inputs continue its samples, and are added to it. Only in eval mode, without gradients and sequence
        shards.
        lengths: with a cache, how many tokens of each row are real; the rest, on the right, is padding. The logits are
        then those of each row's last real token, (batch, 1, vocab_size).
        Result: without targets logits (batch, seq, vocab_size); on t > 1 ranks each has its own columns (LMHead). With
        targets the loss, a scalar in promote_types(dtype, float32), equal on all tp ranks: the sum over the tokens
        whose target is not -100, or their mean with reduction="mean".
        On context-parallel ranks all arguments are of whole samples, equal on them, and so is the loss. Rows and logits
        are those of the own tokens, (batch, seq / n, vocab_size) on n ranks, in the order of ops.own_tokens.
        Communication: that of the layers, and with targets an all-reduce of a scalar over context-parallel ranks.
        Errors: ValueError for ids, targets or position_ids of another shape or dtype, for ids outside the vocabulary
        (on a CPU), and for more tokens than learned positions. In training also for tokens that cannot be divided among
        the tp ranks. With dropout in training also where only one of sample_index and step is given, or, on several
        ranks, neither.
        """
        if cache is not None or lengths is not None:
            return self._extend(inputs, cache, lengths, targets, position_ids, sample_index, step)
        key = self._dropout_key(inputs, sample_index, step)
        if self.is_first:
            _check_batch(inputs, targets)
            wanted = inputs.shape[1]
            self._check_length(wanted)
            inputs, targets, position_ids = self._pad(inputs, targets, position_ids)
            batch, length = inputs.shape
            positions = Positions(batch, length, position_ids, unread=length - wanted).shared(self.tp.shares_tokens)
            x = self._embed(positions.own(inputs), positions, key)
        else:
            if sample_index is None:
                raise ValueError("a part after the first needs sample_index, which has one entry for each sample")
            context = self.tp.shares_tokens
            ranks = (self.tp.size if self.tp.sharded else 1) * (1 if context is None else context.size)
            wanted = len(inputs) * ranks // len(sample_index)
            positions = Positions(len(sample_index), wanted, position_ids).shared(context)
            x = inputs
        with self.balance.collected() as balance:
            x = self.keep.run(self.layers, x, positions, key)
        if self.lm_head is None:
            return self.balance.attached(x, balance)
        result = self._head(x, targets, positions, wanted, reduction)
        return result if targets is None else self.balance.added(result, balance, targets, reduction)

    def _extend(self, ids: Tensor, cache: KVCache | None, lengths: Sequence[int] | None, *others: Any) -> Tensor:
        """Logits of further tokens of the cache's samples: of all, or with lengths of each row's last one."""
        if any(other is not None for other in others):
            raise ValueError("a cache takes token ids and lengths only: leave the other arguments out")
        _check_batch(ids, None)
        batch, seq = ids.shape
        self._check_extend(cache, batch, seq, lengths)
        assert cache is not None
        positions = cache.positions(batch, seq)
        x = self._embed(ids, positions, None)
        for name, layer in self.layers.items():
            if not keeps(layer, TransformerBlock, "forward"):
                require_cache(layer, f"layers.{name}")
            memory = cache.layer(name)
            memory.reach = min(memory.reach, positions.reach - seq)
            x = layer(x, positions=positions, cache=memory)
            if memory.reach != positions.reach:
                raise ValueError(f"layers.{name} took a cache and left its tokens out: generate without a cache")
        cache.lengths = [old + (lengths[i] if lengths else seq) for i, old in enumerate(cache.lengths or [0] * batch)]
        if lengths is not None:
            last = [row * seq + length - 1 for row, length in enumerate(lengths)]
            x, positions = x[torch.tensor(last, device=x.device)], Positions(batch, 1)
        return self._head(x, None, positions, positions.seq_length, "sum")

    def _check_extend(self, cache: KVCache | None, batch: int, seq: int, lengths: Sequence[int] | None) -> None:
        if cache is None:
            raise ValueError("lengths without a cache: give cache=KVCache(), or leave lengths out")
        if not (self.is_first and self.is_last):
            raise ValueError("a pipeline stage takes no cache: generate with tensor_parallel ranks and the whole model")
        if self.tp.sharded or self.tp.shares_tokens is not None or self.tp.experts is not None:
            raise ValueError(
                f"a cache on {self.tp}: build the model with tp=TensorParallel(mesh, sequence_parallel=False)"
            )
        if self.training:
            raise ValueError("a cache in training mode: call model.eval() first")
        if seq < 1 or (lengths is not None and (len(lengths) != batch or not all(1 <= n <= seq for n in lengths))):
            raise ValueError(
                f"lengths={lengths} of a batch {(batch, seq)}: give each row's number of tokens, 1 to {seq}"
            )
        self._check_length(max(cache.lengths, default=0) + seq)

    def _check_length(self, tokens: int) -> None:
        if self.embed_positions is not None and tokens > self.config.seq_length:
            raise ValueError(
                f"{tokens} tokens per sample, but the model has {self.config.seq_length} learned positions"
            )

    def _dropout_key(self, inputs: Tensor, sample_index: Tensor | None, step: int | None) -> DropoutKey | None:
        if sample_index is not None and step is not None:
            return DropoutKey(self.seed, step, sample_index, self)
        if not self.training or self.config.dropout == 0:
            return None
        p = self.config.dropout
        if sample_index is None and step is None:
            return DropoutKey.drawn(self, p, inputs, len(inputs), instead="sample_index and step")
        given, missing = ("step", "sample_index") if sample_index is None else ("sample_index", "step")
        raise ValueError(
            f"dropout={p} in training needs {missing} beside {given}: together they say which elements a step drops"
        )

    def _embed(self, ids: Tensor, positions: Positions, key: DropoutKey | None) -> Tensor:
        x = flat_rows(self.embed_tokens(ids))
        if self.embed_positions is not None:
            x = self.embed_positions(x, positions=positions)
        return ops.dropout(x, self._embedding_dropout(key, x, positions))

    def _head(self, x: Tensor, targets: Tensor | None, positions: Positions, seq: int, reduction: str) -> Tensor:
        """Logits or loss. If the head was replaced, wrapped or hooked, the loss is computed from its logits."""
        head, vocab, own = self.lm_head, self.vocab, dict[str, Any]()
        if fusable_norm(self.norm) and fusable(LMHead, head):
            own["norm"] = self.norm.prologue(x.shape[-1])
        else:
            x = call_rows(self.norm, x, self.tp)
        shared = positions.context is not None
        terms: dict[str, Any] = {"reduction": "sum" if shared else reduction}
        if self.training:
            terms |= {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        wanted = None if targets is None else positions.own(targets).reshape(-1)
        with self._tied() as tied:
            if wanted is not None and makes_loss(head):
                loss = head(x, targets=wanted, **own, **tied, **terms)
            else:
                entries = Features(slice(vocab.first, vocab.first + vocab.valid), vocab.entries)
                logits = call_column(head, x, self.tp, entries, **own, **tied)
                if wanted is None:
                    return logits.unflatten(0, (positions.batch, positions.seq_length))[:, :seq]
                loss = ops.vocab_parallel_cross_entropy(logits, wanted, vocab, group=self.tp.group, **terms)
        if not shared or targets is None:
            return loss
        loss = over_context(loss, self.tp)
        if reduction == "sum":
            return loss
        counted = targets.ne(IGNORE_INDEX).sum()
        return torch.where(counted > 0, loss / counted.clamp(min=1), math.nan)

    @contextmanager
    def _tied(self) -> Iterator[dict[str, Tensor]]:
        """Yield the argument `tied` for an LMHead that uses the embedding's table; {} for any other head.

        FSDP2 keeps the table gathered in this context.
        """
        if not (self.config.tie_embeddings and isinstance(self.lm_head, LMHead)):
            yield {}
            return
        parts = list(self.embed_tokens.modules())  # others may have wrapped the embedding
        embedding = next((part for part in parts if isinstance(part, VocabParallelEmbedding)), None)
        if embedding is None:
            raise ValueError(
                f"lm_head is tied to the table of embed_tokens, but embed_tokens ({type(self.embed_tokens).__name__}) "
                f"contains no VocabParallelEmbedding: wrap the original one, or build with tie_embeddings=False"
            )
        sharded = [part for part in parts if hasattr(part, "unshard")]  # FSDP2 may free the table after its forward
        for part in sharded:
            part.unshard()
        yield {"tied": embedding.local("weight")}
        if not torch.is_grad_enabled():  # with gradients FSDP2 frees the table after the backward
            for part in sharded:
                part.reshard()

    def _embedding_dropout(self, key: DropoutKey | None, x: Tensor, positions: Positions) -> ops.Dropout | None:
        if key is None or not self.training or self.config.dropout == 0:
            return None
        shard = self.tp.rank if self.tp.sharded else 0
        return key.site(self.config.dropout, self, "embedding", x, positions, shard)
