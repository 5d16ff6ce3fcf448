"""The GPT of tpformer.models as a good engineer writes it in plain PyTorch: what tpformer is timed against.

Belongs here: modules from torch.nn only, their training step, and the proof that they are tpformer's GPT.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpformer.models import GPT, GPTConfig
from tpformer.parallel import gradient_norm
from tpformer.training.model import ModelParts

QKV = ("q_proj", "k_proj", "v_proj")


class PlainAttention(nn.Module):
    """Causal multi-head attention; one nn.Linear for each of q, k and v, or one for all three."""

    def __init__(self, config: GPTConfig, fused_qkv: bool) -> None:
        super().__init__()
        h = config.hidden_size
        self.n_heads, self.fused_qkv = config.n_heads, fused_qkv
        if fused_qkv:
            self.qkv_proj = nn.Linear(h, 3 * h)
        else:
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, h)
        self.o_proj = nn.Linear(h, h)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(x).chunk(3, -1) if self.fused_qkv else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in qkv)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class PlainMLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.ffn_size)
        self.fc2 = nn.Linear(config.ffn_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class PlainBlock(nn.Module):
    def __init__(self, config: GPTConfig, fused_qkv: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = PlainAttention(config, fused_qkv)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = PlainMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


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


def to_plain(plain: PlainGPT, values: dict[str, Tensor]) -> dict[str, Tensor]:
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
    loss = ModelParts([model], microbatch_size=len(batch)).gradients(batch, first_sample=0, step=1)
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
