"""reduce_scatter's kernel has the bits of its reference on processes and on virtual ranks, and times out."""

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

from tpformer.kernels.protocol import bump
from tpformer.kernels.reduce_scatter.kernel import reduce_scatter, reduce_scatter_space
from tpformer.kernels.reduce_scatter.reference import (
    reduce_scatter_bytes,
    reduce_scatter_cost,
    reduce_scatter_reference,
)


def collective(programs: int) -> Collective:
    return Collective(
        launch=partial(reduce_scatter, programs=programs),
        reference=reduce_scatter_reference,
        space=partial(reduce_scatter_space, programs=programs),
        chunks=lambda world: world,
    )


REDUCE_SCATTER = collective(4)  # at most 2 push and 2 reduce


def processes() -> None:
    run_on_processes(REDUCE_SCATTER)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_on_processes(interpreted: WorkerPool, world: int) -> None:
    interpreted(world).run(processes)


def virtual_ranks() -> None:
    run_on_virtual_ranks(REDUCE_SCATTER, 3, (*CASES, (0, torch.float32)))
    for world in (1, 2, 4):
        run_on_virtual_ranks(REDUCE_SCATTER, world, CASES[:3])


def test_on_virtual_ranks(interpreted: WorkerPool) -> None:
    interpreted(1).run(virtual_ranks)


def without_peer() -> list[int]:
    return run_without_peer(REDUCE_SCATTER)


def test_missing_peer_is_reported(interpreted: WorkerPool) -> None:
    assert interpreted(3).run(without_peer)[0] == [1, 2, 7, 8]


def shapes_and_refusals() -> str:
    channel = virtual_channel(2, *reduce_scatter_space(48, 2, 2))
    x = torch.arange(24, dtype=torch.float32).view(8, 1, 3).expand(8, 2, 3)  # two ranks' (4, 2, 3), not contiguous
    out = torch.empty(4, 2, 3)
    bump(channel)
    with pytest.raises(ValueError, match="reduce_scatter needs 96 bytes per slot and 1 flags"):
        reduce_scatter(x, channel, out=out, programs=2)
    channel = virtual_channel(2, *reduce_scatter_space(96, 2, 2))
    bump(channel)
    assert reduce_scatter(x, channel, out=out, programs=2) is out and torch.equal(out, x[:4] + x[4:])
    with pytest.raises(TypeError) as caught:
        reduce_scatter(x.double()[:2], channel, programs=2)
    return str(caught.value)


def test_shapes_outputs_and_refusals(interpreted: WorkerPool) -> None:
    assert interpreted(1).run(shapes_and_refusals) == [
        "reduce_scatter adds bfloat16, float16 and float32, not torch.float64"
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_reference_rounds_once(dtype: torch.dtype) -> None:
    inputs = make_inputs(REDUCE_SCATTER, 0, 1000, 8, dtype)
    actual = reduce_scatter_reference(inputs)
    oracle = torch.stack([x.double() for x in inputs]).sum(0).chunk(8)
    for rank in range(8):
        assert_kernel_close(actual[rank], oracle[rank], oracle[rank].to(dtype), f"chunk {rank} {dtype}")


def test_cost() -> None:
    assert reduce_scatter_bytes(400, 4) == 300 and reduce_scatter_bytes(400, 1) == 0
    assert reduce_scatter_cost(100, 2, 1) == (0, 400)  # a copy
    assert reduce_scatter_cost(100, 2, 4) == (75, 200 + 50 + 2 * 150)
    assert reduce_scatter_space(400, 4, 16) == (4 * 112, 8)  # slots hold whole 16-byte vectors


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
def test_on_virtual_ranks_of_a_gpu(world: int) -> None:
    run_on_gpu(collective(15), world)
