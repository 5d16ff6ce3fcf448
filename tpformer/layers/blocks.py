"""A transformer block made of sizes.

Belongs here: the choice of a block's parts. What the block does with them is in block.py.
"""

from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from tpformer.config import check_choice
from tpformer.kernels.rope.reference import RopeScaling

from .attention import SelfAttention
from .block import TransformerBlock
from .mlp import MLP
from .moe import MoE
from .norm import NORMS
from .tensor_parallel import TensorParallel


def transformer_block(
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
    init_std: float | None = None,
    output_init_std: float | None = None,
    tp: TensorParallel | DeviceMesh | None = None,
    device=None,
    dtype=None,
) -> TransformerBlock:
    """A TransformerBlock of these sizes, with a SelfAttention, an MLP and two norms, whose options these are.

    norm: "layernorm" or "rmsnorm". moe: arguments of MoE, which then takes the MLP's place; ffn_hidden_size is not
    used. Errors: those of the parts.
    """
    check_choice("norm", norm, NORMS)
    place: dict = {"tp": TensorParallel.of(tp), "device": device, "dtype": dtype}
    stds: dict = {"init_std": init_std, "output_init_std": output_init_std}
    # the order in which parts without a seed of init_weights draw their values
    input_layernorm = NORMS[norm](hidden_size, eps=norm_eps, **place)
    attention = SelfAttention(
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
        bias=bias,
        qkv_bias=qkv_bias,
        **stds,
        **place,
    )
    post_attention_layernorm = NORMS[norm](hidden_size, eps=norm_eps, **place)
    mlp: MLP | MoE
    if moe is None:
        mlp = MLP(hidden_size, ffn_hidden_size=ffn_hidden_size, activation=activation, bias=bias, **stds, **place)
    else:
        mlp = MoE(hidden_size, activation=activation, **stds, **place, **moe)
    return TransformerBlock(attention, mlp, input_layernorm, post_attention_layernorm, dropout=dropout)
