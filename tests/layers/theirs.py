"""A transformer of torch.nn modules with our names, and edits of modules: the oracle of habits.

Belongs here: modules that know nothing of this library; edits in place that mean the same to theirs and to ours.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from plain import rotate
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tpformer.layers import Positions

HIDDEN, HEADS, FFN = 24, 4, 48


class Attention(nn.Module):
    """llama: half as many key-value heads as queries, and RoPE. qk_norm: the norms of Qwen 3."""

    def __init__(self, llama: bool = False, qk_norm: bool = False) -> None:
        super().__init__()
        norms = (nn.RMSNorm(HIDDEN // HEADS, eps=1e-5) if qk_norm else None for _ in range(2))
        self.q_norm, self.k_norm = norms
        for norm in (self.q_norm, self.k_norm) if qk_norm else ():
            nn.init.normal_(norm.weight, 1, 0.3)
        self.llama = llama
        keys = HIDDEN // 2 if llama else HIDDEN
        self.q_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN, not llama) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(HIDDEN, keys, not llama) for _ in range(2))

    def forward(self, x: Tensor, *, positions: Positions | None = None) -> Tensor:
        """x is (batch, seq, hidden), or rows together with their positions."""
        batch, seq = x.shape[:2] if positions is None else (positions.batch, positions.seq_length)
        rows = x.reshape(-1, HIDDEN)  # as our block calls its linears
        q, k, v = (
            linear(rows).unflatten(1, (-1, HIDDEN // HEADS)).unflatten(0, (batch, seq))
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if self.llama:
            q, k = rotate(q, 1e4), rotate(k, 1e4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.llama).transpose(1, 2)
        return self.o_proj(y.reshape(rows.shape)).view(x.shape)


class MLP(nn.Module):
    def __init__(self, gated: bool, bias: bool = True) -> None:
        super().__init__()
        self.gated = gated
        if gated:
            self.gate_proj, self.up_proj = nn.Linear(HIDDEN, FFN, bias), nn.Linear(HIDDEN, FFN, bias)
            self.down_proj = nn.Linear(FFN, HIDDEN, bias)
        else:
            self.fc1, self.fc2 = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Block(nn.Module):
    """A float64 block whose norms and biases are off 1 and 0.

    norm: "layernorm" with a plain MLP, or "rmsnorm" with a gated one and norms of queries and keys. llama: Llama's
    attention and no biases, besides.
    """

    def __init__(self, norm: str, llama: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        norms = [nn.LayerNorm(HIDDEN) if norm == "layernorm" else nn.RMSNorm(HIDDEN, eps=1e-5) for _ in range(2)]
        self.input_layernorm, self.post_attention_layernorm = norms
        self.self_attn, self.mlp = Attention(llama, norm == "rmsnorm"), MLP(norm == "rmsnorm", not llama)
        self.double()
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, 1, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class PositionEmbedding(nn.Module):
    """Learned positions, which are added to x as ours are."""

    def __init__(self, seq: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(seq, HIDDEN))

    def forward(self, x: Tensor, **_) -> Tensor:
        return x + self.weight[: x.shape[1]]


class GPT(nn.Module):
    """Learned positions and layernorms, or Llama's. Returns logits, or given targets torch's loss."""

    def __init__(self, vocab: int, seq: int, layers: int, llama: bool = False) -> None:
        super().__init__()
        norm = "rmsnorm" if llama else "layernorm"
        self.layers = nn.ModuleDict({str(index): Block(norm, llama, index) for index in range(layers)})
        self.embed_tokens = nn.Embedding(vocab, HIDDEN)
        self.embed_positions = None if llama else PositionEmbedding(seq)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5) if llama else nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, vocab, bias=False)
        self.double()

    def forward(self, ids: Tensor, *, targets: Tensor | None = None, **terms: Any) -> Tensor:
        x = self.embed_tokens(ids)
        if self.embed_positions is not None:
            x = self.embed_positions(x)
        for block in self.layers.values():
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **terms)


class LoRA(nn.Module):
    """Computes base(x) + B(A(dropout(x)))."""

    def __init__(self, base: nn.Module, a: nn.Module, b: nn.Module, p: float = 0.0) -> None:
        super().__init__()
        self.base, self.a, self.b, self.drop = base, a, b, nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(self.drop(x)))


def put(block: nn.Module, path: str, child: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(block.get_submodule(parent), name, child)


def linear(k: int, n: int, seed: int) -> nn.Linear:
    """A plain linear whose values depend on the seed alone."""
    made = nn.Linear(k, n, bias=False, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        made.weight.copy_(0.1 * torch.randn(n, k, generator=generator, dtype=torch.float64))
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


def forward_hook(block: nn.Module, path: str) -> None:
    block.get_submodule(path).register_forward_hook(lambda _, inputs, y: 1.5 * y + inputs[0].mean(-1, keepdim=True))


def scaling_hook(block: nn.Module, path: str) -> None:
    block.get_submodule(path).register_forward_hook(lambda _, inputs, y: 1.5 * y)


def _scaled(x: Tensor | None, factor: float) -> Tensor | None:
    return factor * x if x is not None and x.is_floating_point() else x  # ids stay as they are


def pre_hook(block: nn.Module, path: str) -> None:
    block.get_submodule(path).register_forward_pre_hook(lambda _, inputs: (_scaled(inputs[0], 1.25),))


def backward_hook(block: nn.Module, path: str) -> None:
    block.get_submodule(path).register_full_backward_hook(lambda _, dx, dy: tuple(_scaled(g, 2) for g in dx))


def backward_pre_hook(block: nn.Module, path: str) -> None:
    block.get_submodule(path).register_full_backward_pre_hook(lambda _, dy: tuple(3 * g for g in dy))


ANYWHERE: dict[str, Callable[[nn.Module, str], None]] = {
    "forward hook": forward_hook,
    "forward pre-hook": pre_hook,
    "backward hook": backward_hook,
    "backward pre-hook": backward_pre_hook,
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
