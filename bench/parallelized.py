"""A GPT's transformer block in plain PyTorch, laid out by torch's own parallelize_module with sequence parallelism.

Belongs here: the modules and their plan, nothing of tpformer's layers. It is what the memory bench compares with.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tpformer.models import GPTConfig

ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def dropout(x: Tensor, p: float) -> Tensor:
    """With a mask of one byte an element, as on a GPU: F.dropout on a CPU would keep one of x's dtype."""
    return torch.native_dropout(x, p, True)[0] if p else x


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        h, kv = config.hidden_size, config.hidden_size // config.n_heads * config.kv_heads
        self.head_dim = h // config.n_heads
        self.q_proj, self.o_proj = nn.Linear(h, h, config.bias), nn.Linear(h, h, config.bias)
        self.k_proj, self.v_proj = nn.Linear(h, kv, config.bias), nn.Linear(h, kv, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        qkv = (proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.ffn_size, config.bias)
        self.fc2 = nn.Linear(config.ffn_size, config.hidden_size, config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class Block(nn.Module):
    """The pre-norm block of a GPTConfig with LayerNorm, GELU and learned positions, on x (batch, seq / t, hidden)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.p = config.dropout
        self.norm1 = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + dropout(self.attention(self.norm1(x)), self.p)
        return x + dropout(self.mlp(self.norm2(x)), self.p)


def parallelized(config: GPTConfig, mesh: DeviceMesh | None, dtype: torch.dtype) -> Block:
    """The block on a CPU, its parameters without values; mesh None: not parallel."""
    with torch.device("meta"):
        block = Block(config).to(dtype)
    if mesh is not None:
        # the norms' outputs are sequence shards, gathered once for all linears that read them
        gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        column, row = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
        plan = {
            **{"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": gather, "mlp": gather},
            **{f"attention.{name}_proj": column for name in "qkv"},
            **{"attention.o_proj": row, "mlp.fc1": column, "mlp.fc2": row},
        }
        parallelize_module(block, mesh, plan)
    return block.to_empty(device="cpu")


def fits(config: GPTConfig) -> bool:
    """Whether the block has this architecture."""
    return config.norm == "layernorm" and config.activation in ACTIVATIONS and config.position == "learned"
