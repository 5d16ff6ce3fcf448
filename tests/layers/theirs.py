"""A transformer of torch.nn modules with our names and options, and edits of modules: the oracle of layers.

Belongs here: modules that know nothing of this library; edits in place that mean the same to theirs and to ours.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tpformer.layers import Positions

HIDDEN, HEADS, FFN = 24, 4, 48
# Llama's, with the norms of Qwen 3
LLAMA: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu", "n_kv_heads": HEADS // 2, "qk_norm": True}
LLAMA |= {"rope_base": 1e4, "bias": False}
by_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": by_tanh, "relu2": lambda x: F.relu(x).square(), "swiglu": F.silu, "geglu": by_tanh,
}  # fmt: skip


def slowed(frequency: float, factor: float, low: float, high: float, length: int) -> float:
    """Llama 3.1's scaling of one frequency, as it is published: by wavelength, in three cases."""
    wavelength = 2 * math.pi / frequency
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def rotate(x: Tensor, base: float, interleaved: bool = False, offset: int = 0, scaling: tuple | None = None) -> Tensor:
    """Turn the pairs (i, i + d/2) of x (batch, heads, seq, d), or if interleaved (2i, 2i + 1), as complex numbers."""
    half = x.shape[-1] // 2
    frequency = base ** -(torch.arange(half, dtype=torch.float64) / half)
    if scaling is not None:
        frequency = torch.tensor([slowed(each, *scaling) for each in frequency.tolist()], dtype=torch.float64)
    angle = torch.arange(offset, offset + x.shape[2], dtype=torch.float64)[:, None] * frequency
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = torch.complex(first.double(), second.double()) * torch.polar(torch.ones_like(angle), angle)
    pairs = [turned.real, turned.imag]
    return (torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)).to(x.dtype)


class Attention(nn.Module):
    def __init__(
        self, hidden: int = HIDDEN, heads: int = HEADS, *, n_kv_heads: int | None = None, head_dim: int | None = None,
        bias: bool = True, qkv_bias: bool | None = None, qk_norm: bool = False, rope_base: float | None = None,
        rope_interleaved: bool = False, rope_scaling: tuple | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.d = head_dim or hidden // heads
        width, keys, of_qkv = heads * self.d, (n_kv_heads or heads) * self.d, bias if qkv_bias is None else qkv_bias
        self.q_norm, self.k_norm = (nn.RMSNorm(self.d, eps=1e-5) if qk_norm else None for _ in range(2))
        self.q_proj, self.o_proj = nn.Linear(hidden, width, of_qkv), nn.Linear(width, hidden, bias)
        self.k_proj, self.v_proj = (nn.Linear(hidden, keys, of_qkv) for _ in range(2))
        self.rope = {"base": rope_base, "interleaved": rope_interleaved, "scaling": rope_scaling}

    def forward(self, x: Tensor, *, positions: Positions | None = None, visible: Tensor | None = None) -> Tensor:
        """x is (batch, seq, hidden), or rows together with their positions. visible (batch, seq, seq): whether a query
        sees a key; None is causal attention."""
        batch, seq = x.shape[:2] if positions is None else (positions.batch, positions.seq_length)
        rows = x.reshape(-1, x.shape[-1])  # as our block calls its linears
        q, k, v = (each(rows).unflatten(-1, (-1, self.d)) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.unflatten(0, (batch, seq)) for y in (q, k, v))  # there may be no sample
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if self.rope["base"] is not None:
            q, k = rotate(q, **self.rope), rotate(k, **self.rope)
        queries = q.shape[1] // k.shape[1]
        k, v = (y.repeat_interleave(queries, 1) for y in (k, v))
        if x.dtype == torch.float64:  # the oracle follows the formula
            seen = torch.ones(1, seq, seq).tril().bool() if visible is None else visible
            y = (q @ k.mT / self.d**0.5).masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v
        else:  # the baseline is what PyTorch attains in a lower precision
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2).flatten(0, 1)).view(x.shape)


class MLP(nn.Module):
    def __init__(
        self, hidden: int = HIDDEN, ffn_hidden_size: int | None = None, activation: str = "gelu_tanh", bias: bool = True
    ) -> None:
        super().__init__()
        self.activation, ffn = activation, ffn_hidden_size or 4 * hidden
        if activation.endswith("glu"):
            self.gate_proj, self.up_proj = nn.Linear(hidden, ffn, bias), nn.Linear(hidden, ffn, bias)
            self.down_proj = nn.Linear(ffn, hidden, bias)
        else:
            self.fc1, self.fc2 = nn.Linear(hidden, ffn, bias), nn.Linear(ffn, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.activation]
        if hasattr(self, "gate_proj"):
            return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))
        return self.fc2(act(self.fc1(x)))


