"""A GPT's and a Llama's transformer block as a good engineer writes them in plain PyTorch: the rivals of bench `layer`.

Belongs here: modules from torch.nn only, with the parameter names of tpformer's block; GPT's parts are baseline.py's.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpformer.kernels.rope.reference import rope_table
from tpformer.models import GPTConfig

from .baseline import PlainBlock, to_plain
from .memory_bound.formulas import rope

Drop = Callable[[Tensor, str], Tensor]  # what a branch's end is put through; the name of the branch


class PlainLayer(PlainBlock):
    """PlainBlock with dropout at the end of both branches."""

    def __init__(self, config: GPTConfig, fused_qkv: bool, drop: Drop | None) -> None:
        super().__init__(config, fused_qkv)
        self.drop = drop or (lambda x, branch: F.dropout(x, config.dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.self_attn(self.input_layernorm(x)), "attention")
        return x + self.drop(self.mlp(self.post_attention_layernorm(x)), "mlp")


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary embedding, no biases; the table of angles is at least float32."""

    def __init__(self, config: GPTConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        h, d = config.hidden_size, config.hidden_size // config.n_heads
        self.head_dim, self.grouped = d, config.kv_heads != config.n_heads
        self.q_proj, self.o_proj = nn.Linear(h, h, bias=False), nn.Linear(h, h, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(h, config.kv_heads * d, bias=False) for _ in range(2))
        self.table = rope_table(config.seq_length, d, config.rope_base, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        heads = [y.unflatten(-1, (-1, self.head_dim)) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))]
        (batch, length), (q, k, v) = x.shape[:2], heads
        positions = torch.arange(length, device=x.device).repeat(batch)
        q, k = rope(q.flatten(0, 1), k.flatten(0, 1), *self.table, positions, interleaved=False, inverse=False)
        q, k, v = (y.view(batch, length, -1, self.head_dim).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class LlamaMLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        h, f = config.hidden_size, config.ffn_size
        self.gate_proj, self.up_proj = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False)
        self.down_proj = nn.Linear(f, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, config: GPTConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = LlamaAttention(config, dtype, device)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def plain_layer(
    ours: nn.Module, config: GPTConfig, dtype: torch.dtype, *, fused_qkv: bool = False, drop: Drop | None = None
) -> nn.Module:
    """The plain block of this configuration with the values of `ours`, on its device; drop: instead of F.dropout."""
    values = {name: value.detach() for name, value in ours.named_parameters()}
    device = next(iter(values.values())).device
    with device:
        llama = config.position == "rope"
        layer = LlamaLayer(config, dtype, device) if llama else PlainLayer(config, fused_qkv, drop)
    layer = layer.to(dtype)
    layer.load_state_dict(to_plain(layer, values))
    return layer
