"""Low-precision compute with full-precision master weights, through FSDP2."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def apply_mixed_precision(model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Compute in compute_dtype with the parameters, and their gradients, kept in the dtype they were built in.

    mesh: 1-D, the axis that FSDP2 may shard over (size 1 included). Each of model.layers is one unit, the rest another;
    tied embeddings therefore share a unit. Gradients are reduced, and partial ones completed, in the parameters' dtype.
    """
    master = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=master, cast_forward_inputs=False)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
