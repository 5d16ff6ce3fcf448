"""The layers of a GPT, built from its architecture."""

import math
from typing import Any

from torch import nn

from tpformer import layers, ops
from tpformer.config import GPTConfig
from tpformer.layers import RopeScaling, TransformerBlock


def transformer_blocks(config: GPTConfig, part: range, **options: Any) -> nn.ModuleDict:
    """The layers of a part, by their global indices, so that names survive a pipeline split. options: as of
    gpt_block."""
    return nn.ModuleDict({str(i): gpt_block(config, i, **options) for i in part})


def gpt_block(config: GPTConfig, layer: int = 0, *, balance: float = 0.0, **options: Any) -> TransformerBlock:
    """The layer with this index. balance: as in Router. options: further arguments of layers.transformer_block."""
    scaling = RopeScaling(
        config.rope_scaling_factor, config.rope_low_frequency, config.rope_high_frequency, config.rope_original_length
    )
    return layers.transformer_block(
        config.hidden_size,
        config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        ffn_hidden_size=config.ffn_hidden_size,
        norm=config.norm,
        norm_eps=config.norm_eps,
        qk_norm=config.qk_norm,
        activation=config.activation,
        moe=_moe(config, balance) if config.has_experts(layer) else None,
        sliding_window=config.sliding_window,
        rope_base=config.rope_base if config.position == "rope" else None,
        rope_interleaved=config.rope_interleaved,
        rope_scaling=None if scaling.factor == 1 else scaling,
        bias=config.bias,
        qkv_bias=config.qkv_bias,
        dropout=config.dropout,
        init_std=config.init_std,
        output_init_std=config.init_std / math.sqrt(2 * config.n_layers),
        **options,
    )


def _moe(config: GPTConfig, balance: float) -> dict[str, Any]:
    """The arguments of MoE."""
    policy = ops.Policy(
        config.experts_per_token,
        config.router_score,
        config.router_normalised,
        config.router_scale,
        config.router_groups,
        config.router_top_groups,
    )
    return {
        "n_experts": config.n_experts,
        "ffn_hidden_size": config.expert_size,
        "shared_ffn_size": config.shared_expert_size,
        "policy": policy,
        "router_bias": config.router_bias,
        "balance": balance,
    }
