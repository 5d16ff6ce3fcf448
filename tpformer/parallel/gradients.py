"""What happens to gradients between backward and optimizer, on any mesh: partial sums and the global norm."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate

from tpformer.distributed.collectives import all_reduce
from tpformer.distributed.dtensor import local_part
from tpformer.distributed.local_gradients import local_norms
from tpformer.layers import ParallelModule
from tpformer.layers.children import RUNS_WHOLE

SUMMED_AT = "_summed_at"  # on a gradient: its version when it was summed


@torch.no_grad()
def reduce_partial_gradients(
    model: nn.Module, *, partial: Sequence[str] | str = (), whole: Sequence[str] | str = ()
) -> None:
    """Add up, over their mesh axis, gradients of which each rank holds a part. Call it once per step, before clipping.

    Parameters that all tensor-parallel ranks share but use on their own sequence shard (norm weights, row biases,
    positions) or on their own heads (shared key-value heads, norms of queries and keys) get Partial gradients. They
    become Replicate, equal on all ranks.
    partial, whole: needed for parameters of your own that are not laid out over tensor-parallel ranks, in a model with
    sequence shards. Name each one, or a pattern such as "*.lora_a.weight": in `partial` if its gradient is made from
    this rank's shard (it is then summed), in `whole` if it is already equal on all ranks (it is then left alone).
    Nothing else tells the two apart. Modules that replace this library's need no name: they get whole rows.
    Communication: one all-reduce of all such gradients per (axis, placements, dtype), and one per dtype for parameters
    of your own. Calling it again does nothing.
    FSDP2 does this itself while it reduces, except for parameters of your own; call it either way.
    Errors:  ValueError for a parameter that is named nowhere, or in both. RuntimeError where a sum has been changed,
             by clipping or another backward, before the next call.
    """
    own = _own_parts(model, partial, whole)
    sum_partial_gradients(model.parameters())
    for (group, _), parameters in own.items():
        local = [local_part(parameter.grad) for parameter in parameters]
        for held, piece in zip(local, _summed(local, [group]), strict=True):
            held.copy_(piece)
        for parameter in parameters:  # after all copies: FSDP2's are slices of one tensor, with one version
            setattr(parameter.grad, SUMMED_AT, _version(parameter.grad))


@torch.no_grad()
def sum_partial_gradients(parameters: Iterable[Tensor]) -> None:
    """Make whole, Replicate, the gradients that are DTensors with Partial placements.

    Communication: one all-reduce per mesh axis of each (mesh, placements, dtype).
    """
    buckets: dict[tuple, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(isinstance(place, Partial) for place in grad.placements):
            buckets[grad.device_mesh, grad.placements, grad.dtype].append(parameter)
    for (mesh, placements, _), parameters in buckets.items():
        local = [parameter.grad.to_local() for parameter in parameters]
        groups = [mesh.get_group(axis) for axis, place in enumerate(placements) if isinstance(place, Partial)]
        whole_places = [Replicate() if isinstance(place, Partial) else place for place in placements]
        for parameter, piece in zip(parameters, _summed(local, groups), strict=True):
            # memory of its own: torch cannot deepcopy a DTensor that starts inside of another's
            parameter.grad = DTensor.from_local(piece.clone(), mesh, whole_places, run_check=False)


def _summed(parts: list[Tensor], groups: Iterable[ProcessGroup]) -> list[Tensor]:
    """Each tensor's sum over the ranks of all groups, by one all-reduce per group."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    for group in groups:
        flat = all_reduce(flat, group)
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]


