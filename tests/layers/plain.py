"""A transformer block in plain PyTorch, written from the formulas: the oracle of the layers.

Belongs here: functions of x and of the parameters in one of our state dicts. No layers, no tests.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, p: dict[str, Tensor], name: str, kind: str) -> Tensor:
    size = x.shape[-1:]
    if kind == "rmsnorm":
        return F.rms_norm(x, size, p[f"{name}.weight"], 1e-5)
    return F.layer_norm(x, size, p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)


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
    """Rotate x (batch, heads, seq, d), whose first token is at `offset`. The pairs (i, i + d/2), or if interleaved (2i,
    2i + 1), are turned as complex numbers."""
    half = x.shape[-1] // 2
    frequency = base ** -(torch.arange(half, dtype=torch.float64) / half)
    if scaling is not None:
        frequency = torch.tensor([slowed(each, *scaling) for each in frequency.tolist()], dtype=torch.float64)
    angle = torch.arange(offset, offset + x.shape[2], dtype=torch.float64)[:, None] * frequency
    wide = x.double()
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    pairs = [turned.real, turned.imag]
    return (torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)).to(x.dtype)


def attention(
    x: Tensor,
    p: dict[str, Tensor],
    heads: int,
    kv_heads: int,
    rope_base: float | None,
    rope_interleaved: bool = False,
    visible: Tensor | None = None,
    rope_scaling: tuple | None = None,
) -> Tensor:
    """visible (batch, seq, seq): whether a query sees a key; None is causal attention."""
    batch, seq, _ = x.shape
    d = p["q_proj.weight"].shape[0] // heads

    def project(name: str, count: int) -> Tensor:
        y = F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))
        return y.view(batch, seq, count, d).transpose(1, 2)

    q, k, v = project("q_proj", heads), project("k_proj", kv_heads), project("v_proj", kv_heads)
    if "q_norm.weight" in p:
        q, k = norm(q, p, "q_norm", "rmsnorm"), norm(k, p, "k_norm", "rmsnorm")
    if rope_base is not None:
        q, k = (rotate(y, rope_base, rope_interleaved, scaling=rope_scaling) for y in (q, k))
    k, v = (y.repeat_interleave(heads // kv_heads, 1) for y in (k, v))
    if x.dtype == torch.float64:  # the oracle follows the formula
        scores = (q @ k.transpose(-1, -2)) / d**0.5
        seen = torch.ones(batch, seq, seq).tril().bool() if visible is None else visible
        y = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v
    else:  # the baseline is what PyTorch attains in a lower precision
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = y.transpose(1, 2).reshape(batch, seq, heads * d)
    return F.linear(y, p["o_proj.weight"], p.get("o_proj.bias"))


def mlp(x: Tensor, p: dict[str, Tensor], activation: str) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    if activation in ("swiglu", "geglu"):
        gate = linear("gate_proj", x)
        gate = F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")
        return linear("down_proj", gate * linear("up_proj", x))
    if activation == "relu2":
        return linear("fc2", F.relu(linear("fc1", x)).square())
    return linear("fc2", F.gelu(linear("fc1", x), approximate="tanh" if activation == "gelu_tanh" else "none"))


def under(p: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in p.items() if name.startswith(prefix)}


def block(
    x: Tensor,
    p: dict[str, Tensor],
    heads: int,
    *,
    n_kv_heads: int | None = None,
    norm_kind: str = "layernorm",
    activation: str = "gelu_tanh",
    rope_base: float | None = None,
    rope_interleaved: bool = False,
    rope_scaling: tuple | None = None,
    masks: Sequence[Tensor] | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Map x (batch, seq, hidden) with the parameters p of a TransformerBlock. masks: the dropout of both branches, as
    factors."""
    h = norm(x, p, "input_layernorm", norm_kind)
    first, second = masks or (1, 1)
    options = (rope_base, rope_interleaved, visible, rope_scaling)
    x = x + first * attention(h, under(p, "self_attn."), heads, n_kv_heads or heads, *options)
    return x + second * mlp(norm(x, p, "post_attention_layernorm", norm_kind), under(p, "mlp."), activation)
