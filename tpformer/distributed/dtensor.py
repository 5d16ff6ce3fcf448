"""Questions about tensors that may be DTensors, without importing DTensor for them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, TypeGuard
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from tpformer.torch_private import held_by

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """isinstance(x, DTensor). Importing DTensor takes most of a second; as long as nobody has, no tensor is one.

    Once somebody has, torch.distributed has the module as an attribute. torch.compile would trace all of sys.modules.
    """
    module = getattr(dist, "tensor", None)
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


@cache
def let_data_be_set() -> WeakSet[DeviceMesh]:
    """From now on `x.data = y` gives a DTensor on one of these meshes the memory of y. torch's keeps its values.

    The result: the meshes. On others torch's rule stays, as FSDP2 reads the memory elsewhere; a subclass has a rule of
    its own. ValueError for a y of another layout or dtype.
    """
    from torch.distributed.tensor import DTensor

    meshes: WeakSet[DeviceMesh] = WeakSet()

    def set_data(x: DTensor, y: Tensor) -> None:
        if type(x) is DTensor and x.device_mesh in meshes:
            own, given = (
                isinstance(z, DTensor) and (z.device_mesh, z.placements, z.shape, z.dtype, z.device) for z in (x, y)
            )
            if own != given:
                raise ValueError(
                    f".data of a DTensor {tuple(x.shape)} {x.dtype}, {x.placements}, takes one that is laid out alike: "
                    f"give distribute_tensor(whole, x.device_mesh, x.placements), or for another dtype model.to(...)"
                )
            with torch.no_grad():
                held_by(x).data = y.to_local()
        Tensor.data.__set__(x, y)

    DTensor.data = property(Tensor.data.__get__, set_data)
    return meshes
