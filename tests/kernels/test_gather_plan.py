"""How many programs push, when they take tiles, and from which size on copies are faster, by the model."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from tpformer.kernels.all_gather_matmul import plan
from tpformer.kernels.all_gather_matmul.plan import Push, Work
from tpformer.kernels.configurations import TILES
from tpformer.kernels.cost import MACHINES, RELEASE_SECONDS

H200, _, A100, B200 = MACHINES
MIB = 1 << 20


@pytest.mark.parametrize("machine, pushers", [(H200, 18), (A100, 12), (B200, 35)])
def test_pushers_fill_the_links(machine, pushers):
    """380 GB/s for 1 us are 11.6 times 32 KiB, and a third of the pushers may wait."""
    assert plan.pushers_of(MIB, machine) == min(pushers, 32)
    assert plan.pushers_of(2 * MIB, machine) == pushers
    assert pushers * 2 // 3 * plan.IN_FLIGHT / machine.load_latency >= 0.99 * machine.link
    assert plan.pushers_of(3 * plan.IN_FLIGHT, machine) == 3  # a shard has no more pieces
    assert plan.pushers_of(3 * plan.IN_FLIGHT + 1, machine) == 4


def test_the_turn_of_a_group_is_as_long_as_it_waits():
    assert all(plan.TURN_PIECES * machine.load_latency >= RELEASE_SECONDS for machine in MACHINES)


def test_seconds():
    """Of 4 MiB to 7 peers: 11.0 us each at 380 GB/s, in which a pusher of 18 has 8 us for its pieces, and waits 2 us.
    A pusher of one has 32.8 GB/s, and one of 16 the 4 us of 2 pieces and a wait, while the links take 2.8 us."""
    assert plan.push_seconds(4 * MIB, 8, 18, H200) == pytest.approx(7 * 11.04e-6 + 2e-6, rel=1e-3)
    assert plan.push_seconds(4 * MIB, 8, 1, H200) == pytest.approx(7 * (128e-6 + 2e-6) + 2e-6)
    assert plan.push_seconds(MIB, 8, 16, H200) == pytest.approx(7 * 4e-6 + 2e-6)
    assert plan.copy_seconds(4 * MIB, 8, H200) == pytest.approx(7 * (11.04e-6 + 6.4e-6), rel=1e-3)
    assert plan.push_seconds(4 * MIB, 1, 18, H200) == plan.copy_seconds(4 * MIB, 1, H200) == 0


def test_all_flags_but_the_last_peer_s_come_when_every_group_had_its_turn():
    assert plan.push_arrivals(4 * MIB, 4, 18, H200) == pytest.approx([0, 17.04e-6, 28.08e-6, 35.11e-6], rel=1e-3)
    assert plan.push_arrivals(MIB, 3, 16, H200) == pytest.approx([0, 8e-6, 10e-6])  # a share has 2 pieces
    assert plan.push_arrivals(MIB, 1, 16, H200) == [0]


def test_pushers_join_with_the_first_chunk_that_begins_after_the_push():
    """The push takes 79 us, a chunk 20 us, and 22 us without 12 pushers."""
    work = Work(4 * MIB, 8, 1000, 160e-6)
    assert plan.plan_push(work, 12, 132, H200) == Push(12, 5)
    assert plan.plan_push(work._replace(seconds=16e-6), 12, 132, H200) == Push(12, 8)  # never
    assert plan.plan_push(work._replace(seconds=1.0), 12, 132, H200) == Push(12, 1)
    assert plan.plan_push(work._replace(tiles=120), 12, 132, H200) == Push(12, 8)  # a tile for each of the others
    assert plan.plan_push(work, 1, 1, H200) == Push(1, 0)  # nobody else could take tiles


def test_a_launch_has_all_resident_programs_if_there_are_tiles(monkeypatch):
    monkeypatch.setattr(plan, "persistent_programs", lambda device, tiles, tile, programs, *_: min(tiles, programs))
    work, cpu, tile = Work(4 * MIB, 8, 1000, 160e-6), torch.device("cpu"), TILES["large"]
    assert plan.plan_launch(work, cpu, tile, True, 132, 1, 0) == (132, Push(18, 4))
    assert plan.plan_launch(work._replace(tiles=56), cpu, tile, True, 132, 1, 0) == (74, Push(18, 8))
    assert plan.plan_launch(work, cpu, tile, True, 16, 8, 0)[1].pushers == 8  # of few, half push
    assert plan.plan_launch(work, cpu, tile, False, 132, 1, 0) == (132, plan.NO_PUSH)
    assert plan.plan_launch(work._replace(world=1), cpu, tile, True, 132, 1, 0)[1].pushers == 0


def test_copies_hide_more_under_another_kernel_from_some_size_on():
    """A push would come after that kernel, and a copy to a peer begins 6.4 us late, so a copy is faster once the push
    to a peer takes as long, from 2.4 MB on."""
    assert not plan.copies_hide_more(2 * MIB, 8, H200)
    assert plan.copies_hide_more(3 * MIB, 8, H200)
