"""clip_grad_norm_: torch.nn.utils.clip_grad_norm_ for parameters that lie on different meshes, or on none."""

import functools
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tpformer.distributed.local_gradients import scale_gradients
from tpformer.layers import ParallelModule

from .gradients import axis_groups, gradient_norm, sum_partial_gradients


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients so that their norm is at most max_norm; returns the norm before that, equal on all ranks.

    The norm is that of the whole model in one process, whatever the parameters are: plain tensors, which are equal on
    all ranks, DTensors on a tensor-parallel axis, FSDP2's DTensors on one axis or two, or all of these together.
    parameters: as torch's, or a module. A module tells its tensor-parallel ranks even where all its parameters are
    whole; parameters alone tell those of the meshes that one of them lies on. Gradients that are DTensors with Partial
    placements are added up first. In models with sequence shards that you built of this library's layers, call
    reduce_partial_gradients before, as for a step without clipping: it knows your own parameters.
    norm_type: the order of the norm, above 0; math.inf or "inf" is the largest magnitude.
    foreach: taken so that calls of torch's function need no change; the result does not depend on it.
    Returns a scalar in the gradients' dtype (0 without gradients), as torch's function does.
    Communication: one all-reduce of 8 bytes per mesh axis, and those of the partial gradients.
    Errors:  ValueError for a norm_type that is not above 0; RuntimeError for a norm that is infinite or NaN, with
             error_if_nonfinite.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} is the order of a norm, which is above 0: give 2.0 or math.inf")
    groups: list[ProcessGroup | None] = []
    if isinstance(parameters, nn.Module):
        groups = [part.tp.group for part in parameters.modules() if isinstance(part, ParallelModule)]
        parameters = parameters.parameters()
    found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    groups += [group for parameter in found for group in axis_groups(parameter)]
    sum_partial_gradients(found)
    distinct = {tuple(dist.get_process_group_ranks(group)): group for group in groups if group is not None}
    norm = gradient_norm(found, list(distinct.values()), norm_type=norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {float(norm)}, so they cannot be scaled to "
            f"{max_norm}: set error_if_nonfinite=False to scale them by it all the same"
        )
    scale_gradients(found, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    dtypes = [parameter.grad.dtype for parameter in found if parameter.grad is not None]
    return norm.to(functools.reduce(torch.promote_types, dtypes, torch.float32 if not dtypes else dtypes[0]))
