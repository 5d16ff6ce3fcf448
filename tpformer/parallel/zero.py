"""ZeRO stages 0 to 3, low-precision compute and CPU offload: FSDP2, set up and told when to reduce.

Belongs here: what a stage means in FSDP2's terms, and the only uses of FSDP2's private names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tpformer.config import Layout


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes of a run's mesh that FSDP2 works on: dp_shard, with dp_replicate before it where that is not 1."""
    return mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]


def apply_zero(
    part: nn.Module, units: Iterable[nn.Module], mesh: DeviceMesh, layout: Layout, compute_dtype: torch.dtype
) -> None:
    """Lay a part of the model out over the data-parallel axes of `mesh` by FSDP2, as layout.zero says.

    units: modules within `part`, in the order of its forward, that are gathered, and reduced, one after the other; what
    is left of it is one more.
    Parameters keep the dtype they were built in (master weights) and compute in compute_dtype. Gradients are summed,
    not averaged: a loss is to be divided by the target tokens of the global batch.
    Communication, per unit of P parameters: stages 0 to 2 one all-gather of P * compute itemsize a step, stage 3 one in
    the forward and one in the backward of each microbatch; stages 0 and 1 one reduce-scatter of P * reduce itemsize a
    step, stages 2 and 3 one each microbatch; and over dp_replicate one all-reduce of what that leaves a step (one each
    microbatch where stages 2 and 3 reduce in 16 bits, which is no format to add up microbatches in).
    """
    master = next((parameter.dtype for parameter in part.parameters()), compute_dtype)
    low = compute_dtype.itemsize < master.itemsize
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=getattr(torch, layout.reduce_dtype) if low else master,
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mesh": data_parallel_mesh(mesh), "mp_policy": policy}
    if layout.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    shards = mesh["dp_shard"].size()
    options["shard_placement_fn"] = lambda parameter: _placement(parameter, shards)
    sharded = [fully_shard(unit, reshard_after_forward=layout.zero == 3, **options) for unit in units]
    # the rest (embedding, last norm, head) is needed at both ends of a forward: torch keeps a root's parameters
    sharded.append(fully_shard(part, reshard_after_forward=None if layout.zero == 3 else False, **options))
    for unit, before in zip(sharded, [sharded[-1], *sharded], strict=False):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo lacks the operation that divides
        # left to itself, torch takes the unit that ended a forward before this one: with several microbatches in flight
        # it gathers units that are not needed, or stops gathering ahead (pytorch#164756)
        unit.set_modules_to_backward_prefetch([before])


def _placement(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Shard(1) for a matrix that the tp axis already cut by rows: each rank then keeps one block, not strided rows."""
    if isinstance(parameter, DTensor) and parameter.ndim == 2 and parameter.placements == (Shard(0),):
        return Shard(1) if parameter.shape[1] % shards == 0 else None
    return None


def prepare_backward(part: nn.Module, zero_stage: int, *, last: bool) -> None:
    """Before a backward of `part`: whether its gradients are reduced, and its parameters given up, after it.

    last: of the step. Stages 0 and 1 accumulate unreduced gradients until then. Without FSDP2 nothing happens.
    """
    if isinstance(part, FSDPModule):
        part.set_requires_gradient_sync(last or zero_stage >= 2)
        # sums over dp_shard wait for dp_replicate as shards in the reduce dtype: where that can add up microbatches
        part.set_requires_all_reduce(last or fully_shard.state(part)._mp_policy.reduce_dtype.itemsize < 4)
        part.set_is_last_backward(last or zero_stage >= 2)  # its reductions are complete when it returns
        part.set_reshard_after_backward(last or zero_stage == 3)


def reshard(part: nn.Module) -> None:
    """Give up parameters that a forward without backward left gathered: `part.parameters()` are the shards again."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def parameter_groups(part: FSDPModule) -> Iterator[Any]:
    """FSDP2's groups of parameters that it gathers together, after the part's first forward: the root's first."""
    for state in fully_shard.state(part)._state_ctx.all_states:
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group per state
        yield from groups if groups is not None else filter(None, [state._fsdp_param_group])


def take_weight_gradients(part: nn.Module) -> None:
    """After weight gradients were added to .grad outside of a backward: accumulate them in the reduce dtype."""
    if isinstance(part, FSDPModule):
        for group in parameter_groups(part):
            group.post_backward()


def reduce_accumulated(part: nn.Module) -> None:
    """Reduce what backwards without reduction accumulated, and give up the unsharded parameters.

    What torch.distributed.pipelining does after the last microbatch (perform_reduce_grad): its backwards do not tell
    FSDP2 which one is the last.
    """
    if isinstance(part, FSDPModule):
        prepare_backward(part, 0, last=True)
        take_weight_gradients(part)
        fully_shard.state(part)._root_post_backward_final_callback()
