"""The world starts without a launcher, the mesh has its axes, and wrong sizes and environments are refused."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from commands import Commands
from pool import PROCESS_GROUP_TIMEOUT, WorkerPool

from tpformer.distributed import all_reduce, build_mesh, initialize


def coordinates() -> tuple[list[int], dict[str, list[int]]]:
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=2)
    assert mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "tp")
    groups = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names}
    return list(mesh.get_coordinate() or ()), groups


def test_axes_outer_to_inner(ranks: WorkerPool) -> None:
    results = ranks(4).run(coordinates)
    assert [coordinate for coordinate, _ in results] == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert results[2][1] == {"pp": [2], "dp_replicate": [2], "dp_shard": [0, 2], "tp": [2, 3]}


def timeouts() -> list[timedelta]:
    mesh = build_mesh("cpu", tensor_parallel=2, timeout=timedelta(seconds=77))
    groups = [mesh.get_group(name) for name in ("pp", "dp_replicate", "dp_shard")]
    assert mesh.get_group("tp") is dist.group.WORLD  # it keeps the timeout that it was made with
    groups.append(mesh.get_group("tp"))
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_every_group_of_the_mesh_has_the_timeout(ranks: WorkerPool) -> None:
    assert ranks(2).run(timeouts) == [[timedelta(seconds=77)] * 3 + [PROCESS_GROUP_TIMEOUT]] * 2


def refusals() -> None:
    wrong = (
        r"^pipeline_parallel 1 \* data_parallel_replicate 1 \* data_parallel_shard 1 \* tensor_parallel 3 = 3 ranks, "
        "but the world has 2: start 3 processes or change one of the sizes$"
    )
    for words, sizes in (
        (wrong, {"tensor_parallel": 3}),
        ("^every axis needs at least one rank.*tensor_parallel 0", {"tensor_parallel": 0}),
        ("= 4 ranks, but the world has 2", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    ):
        with pytest.raises(ValueError, match=words):
            build_mesh("cpu", **sizes)


def test_wrong_world_size_has_numbers_and_remedy(ranks: WorkerPool) -> None:
    ranks(2).run(refusals)


def test_mesh_needs_a_world() -> None:
    with pytest.raises(RuntimeError, match="call tpformer.distributed.initialize"):
        build_mesh("cpu", tensor_parallel=1)


def join_and_add_up() -> None:
    initialize("cpu")
    initialize("cpu")
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())
    print("total", all_reduce(torch.tensor([dist.get_rank() + 1.0]), mesh.get_group("tp")).item())
    dist.destroy_process_group()


LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def test_one_process_without_launcher(commands: Commands) -> None:
    _, output, errors = commands.call(join_and_add_up).finish()
    assert output == "total 1.0\n", errors


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start with torchrun"):
        initialize("cpu")


def test_unknown_device_types_are_refused() -> None:
    with pytest.raises(ValueError, match='"cpu" or "cuda", not \'tpu\''):
        initialize("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="none is visible"):
            initialize("cuda")
