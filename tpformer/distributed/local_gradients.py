"""What a rank does with its own parts of gradients: their norms, and their scaling. No communication."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tpformer.torch_private import foreach_multiply_, foreach_norm

from .dtensor import local_part


@torch.no_grad()
def local_norms(parameters: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of what this rank holds of each gradient, 0 where that is nothing; float64 (parameters,).

    No communication. A parameter whose gradient has an element that is not finite has a norm that is not finite.
    """
    grads = {index: local_part(p.grad) for index, p in enumerate(parameters) if p.grad is not None}
    held = [index for index, grad in grads.items() if grad.numel()]  # FSDP2 may leave a rank nothing of a small one
    if not held:
        device = local_part(parameters[0]).device if parameters else None
        return torch.zeros(len(parameters), dtype=torch.float64, device=device)
    found = dict(zip(held, foreach_norm([grads[index] for index in held], norm_type), strict=True))
    nothing = torch.zeros_like(found[held[0]])
    return torch.stack([found.get(index, nothing) for index in range(len(parameters))]).double()


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply all gradients by one number, in place; a 0-dim Tensor stays on its device. No communication."""
    if isinstance(factor, Tensor) or factor != 1.0:
        foreach_multiply_([local_part(each.grad) for each in parameters if each.grad is not None], factor)


def clipping(norm: Tensor, clip_norm: float) -> Tensor | float:
    """What gradients of this norm are multiplied by, so that it is at most clip_norm; 0 turns clipping off."""
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0) if clip_norm > 0 else 1.0