class Block(nn.Module):
    """A float64 block whose norms and biases are off 1 and 0."""

    def __init__(
        self, hidden: int = HIDDEN, heads: int = HEADS, *, norm: str = "layernorm", activation: str = "gelu_tanh",
        ffn_hidden_size: int | None = None, bias: bool = True, seed: int = 0, **attention: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(seed)
        kind = nn.LayerNorm if norm == "layernorm" else nn.RMSNorm
        self.input_layernorm, self.post_attention_layernorm = (kind(hidden, eps=1e-5) for _ in range(2))
        self.self_attn = Attention(hidden, heads, bias=bias, **attention)
        self.mlp = MLP(hidden, ffn_hidden_size, activation, bias)
        self.double()
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, 1, 0.3)

    def forward(self, x: Tensor, *, masks: Sequence[Any] = (1, 1), **attention: Any) -> Tensor:
        """masks: the dropout of both branches, as factors."""
        x = x + masks[0] * self.self_attn(self.input_layernorm(x), **attention)
        return x + masks[1] * self.mlp(self.post_attention_layernorm(x))


class PositionEmbedding(nn.Module):
    def __init__(self, seq: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(seq, HIDDEN))

    def forward(self, x: Tensor, **_) -> Tensor:
        return x + self.weight[: x.shape[1]]


class GPT(nn.Module):
    """Learned positions and layernorms, or Llama's. Returns logits, or given targets torch's loss."""

    def __init__(self, vocab: int, seq: int, layers: int, llama: bool = False) -> None:
        super().__init__()
        options: dict[str, Any] = {"ffn_hidden_size": FFN} | (LLAMA if llama else {})
        self.layers = nn.ModuleDict({str(index): Block(seed=index, **options) for index in range(layers)})
        self.embed_tokens = nn.Embedding(vocab, HIDDEN)
        self.embed_positions = None if llama else PositionEmbedding(seq)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5) if llama else nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, vocab, bias=False)
        self.double()

    def forward(self, ids: Tensor, *, targets: Tensor | None = None, **terms: Any) -> Tensor:
        x = self.embed_tokens(ids)
        x = x if self.embed_positions is None else self.embed_positions(x)
        for block in self.layers.values():
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **terms)


class LoRA(nn.Module):
    def __init__(self, base: nn.Module, a: nn.Module, b: nn.Module, p: float = 0.0) -> None:
        super().__init__()
        self.base, self.a, self.b, self.drop = base, a, b, nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(self.drop(x)))


def put(block: nn.Module, path: str, child: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(block.get_submodule(parent), name, child)


def linear(k: int, n: int, seed: int) -> nn.Linear:
    made = nn.Linear(k, n, bias=False, dtype=torch.float64)
    nn.init.normal_(made.weight, std=0.1, generator=torch.Generator().manual_seed(seed))
    return made


def subclass(block: nn.Module, path: str) -> None:
    child = block.get_submodule(path)

    class Scaled(type(child)):  # type: ignore[misc]
        def forward(self, x, **options):
            return 0.5 * super().forward(x, **options)

    child.__class__ = Scaled


def replace_forward(block: nn.Module, path: str) -> None:
    child = block.get_submodule(path)
    forward = child.forward
    child.forward = lambda x, **options: 0.7 * forward(x, **options)  # type: ignore[method-assign]


def spectral_norm(block: nn.Module, path: str) -> None:
    """It is put in evaluation: in training every forward, a recomputed one too, moves its estimate of the norm."""
    torch.manual_seed(1)
    parametrizations.spectral_norm(block.get_submodule(path)).eval()


def _scaled(x: Tensor | None, factor: float) -> Tensor | None:
    return factor * x if x is not None and x.is_floating_point() else x  # ids stay as they are


def registered(kind: str, hook: Callable[..., Any]) -> Callable[[nn.Module, str], None]:
    return lambda block, path: getattr(block.get_submodule(path), f"register_{kind}_hook")(hook) and None


scaling_hook = registered("forward", lambda _, inputs, y: 1.5 * y)
ANYWHERE: dict[str, Callable[[nn.Module, str], None]] = {
    "forward hook": registered("forward", lambda _, inputs, y: 1.5 * y + inputs[0].mean(-1, keepdim=True)),
    "forward pre-hook": registered("forward_pre", lambda _, inputs: (_scaled(inputs[0], 1.25),)),
    "backward hook": registered("full_backward", lambda _, dx, dy: tuple(_scaled(g, 2) for g in dx)),
    "backward pre-hook": registered("full_backward_pre", lambda _, dy: tuple(3 * g for g in dy)),
    "subclass": subclass,
    "forward replaced": replace_forward,
}
ON_LINEARS: dict[str, Callable[[nn.Module, str], None]] = {
    "wrapped": lambda block, path: put(block, path, nn.Sequential(block.get_submodule(path), nn.Tanh())),
    "weight_norm": lambda block, path: parametrizations.weight_norm(block.get_submodule(path)) and None,
    "spectral_norm": spectral_norm,
    "prune": lambda block, path: prune.l1_unstructured(block.get_submodule(path), "weight", 0.3) and None,
    "frozen": lambda block, path: block.get_submodule(path).requires_grad_(False) and None,
}
