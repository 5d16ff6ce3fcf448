"""Wrong replacements for parts of a training step, which checks of whole layouts must notice.

Belongs here: defects that more than one test injects.
"""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate


def without_reduction(part: torch.nn.Module) -> None:
    """Take partial gradients for whole ones."""
    for parameter in part.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(isinstance(place, Partial) for place in grad.placements):
            places = [Replicate() if isinstance(place, Partial) else place for place in grad.placements]
            parameter.grad = DTensor.from_local(grad.to_local(), grad.device_mesh, places, run_check=False)
