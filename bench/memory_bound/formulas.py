"""The memory-bound operations in plain torch: the oracle in float64, the baseline in a tensor's own dtype, and what
torch.compile gets.

Belongs here: one function per operation and direction, tensors in, a tuple of tensors out, computed in at least
float32 and rounded once, as our kernels do. Backwards are written out, so that no autograd is timed.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = tuple[Tensor, ...]


def compiled(function: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """One graph for these shapes, in torch.compile's default mode. Forgets what was compiled before."""
    torch.compiler.reset()  # else the same formula at a ninth shape is refused
    return torch.compile(function, fullgraph=True, dynamic=False)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norm_forward(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float) -> Tensors:
    """(y, statistics...): mean and rstd of layernorm, rstd of rmsnorm; each (M, 1)."""
    rows, scale = wide(x), wide(weight)
    if kind == "rmsnorm":
        rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        return (rows * rstd * scale).to(x.dtype), rstd
    variance, mean = torch.var_mean(rows, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    y = (rows - mean) * rstd * scale
    return (y if bias is None else y + wide(bias)).to(x.dtype), mean, rstd


def norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dresidual: Tensor | None,
) -> Tensors:
    """(dx + dresidual, dweight), and dbias if there is a bias; mean None: rmsnorm."""
    rows, gradient = wide(x), wide(dy)
    normed = (rows if mean is None else rows - mean) * rstd
    inner = gradient * wide(weight)
    dx = inner - normed * (inner * normed).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - inner.mean(-1, keepdim=True)
    dx = dx * rstd
    if dresidual is not None:
        dx = dx + wide(dresidual)
    parameters = [(gradient * normed).sum(0).to(weight.dtype)]
    if bias is not None:
        parameters.append(gradient.sum(0).to(weight.dtype))
    return dx.to(x.dtype), *parameters


def dropped(x: Tensor, keep: Tensor | None, p: float) -> Tensor:
    """x with what is not kept zeroed, in x's dtype; keep None: x."""
    return x if keep is None else torch.where(keep, x * (1 / (1 - p)), 0)


def finish_forward(x: Tensor, bias: Tensor | None, residual: Tensor, drop: Callable[[Tensor], Tensor]) -> Tensors:
    """(z,): residual + drop(x + bias)."""
    total = wide(x) if bias is None else wide(x) + wide(bias)
    return ((wide(residual) + drop(total)).to(x.dtype),)


def finish_backward(dz: Tensor, keep: Tensor | None, p: float) -> Tensors:
    """(dx, dbias) of finish_forward."""
    dx = dropped(wide(dz), keep, p)
    return dx.to(dz.dtype), dx.sum(0).to(dz.dtype)


def act(x: Tensor, name: str) -> Tensor:
    if name == "relu2":
        return F.relu(x).square()
    return F.silu(x) if name == "silu" else F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def act_derivative(x: Tensor, name: str) -> Tensor:
    if name == "relu2":
        return 2 * F.relu(x)
    if name == "silu":
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s))
    if name == "gelu":
        return 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5
    root = (2 / torch.pi) ** 0.5
    t = torch.tanh(root * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x)


def activation_forward(x: Tensor, gate: Tensor | None, name: str) -> Tensors:
    if gate is None:
        return (act(wide(x), name).to(x.dtype),)
    return ((act(wide(gate), name) * wide(x)).to(x.dtype),)


def activation_backward(da: Tensor, x: Tensor, gate: Tensor | None, name: str) -> Tensors:
    """(dx, a), or (dx, dgate, a): the gradients, and the activation again for the weight's gradient."""
    upstream, up = wide(da), wide(x)
    if gate is None:
        return (upstream * act_derivative(up, name)).to(x.dtype), act(up, name).to(x.dtype)
    opened = wide(gate)
    value = act(opened, name)
    dgate = upstream * up * act_derivative(opened, name)
    return (upstream * value).to(x.dtype), dgate.to(x.dtype), (value * up).to(x.dtype)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, inverse: bool
) -> Tensors:
    """q and k (T, heads, d) turned by their positions' rows of the tables (length, d / 2)."""
    cosine, sine = cos[positions][:, None], sin[positions][:, None]
    if inverse:
        sine = -sine

    def turned(x: Tensor) -> Tensor:
        pairs = wide(x).unflatten(-1, (-1, 2) if interleaved else (2, -1))
        first, second = pairs.unbind(-1 if interleaved else -2)
        parts = [first * cosine - second * sine, second * cosine + first * sine]
        return torch.stack(parts, -1 if interleaved else -2).flatten(-2).to(x.dtype)

    return turned(q), turned(k)


def cross_entropy_forward(logits: Tensor, targets: Tensor) -> Tensors:
    return (F.cross_entropy(wide(logits), targets, reduction="none"),)


def cross_entropy_both(logits: Tensor, targets: Tensor) -> Tensors:
    """(losses, gradient of their sum)."""
    rows = wide(logits)
    total = rows.logsumexp(-1, keepdim=True)
    losses = (total - rows.gather(1, targets[:, None]))[:, 0]
    here = torch.arange(rows.shape[1], device=rows.device) == targets[:, None]
    return losses, ((rows - total).exp() - here.to(rows.dtype)).to(logits.dtype)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The summed loss, all logits in memory."""
    return F.cross_entropy(wide(F.linear(x, weight)), targets, reduction="sum")
