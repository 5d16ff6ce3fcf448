"""The transformer as a good engineer writes it in plain PyTorch: what tpformer is timed and measured against.

Belongs here: modules of torch.nn only, with tpformer's parameter names, their training step, their layout by torch's
own parallelize_module, and the proof that they are tpformer's model.
"""

import dataclasses
from collections.abc import Callable

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

from tpformer.config import MLP_ACTIVATIONS
from tpformer.kernels.rope.reference import Table, rope_table
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import gradient_norm
from tpformer.training.model import ModelParts

from .memory_bound.formulas import act, rope_rotate

QKV = ("q_proj", "k_proj", "v_proj")
Drop = Callable[[Tensor, str], Tensor]  # what a branch's end is put through; the name of the branch


class Attention(nn.Module):
    """Causal attention, maybe grouped, maybe rotary; an nn.Linear for each of q, k and v, or one for all three."""

    def __init__(self, config: GPTConfig, fused_qkv: bool = False) -> None:
        super().__init__()
        h, self.head_dim = config.hidden_size, config.head_size
        self.sizes, self.fused_qkv = [config.query_size, config.kv_size, config.kv_size], fused_qkv
        self.table: Table | None = None  # of angles, where there is rotary embedding
        if fused_qkv:
            self.qkv_proj = nn.Linear(h, sum(self.sizes), config.has_qkv_bias)
        else:
            linears = (nn.Linear(h, size, config.has_qkv_bias) for size in self.sizes)
            self.q_proj, self.k_proj, self.v_proj = linears
        self.o_proj = nn.Linear(config.query_size, h, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(x).split(self.sizes, -1) if self.fused_qkv else [getattr(self, name)(x) for name in QKV]
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in qkv)
        if self.table is not None:
            batch, length = x.shape[:2]
            positions = torch.arange(length, device=x.device).repeat(batch)
            turned = rope_rotate(q.flatten(0, 1), k.flatten(0, 1), self.table, positions)
            q, k = (y.unflatten(0, (batch, length)) for y in turned)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linears around an activation, or three where it is gated."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        h, f, bias = config.hidden_size, config.ffn_size, config.bias
        self.activation, self.gated = MLP_ACTIVATIONS[config.activation]
        if self.gated:
            self.gate_proj, self.up_proj = nn.Linear(h, f, bias), nn.Linear(h, f, bias)
            self.down_proj = nn.Linear(f, h, bias)
        else:
            self.fc1, self.fc2 = nn.Linear(h, f, bias), nn.Linear(f, h, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down_proj(act(self.gate_proj(x), self.activation) * self.up_proj(x))
        return self.fc2(act(self.fc1(x), self.activation))


class PlainBlock(nn.Module):
    """The pre-norm block of a GPTConfig on x (batch, seq, hidden), with dropout at the end of both branches."""

    def __init__(self, config: GPTConfig, fused_qkv: bool = False, drop: Drop | None = None) -> None:
        super().__init__()
        norm = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
        self.input_layernorm = norm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, fused_qkv)
        self.post_attention_layernorm = norm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)
        self.drop = drop or (lambda x, branch: F.dropout(x, config.dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.self_attn(self.input_layernorm(x)), "attention")
        return x + self.drop(self.mlp(self.post_attention_layernorm(x)), "mlp")


class PlainGPT(nn.Module):
    """The default architecture of GPTConfig: LayerNorm, tanh GELU, learned positions, biases, tied embeddings.

    Its parameters have the names of tpformer's, but for qkv_proj with fused_qkv. The table is not padded.
    """

    def __init__(self, config: GPTConfig, *, fused_qkv: bool = False) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.seq_length, config.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(config, fused_qkv) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats per token; ids and targets (batch, seq) int64."""
        x = self.embed_tokens(ids) + self.embed_positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_from(ours: GPT, *, fused_qkv: bool = False) -> PlainGPT:
    """A plain model with the values and the dtype of `ours`, which has no mesh."""
    plain = PlainGPT(ours.config, fused_qkv=fused_qkv).to(next(ours.parameters()).dtype)
    plain.load_state_dict(to_plain(plain, {name: value.detach() for name, value in ours.named_parameters()}))
    return plain


def plain_block(
    ours: nn.Module, config: GPTConfig, dtype: torch.dtype, *, fused_qkv: bool = False, drop: Drop | None = None
) -> PlainBlock:
    """The plain block of this configuration with the values of `ours`, on its device; drop: instead of F.dropout."""
    values = {name: value.detach() for name, value in ours.named_parameters()}
    device = next(iter(values.values())).device
    with device:
        block = PlainBlock(config, fused_qkv, drop).to(dtype)
    if config.position == "rope":
        block.self_attn.table = rope_table(config.seq_length, config.head_size, config.rope_base, dtype, device)
    block.load_state_dict(to_plain(block, values))
    return block


def to_plain(plain: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """tpformer's parameters, or their gradients, by the plain model's names; without the table's padding."""
    result = {}
    for name, parameter in plain.named_parameters():
        parts = [name.replace("qkv_proj", part) for part in QKV] if "qkv_proj" in name else [name]
        result[name] = torch.cat([values[part] for part in parts])[: len(parameter)]
    return result


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, clip_norm: float) -> Tensor:
    """One training step on batch (samples, seq_length + 1); the loss."""
    loss = model(batch[:, :-1], batch[:, 1:])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def check_against_plain(model: GPT, batch: Tensor, clip_norm: float, tolerance: float) -> Tensor:
    """Loss, gradient norm and every gradient of both plain models against `model`, which has no mesh.

    Raises AssertionError for a difference above the tolerance (gradients: relative to the norm of all of them);
    returns tpformer's (loss, norm).
    """
    loss = ModelParts([model], microbatch_size=len(batch)).gradients(batch, first_sample=0)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = gradient_norm(model.parameters(), [])
    for fused_qkv in (False, True):
        other = plain_from(model, fused_qkv=fused_qkv)
        plain_loss = other(batch[:, :-1], batch[:, 1:])
        plain_loss.backward()
        require_close("loss", loss, plain_loss.detach(), tolerance)
        for name, gradient in to_plain(other, gradients).items():
            require_close(f"gradient of {name}", gradient, other.get_parameter(name).grad, tolerance * float(norm))
        plain_norm = nn.utils.clip_grad_norm_(other.parameters(), clip_norm)
        require_close("gradient norm", norm, plain_norm, tolerance)
    return torch.stack([loss, norm])


