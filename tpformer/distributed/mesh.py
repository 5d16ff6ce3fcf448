"""The process group and the device mesh of a run.

Belongs here: joining the world, and laying its ranks out on axes. Nothing that communicates tensors.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpformer.torch_private import set_group_timeout

from .groups import REGISTRY
from .shared_memory import TIMEOUT_SECONDS

AXES = ("pp", "dp_replicate", "dp_shard", "tp")  # outer to inner: tp ranks are neighbours
DEFAULT_TIMEOUT = timedelta(seconds=TIMEOUT_SECONDS)
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STORE_VARIABLE = "TPFORMER_STORE"  # the file by which ranks of run_ranks find one another
LOOPBACK = ("lo", "lo0")  # its name on Linux and on macOS


def initialize(device_type: str, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """Join the world that torchrun's environment describes; without RANK and WORLD_SIZE start a world of one rank.

    A world of one rank, and one of run_ranks, which is on this machine alone, use the loopback interface only: no other
    machine reaches their sockets.
    device_type: "cpu" (gloo) or "cuda" (nccl for CUDA tensors, gloo for CPU ones; the device LOCAL_RANK is selected).
    timeout: how long an operation of the group waits for its peers. An existing process group is kept as it is.
    Raises ValueError for another device_type or half an environment, RuntimeError for "cuda" without a CUDA device.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f'device_type must be "cpu" or "cuda", not {device_type!r}')
    if dist.is_initialized():
        return
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError('device_type "cuda" needs a CUDA device and none is visible: use "cpu"')
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        _stay_on_loopback()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if file := os.environ.get(STORE_VARIABLE):
        _stay_on_loopback()
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(file, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        return
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"the environment has some of {', '.join(LAUNCHER_VARIABLES)} but not {', '.join(missing)}: "
            "start with torchrun, or unset RANK and WORLD_SIZE for one process"
        )
    dist.init_process_group(backend, timeout=timeout)


def _stay_on_loopback() -> None:
    """Let gloo and NCCL bind the loopback interface alone, for groups that are made later too.

    Both read the environment when a group is made. NCCL keeps the interface that the user has chosen.
    """
    for name in LOOPBACK:
        if name in (found for _, found in socket.if_nameindex()):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def build_mesh(
    device_type: str,
    *,
    tensor_parallel: int,
    data_parallel_replicate: int = 1,
    data_parallel_shard: int = 1,
    pipeline_parallel: int = 1,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> DeviceMesh:
    """The mesh with the axes ("pp", "dp_replicate", "dp_shard", "tp") over all ranks in order; sizes may be 1.

    Collective over the world: one process group for each axis and slice. Operations wait `timeout` for their peers,
    except that an axis as large as the world uses the world's group, which keeps its own timeout in torch.distributed.
    Raises RuntimeError before `initialize`, ValueError if a size is below 1 or the world size is not their product.
    """
    sizes = (pipeline_parallel, data_parallel_replicate, data_parallel_shard, tensor_parallel)
    names = ("pipeline_parallel", "data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
    if not dist.is_initialized():
        raise RuntimeError("there is no process group yet: call tpformer.distributed.initialize(device_type) first")
    layout = " * ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    product = torch.Size(sizes).numel()
    if min(sizes) < 1:
        raise ValueError(f"every axis needs at least one rank: {layout}")
    if product != dist.get_world_size():
        raise ValueError(
            f"{layout} = {product} ranks, but the world has {dist.get_world_size()}: "
            f"start {product} processes or change one of the sizes"
        )
    REGISTRY.timeout = timeout.total_seconds()
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    for axis in AXES:
        group = mesh.get_group(axis)
        if group is not dist.group.WORLD and dist.get_backend(group) != "fake":
            set_group_timeout(group, timeout)  # new groups do not inherit the world's
    return mesh
