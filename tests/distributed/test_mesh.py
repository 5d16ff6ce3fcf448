"""The world starts without a launcher, the mesh's groups have their timeout, and wrong sizes and environments are
refused. tests/planner/test_placement.py has the axes of the mesh."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import PROCESS_GROUP_TIMEOUT
from testing import on_every_rank

from tpformer.distributed import build_mesh, initialize
from tpformer.distributed.mesh import AXES


@on_every_rank(2)
def test_every_group_of_the_mesh_has_the_timeout() -> None:
    """But for the world's, which keeps the timeout that it was made with."""
    asked = timedelta(seconds=77)
    mesh = build_mesh("cpu", tensor_parallel=2, timeout=asked)
    assert mesh.get_group("tp") is dist.group.WORLD
    wanted = {**dict.fromkeys(AXES, asked), "tp": PROCESS_GROUP_TIMEOUT}
    groups = {name: mesh.get_group(name)._get_backend(torch.device("cpu")) for name in wanted}
    assert {name: group.options._timeout for name, group in groups.items()} == wanted


@on_every_rank(2)
def test_wrong_world_size_has_numbers_and_remedy() -> None:
    axes = ("pipeline_parallel", "data_parallel_replicate", "data_parallel_shard", "context_parallel")
    product = "".join(rf"{axis} 1 \* " for axis in axes)
    remedy = "but the world has 2: start 3 processes or change one of the sizes"
    for words, sizes in (
        (f"^{product}tensor_parallel 3 = 3 ranks, {remedy}$", {"tensor_parallel": 3}),
        ("^every axis needs at least one rank.*tensor_parallel 0", {"tensor_parallel": 0}),
        ("= 4 ranks, but the world has 2", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    ):
        with pytest.raises(ValueError, match=words):
            build_mesh("cpu", **sizes)


def test_no_world_half_an_environment_and_unknown_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="call tpformer.distributed.initialize"):
        build_mesh("cpu", tensor_parallel=1)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="has RANK without WORLD_SIZE: start the ranks with torchrun"):
        initialize("cpu")
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match='"cpu" or "cuda", not \'tpu\''):
        initialize("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="none is visible"):
            initialize("cuda")