def require_close(what: str, ours: Tensor, other: Tensor | None, tolerance: float) -> None:
    """AssertionError unless the largest difference is within the tolerance."""
    if other is None:
        raise AssertionError(f"{what}: the other one has none")
    error = float((ours.double() - other).abs().max())
    if not error <= tolerance:
        raise AssertionError(f"{what}: error {error:.2e}, at most {tolerance:.2e} is right")


def parallelized(config: GPTConfig, mesh: DeviceMesh | None, dtype: torch.dtype) -> PlainBlock:
    """The block on a CPU by torch's parallelize_module, x (batch, seq / t, hidden); mesh None: not parallel.

    Its parameters have no values. Its dropout keeps a mask of one byte an element, as on a GPU: F.dropout on a CPU
    would keep one of x's dtype.
    """

    def drop(x: Tensor, branch: str) -> Tensor:
        return torch.native_dropout(x, config.dropout, True)[0] if config.dropout else x

    with torch.device("meta"):
        block = PlainBlock(config, drop=drop).to(dtype)
    if mesh is not None:
        # the norms' outputs are sequence shards, gathered once for all linears that read them
        gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan = {
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), SequenceParallel()),
            **dict.fromkeys(("self_attn", "mlp"), gather),
            **dict.fromkeys((*(f"self_attn.{name}" for name in QKV), "mlp.fc1"), ColwiseParallel()),
            **dict.fromkeys(("self_attn.o_proj", "mlp.fc2"), RowwiseParallel(output_layouts=Shard(1))),
        }
        parallelize_module(block, mesh, plan)
    return block.to_empty(device="cpu")


def fits(config: GPTConfig) -> bool:
    """Whether `parallelized` lays out this architecture: LayerNorm, GELU, learned positions, no option of attention."""
    usual = dataclasses.replace(config, head_dim=None, qk_norm=False, qkv_bias=None, sliding_window=None)
    gelu = config.activation in ("gelu", "gelu_tanh")
    return config == usual and config.norm == "layernorm" and gelu and config.position == "learned"
