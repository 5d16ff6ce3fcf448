"""Questions about tensors that may be DTensors, without importing DTensor for them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """isinstance(x, DTensor). Importing DTensor takes most of a second; as long as nobody has, no tensor is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: a DTensor's local tensor, or the tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """A whole parameter, gradient or activation. Collective over the mesh of a DTensor.

    Where ranks hold copies, each rank gets its own, so that a copy that differs is found.
    """
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def check_own_part(name: str, tensor: Tensor) -> None:
    """ValueError if a tensor holds another rank's part: one that was read from that rank's file. Communicates nothing.

    Where a DTensor goes into a file its mesh goes with it, and so does the place of the rank that wrote it.
    """
    if not is_dtensor(tensor) or not any(place.is_shard() for place in tensor.placements):
        return
    mesh = tensor.device_mesh
    here = (mesh.mesh == dist.get_rank()).nonzero()
    written, own = mesh.get_coordinate(), here[0].tolist() if len(here) else None
    if written is not None and list(written) != own:
        raise ValueError(
            f"{name} is the part of rank {int(mesh.mesh[tuple(written)])}, which wrote this file, and this is rank "
            f"{dist.get_rank()}: save tpformer.full_state_dict(model), called on all ranks, or by "
            f"torch.distributed.checkpoint"
        )
