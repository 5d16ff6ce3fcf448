"""Which ranks share one copy of a model, and whether their copies are equal."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tpformer.distributed import build_mesh, initialize
from tpformer.distributed.agreement import digests
from tpformer.distributed.collectives import all_reduce
from tpformer.distributed.dtensor import is_dtensor
from tpformer.layers import TensorParallel
from tpformer.torch_private import has_gradient_hooks

from .alone import GATHERED, SUMMED, WHOLE
from .kinds import describe
from .measured import measuring
from .plan import Plan, is_measured, plan_of
from .regions import record

WRAPPED = (DistributedDataParallel, DataParallel, FSDPModule, FullyShardedDataParallel)


def share_out(model: nn.Module, gpus: int, plan: str | Mapping[str, str], example: Any) -> tuple[DeviceMesh, Plan]:
    """(the mesh over all processes, the plan for its axis "tp"); joins the process group if there is none.

    The number of tensor-parallel ranks divides gpus, and is the one that leaves each rank the fewest weights to compute
    with; the largest if several do. The other ranks, along "dp_shard", compute with other samples.
    Errors:  ValueError if another number of processes runs this program, or none could.
    """
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"gpus={gpus!r}: give the number of processes, one for each GPU, at least 1")
    if world != gpus:
        raise ValueError(
            f"gpus={gpus}, but {world} {'process runs' if world == 1 else 'processes run'} this program: start it with "
            f"torchrun --nproc-per-node {gpus}"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    initialize(device)
    counts = [gpus] if isinstance(plan, Mapping) else [t for t in range(gpus, 0, -1) if gpus % t == 0]
    known = describe(model)
    with measuring(model):
        recording = None if gpus == 1 or is_measured(plan, gpus, known) else record(model, known, example)
        plans = [plan_of(model, plan, t, recording) for t in counts]
    best = min(plans, key=lambda made: weights_per_rank(model, made))
    return build_mesh(device, tensor_parallel=best.t, data_parallel_shard=gpus // best.t), best


def weights_per_rank(model: nn.Module, plan: Plan) -> float:
    """How many weights a rank computes with. What could not be cut together counts as whole: what is computed between
    is not shared."""
    total = 0.0
    for name, module in model.named_modules():
        style = plan.style(name)
        alone = style in GATHERED and name and plan.patterns[name] in plan.gathered
        share = 1 if alone or style in (*WHOLE, *SUMMED) else plan.t
        total += sum(parameter.numel() for parameter in module.parameters(recurse=False)) / share
    return total


def check_model(model: nn.Module, tp: TensorParallel) -> None:
    """ValueError if parameters have gradients, or if parameters or buffers differ between ranks."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wrapped = next((part for part in model.modules() if isinstance(part, WRAPPED)), None)
    if wrapped is not None:
        raise ValueError(
            f"a {type(wrapped).__name__} is data-parallel already: call parallelize first, and then FSDP2's "
            f"fully_shard on top"
        )
    graded = next((name for name, x in named.items() if x.grad is not None), None)
    if graded is not None:
        raise ValueError(f"{graded} has a gradient: call parallelize before the first backward, or zero_grad() first")
    hooked = next((name for name, x in model.named_parameters() if has_gradient_hooks(x)), None)
    if hooked is not None:
        raise ValueError(f"{hooked} has hooks for its gradient: call parallelize before they are registered")
    check_equal(named, tp)


def check_equal(named: Mapping[str, Tensor], tp: TensorParallel) -> None:
    """ValueError if tensors differ between ranks, but for those that are laid out on ranks.

    Communicates: an all-reduce of 32 bytes a tensor.
    """
    assert tp.mesh is not None
    plain = {name: x for name, x in named.items() if not is_dtensor(x)}
    names = zlib.crc32(repr([(name, tuple(x.shape)) for name, x in named.items()]).encode())
    own = digests([torch.tensor(names), *plain.values()])
    extremes = all_reduce(torch.cat([own, ~own]).to(tp.mesh.device_type), tp.group, "max").view(2, -1, 2)
    equal = (extremes[0] == ~extremes[1]).all(1).tolist()
    differing = [name for name, same in zip(("", *plain), equal, strict=True) if not same]
    if differing:
        raise ValueError(
            f"{differing[0] or 'the list of names and shapes'} differs between tensor-parallel ranks: build or load "
            f"the same model on every rank, one with random values after the same torch.manual_seed"
        )
