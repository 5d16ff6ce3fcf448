"""A pipeline made of any nn.Sequential, whose children are divided among the stages."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

from tpformer.config import FP8, KEEP_KEYS, Layout
from tpformer.distributed import indexed

from .exchange import exchange_named
from .pipeline import Pipeline
from .split import split_stages
from .zero import apply_zero, quantised_weights


def pipeline_sequential(
    model: nn.Sequential,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    example: Tensor,
    n_microbatches: int,
    loss_fn: Callable[[Tensor, Any], Tensor],
) -> Pipeline:
    """Make a Pipeline of this rank's stages of `model`.

    model: the same on all ranks, either with equal values or on the meta device; then fill `Pipeline.parts` yourself.
    Each child takes the tensor that the child before it returned. Parts keep the model's parameter names.
    example: an input of one microbatch on one data-parallel rank. Only its shape and dtype matter.
    layout: its pipeline, ZeRO and data-parallel settings. Tensor parallelism, recomputation and offloading of
    activations are left to the children.
    loss_fn(output, target): the loss of a microbatch. Gradients are summed over microbatches and data-parallel ranks,
    so divide the loss by the number of samples in the global batch.
    Communication: Pipeline's, and with data-parallel axes or cpu_offload that of apply_zero, with a unit per child.
    Errors: ValueError for fewer children than stages, for a layout that contradicts itself, for settings that are
    left to the children, and for zero_gather = "fp8" where it would change nothing.
    """
    _check(layout, model)
    layout.check_pipeline(len(model), n_microbatches)
    boundaries, costs = _trace(model, example, layout.pipeline_split)
    ranges = split_stages(costs, layout.n_stages)
    children = list(model.named_children())
    device = indexed(torch.device(mesh.device_type))
    parts: list[nn.Module] = []
    for stage in layout.stages_of(mesh["pp"].get_local_rank()):
        part = nn.Sequential(OrderedDict(children[ranges[stage].start : ranges[stage].stop]))
        if not any(tensor.is_meta for tensor in (*part.parameters(), *part.buffers())):
            part.to(device)
        if (layout.data_parallel > 1 or layout.cpu_offload) and next(part.parameters(), None) is not None:
            units = [child for child in part if next(child.parameters(), None) is not None]
            apply_zero(part, units, mesh, layout, next(part.parameters()).dtype)
        parts.append(part)
    output = torch.empty_like(boundaries[-1])
    begins = [boundaries[each.start] for each in ranges]
    return Pipeline(
        parts,
        layout,
        mesh,
        n_microbatches=n_microbatches,
        boundaries=[*begins, output],
        loss_fn=loss_fn,
        device=device,
    )


def _check(layout: Layout, model: nn.Sequential) -> None:
    layout.check()
    exchange_named(layout.exchange).check(layout)
    if layout.context_parallel > 1:
        raise ValueError(
            f"pipeline_sequential cannot divide samples among parallel.context_parallel={layout.context_parallel} "
            f"ranks: set it to 1, and give the model's attention a context of its own"
        )
    if layout.zero_gather == FP8 and (layout.shards == 1 or not quantised_weights(model)):
        raise ValueError(
            f'parallel.zero_gather="fp8" with {layout.shards} ranks that share each weight, and '
            f"{len(quantised_weights(model))} weights that only this library's linears in FP8 multiply: raise "
            f'data_parallel_shard, build linears with TensorParallel(mesh, precision="fp8"), or leave zero_gather out'
        )
    for name in (*KEEP_KEYS, "memory_budget"):
        if getattr(layout, name) != getattr(Layout, name):
            raise ValueError(
                f"pipeline_sequential does not apply parallel.{name}={getattr(layout, name)!r}: leave it unset, and "
                f"say it of the model's blocks, by layers.keep(model, ...), or use ops.recompute or ops.Offload in the "
                f"children"
            )


def _trace(model: nn.Sequential, example: Tensor, by: str) -> tuple[list[Tensor], list[float]]:
    """(boundaries, costs). boundaries: meta tensors, the input of each child and then the output of the last one.

    costs: each child's number of parameters if `by` is "parameters", else the FLOPs of its forward.
    """
    x = torch.empty_like(example, device="meta")
    boundaries, costs = [x], []
    for child in model:
        shapes = copy.deepcopy(child).to("meta")
        with torch.no_grad(), FlopCounterMode(display=False) as flops:
            x = shapes(x)
        boundaries.append(x)
        size = sum(parameter.numel() for parameter in child.parameters())
        costs.append(float(size if by == "parameters" else flops.get_total_flops()))
    return boundaries, costs
