"""The memory-bound operations in plain torch: the oracle in float64, the baseline in a tensor's own dtype, and what
torch.compile gets.

Belongs here: a function for each operation and direction, which takes and gives what the operation does, computed in
at least float32 and rounded once. Backwards are written out, so that no autograd is timed.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tpformer.kernels.finish import Dropout, Finish, Norm
from tpformer.kernels.norm.reference import Statistics
from tpformer.kernels.philox.reference import random_words
from tpformer.kernels.rope.reference import Table
from tpformer.kernels.route.reference import Policy

Tensors = tuple[Tensor, ...]
Drop = Callable[[Tensor], Tensor]


def wide(x: Tensor) -> Tensor:
    """x in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norm_forward(x: Tensor, norm: Norm) -> tuple[Tensor, ...]:
    """(y, statistics...): mean and rstd of layernorm, rstd of rmsnorm; each (M, 1)."""
    kind, weight, bias, eps = norm
    assert weight is not None and eps is not None
    rows, scale = wide(x), wide(weight)
    if kind == "rmsnorm":
        rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        return (rows * rstd * scale).to(x.dtype), rstd
    variance, mean = torch.var_mean(rows, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    y = (rows - mean) * rstd * scale
    return (y if bias is None else y + wide(bias)).to(x.dtype), mean, rstd


def norm_backward(
    dy: Tensor, x: Tensor, statistics: Statistics, norm: Norm, dresidual: Tensor | None = None
) -> Tensors:
    """(dx + dresidual, dweight), and dbias if there is a bias."""
    (mean, rstd), weight, bias = statistics, norm.weight, norm.bias
    assert weight is not None
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


def kept(dropout: Dropout, n: int) -> Tensor:
    """The mask (M, N) of these rows: what plain torch would have stored."""
    return random_words(dropout.key, dropout.start, n) >= round(dropout.p * 2**32)


def masked(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """x with what is not kept zeroed."""
    return torch.where(keep, x * (1 / (1 - p)), 0)


def dropout_apply(x: Tensor, start: Tensor, key: int, p: float) -> Tensor:
    return masked(x, kept(Dropout(start, key, p), x.shape[-1]), p)


def finish_forward(x: Tensor, finish: Finish, drop: Drop | None = None) -> Tensor:
    """residual + dropout(x + bias); drop: instead of the dropout with the bits of `finish`."""
    total = wide(x) if finish.bias is None else wide(x) + wide(finish.bias)
    if finish.dropout is not None:
        total = dropout_apply(total, *finish.dropout) if drop is None else drop(total)
    assert finish.residual is not None
    return (wide(finish.residual) + total).to(x.dtype)


def finish_norm_forward(x: Tensor, finish: Finish, drop: Drop | None = None) -> Tensors:
    """(z, norm of z as it is stored, statistics...)."""
    z = finish_forward(x, finish, drop)
    assert finish.norm is not None
    return z, *norm_forward(z, finish.norm)


def finish_backward(dz: Tensor, keep: Tensor, p: float) -> Tensors:
    """(dx, dbias) of finish_forward, from the mask that its forward would have stored."""
    dx = masked(wide(dz), keep, p)
    return dx.to(dz.dtype), dx.sum(0).to(dz.dtype)


def act(x: Tensor, name: str) -> Tensor:
    """The activation of this name, in x's dtype."""
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


def activation_forward(x: Tensor, name: str, gate: Tensor | None = None) -> Tensor:
    return (act(wide(x), name) if gate is None else act(wide(gate), name) * wide(x)).to(x.dtype)


def activation_backward(da: Tensor, x: Tensor, name: str, gate: Tensor | None = None) -> Tensors:
    """(dx, a), or (dx, dgate, a): the gradients, and the activation again for the weight's gradient."""
    upstream, up = wide(da), wide(x)
    if gate is None:
        return (upstream * act_derivative(up, name)).to(x.dtype), act(up, name).to(x.dtype)
    opened = wide(gate)
    value = act(opened, name)
    dgate = upstream * up * act_derivative(opened, name)
    return (upstream * value).to(x.dtype), dgate.to(x.dtype), (value * up).to(x.dtype)


def rope_rotate(
    q: Tensor, k: Tensor, table: Table, positions: Tensor, interleaved: bool = False, inverse: bool = False
) -> Tensors:
    """q and k (T, heads, d) turned by their positions' rows of the table."""
    cosine, sine = (rows[positions][:, None] for rows in table)
    if inverse:
        sine = -sine

    def turned(x: Tensor) -> Tensor:
        pairs = wide(x).unflatten(-1, (-1, 2) if interleaved else (2, -1))
        first, second = pairs.unbind(-1 if interleaved else -2)
        parts = [first * cosine - second * sine, second * cosine + first * sine]
        return torch.stack(parts, -1 if interleaved else -2).flatten(-2).to(x.dtype)

    return turned(q), turned(k)


def cross_entropy_forward(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits), targets, reduction="none")


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


def weighted_activation_forward(gate_up: Tensor, name: str, weights: Tensor) -> Tensor:
    gate, up = wide(gate_up).chunk(2, 1)
    return (act(gate, name) * up * weights[:, None]).to(gate_up.dtype)


def weighted_activation_backward(da: Tensor, gate_up: Tensor, name: str, weights: Tensor) -> Tensors:
    """(gradient of gate_up, the result again, gradient of the weights)."""
    (gate, up), upstream = wide(gate_up).chunk(2, 1), wide(da)
    value, weight = act(gate, name), weights[:, None]
    gradients = torch.cat([upstream * weight * up * act_derivative(gate, name), upstream * weight * value], 1)
    return gradients.to(da.dtype), (value * up * weight).to(da.dtype), (upstream * value * up).sum(1)


def combine(rows: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """The sum of each token's rows. This rank holds all of them."""
    return wide(rows[positions]).sum(1).to(rows.dtype)


def route_forward(logits: Tensor, policy: Policy) -> Tensors:
    """(experts, weights, scores) by softmax, normalised, without groups."""
    scores = logits.softmax(1)
    experts = scores.topk(policy.k).indices.sort(1).values
    picked = scores.gather(1, experts)
    return experts.to(torch.int32), picked / picked.sum(1, keepdim=True) * policy.scale, scores


def route_backward(dweights: Tensor, experts: Tensor, scores: Tensor, policy: Policy) -> Tensor:
    """dlogits of route_forward."""
    index, gradient = experts.long(), dweights * policy.scale
    picked = scores.gather(1, index)
    total = picked.sum(1, keepdim=True)
    gradient = (gradient - (gradient * picked).sum(1, keepdim=True) / total) / total
    dscores = torch.zeros_like(scores).scatter(1, index, gradient)
    return scores * (dscores - (dscores * scores).sum(1, keepdim=True))
