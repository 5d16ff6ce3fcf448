"""The optimizers' updates of many tensors: the specification, which is torch's fused AdamW and SGD, and the cost."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from tpformer.torch_private import foreach_copy_, foreach_multiply_

from ..cast import cast
from ..cost import Cost
from ..operands import FLOATS, require


@torch.no_grad()
def adamw_(
    masters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor] | None,
    *,
    lr: float | Tensor,
    scale: float | Tensor,
    skipped: Tensor,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """A step of AdamW in place, and each master rounded to its copy.

    Math:     g = scale * gradient; p -= lr weight_decay p; m += (1 - beta1) (g - m); v = beta2 v + (1 - beta2) g**2;
              t += 1; p -= lr / (1 - beta1**t) m / (sqrt(v / (1 - beta2**t)) + eps). Where skipped is 1: nothing
    Shapes:   as many tensors in each list, the i-th ones of one shape on one device: masters p, exp_avgs m and
              exp_avg_sqs v of a dtype; gradients of any; copies of any, or None if there are none; steps t 0-dim
              float32. lr, scale: numbers or 0-dim tensors; skipped: a 0-dim float32 tensor. Gradients of the masters'
              dtype may be scaled in place
    Numerics: torch's, with gradients cast to the masters' dtype before they are scaled. copies are what masters round
              to, before and after
    Traffic:  see update_cost
    Source:   Loshchilov & Hutter 2017 (arXiv:1711.05101), as torch.optim.AdamW(fused=True)
    """
    check_numbers(masters, lr, scale, skipped)
    check(masters, gradients, exp_avgs, exp_avg_sqs, copies=copies, steps=steps)
    adamw(
        list(masters), scaled(gradients, masters, scale), list(exp_avgs), list(exp_avg_sqs), [], list(steps),
        fused=True, found_inf=skipped, amsgrad=False, beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay,
        eps=eps, maximize=False,
    )  # fmt: skip
    round_to(copies, masters)


@torch.no_grad()
def sgd_(
    masters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    copies: Sequence[Tensor] | None,
    *,
    lr: float | Tensor,
    scale: float | Tensor,
    skipped: Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """A step of SGD in place, and each master rounded to its copy.

    Math:     g = scale * gradient + weight_decay p; b = momentum b + g; p -= lr b, or lr (g + momentum b) with
              nesterov; without momentum p -= lr g. Where skipped is 1: nothing
    Shapes:   as for adamw_; momentum_buffers b like masters, which begin at 0, or none without momentum
    Numerics: as for adamw_; masters of 16 bits move in float32 and are rounded
    Traffic:  see update_cost
    Source:   Sutskever et al. 2013, as torch.optim.SGD(fused=True) with dampening 0
    """
    check_numbers(masters, lr, scale, skipped)
    check_momentum(masters, momentum_buffers, momentum)
    check(masters, gradients, momentum_buffers, copies=copies)
    wide, buffers = ([_moving(x) for x in tensors] for tensors in (masters, momentum_buffers))
    sgd(
        wide, scaled(gradients, wide, scale), buffers, fused=True, found_inf=skipped, weight_decay=weight_decay,
        momentum=momentum, lr=lr, dampening=0.0, nesterov=nesterov, maximize=False,
    )  # fmt: skip
    for x, own in zip([*masters, *momentum_buffers], [*wide, *buffers], strict=True):
        if x is not own:
            x.copy_(own)
    round_to(copies, masters)


def _moving(x: Tensor) -> Tensor:
    """What torch's fused SGD can move: on a CPU it leaves most elements of 16 bits where they were (torch 2.13)."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_cpu else x


def check(
    masters: Sequence[Tensor], gradients: Sequence[Tensor], *states: Sequence[Tensor],
    copies: Sequence[Tensor] | None, steps: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """ValueError unless each list that is not empty has a tensor for each master, of its shape and on its device;
    steps are 0-dim, and states have the master's dtype."""
    each = {"gradient": gradients, "copy": copies or (), **{f"state {i}": state for i, state in enumerate(states)}}
    if steps is not None:
        each["step"] = steps
    for name, tensors in each.items():
        if len(tensors) != len(masters) and (tensors or name in ("gradient", "step")):
            raise ValueError(f"{name}: there are {len(tensors)} tensors, but {len(masters)} masters: give one for each")
        for x, master in zip(tensors, masters, strict=False):
            shape, dtypes = (master.shape, FLOATS) if name != "step" else ((), (torch.float32,))
            require("update", master, (name, x, shape, (master.dtype,) if name.startswith("state") else dtypes))


def check_numbers(masters: Sequence[Tensor], lr: float | Tensor, scale: float | Tensor, skipped: Tensor) -> None:
    """ValueError unless those that are tensors are 0-dim, on the masters' device."""
    numbers = [(name, x, (), FLOATS) for name, x in (("lr", lr), ("scale", scale)) if isinstance(x, Tensor)]
    if masters:
        require("update", masters[0], ("skipped", skipped, (), (torch.float32,)), *numbers)


def check_momentum(masters: Sequence[Tensor], momentum_buffers: Sequence[Tensor], momentum: float) -> None:
    """ValueError for momentum without buffers, which would be lost, and for buffers without momentum."""
    if masters and (momentum != 0) != (len(momentum_buffers) > 0):
        raise ValueError(
            f"update: momentum={momentum} with {len(momentum_buffers)} momentum buffers: give one for each master with "
            f"momentum, and none without"
        )


def scaled(gradients: Sequence[Tensor], masters: Sequence[Tensor], scale: float | Tensor) -> list[Tensor]:
    """Gradients in their masters' dtypes, laid out as those are, times the scale. Of those that are so already, in
    place."""
    wide = []
    for gradient, master in zip(gradients, masters, strict=True):
        alike = cast(gradient, master.dtype)
        if alike.stride() != master.stride():  # torch's fused optimizers take elements in the order of memory
            alike = torch.empty_like(master).copy_(alike)
        wide.append(alike)
    if isinstance(scale, Tensor) or scale != 1.0:
        foreach_multiply_(wide, scale)
    return wide


def round_to(copies: Sequence[Tensor] | None, masters: Sequence[Tensor]) -> None:
    """Round each master to its copy, if there are copies."""
    if copies:
        foreach_copy_(list(copies), list(masters))


def update_cost(numel: int, gradient: int, copy: int = 0, optimizer: str = "adamw") -> Cost:
    """Reads each gradient, and reads and writes each float32 master and moment; writes each copy.

    numel: elements of all tensors together. gradient, copy: bytes of an element; 0 without copies. optimizer: adamw,
    sgd with momentum, or sgd without, "plain sgd".
    """
    moments, flops = {"adamw": (2, 16), "sgd": (1, 7), "plain sgd": (0, 5)}[optimizer]
    return Cost(flops * numel, (gradient + 8 * (1 + moments) + copy) * numel)
