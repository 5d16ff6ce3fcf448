"""The whole of a sharded model on one rank, and save_pretrained of transformers and PEFT, called on all ranks.

Belongs here: full_state_dict, and what makes a parallel model's own methods of saving right.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpformer.layers import TensorParallel
from tpformer.torch_private import plain_name

from .tensor_parts import said

PATIENCE = 60  # seconds


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """model.state_dict() with whole tensors in CPU memory on rank 0; empty on other ranks. All ranks call it.

    Names are those of the model without wrappers (torch.compile, activation checkpointing). Tied parameters share
    memory. On rank 0 plain tensors that are in CPU memory are the model's own, as in model.state_dict().
    Memory: rank 0 has the whole at the end; another rank has one whole tensor at a time.
    Communication: an all-gather of each sharded tensor over each axis that it is sharded on.
    """
    with said("full_state_dict", PATIENCE):
        return _gathered(model, model.state_dict())


@torch.no_grad()
def _gathered(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The whole tensors of a state_dict of the model, on rank 0. Names that are tied in the model are one tensor."""
    identities = {plain_name(name): id(value) for name, value in model.named_parameters(remove_duplicate=False)}
    writes = not dist.is_initialized() or dist.get_rank() == 0
    whole: dict[str, Any] = {}
    first: dict[int, str] = {}
    for wrapped, value in state.items():
        name = plain_name(wrapped)
        known = first.setdefault(identities[name], name) if name in identities else name
        if known == name:
            if isinstance(value, DTensor):
                value = value.full_tensor()
                if value.untyped_storage().nbytes() > value.nbytes:  # uneven shards were padded to be gathered
                    value = value.clone()
            value = value.detach().cpu() if isinstance(value, Tensor) else value
        if writes:
            whole[name] = value if known == name else whole[known]
        del value
    return whole


def save_from_all_ranks(model: nn.Module, tp: TensorParallel) -> None:
    """Make save_pretrained right for every part of a parallel model that has it. Calling this again does nothing.

    All ranks call save_pretrained, with the keywords of transformers or PEFT; rank 0 of the world writes what one
    process would write. On GPUs a model of transformers is made known to Trainer and Accelerate as well.
    """
    for part in model.modules():
        if hasattr(type(part), "save_pretrained"):
            part.save_pretrained = partial(_save_pretrained, part)  # can be pickled, as a method cannot
            if tp.mesh is not None and tp.mesh.device_type != "cpu" and dist.get_world_size() == tp.size:
                make_known(part, tp.size)


def make_known(model: Any, ranks: int) -> None:
    """Give a model of transformers the attributes by which Trainer, Accelerate and PEFT know one that is parallel.

    They then give all tensor-parallel ranks one batch, wrap the model in nothing, and save from all ranks. Not for a
    model with ranks for data parallelism besides, whose gradients they would not average, and not on CPUs, where
    Accelerate knows no tensor parallelism: there they refuse a model with DTensors, so nothing goes wrong silently.
    """
    if hasattr(type(model), "is_distributed_loading_by_transformers"):
        for name, value in {"_tp_size": ranks, "_is_distributed_loading_by_transformers": True}.items():
            setattr(model, name, value)
        # tp_size is 1 here because other models may have this config, too, and their saving would wait for all ranks
        sizes = SimpleNamespace(tp_size=1, dp_size=1, ep_size=1, dp_replicate_size=1)
        model.config.distributed_config = sizes


def _save_pretrained(self: Any, save_directory: Any, *, state_dict: Mapping[str, Any] | None = None, **options: Any):
    """save_pretrained of the module's class, called on all ranks: rank 0 writes whole tensors, and the others wait.

    Errors: where rank 0 fails, RuntimeError on the others.
    """
    with said("save_pretrained", PATIENCE):
        state = _gathered(self, self.state_dict() if state_dict is None else state_dict)
    if not dist.is_initialized():
        return type(self).save_pretrained(self, save_directory, state_dict=state, **options)
    failure: list[str | None] = [None]
    try:
        if dist.get_rank() == 0:
            type(self).save_pretrained(self, save_directory, state_dict=state, **options)
    except BaseException as error:
        failure = [f"{type(error).__name__}: {error}"]
        raise
    finally:
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise RuntimeError(f"rank 0 has not written {save_directory}: {failure[0]}")
