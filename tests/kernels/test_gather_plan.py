"""How many programs push, when they take tiles, and from which size on copies are faster, by the model."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from tpformer.kernels.all_gather_matmul import plan
from tpformer.kernels.all_gather_matmul.plan import Push, Work
from tpformer.kernels.configurations import TILES
from tpformer.kernels.cost import MACHINES

H200, _, A100, B200 = MACHINES
MIB = 1 << 20


@pytest.mark.parametrize("machine, pushers", [(H200, 12), (A100, 8), (B200, 24)])
def test_pushers_fill_the_links(machine, pushers):
    """380 GB/s for 1 us are 12 times 32 KiB."""
    assert plan.pushers_of(MIB, machine) == pushers
    assert pushers * plan.IN_FLIGHT / machine.load_latency >= machine.link
    assert plan.pushers_of(3 * plan.IN_FLIGHT, machine) == 3  # a shard has no more pieces
    assert plan.pushers_of(3 * plan.IN_FLIGHT + 1, machine) == 4


def test_seconds():
    """Of 4 MiB to 7 peers: 11.0 us each at 380 GB/s. One pusher has 32.8 GB/s."""
    assert plan.push_seconds(4 * MIB, 8, 12, H200) == pytest.approx(7 * (11.04e-6 + 2e-6), rel=1e-3)
    assert plan.push_seconds(4 * MIB, 8, 1, H200) == pytest.approx(7 * (128e-6 + 2e-6))
    assert plan.copy_seconds(4 * MIB, 8, H200) == pytest.approx(7 * (11.04e-6 + 6.4e-6), rel=1e-3)
    assert plan.push_seconds(4 * MIB, 1, 12, H200) == plan.copy_seconds(4 * MIB, 1, H200) == 0


def test_pushers_join_with_the_first_chunk_that_begins_after_the_push():
    """The push takes 91 us, a chunk 20 us, and 22 us without the pushers."""
    work = Work(4 * MIB, 8, 1000, 160e-6)
    assert plan.plan_push(work, 12, 132, H200) == Push(12, 5)
    assert plan.plan_push(work._replace(seconds=16e-6), 12, 132, H200) == Push(12, 8)  # never
    assert plan.plan_push(work._replace(seconds=1.0), 12, 132, H200) == Push(12, 1)
    assert plan.plan_push(work._replace(tiles=120), 12, 132, H200) == Push(12, 8)  # a tile for each of the others
    assert plan.plan_push(work, 1, 1, H200) == Push(1, 0)  # nobody else could take tiles


def test_a_launch_has_all_resident_programs_if_there_are_tiles(monkeypatch):
    monkeypatch.setattr(plan, "persistent_programs", lambda device, tiles, tile, programs, *_: min(tiles, programs))
    work, cpu, tile = Work(4 * MIB, 8, 1000, 160e-6), torch.device("cpu"), TILES["large"]
    assert plan.plan_launch(work, cpu, tile, True, 132, 1, 0) == (132, Push(12, 5))
    assert plan.plan_launch(work._replace(tiles=56), cpu, tile, True, 132, 1, 0) == (68, Push(12, 8))
    assert plan.plan_launch(work, cpu, tile, True, 16, 8, 0)[1].pushers == 8  # of few, half push
    assert plan.plan_launch(work, cpu, tile, False, 132, 1, 0) == (132, plan.NO_PUSH)
    assert plan.plan_launch(work._replace(world=1), cpu, tile, True, 132, 1, 0)[1].pushers == 0


def test_copies_leave_the_processors_to_a_long_gemm_and_begin_late():
    """A copy to a peer takes 4.4 us more than a push. It is hidden behind a long GEMM, which pushers would slow. Under
    another kernel a push would come after that, so a copy is faster once its bytes take 4.4 us, from 1.7 MB on."""
    for nbytes in (MIB, 4 * MIB, 32 * MIB):
        assert plan.copies_are_faster(nbytes, 8, 1e-2, 132, H200)
        assert not plan.copies_are_faster(nbytes, 8, 1e-6, 132, H200)
    assert not plan.copies_are_faster(MIB, 8, None, 132, H200)
    assert plan.copies_are_faster(2 * MIB, 8, None, 132, H200)
