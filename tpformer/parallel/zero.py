"""ZeRO stages 0 to 3, low-precision compute and CPU offload: FSDP2, set up and told when to reduce.

Belongs here: what a stage means in FSDP2's terms, and the only uses of FSDP2's private names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

from tpformer.config import FP8, Layout
from tpformer.config.zero_gather import shard_dim
from tpformer.distributed.mesh import DEFAULT_TIMEOUT, data_mesh, expert_mesh
from tpformer.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpformer.layers.moe import Experts

from .block_gather import BlockGather, SentShard
from .exchange import Exchange, exchange_named

# the parameters that GEMMs in FP8 multiply; one that is computed from others, as by pruning, has another name
LINEAR = ("weight",)
BLOCKED = {ColumnParallelLinear: LINEAR, RowParallelLinear: LINEAR, Experts: ("gate_up_proj", "down_proj")}


class ReplicaSum:
    """FSDP2's all-reduce hook of one unit, for an Exchange that adds up over replicas itself.

    add: Exchange.unit's. last: whether replicas add up now; prepare_backward sets it. Sums over microbatches wait here
    until then.
    """

    def __init__(self, add: Callable[[Tensor], object]) -> None:
        self.add, self.last = add, True
        self._waiting: Tensor | None = None

    def __call__(self, x: Tensor) -> None:
        """x: (elements,) of the reduce dtype, which FSDP2 adds to the gradients afterwards."""
        if not self.last:
            self._waiting = x.clone() if self._waiting is None else self._waiting.add_(x)
            x.zero_()
            return
        if self._waiting is not None:
            x += self._waiting
            self._waiting = None
        self.add(x)


def _fsdp_mesh(data: DeviceMesh, exchange: Exchange) -> DeviceMesh:
    """The axes of data_mesh that FSDP2 works on: shards, and before it replicas if FSDP2 sums over them."""
    replica, shard = data.mesh_dim_names
    return data[shard] if data[replica].size() == 1 or exchange.sums_replicas else data


def uses_fsdp(layout: Layout, compute_dtype: torch.dtype) -> bool:
    """Whether a run with this layout and compute dtype needs FSDP2: to share, to offload, or for 16 bits in a pipeline
    or on several workers. One rank with whole samples of its own in 16 bits has MasterWeights."""
    copies = layout.copies > 1 or layout.copies_experts
    several = copies or layout.pipeline_parallel > 1
    return copies or layout.cpu_offload or (several and compute_dtype.itemsize < 4)


def apply_zero(
    part: nn.Module,
    units: Iterable[nn.Module],
    mesh: DeviceMesh,
    layout: Layout,
    compute_dtype: torch.dtype,
    exchange: Exchange | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> None:
    """Lay a part of the model out over the ranks of `mesh` that have other tokens, by FSDP2, as layout.zero says.

    units: modules of `part` in the order of its forward. Each is gathered and reduced as a whole; the rest of `part` is
    one more unit. exchange: how replicas add up; unset: a new one of layout.exchange. timeout: of new process groups.
    Parameters keep the dtype they were built in (master weights) and compute in compute_dtype. Gradients are summed,
    not averaged: divide the loss by the target tokens of the global batch.
    Experts that exchange tokens are laid out over the ranks that have the same of them, in the unit of their layer.
    Communication, for a unit of P parameters, or for the experts and the rest of a unit that has both:
        all-gather of P * compute itemsize: stages 0 to 2 once a step; stage 3 in the forward and the backward of each
        microbatch (the rest of `part` in the forward only); with layout.zero_gather = "fp8" weights of linears in FP8
        are a byte a number and one for each block;
        reduce-scatter of P * reduce itemsize: stages 0 and 1 once a step, stages 2 and 3 once a microbatch;
        all-reduce over replicas, or the exchange's own sum, of what the reduce-scatter leaves: once a step, but
        once a microbatch where stages 2 and 3 reduce in 16 bits, in which microbatches must not be added up.
    """
    exchange = exchange or exchange_named(layout.exchange)
    if exchange.takes_steps:
        raise ValueError(f"a {type(exchange).__name__} wants whole parameters on each rank: leave ZeRO out")
    names = _unit_names(part, units := list(units))
    master = next((parameter.dtype for parameter in part.parameters()), compute_dtype)
    low = compute_dtype.itemsize < master.itemsize
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=getattr(torch, layout.reduce_dtype) if low else master,
        cast_forward_inputs=False,
    )
    data = data_mesh(mesh, layout.replicas, timeout)
    options: dict[str, Any] = {"mesh": _fsdp_mesh(data, exchange), "mp_policy": policy}
    if layout.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    options["shard_placement_fn"] = _placements(part, mesh, layout, timeout)
    sharded = [fully_shard(unit, reshard_after_forward=layout.zero == 3, **options) for unit in units]
    # the rest (embedding, last norm, head) is needed at both ends of a forward: torch keeps a root's parameters
    sharded.append(fully_shard(part, reshard_after_forward=None if layout.zero == 3 else False, **options))
    for unit, before, name in zip(sharded, [sharded[-1], *sharded], names, strict=False):
        if options["mesh"].size() > 1 or layout.copies_experts:
            # torch would divide the gradients of a single rank by 1, in a copy of them
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo lacks the operation that divides
        # left to itself, torch takes the unit that ended a forward before this one: with several microbatches in flight
        # it gathers units that are not needed, or stops gathering ahead (pytorch#164756)
        unit.set_modules_to_backward_prefetch([before])
        if exchange.sums_replicas and name:
            held = [each for group in _groups(fully_shard.state(unit)) for each in group.fsdp_params]
            shapes = [each.padded_sharded_param_size for each in held]
            unit.set_all_reduce_hook(ReplicaSum(exchange.unit(name, shapes, data.get_group(0))))
    if layout.zero_gather == FP8:
        _gather_blocks(part, sharded)


def _gather_blocks(part: nn.Module, units: Iterable[FSDPModule]) -> None:
    """Let units send those weights of linears in FP8 in blocks of which every rank's shard is whole ones."""
    quantised = quantised_weights(part)
    for unit in units:
        names = {id(each): name for name, each in unit.named_parameters()}
        for group in _groups(fully_shard.state(unit)):
            shards = []
            for each in group.fsdp_params:
                own = id(each.sharded_param)
                shards.append(SentShard(names[own], tuple(each.padded_sharded_param_size), own in quantised))
            if any(shard.in_blocks for shard in shards) and group.mesh_info.shard_mesh_size > 1:
                group._all_gather_comm = BlockGather(shards)  # torch's own setter takes no unit of several groups