def _own_parts(
    model: nn.Module, partial: Sequence[str] | str, whole: Sequence[str] | str
) -> dict[tuple[ProcessGroup, torch.dtype], list[nn.Parameter]]:
    """The user's own parameters whose gradients are still this rank's part, by (tensor-parallel group, dtype)."""
    layers = [part for part in model.modules() if isinstance(part, ParallelModule) and not part.makes_whole_gradients]
    sharded = next((part.tp for part in layers if part.tp.sharded), None)
    if sharded is None:
        return {}
    equal = {id(p) for part in model.modules() if getattr(part, RUNS_WHOLE, False) for p in part.parameters()}
    ranks = dist.get_process_group_ranks(sharded.group)
    # experts that exchange tokens lie on other ranks than the rest, and sum the gradients of all their rows
    equal |= {id(p) for layer in layers if layer.exchanges for p in layer.parameters(recurse=False)}
    parts: dict[tuple[ProcessGroup, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    unknown = []
    patterns = [(names,) if isinstance(names, str) else names for names in (partial, whole)]
    for name, parameter in model.named_parameters():
        if parameter.grad is None or id(parameter) in equal or ranks in _axes(parameter):
            continue
        in_partial, in_whole = (any(fnmatchcase(name, pattern) for pattern in names) for names in patterns)
        if in_partial == in_whole:
            unknown.append(name)
        elif in_partial:
            summed_at = getattr(parameter.grad, SUMMED_AT, None)
            if summed_at is None:
                parts[sharded.group, parameter.grad.dtype].append(parameter)
            elif summed_at != _version(parameter.grad):
                raise RuntimeError(
                    f"the gradient of {name} has been summed over tensor-parallel ranks and changed since: call "
                    f"reduce_partial_gradients once per step, before clipping, and zero_grad(set_to_none=True) after it"
                )
    if unknown:
        raise ValueError(
            f"{len(unknown)} parameters are not laid out over tensor-parallel ranks in a model with sequence shards "
            f"({', '.join(unknown[:3])}{', ...' * (len(unknown) > 3)}): name each in partial=[...] of "
            f"reduce_partial_gradients if its gradient is of this rank's rows, in whole=[...] if it is equal everywhere"
        )
    return parts


def _version(grad: Tensor) -> tuple[int, int]:
    """It changes with every write to a DTensor, and to its local tensor, into which FSDP2 adds."""
    return grad._version, local_part(grad)._version


def axis_groups(tensor: Tensor) -> list[ProcessGroup]:
    """The process group of each mesh axis that a tensor is laid out over."""
    if not isinstance(tensor, DTensor):
        return []
    return [tensor.device_mesh.get_group(axis) for axis in range(tensor.device_mesh.ndim)]


def _axes(tensor: Tensor) -> list[list[int]]:
    """The ranks along each mesh axis that a tensor is laid out over; torch may give equal meshes different groups."""
    return [dist.get_process_group_ranks(group) for group in axis_groups(tensor)]


def _reached(groups: Iterable[Sequence[int]]) -> set[int]:
    """The ranks whose numbers are in a sum over one group after another, if a mesh has its ranks in order."""
    own = dist.get_rank()
    found = {own}
    for ranks in groups:
        found = {one + other - own for one in found for other in ranks}
    return found


def _check_reached(grad: DTensor, groups: Iterable[Sequence[int]]) -> None:
    """ValueError for groups that leave out ranks with other parts of a gradient."""
    axes = zip(_axes(grad), grad.placements, strict=True)
    parts = _reached(ranks for ranks, place in axes if not isinstance(place, Replicate | Partial))
    summed = _reached(groups)
    if parts <= summed or not summed <= {*range(dist.get_world_size())}:  # the ranks of that mesh are in another order
        return
    raise ValueError(
        f"a gradient of shape {tuple(grad.shape)} has parts on {len(parts)} ranks, and the norm's groups leave out "
        f"rank {min(parts - summed)} of these: give the groups of all mesh axes that parameters are laid out over or "
        f"copied on, for experts that exchange tokens, too, those of dp_replicate, dp_shard, cp and tp"
    )


def _copies(grad: Tensor, ranks: int) -> int:
    """How many of the ranks that a norm is summed over hold the same part of a gradient: all, divided by the parts.

    A gradient's mesh may lay these ranks out on other axes than the groups that add them up.
    """
    if isinstance(grad, DTensor):
        for axis, place in enumerate(grad.placements):
            if isinstance(place, Partial):
                raise RuntimeError("a gradient is still partial: call reduce_partial_gradients(model) before its norm")
            if not isinstance(place, Replicate):
                ranks, rest = divmod(ranks, grad.device_mesh.size(axis))
                assert not rest, f"a gradient in parts over {grad.device_mesh}, whose ranks the norm's groups leave out"
    return ranks


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[Tensor],
    groups: Iterable[ProcessGroup | None],
    *,
    norm_type: float = 2.0,
    pipeline: ProcessGroup | None = None,
    held_twice: Iterable[nn.Parameter] = (),
) -> Tensor:
    """The norm of all gradients as one process would hold them; a float64 scalar, equal on all ranks.

    groups: the process groups of the mesh axes that parameters are laid out over, or copied on (None is skipped);
    norm_type: the order p, above 0; math.inf is the largest magnitude. pipeline: the group of the ranks that hold other
    parameters. Each part of a gradient is counted once: its p-th powers are divided by the number of ranks that hold
    it, and by 2 again for parameters of `held_twice` (TiedParameter.local).
    Communication: one all-reduce of 8 bytes per group. RuntimeError for a gradient that is still partial, ValueError
    for groups that leave out ranks with other parts of a gradient.
    """
    options: dict = {"norm_type": norm_type, "pipeline": pipeline, "held_twice": held_twice}
    return gradient_norms([list(parameters)], groups, **options)[0]


@torch.no_grad()
def gradient_norms(
    sets: Sequence[Sequence[Tensor]],
    groups: Iterable[ProcessGroup | None],
    *,
    norm_type: float = 2.0,
    pipeline: ProcessGroup | None = None,
    held_twice: Iterable[nn.Parameter] = (),
    local: Sequence[Tensor] | None = None,
) -> Tensor:
    """gradient_norm of each of several sets of parameters, by the same number of all-reduces; float64 (sets,).

    The sets are the same on all ranks; a pipeline rank leaves those empty that others hold. local: what local_norms
    gives for each set, if that is known already.
    """
    largest = norm_type == math.inf
    over = [group for group in groups if group is not None]
    ranks, of_groups = math.prod(group.size() for group in over), [dist.get_process_group_ranks(each) for each in over]
    checked: set[tuple] = set()
    twice = {id(parameter) for parameter in held_twice}
    # also of a rank without gradients: all join in one collective
    device = next((local_part(parameter).device for parameters in sets for parameter in parameters), None)
    totals = torch.zeros(len(sets), dtype=torch.float64, device=device)
    for index, parameters in enumerate(sets):
        by_copies: dict[int, list[Tensor]] = defaultdict(list)
        own = local_norms(parameters, norm_type) if local is None else local[index]
        for parameter, norm in zip(parameters, own.unbind(), strict=True):
            if parameter.grad is not None:
                if isinstance(grad := parameter.grad, DTensor) and (grad.device_mesh, grad.placements) not in checked:
                    checked.add((grad.device_mesh, grad.placements))
                    _check_reached(grad, of_groups)
                copies = _copies(parameter.grad, ranks) * (2 if id(parameter) in twice else 1)
                by_copies[copies].append(norm)
        for copies, found in by_copies.items():
            norms = torch.stack(found)
            total = torch.maximum(totals[index], norms.max()) if largest else norms.pow(norm_type).sum() / copies
            totals[index] = total if largest else totals[index] + total
    for group in (*over, pipeline):
        totals = all_reduce(totals, group, "max" if largest else "sum")
    return totals if largest else totals.pow(1.0 / norm_type)
