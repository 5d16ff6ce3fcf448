"""Counts the bytes of parameters, gradients and optimizer state that a rank holds, as FSDP2 keeps them.

Belongs here: counting for any ModelParts, by the planner's names, and hooks for the moments to count at. Which model is
counted, and what the counts should be, is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from tpformer.parallel.zero import parameter_groups
from tpformer.planner.states import ACCUMULATED, COPIES, GRADIENTS, OPTIMIZER, PARAMETERS
from tpformer.planner.storages import live_storages, local
from tpformer.training.model import ModelParts

BUFFERS = "communication buffers"
KINDS = (PARAMETERS, COPIES, ACCUMULATED, GRADIENTS, OPTIMIZER, BUFFERS)
Held = dict[str, int]


def _group_tensors(group: Any) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (kind, tensor) for what one FSDP2 parameter group holds."""
    for parameter in group.fsdp_params:
        yield PARAMETERS, parameter._sharded_param_data
        yield GRADIENTS, parameter.sharded_param.grad
        yield from ((COPIES, output) for output in parameter.all_gather_outputs)
        yield ACCUMULATED, parameter.unsharded_accumulated_grad
        unsharded = getattr(parameter, "_unsharded_param", None)
        yield ACCUMULATED, None if unsharded is None else unsharded.grad
    yield GRADIENTS, group._partial_reduce_output  # reduced over dp_shard, not yet over dp_replicate
    yield BUFFERS, None if group._all_gather_result is None else group._all_gather_result.all_gather_output


def _communicated(communication: Any) -> Iterator[Tensor]:
    """Yield the buffers that FSDP2 keeps until the part's next collective is done."""
    gathered = getattr(communication, "all_gather_state", None)  # FSDP2 makes it in the first forward
    if gathered is not None:
        yield gathered.all_gather_result.all_gather_output
    yield from (state.reduce_scatter_input for state in getattr(communication, "reduce_scatter_states", ()))


def _tensors(model: ModelParts, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, Tensor | None]]:
    for part in model.parts:
        if isinstance(part, FSDPModule):
            for group in parameter_groups(part):
                yield from _group_tensors(group)
            yield from ((BUFFERS, x) for x in _communicated(fully_shard.state(part)._comm_ctx))
        else:
            for parameter in part.parameters():
                yield PARAMETERS, parameter
                yield GRADIENTS, parameter.grad
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from ((OPTIMIZER, value) for value in state.values() if isinstance(value, Tensor))


def held(model: ModelParts, optimizers: Iterable[torch.optim.Optimizer]) -> Held:
    """Bytes by kind. Each storage counts once, with its whole size. Call it after the first forward."""
    kinds: dict[torch.UntypedStorage, str] = {}
    for kind, tensor in _tensors(model, optimizers):
        if tensor is not None:
            kinds.setdefault(local(tensor).untyped_storage(), kind)
    sizes = dict.fromkeys(KINDS, 0)
    for storage, kind in kinds.items():
        sizes[kind] += storage.nbytes()
    return sizes


def live_bytes() -> int:
    """Bytes of all storages of this process's tensors, without the collectives' shared memory (torch did not allocate
    it)."""
    alive = live_storages(lambda x: not x.is_meta and type(x) in (Tensor, torch.nn.Parameter))
    return sum(storage.nbytes() for storage in alive if storage.resizable())


def watch_layers(model: ModelParts, sample: Callable[[], None], at_end: Callable[[], None]) -> None:
    """Have `sample` called at both ends of every layer's forward and backward, and `at_end` after a part's forward.

    If a schedule makes weight gradients apart from the rest of the backward, `sample` is called after them, too. The
    first sample of a layer's backward comes when its parameters are gathered, the last before its gradients are
    reduced.
    """

    def watch(tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: sample())

    def before(_: Any, arguments: Sequence[Any]) -> None:
        sample()
        watch(arguments[0])

    def after(_: Any, arguments: Sequence[Any], result: Any) -> None:
        sample()
        watch(result)

    for part in model.parts:
        part.register_forward_hook(lambda *_: at_end())
        for layer in part.layers.values():
            layer.register_forward_pre_hook(before)
            layer.register_forward_hook(after)
    for stage in () if model.pipeline is None else model.pipeline.stages:
        if stage.dw_builder:
            stage.dw_builder = partial(_then, stage.dw_builder, sample)


def _then(builder: Callable[[], Callable[[], None]], sample: Callable[[], None]) -> Callable[[], None]:
    """A function that makes the weight gradients, as the one that `builder` builds, and then calls `sample`."""
    make = builder()

    def run() -> None:
        make()
        sample()

    return run