def quantised_weights(part: nn.Module) -> set[int]:
    """The ids of the weights of which nothing reads more than the blocks: those of linears and experts in FP8 whose
    class is none of the user's, and which have no other module's parameter."""
    found: set[int] = set()
    others: set[int] = set()
    for module in part.modules():
        kind: Any = next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))
        weights = BLOCKED[kind] if kind in BLOCKED and module.tp.precision == FP8 else ()
        for name, parameter in module.named_parameters(recurse=False):
            (found if name in weights else others).add(id(parameter))
    return found - others


def gathers_of(part: nn.Module) -> list[str]:
    """How units that gather blocks send weights of linears, in words: one line for all that are alike."""
    units = [module for module in part.modules() if isinstance(module, FSDPModule)]
    comms = [group._all_gather_comm for unit in units for group in _groups(fully_shard.state(unit))]
    return list(dict.fromkeys(str(comm) for comm in comms if isinstance(comm, BlockGather)))


def _unit_names(part: nn.Module, units: Iterable[nn.Module]) -> list[str]:
    """The name in the part of each unit, and last the names of the parameters that no unit has: two parts of a rank may
    share some of them."""
    found = {module: name for name, module in part.named_modules()}
    names = [found[unit] for unit in units]
    inner = tuple(f"{name}." for name in names)
    return [*names, "+".join(name for name, _ in part.named_parameters() if not name.startswith(inner))]


