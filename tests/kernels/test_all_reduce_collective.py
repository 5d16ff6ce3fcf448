"""all_reduce's kernels have the bits of their reference on processes and on virtual ranks, and time out."""

from functools import partial

import pytest
import torch
from pool import WorkerPool
from testing import assert_kernel_close

pytest.importorskip("triton")

from channels import virtual_channel
from collectives import (
    CASES,
    Collective,
    make_inputs,
    run_on_gpu,
    run_on_processes,
    run_on_virtual_ranks,
    run_without_peer,
)

from tpformer.kernels.all_reduce.kernel import all_reduce, all_reduce_space, two_shot_pays
from tpformer.kernels.all_reduce.reference import all_reduce_bytes, all_reduce_cost, all_reduce_reference
from tpformer.kernels.protocol import bump


def collective(shots: str, programs: int) -> Collective:
    return Collective(
        launch=partial(all_reduce, programs=programs, two_shot=shots == "two"),
        reference=all_reduce_reference,
        space=partial(all_reduce_space, programs=programs, two_shot=shots == "two"),
    )


# one-shot: at most 3 push and 3 reduce; two-shot: 2 push, 2 reduce, 3 finish
SHOTS = {shots: collective(shots, 7) for shots in ("one", "two")}
# with two shots and up to 4 ranks: chunks that are short, and chunks that are empty
FEW = ((2, torch.float32), (3, torch.float32), (5, torch.float32), (9, torch.float16), (0, torch.float32))


def processes(shots: str) -> None:
    run_on_processes(SHOTS[shots])


@pytest.mark.parametrize("shots", SHOTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_on_processes(interpreted: WorkerPool, world: int, shots: str) -> None:
    interpreted(world).run(processes, shots)


def virtual_ranks(shots: str) -> None:
    run_on_virtual_ranks(SHOTS[shots], 3, CASES + FEW)
    for world in (1, 2, 4):
        run_on_virtual_ranks(SHOTS[shots], world, FEW)


@pytest.mark.parametrize("shots", SHOTS)
def test_on_virtual_ranks(interpreted: WorkerPool, shots: str) -> None:
    interpreted(1).run(virtual_ranks, shots)


def without_peer(shots: str) -> list[int]:
    return run_without_peer(SHOTS[shots])


@pytest.mark.parametrize("shots", SHOTS)
def test_missing_peer_is_reported(interpreted: WorkerPool, shots: str) -> None:
    assert interpreted(3).run(without_peer, shots)[0] == [1, 2, 7, 8]


def shapes_and_refusals() -> str:
    x = torch.arange(6.0).expand(2, 6).view(2, 2, 3)
    channel = virtual_channel(2, *all_reduce_space(16, 2, 2))
    with pytest.raises(ValueError, match="all_reduce needs 64 bytes per slot and 1 flags"):
        all_reduce(x, channel, programs=2)
    channel = virtual_channel(2, *all_reduce_space(24, 2, 2))
    bump(channel)
    out = torch.empty(2, 2, 3)
    assert all_reduce(x, channel, out=out, programs=2) is out and torch.equal(out, 2 * x)
    with pytest.raises(TypeError) as caught:
        all_reduce(x.long()[:, :1], channel, programs=2)
    return str(caught.value)


def test_shapes_outputs_and_refusals(interpreted: WorkerPool) -> None:
    assert interpreted(1).run(shapes_and_refusals) == ["all_reduce adds bfloat16, float16 and float32, not torch.int64"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_reference_rounds_once(dtype: torch.dtype) -> None:
    inputs = make_inputs(SHOTS["one"], 0, 1000, 8, dtype)
    oracle = torch.stack([x.double() for x in inputs]).sum(0)
    for rank, actual in enumerate(all_reduce_reference(inputs)):
        assert_kernel_close(actual, oracle, oracle.to(dtype), f"rank {rank} {dtype}")


def test_two_shot_pays_for_more_ranks_and_bytes() -> None:
    kib = 1024
    assert not any(two_shot_pays(nbytes, world) for nbytes in (1, 1 << 30) for world in (1, 2))
    assert [two_shot_pays(256 * kib, world) for world in (3, 4, 5, 8)] == [False, False, True, True]
    assert two_shot_pays(512 * kib, 4) and not two_shot_pays(512 * kib - 1, 4) and not two_shot_pays(256 * kib - 1, 8)


def test_cost() -> None:
    assert all_reduce_bytes(400, 4, two_shot=False) == 1200 and all_reduce_bytes(400, 4, two_shot=True) == 600
    assert all_reduce_bytes(400, 2, two_shot=False) == all_reduce_bytes(400, 2, two_shot=True)
    assert all_reduce_cost(100, 2, 1, two_shot=False) == (0, 400)  # a copy
    assert all_reduce_cost(100, 2, 4, two_shot=False) == (300, 200 + 200 + 2 * 600)
    assert all_reduce_cost(100, 2, 4, two_shot=True) == (75, 200 + 200 + 4 * 150)
    assert all_reduce_space(200, 4, 16, two_shot=False) == (4 * 208, 8)
    assert all_reduce_space(200, 4, 16, two_shot=True) == (2 * 4 * 64, 2 * 5)
    for nbytes in (1000, 1 << 20):
        assert all_reduce_space(nbytes, 8, 16) == all_reduce_space(nbytes, 8, 16, two_shot_pays(nbytes, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("shots", SHOTS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_on_virtual_ranks_of_a_gpu(world: int, shots: str) -> None:
    run_on_gpu(collective(shots, 15), world)
