"""all_gather's kernel equals its reference on processes and on virtual ranks, over several epochs, and times out."""

from functools import partial

import pytest
import torch
from pool import WorkerPool

pytest.importorskip("triton")

from channels import virtual_channel
from collectives import CASES, Collective, run_on_gpu, run_on_processes, run_on_virtual_ranks, run_without_peer

from tpformer.kernels.all_gather.kernel import all_gather, all_gather_space
from tpformer.kernels.all_gather.reference import all_gather_bytes, all_gather_cost, all_gather_reference
from tpformer.kernels.protocol import bump


def collective(programs: int) -> Collective:
    return Collective(
        launch=partial(all_gather, programs=programs),
        reference=all_gather_reference,
        space=partial(all_gather_space, programs=programs),
    )


ALL_GATHER = collective(5)  # at most 2 push and 3 finish
# a copy: bfloat16 is right in the interpreter, too; and nothing at all
DTYPES = ((1021, torch.bfloat16), (7, torch.int64), (1021, torch.bool), (0, torch.float32), (3, torch.float64))


def processes() -> None:
    run_on_processes(ALL_GATHER)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_on_processes(interpreted: WorkerPool, world: int) -> None:
    interpreted(world).run(processes)


def virtual_ranks() -> None:
    run_on_virtual_ranks(ALL_GATHER, 3, CASES + DTYPES)
    for world in (1, 2, 4):
        run_on_virtual_ranks(ALL_GATHER, world, CASES[:3] + DTYPES)


def test_on_virtual_ranks(interpreted: WorkerPool) -> None:
    interpreted(1).run(virtual_ranks)


def without_peer() -> list[int]:
    return run_without_peer(ALL_GATHER)


def test_missing_peer_is_reported(interpreted: WorkerPool) -> None:
    assert interpreted(3).run(without_peer)[0] == [1, 2, 7, 8]


def shapes_and_outputs() -> str:
    channel = virtual_channel(2, *all_gather_space(24, 2, 2))
    x = torch.arange(24, dtype=torch.float32).view(4, 3, 2).transpose(1, 2)  # two ranks' (2, 2, 3), not contiguous
    out = torch.empty(8, 2, 3)
    bump(channel)
    assert all_gather(x[:, :1], channel, programs=2).shape == (8, 1, 3)
    with pytest.raises(ValueError) as caught:
        all_gather(x, channel, out=out, programs=2)
    channel = virtual_channel(2, *all_gather_space(48, 2, 2))
    bump(channel)
    assert all_gather(x, channel, out=out, programs=2) is out and torch.equal(out, torch.cat([x, x]))
    bump(channel)
    unaligned = torch.arange(25, dtype=torch.float32)[1:]
    assert torch.equal(all_gather(unaligned, channel, programs=2), torch.cat([unaligned, unaligned]))
    return str(caught.value)


def test_shapes_outputs_and_too_small_a_slot(interpreted: WorkerPool) -> None:
    assert interpreted(1).run(shapes_and_outputs) == [
        "all_gather needs 96 bytes per slot and 1 flags per writer, but the channel has 64 and 1: "
        "size it by all_gather_space"
    ]


def test_cost() -> None:
    assert all_gather_bytes(100, 4) == 300 and all_gather_bytes(100, 1) == 0
    assert all_gather_cost(100, 1) == (0, 200)  # a copy
    assert all_gather_cost(100, 4) == (0, 100 + 400 + 2 * 300)
    assert all_gather_space(100, 4, 16) == (4 * 112, 8)  # slots hold whole 16-byte vectors


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
def test_on_virtual_ranks_of_a_gpu(world: int) -> None:
    run_on_gpu(collective(15), world)
