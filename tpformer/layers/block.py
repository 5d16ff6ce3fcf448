"""The pre-norm transformer block."""

from typing import Any, Self

from torch import Tensor, nn

from tpformer import ops
from tpformer.config import FP8, check_range
from tpformer.ops.sequence import flat_rows

from .attention import SelfAttention
from .cache import LayerCache, require_cache
from .children import call_rows, fusable, keeps, unwrapped, why_called
from .dropout import DropoutKey
from .keep_block import Keep, said_by_keep
from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import MLP
from .module import ParallelModule
from .moe import Experts, MoE
from .norm import NORMS
from .positions import Positions, positions_of
from .router import Router

OWN = (SelfAttention, MLP, MoE, Router, Experts, ColumnParallelLinear, RowParallelLinear, *NORMS.values())


class TransformerBlock(ParallelModule):
    """x + dropout(attention(norm(x))), and then the same with the MLP in place of the attention.

    Layout:  x and result (tokens / t, hidden_size) or (batch, seq / t, hidden_size) with sequence_parallel, else
             (tokens, hidden_size) or (batch, seq, hidden_size), equal on all ranks.
    Communication, per rank, B = tokens * hidden_size * itemsize: with sequence_parallel the forward has 2 all-gathers
             and 2 reduce-scatters of B, the backward the same and 2 more all-gathers, because column inputs are
             gathered again; otherwise forward and backward each have 2 all-reduces of B.
    Memory:  as layers.keep says, at first 20 bytes * tokens * hidden / t in 16 bits with MHA, GELU and
             ffn = 4 * hidden, and statistics (Keep).
    Dropout: in training, if p > 0. With a `dropout_key` it is the same in every layout. Without one, on one rank only,
             it is drawn from torch's generator, as nn.Dropout's is.
    attention: a SelfAttention, as a rule; forward's `positions` and `key_padding_mask` are its. mlp: an MLP or a MoE.
    Both norms: a LayerNorm or RMSNorm. All lie on the same tensor-parallel ranks. transformer_block makes all of sizes.
    A child is called as a module, not fused, if it has a hook, a parametrization or a replaced forward, or is of
    another class; explain() lists such children, and the others stay fused. Such a child gets rows
    (tokens, hidden_size), and an attention also gets positions=Positions. A module that is not of this library gets all
    rows and features on every rank, and returns all of them.
    Errors:  ValueError for parts on different ranks, and for dropout outside [0, 1).
    """

    recompute, pack_activations = said_by_keep("recompute"), said_by_keep("pack_activations")

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """TypeError for sizes, of which transformer_block makes a block."""
        sizes = args[:1] and isinstance(args[0], int) or "hidden_size" in options
        if sizes and cls.__init__ is TransformerBlock.__init__:
            raise TypeError(
                f"{cls.__name__} takes its parts, an attention, an MLP and two norms: "
                f"tpformer.layers.transformer_block(hidden_size, n_heads, ...) makes one of sizes"
            )
        return super().__new__(cls)

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        input_layernorm: nn.Module,
        post_attention_layernorm: nn.Module,
        *,
        dropout: float = 0.0,
    ) -> None:
        parts = (attention, mlp, input_layernorm, post_attention_layernorm)
        super().__init__(next((part.tp for part in parts if isinstance(part, ParallelModule)), None))
        check_range("model.dropout", dropout, "dropout")
        self.dropout = dropout
        self.keep = Keep()  # what waits for the backward: layers.keep sets it
        self.input_layernorm: Any = input_layernorm
        self.self_attn: Any = attention
        self.post_attention_layernorm: Any = post_attention_layernorm
        self.mlp: Any = mlp

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Do what nn.Module does; a block that was saved before there was `keep` has its options as attributes."""
        super().__setstate__(state)
        recompute, packs = (self.__dict__.pop(name, None) for name in ("recompute", "pack_activations"))
        if "keep" not in self.__dict__:
            self.keep = Keep(recompute or "none", bool(packs))

    def forward(
        self,
        x: Tensor,
        *,
        positions: Positions | None = None,
        key_padding_mask: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """The block's result, like x. cache: that of SelfAttention."""
        positions = positions_of(x, positions, self.tp, key_padding_mask)
        rows = flat_rows(x)
        sites = self._dropout_sites(rows, positions, dropout_key)
        if cache is None:
            rows = self.keep.run(self, rows, positions, sites)
        else:
            rows = self.rows(rows, positions, sites, cache)
        return rows if rows.shape == x.shape else rows.view(x.shape)

    def draws(self, key: DropoutKey | None) -> bool:
        """Whether a call may draw from torch's generator."""
        return self.composed or (key is None and self.training and self.dropout > 0)

    @property
    def composed(self) -> bool:
        """Whether a part is another library's or was changed, so that it may draw numbers, in each run the same."""
        return any(why_called(part, *OWN) for part in self.modules() if part is not self)

    def _dropout_sites(self, rows: Tensor, positions: Positions, key: DropoutKey | None) -> list[ops.Dropout | None]:
        """The dropout of the attention's branch and of the MLP's."""
        if not self.training or self.dropout == 0 or rows.is_meta:  # meta tensors have no values to drop
            return [None, None]
        if key is None:
            needed = "dropout_key=DropoutKey(seed, step, sample_index, model)"
            key = DropoutKey.drawn(self, self.dropout, rows, positions.batch, instead=needed)
        shard = self.tp.rank if self.tp.sharded else 0
        return [key.site(self.dropout, self, name, rows, positions, shard) for name in ("attention", "mlp")]

    def rows(
        self, x: Tensor, positions: Positions, sites: list[ops.Dropout | None], cache: LayerCache | None = None
    ) -> Tensor:
        """x + attention(norm(x)), then x + mlp(norm(x)), of rows. sites: the dropout of both."""
        # in FP8 a norm of its own writes blocks, which are less than rows that a pass would have to quantise
        in_blocks = self.tp.precision == FP8 and isinstance(unwrapped(self.mlp), MLP)
        next_norm = None if in_blocks else self.post_attention_layernorm
        x, normed = self.add_attention(x, positions, sites[0], next_norm, cache)
        return self.add_mlp(x, normed, positions, sites[1], self.private(sites[0]))

    def private(self, site: ops.Dropout | None) -> bool:
        """Whether the gradient of what add_attention returns is private, as of ops.column_linear, and in FP8. site: as
        add_attention has it."""
        if site is not None or self.tp.precision != FP8:
            return False
        attention, o_proj = self.self_attn, getattr(self.self_attn, "o_proj", None)
        if not isinstance(o_proj, RowParallelLinear) or o_proj.tp.precision != FP8:
            return False
        own = keeps(self, TransformerBlock, "add_attention", "add_mlp")  # which give and take it
        return own and fusable(SelfAttention, attention) and fusable(RowParallelLinear, o_proj) and o_proj.bias is None

    def add_attention(
        self,
        x: Tensor,
        positions: Positions,
        site: ops.Dropout | None,
        next_norm: nn.Module | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, ops.Normed | None]:
        """x + dropout(attention(norm(x))), and its norm by next_norm; None if that is not made in the same pass."""
        norm, attention = self.input_layernorm, self.self_attn
        if not fusable(SelfAttention, attention):
            return x + ops.dropout(self._called_attention(call_rows(norm, x, self.tp), positions, cache), site), None
        # This does the same in fewer passes. The projections do the norm and the gather, and keep neither's output. One
        # pass over the reduced rows adds bias, dropout and x, and makes the next norm.
        return attention.branch(x, positions, norm, residual=True, dropout=site, next_norm=next_norm, cache=cache)

    def add_mlp(
        self,
        x: Tensor,
        normed: ops.Normed | None,
        positions: Positions,
        site: ops.Dropout | None,
        private: bool = False,
    ) -> Tensor:
        """x + dropout(mlp(norm(x))). normed: norm(x), if it was made together with x. private: as of
        ops.column_linear."""
        norm, mlp = self.post_attention_layernorm, self.mlp
        routes = type(mlp) is not MLP and isinstance(unwrapped(mlp), MoE)
        options: dict = {"positions": positions} if routes else {}
        if not (fusable(MLP, mlp) or fusable(MoE, mlp)):
            return x + ops.dropout(call_rows(mlp, call_rows(norm, x, self.tp), self.tp, **options), site)
        # This does the same in fewer passes, as above, and does not keep act(fc1(...)), either.
        return mlp.branch(x, norm, normed=normed, residual=True, dropout=site, private=private, **options)

    def _called_attention(self, x: Tensor, positions: Positions, cache: LayerCache | None) -> Tensor:
        """The attention, called as a module. If it is not this library's, it gets its rows in the order of samples.

        If x holds slices of samples, that takes two more all-gathers of x in the forward, and two in the backward.
        """
        if cache is not None:
            require_cache(self.self_attn, "self_attn")
            return call_rows(self.self_attn, x, self.tp, positions=positions, cache=cache)
        own = any(isinstance(part, SelfAttention) for part in self.self_attn.modules())
        if positions.context is not None and not own:
            raise ValueError(
                f"self_attn is a {type(self.self_attn).__name__}, which would attend to the tokens of one of "
                f"{positions.context.size} context-parallel ranks alone: take a SelfAttention, or leave context out"
            )
        if positions.sequence_shards == 1 or own:
            return call_rows(self.self_attn, x, self.tp, positions=positions)
        group, plain = self.tp.group, positions.sequence_sharded(1)
        rows = ops.scatter_rows(positions.to_samples(ops.gather_rows(x, group)), group)
        y = call_rows(self.self_attn, rows, self.tp, positions=plain)
        return ops.scatter_rows(positions.to_rows(ops.gather_rows(y, group)), group)
