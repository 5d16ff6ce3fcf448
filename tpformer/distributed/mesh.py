"""The process group and the device mesh of a run.

Belongs here: joining the world, and laying its ranks out on axes. Nothing that communicates tensors.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpformer.launchers import REMEDY, STORE_VARIABLE, JoinError, adopt
from tpformer.torch_private import set_group_timeout, view_of

from .agreement import Decides, agree
from .groups import REGISTRY, close
from .shared_memory import TIMEOUT_SECONDS

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outer to inner: tp ranks are neighbours
DEFAULT_TIMEOUT = timedelta(seconds=TIMEOUT_SECONDS)
PROGRAM = Decides("a program of its own")
LOOPBACK = ("lo", "lo0")  # its name on Linux and on macOS


def initialize(device_type: str, timeout: timedelta = DEFAULT_TIMEOUT, decides: Decides = PROGRAM) -> None:
    """Join the world that torchrun's environment describes, or that of another launcher (tpformer.launchers); without
    either start a world of one rank.

    A world of one rank, and one of run_ranks, which is on this machine alone, use the loopback interface only: no other
    machine reaches their sockets.
    device_type: "cpu" (gloo) or "cuda" (nccl for CUDA tensors, gloo for CPU ones; the device LOCAL_RANK is selected).
    timeout: how long an operation of the group waits for its peers. An existing process group is kept as it is.
    decides: what all ranks must have alike, beside their software; compared as agreement.agree says.
    Raises ValueError for another device_type, half an environment, or ranks that differ; RuntimeError for "cuda"
    without a CUDA device; JoinError if the ranks do not find one another.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f'device_type must be "cpu" or "cuda", not {device_type!r}')
    if dist.is_initialized():
        return
    adopt()
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError('device_type "cuda" needs a CUDA device and none is visible: use "cpu"')
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    with joining():
        _join(backend, timeout)
        agree(decides)


def _join(backend: str, timeout: timedelta) -> None:
    """Enter the world that the environment describes."""
    if "RANK" not in os.environ:
        _stay_on_loopback()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if file := os.environ.get(STORE_VARIABLE):
        _stay_on_loopback()
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(file, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"the environment has RANK and WORLD_SIZE, but not {' and '.join(missing)}: {REMEDY}")
    _reach(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout.total_seconds())
    dist.init_process_group(backend, timeout=timeout)


def _reach(host: str, port: int, seconds: float) -> None:
    """Wait until rank 0 listens, which may start later, and whose name may become known later. OSError if it does not.

    torch would wait as well, with lines and stacks of its own for each try. Rank 0 itself only needs the name, unless
    torchrun listens for it.
    """
    serves = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline = time.monotonic() + seconds
    while True:
        try:
            if serves:
                socket.getaddrinfo(host, port)
            else:
                socket.create_connection((host, port), timeout=min(seconds, 10.0)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


@contextmanager
def joining() -> Iterator[None]:
    """Within, what keeps ranks from finding one another is a JoinError, in one sentence without torch's stacks."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if "CUDA" in str(error):
            raise
        at = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")).strip(":")
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise JoinError(
            f"rank {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')} on {socket.gethostname()} did "
            f"not find the others{f' at {at}' if at else ''} ({why[:300]}): see that all ranks were started, that "
            f"MASTER_ADDR and MASTER_PORT are rank 0's and can be reached, and that `ulimit -n` allows enough files"
        ) from None


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
    context_parallel: int = 1,
    pipeline_parallel: int = 1,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> DeviceMesh:
    """The mesh with the axes ("pp", "dp_replicate", "dp_shard", "cp", "tp") over all ranks in order; sizes may be 1.

    Collective over the world: one process group for each axis and slice. Operations wait `timeout` for their peers,
    except that an axis as large as the world uses the world's group, which keeps its own timeout in torch.distributed.
    Raises RuntimeError before `initialize`, ValueError if a size is below 1 or the world size is not their product.
    """
    sizes = (pipeline_parallel, data_parallel_replicate, data_parallel_shard, context_parallel, tensor_parallel)
    names = (
        *("pipeline_parallel", "data_parallel_replicate", "data_parallel_shard"),
        *("context_parallel", "tensor_parallel"),
    )
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
    with joining():
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    _set_timeouts(mesh, timeout)
    return mesh


def data_mesh(mesh: DeviceMesh, replicas: int, timeout: timedelta = DEFAULT_TIMEOUT) -> DeviceMesh:
    """The axes ("replica", "shard") of the ranks that compute with the same parameters on other tokens: those of
    dp_replicate, dp_shard and cp. Collective when a mesh is first asked for it, with its groups' `timeout`.

    replicas: how many of them hold equal shards. Without context parallelism it is two axes of `mesh` itself.
    """
    axes = ("dp_replicate", "dp_shard", "cp")
    if mesh["cp"].size() == 1:
        return mesh[axes[:2]]
    return _view(mesh, axes, {"replica": replicas, "shard": -1}, timeout)


def expert_mesh(mesh: DeviceMesh, replicas: int, ep: int, timeout: timedelta = DEFAULT_TIMEOUT) -> DeviceMesh:
    """The axes ("ereplica", "eshard", "ep") of all ranks of a pipeline stage, those of dp_replicate, dp_shard, cp and
    tp: ep neighbours share the experts. Collective when a mesh is first asked for it, with its groups' `timeout`.

    replicas: how many of the ranks with the same experts hold equal shards of them.
    """
    sizes = {"ereplica": replicas, "eshard": -1, "ep": ep}
    return _view(mesh, ("dp_replicate", "dp_shard", "cp", "tp"), sizes, timeout)


def _view(mesh: DeviceMesh, axes: tuple[str, ...], sizes: dict[str, int], timeout: timedelta) -> DeviceMesh:
    """The ranks of several axes of a mesh, in order, on axes of these sizes, of which one is -1: what is left. Their
    names are followed by the sizes, as torch takes a name that is used twice for the axis of its first use."""
    ranks = torch.Size([mesh[axis].size() for axis in axes]).numel()
    rest = ranks // -torch.Size(sizes.values()).numel()
    shape = tuple(rest if size == -1 else size for size in sizes.values())
    names = tuple(f"{name}_of_{'x'.join(map(str, shape))}" for name in sizes)
    views = _views(mesh)  # beside the mesh, as another that is equal to it has other groups
    if names not in views:
        with joining():
            views[names] = view_of(mesh, axes, shape, names)
        _set_timeouts(views[names], timeout)
        of_axes = (views[names].get_group(axis) for axis in range(views[names].ndim))
        REGISTRY.beside.update(group for group in of_axes if group.size() > 1)
    return views[names]


def close_mesh(mesh: DeviceMesh) -> None:
    """Forget the groups of a mesh and of its views, and free their workspaces. Not collective."""
    for each in (mesh, *_views(mesh).values()):
        for axis in range(each.ndim):
            close(each.get_group(axis))


def _views(mesh: DeviceMesh) -> dict[tuple[str, ...], DeviceMesh]:
    return vars(mesh).setdefault("tpformer_views", {})


def _set_timeouts(mesh: DeviceMesh, timeout: timedelta) -> None:
    """New groups do not inherit the world's timeout."""
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        if group is not dist.group.WORLD and dist.get_backend(group) != "fake":
            set_group_timeout(group, timeout)
