"""The pre-norm transformer block."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops
from tpformer.config import RECOMPUTE, check_choice, check_packing, check_range
from tpformer.kernels.rope.reference import RopeScaling
from tpformer.ops.packing import may_pack, packed_activations
from tpformer.ops.sequence import flat_rows
from tpformer.ops.uncompiled import uncompiled
from tpformer.torch_private import base_of, forward_hooks, forward_pre_hooks
from tpformer.words import dtype_name

from .attention import SelfAttention
from .cache import LayerCache, require_cache
from .children import call_rows, fusable, keeps_forward, others_hook, unwrapped, why_called
from .dropout import DropoutKey
from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import MLP
from .module import ParallelModule
from .moe import Experts, MoE, Router
from .norm import NORMS
from .positions import Positions, positions_of
from .tensor_parallel import TensorParallel

OWN = (SelfAttention, MLP, MoE, Router, Experts, ColumnParallelLinear, RowParallelLinear, *NORMS.values())


class TransformerBlock(ParallelModule):
    """x + dropout(attention(norm(x))), and then the same with the MLP in place of the attention.

    Layout:  x and result (tokens / t, hidden_size) or (batch, seq / t, hidden_size) with sequence_parallel, else
             (tokens, hidden_size) or (batch, seq, hidden_size), equal on all ranks.
    Communication, per rank, B = tokens * hidden_size * itemsize: with sequence_parallel the forward has 2 all-gathers
             and 2 reduce-scatters of B, the backward the same and 2 more all-gathers, because column inputs are
             gathered again; otherwise forward and backward each have 2 all-reduces of B.
    Memory:  what it keeps for the backward, in bytes / (tokens * hidden / t), in 16 bits with MHA, GELU and
             ffn = 4 * hidden, not counting the statistics of each row (16 / hidden + 4 / head_dim):
             recompute="none"  20; the backward runs no GEMM of the forward again
             recompute="mlp"   12; it runs the fc1 GEMM and its all-gather again
             recompute="full"   2; it runs the forward again, except its last GEMM and reduction
             With x (batch, seq / t, hidden_size) the first two keep 2 more, for the attention's result in both orders.
             With qk_norm the first two keep 4 more, for the queries and keys before their norms (in general
             2 (n_heads + n_kv_heads) head_dim / hidden), and one more statistic of each head.
             `python -m bench memory` counts these.
             pack_activations: what is kept of bfloat16 takes 0.755 as much, in every mode (ops/packing.py).
             The bits are the same. torch.compile leaves such a block alone. On a GPU see ops.packing_report.
    Dropout: in training, if p > 0. With a `dropout_key` it is the same in every layout. Without one, on one rank only,
             it is drawn from torch's generator, as nn.Dropout's is.
    moe: arguments of MoE, which then takes the MLP's place; ffn_hidden_size is not used.
    What else concerns attention, forward's `positions` and `key_padding_mask` included, is that of SelfAttention.
    A child is called as a module, not fused, if it has a hook, a parametrization or a replaced forward, or is of
    another class; explain() lists such children, and the others stay fused. Such a child gets rows
    (tokens, hidden_size), and an attention also gets positions=Positions. A module that is not of this library gets all
    rows and features on every rank, and returns all of them.
    """

    pack_activations = False  # of a block that was pickled before there was such an option

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn_hidden_size: int | None = None,
        norm: str = "layernorm",
        norm_eps: float = 1e-5,
        qk_norm: bool = False,
        activation: str = "gelu_tanh",
        moe: Mapping[str, Any] | None = None,
        is_causal: bool = True,
        sliding_window: int | None = None,
        rope_base: float | None = None,
        rope_interleaved: bool = False,
        rope_scaling: RopeScaling | None = None,
        bias: bool = True,
        qkv_bias: bool | None = None,
        dropout: float = 0.0,
        recompute: str = "none",
        pack_activations: bool = False,
        init_std: float | None = None,
        output_init_std: float | None = None,
        tp: TensorParallel | DeviceMesh | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(tp)
        check_choice("norm", norm, NORMS)
        check_choice("recompute", recompute, RECOMPUTE)
        check_range("model.dropout", dropout, "dropout")
        self.dropout, self.recompute, self.pack_activations = dropout, recompute, pack_activations
        place: dict = {"tp": self.tp, "device": device, "dtype": dtype}
        linears: dict = {"bias": bias, "init_std": init_std, "output_init_std": output_init_std, **place}
        self.input_layernorm = NORMS[norm](hidden_size, eps=norm_eps, **place)
        self.self_attn = SelfAttention(
            hidden_size,
            n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            qk_norm=qk_norm,
            norm_eps=norm_eps,
            is_causal=is_causal,
            sliding_window=sliding_window,
            rope_base=rope_base,
            rope_interleaved=rope_interleaved,
            rope_scaling=rope_scaling,
            qkv_bias=qkv_bias,
            **linears,
        )
        self.post_attention_layernorm = NORMS[norm](hidden_size, eps=norm_eps, **place)
        self.mlp: Any
        if moe is None:
            self.mlp = MLP(hidden_size, ffn_hidden_size=ffn_hidden_size, activation=activation, **linears)
        else:
            stds = {name: linears[name] for name in ("init_std", "output_init_std")}
            self.mlp = MoE(hidden_size, activation=activation, **stds, **place, **moe)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Positions | None = None,
        key_padding_mask: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        ends_region: bool = False,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """The block's result, like x. ends_region: it is the last of a region that its caller recomputes.

        cache: that of SelfAttention.
        """
        positions = positions_of(x, positions, self.tp, key_padding_mask)
        run = self._run_packed if self.packs(x) and cache is None else self._run
        rows = run(x, positions, dropout_key, ends_region, cache)
        return rows if rows.shape == x.shape else rows.view(x.shape)

    def _run(
        self, x: Tensor, positions: Positions, key: DropoutKey | None, ends_region: bool, cache: LayerCache | None
    ) -> Tensor:
        rows = flat_rows(x)
        sites = self._dropout_sites(rows, positions, key)
        if self.recompute == "full" and cache is None and torch.is_grad_enabled():
            return ops.recompute(self._layer, rows, positions, sites, True, keep_random_state=self._composed)
        return self._layer(rows, positions, sites, ends_region, cache)

    @uncompiled
    def _run_packed(self, x: Tensor, *arguments: Any) -> Tensor:
        with packing(x, self):
            return self._run(x, *arguments)

    def packs(self, x: Tensor) -> bool:
        """Whether a forward of x packs what it saves (packing.may_pack).

        ValueError for an x of another dtype than bfloat16.
        """
        if not self.pack_activations or x.is_meta or not may_pack():
            return False
        check_packing(dtype_name(x.dtype))
        return True

    def draws(self, key: DropoutKey | None) -> bool:
        """Whether a call may draw from torch's generator."""
        return self._composed or (key is None and self.training and self.dropout > 0)

    @property
    def _composed(self) -> bool:
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

    def _layer(
        self,
        x: Tensor,
        positions: Positions,
        sites: list[ops.Dropout | None],
        ends_region: bool,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x + attention(norm(x)), then x + mlp(norm(x))."""
        if self.recompute == "mlp" and torch.is_grad_enabled():
            x, _ = self._add_attention(x, positions, sites[0], None, cache)
            return ops.recompute(self._add_mlp, x, None, sites[1], True, positions, keep_random_state=self._composed)
        x, normed = self._add_attention(x, positions, sites[0], self.post_attention_layernorm, cache)
        return self._add_mlp(x, normed, sites[1], ends_region, positions)

    def _add_attention(
        self,
        x: Tensor,
        positions: Positions,
        site: ops.Dropout | None,
        next_norm: nn.Module | None,
        cache: LayerCache | None,
    ) -> tuple[Tensor, ops.Normed | None]:
        """x + dropout(attention(norm(x))), and its norm by next_norm; None if that is not made in the same pass."""
        norm, attention = self.input_layernorm, self.self_attn
        if not fusable(SelfAttention, attention):
            return x + ops.dropout(self._called_attention(call_rows(norm, x, self.tp), positions, cache), site), None
        # This does the same in fewer passes. The projections do the norm and the gather, and keep neither's output. One
        # pass over the reduced rows adds bias, dropout and x, and makes the next norm.
        options: dict = {"residual": True, "dropout": site, "next_norm": next_norm, "cache": cache}
        return attention.branch(x, positions, norm, **options)

    def _add_mlp(
        self,
        x: Tensor,
        normed: ops.Normed | None,
        site: ops.Dropout | None,
        ends_region: bool,
        positions: Positions,
    ) -> Tensor:
        """x + dropout(mlp(norm(x))). normed: norm(x), if it was made together with x."""
        norm, mlp = self.post_attention_layernorm, self.mlp
        options: dict = {"positions": positions} if isinstance(unwrapped(mlp), MoE) else {}
        if not (fusable(MLP, mlp) or fusable(MoE, mlp)):
            return x + ops.dropout(call_rows(mlp, call_rows(norm, x, self.tp), self.tp, **options), site)
        # This does the same in fewer passes, as above, and does not keep act(fc1(...)), either. The second run of a
        # region that ends here leaves out its last GEMM, whose result nothing reads.
        return mlp.branch(x, norm, normed=normed, residual=True, dropout=site, ends_region=ends_region, **options)

    def _called_attention(self, x: Tensor, positions: Positions, cache: LayerCache | None) -> Tensor:
        """The attention, called as a module. If it is not this library's, it gets its rows in the order of samples.

        If x holds slices of samples, that takes two more all-gathers of x in the forward, and two in the backward.
        """
        if cache is not None:
            require_cache(self.self_attn, "self_attn")
            return call_rows(self.self_attn, x, self.tp, positions=positions, cache=cache)
        if positions.sequence_shards == 1 or any(isinstance(part, SelfAttention) for part in self.self_attn.modules()):
            return call_rows(self.self_attn, x, self.tp, positions=positions)
        group, plain = self.tp.group, positions.sequence_sharded(1)
        rows = ops.scatter_rows(positions.to_samples(ops.gather_rows(x, group)), group)
        y = call_rows(self.self_attn, rows, self.tp, positions=plain)
        return ops.scatter_rows(positions.to_rows(ops.gather_rows(y, group)), group)


def packing(x: Tensor, *layers: nn.Module) -> AbstractContextManager[None]:
    """ops.packed_activations for layers that take x. An x that is a leaf is held by whoever wants its gradient, as what
    a pipeline stage has received is by the pipeline."""
    base = base_of(x)
    return packed_activations(*layers, held=[x] if base.is_leaf and base.requires_grad else [])


def run_region(layers: Sequence[nn.Module], x: Tensor, positions: Positions, dropout_key: DropoutKey | None) -> Tensor:
    """Run layers one after another as one recomputed region, which keeps only x. Their blocks have recompute="none".

    x is packed if the first of them packs.

    If the last layer is a block whose result no hook sees, the second run leaves out the last GEMM and its reduction.
    """
    last = layers[-1]
    options: dict = {"positions": positions, "dropout_key": dropout_key}
    ours = [keeps_forward(layer, TransformerBlock) for layer in layers]
    ends: dict = {"ends_region": True} if ours[-1] and not others_hook(forward_hooks(last)) else {}

    def region(x: Tensor) -> Tensor:
        for layer in layers[:-1]:
            x = layer(x, **options)
        return last(x, **options, **ends)

    hooked = any(others_hook(hooks) for layer in layers for hooks in (forward_pre_hooks(layer), forward_hooks(layer)))
    draws = hooked or not all(ours) or any(layer.draws(dropout_key) for layer in layers)
    first = unwrapped(layers[0])
    packs = isinstance(first, TransformerBlock) and first.packs(x)
    with packing(x, *layers) if packs else nullcontext():
        return ops.recompute(region, x, keep_random_state=draws)
