"""What every optimizer is told or refused when it steps parameters that lie on ranks, whoever made it."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import has_torch_function

from tpformer.distributed.dtensor import check_own_part, is_dtensor
from tpformer.torch_private import held_by, own_slices

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

CHECKED = "_tpformer_checked"  # an optimizer's attribute: the state that has been looked at


@cache
def watch_optimizers() -> None:
    """From now on, every optimizer's step is right for parameters on ranks, or is refused. Later calls do nothing.

    Where a group has plain parameters and DTensors, torch's multi-tensor operations refuse both together. On a GPU they
    are the default, so such a group goes parameter by parameter, unless it asks for them.
    Adafactor's step sizes and factored statistics are those of whole tensors. For a sharded vector torch's Adafactor
    silently takes those of the shard; for a sharded matrix it raises from within. Optimizers that work element by
    element, such as AdamW, are exact. torch's Muon orthogonalises whatever it is given, which is the shard of a sharded
    matrix. A state that another rank has saved is refused. What a step writes is counted, so that a backward of a
    forward before it raises: torch's multi-tensor operations do not count it for DTensors.
    """
    register_optimizer_step_pre_hook(_part_by_part)
    register_optimizer_step_pre_hook(_refuse)
    register_optimizer_step_pre_hook(_check_loaded)
    register_optimizer_step_pre_hook(_count_writes)


def _part_by_part(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        if "foreach" not in group or len(set(map(is_dtensor, group["params"]))) < 2:
            continue
        if asked := next((name for name in ("foreach", "fused") if group.get(name)), None):
            raise ValueError(
                f"{asked}=True for plain parameters and DTensors in one group, which torch refuses together: leave "
                f"{asked} out, or make a group of each kind"
            )
        group["foreach"] = False


def _count_writes(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    torch.autograd.graph.increment_version([p for p in parameters if is_dtensor(p)])


@torch.no_grad()
def _check_loaded(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Cut a state that one process saved, and that was loaded since the last step, to this rank's part.

    ValueError if it is another rank's, or of tensors of another shape."""
    state = optimizer.state
    if vars(optimizer).get(CHECKED) is state:
        return
    for parameter, held in state.items():
        for name, value in held.items() if isinstance(held, dict) else ():
            check_own_part(f"{name} of {type(optimizer).__name__}", value)
            if is_dtensor(parameter) and isinstance(value, Tensor) and value.ndim and not is_dtensor(value):
                held[name] = _own_part(f"{name} of {type(optimizer).__name__}", value, parameter)
    vars(optimizer)[CHECKED] = state


def _own_part(name: str, whole: Tensor, like: DTensor) -> Tensor:
    """A whole tensor of a state, laid out as its parameter is."""
    if whole.shape != like.shape:
        raise ValueError(
            f"{name} is {tuple(whole.shape)}, and its parameter is {tuple(like.shape)} on all ranks together: load the "
            f"state of an optimizer that had the same parameters in the same order"
        )
    part = torch.zeros_like(like, dtype=whole.dtype, requires_grad=False)
    held_by(part).copy_(whole[own_slices(like.shape, like.device_mesh, like.placements)])
    return part


def _no_operation(optimizer: optim.Optimizer) -> str | None:
    """What torch's step of this optimizer cannot do with DTensors, and what to do instead. None if it has another."""
    if not inspect.unwrap(type(optimizer).step).__module__.startswith("torch."):
        return None
    if isinstance(optimizer, optim.Rprop):
        return "Rprop of DTensors: use another optimizer, such as AdamW"
    fused = isinstance(optimizer, optim.SGD | optim.Adagrad) and any(g.get("fused") for g in optimizer.param_groups)
    return f"{type(optimizer).__name__}(fused=True) of DTensors: leave fused out" if fused else None


def _refuse(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if lacking := _no_operation(optimizer):
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            if is_dtensor(parameter) and not has_torch_function((parameter,)):  # models that are cut in place have one
                raise ValueError(f"torch has no {lacking}")
    if isinstance(optimizer, getattr(optim, "Muon", ())):
        why = "it would orthogonalise this rank's shard; use tpformer.Muon"
    elif any(kind.__name__ == "Adafactor" for kind in type(optimizer).__mro__):  # transformers has one, too
        why = "its statistics are of whole tensors; use AdamW"
    else:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if is_dtensor(parameter) and any(place.is_shard() for place in parameter.placements):
                raise ValueError(
                    f"{type(optimizer).__name__} cannot step a parameter of {tuple(parameter.shape)} that is sharded "
                    f"over ranks: {why}"
                )
