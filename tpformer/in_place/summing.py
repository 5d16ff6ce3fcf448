"""Modules of any class that see a rank's part of what they hold whole, and whose gradients are summed over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer import ops
from tpformer.distributed.dtensor import is_dtensor
from tpformer.layers import TensorParallel
from tpformer.ops.uncompiled import uncompiled

from .linears import class_of, reduced


def sum_gradients(
    module: nn.Module, tp: TensorParallel | DeviceMesh | None, seen: Mapping[str, int | None] | None = None
) -> None:
    """Let a module's own parameters, whole on every rank, get the sum of all ranks' gradients.

    For a module of any class that works on this rank's part: its rows of the sequence, or its heads. Its parameters
    stay as they are, plain or Replicate, and its children are left alone.
    seen:    {name of a parameter or buffer: the dim of which the forward sees this rank's equal part, None for all of
             it}; None for all parameters, whole. A dotted name is one that a module within holds, and this one uses.
    Communication, per rank: backward an all-reduce for each of these parameters.
    Errors:  ValueError for parameters that are sharded, and where the gradients are summed already.
    """
    tp = TensorParallel.of(tp)
    for name, parameter in module.named_parameters(recurse=False):
        if is_dtensor(parameter) and not (
            parameter.device_mesh == tp.mesh and all(place.is_replicate() for place in parameter.placements)
        ):
            raise ValueError(
                f"{name} of {type(module).__name__} is a DTensor with {parameter.placements} on "
                f"{parameter.device_mesh}: only gradients of parameters that each rank has whole can be summed"
            )
    if isinstance(module, _Summing):
        raise ValueError(f"the gradients of this {type(module).__name__} are summed already")
    own: Any = type(module)
    module.__class__ = class_of(_Summing, own)
    module.summed_over, module.seen = tp.with_all_rows, None if seen is None else dict(seen)


class _Summing(nn.Module):
    """A module whose forward sees parameters that pass their gradients on as sums over ranks, or its part of them."""

    summed_over: TensorParallel
    seen: dict[str, int | None] | None
    sequence_chain: Any = None  # the Chain whose forwards decide whether it runs on sequence shards

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.sequence_chain is not None:
            self.sequence_chain.check_recompute()
        tp = self.summed_over
        held: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for path, dim in (dict.fromkeys(vars(self)["_parameters"]) if self.seen is None else self.seen).items():
                holder, _, name = path.rpartition(".")
                module = self.get_submodule(holder) if holder else self
                parameters = vars(module)["_parameters"]
                own = name in parameters
                table = parameters if own else vars(module)["_buffers"]
                value = table.get(name)
                if value is None:
                    continue
                held.append((table, name, value))
                whole = value.to_local() if is_dtensor(value) else value
                if own:
                    whole = ops.sum_gradient(whole, tp.group)
                table[name] = whole if dim is None else whole.unflatten(dim, (tp.size, -1)).select(dim, tp.rank)
            return super().forward(*args, **kwargs)
        finally:
            for table, name, value in held:
                table[name] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(self, protocol)