def _placements(part: nn.Module, mesh: DeviceMesh, layout: Layout, timeout: timedelta) -> Callable[[nn.Parameter], Any]:
    """FSDP2's shard_placement_fn: where it cuts a parameter, and for experts that exchange tokens over which ranks."""
    experts = [each for each in part.modules() if isinstance(each, Experts) and each.exchanges]
    if not experts:
        return lambda parameter: _placement(parameter, layout.shards)
    assert layout.expert_parallel is not None
    view = expert_mesh(mesh, layout.expert_replicas, layout.expert_parallel, timeout)
    replica, shard, _ = view.mesh_dim_names
    if layout.expert_replicas == 1:
        ranks = FSDPMeshInfo(view[shard], shard_mesh_dim=0)
    else:
        ranks = HSDPMeshInfo(view[replica, shard], replicate_mesh_dim=0, shard_mesh_dim=1)
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult  # torch 2.13

    own = {id(parameter) for each in experts for parameter in each.parameters()}

    def place(parameter: nn.Parameter) -> Any:
        if id(parameter) not in own:
            return _placement(parameter, layout.shards)
        return ShardPlacementResult(_placement(parameter, layout.expert_shards), ranks)

    return place


def _placement(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Shard(1) for what the tp axis already cut by rows, or by experts: each rank then keeps one block, not strided
    rows."""
    cut = isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
    return Shard(1) if shard_dim(parameter.shape, shards, cut) else None


def prepare_backward(part: nn.Module, zero_stage: int, *, last: bool) -> None:
    """Tell FSDP2, before a backward of `part`, whether to reduce gradients and free gathered parameters after it.

    last: whether it is the last backward of the step. Stages 0 and 1 accumulate unreduced gradients until then. Does
    nothing without FSDP2.
    """
    if isinstance(part, FSDPModule):
        part.set_requires_gradient_sync(last or zero_stage >= 2)
        # sums over dp_shard may wait for the all-reduce only in a dtype that can add up microbatches
        reduces = last or fully_shard.state(part)._mp_policy.reduce_dtype.itemsize < 4
        part.set_requires_all_reduce(reduces)
        for group in parameter_groups(part):
            if isinstance(group._all_reduce_hook, ReplicaSum):
                group._all_reduce_hook.last = reduces
        part.set_is_last_backward(last or zero_stage >= 2)  # its reductions are complete when it returns
        part.set_reshard_after_backward(last or zero_stage == 3)


def reshard(part: nn.Module) -> None:
    """Free the parameters that a forward without backward left gathered: `part.parameters()` are shards again."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def parameter_groups(part: FSDPModule) -> Iterator[Any]:
    """FSDP2's groups of parameters that it gathers together, after the part's first forward: the root's first."""
    for state in fully_shard.state(part)._state_ctx.all_states:
        yield from _groups(state)


def _groups(state: Any) -> Iterable[Any]:
    """The groups of parameters of one of FSDP2's states; torch 2.11 has one group per state."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else filter(None, [state._fsdp_param_group])


def take_weight_gradients(part: nn.Module) -> None:
    """Move weight gradients that were added to .grad outside of a backward into FSDP2's accumulated ones.

    .grad is in the compute dtype; what FSDP2 accumulates is in the reduce dtype. It then does what it does behind a
    backward: it gives up gathered parameters, and reduces where this backward is to reduce (a reduce-scatter for each
    unit). A module without FSDP2 stays as it is.
    """
    if isinstance(part, FSDPModule):
        for group in parameter_groups(part):
            group.post_backward()


def reduce_accumulated(part: nn.Module) -> None:
    """Reduce what backwards without reduction accumulated, and free the gathered parameters.

    torch.distributed.pipelining does this after the last microbatch (perform_reduce_grad), as its backwards do not tell
    FSDP2 which one is the last.
    """
    if isinstance(part, FSDPModule):
        prepare_backward(part, 0, last=True)
        take_weight_gradients(part)
        fully_shard.state(part)._root_post_backward_final_callback()
