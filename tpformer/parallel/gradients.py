"""Gradients between backward and the optimizer: adding up partial ones, the global norm, scaling. Any mesh."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate

from tpformer.distributed.collectives import all_reduce


@torch.no_grad()
def reduce_partial_gradients(model: nn.Module) -> None:
    """Add up, over their mesh axis, the gradients that each rank holds only a part of. Once per step, before clipping.

    Parameters that all tensor-parallel ranks share but use on their own sequence shard (norm weights, row biases,
    positions, shared key-value heads) get Partial gradients. They become Replicate, equal on all ranks.
    Communication: one all-reduce per (axis, dtype) of all such gradients together. Calling it again does nothing.
    FSDP2 does this itself while it reduces; call it either way.
    """
    buckets: dict[tuple, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(isinstance(place, Partial) for place in grad.placements):
            buckets[grad.device_mesh, grad.placements, grad.dtype].append(parameter)
    for (mesh, placements, _), parameters in buckets.items():
        local = [parameter.grad.to_local() for parameter in parameters]
        flat = torch.cat([grad.reshape(-1) for grad in local])
        for axis, place in enumerate(placements):
            if isinstance(place, Partial):
                flat = all_reduce(flat, mesh.get_group(axis))
        whole = [Replicate() if isinstance(place, Partial) else place for place in placements]
        pieces = flat.split([grad.numel() for grad in local])
        for parameter, grad, piece in zip(parameters, local, pieces, strict=True):
            parameter.grad = DTensor.from_local(piece.view_as(grad), mesh, whole, run_check=False)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: a DTensor's local tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(grad: Tensor, groups: Iterable[list[int]]) -> int:
    """How many ranks of these groups (each given by its ranks) together hold the same part of a gradient."""
    copies, laid_out = 1, []  # by ranks: torch may give a mesh equal to an earlier one that one's process groups
    if isinstance(grad, DTensor):
        for axis, place in enumerate(grad.placements):
            if isinstance(place, Partial):
                raise RuntimeError("a gradient is still partial: call reduce_partial_gradients(model) before its norm")
            laid_out.append(dist.get_process_group_ranks(grad.device_mesh.get_group(axis)))
            if isinstance(place, Replicate):
                copies *= grad.device_mesh.size(axis)
    for group in groups:
        if group not in laid_out:
            copies *= len(group)
    return copies


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[nn.Parameter],
    groups: Iterable[ProcessGroup | None],
    *,
    pipeline: ProcessGroup | None = None,
    held_twice: Iterable[nn.Parameter] = (),
) -> Tensor:
    """The 2-norm of all gradients as one process would hold them; a float64 scalar, equal on all ranks.

    groups: the process groups of the mesh axes that parameters are laid out over, or copied on (None is skipped);
    pipeline: that of the ranks that hold other parameters. Each part of a gradient is counted once: its square is
    divided by the number of ranks that hold it, and by two more for parameters of `held_twice` (TiedParameter.local).
    Communication: one all-reduce of 8 bytes per group. RuntimeError for a gradient that is still partial.
    """
    groups = [group for group in groups if group is not None]
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    twice = {id(parameter) for parameter in held_twice}
    device: torch.device | None = None
    for parameter in parameters:
        device = device or local_part(parameter).device  # also of a rank without gradients: all join in one collective
        if parameter.grad is not None:
            copies = _copies(parameter.grad, ranks) * (2 if id(parameter) in twice else 1)
            by_copies[copies].append(local_part(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, grads in by_copies.items():
        total = total + torch.stack(torch._foreach_norm(grads)).double().square().sum() / copies
    for group in (*groups, pipeline):
        total = all_reduce(total.view(1), group)[0]
    return total.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients, in place, by one number: that of clipping, of a loss scale, or both. No communication."""
    grads = [local_part(p.grad) for p in parameters if p.grad is not None]
    if factor != 1.0 and grads:
        torch._foreach_mul_(grads, factor)
