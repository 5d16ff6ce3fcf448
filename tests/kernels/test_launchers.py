"""What launchers decide before a launch, by models of the machine: tiles, programs that push, shares of sums; what they
refuse; and by what a replay finds a plan. That a replay launches what the launcher would is in tests/driver."""

import math
from collections.abc import Callable, Iterator

import gemms
import pytest
import torch
from channels import virtual_channel

from tpformer.kernels import configurations
from tpformer.kernels.all_gather_grouped_matmul.kernel import all_gather_grouped_matmul
from tpformer.kernels.all_gather_matmul import plan
from tpformer.kernels.all_gather_matmul.kernel import all_gather_matmul, await_gathered
from tpformer.kernels.all_gather_matmul.plan import Push, Work
from tpformer.kernels.configurations import TILES, WAVES, select_grouped_tile, select_local_tile, select_tile
from tpformer.kernels.cost import MACHINES, RELEASE_SECONDS
from tpformer.kernels.description import describe_call
from tpformer.kernels.finish import Finish, Norm
from tpformer.kernels.launch import resident_programs
from tpformer.kernels.matmul_all_reduce.kernel import band_rows, matmul_all_reduce, select_all_reduce_tile, share_sums
from tpformer.kernels.matmul_all_reduce.kernel import plan as plan_all_reduce
from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter
from tpformer.planner.devices import as_if_on, load_device


@pytest.fixture
def h100() -> Iterator[torch.device]:
    """A device that torch takes for an H100."""
    with as_if_on(load_device("h100")) as device:
        yield device


def test_tiles_are_few_and_used(h100) -> None:
    assert len(TILES) <= 24
    kinds = [(capability, size) for capability in (80, 90, 100) for size in (1, 2, 4)]
    used = {name for kind in kinds for name in configurations.tile_names(*kind)}
    narrow = {name for kind in kinds for name in configurations.narrow_tile_names(*kind)}  # for few rows
    assert used | narrow | {"interpreted"} == set(TILES) and used == set(WAVES)
    for name in used:
        itemsize = 1 if name.startswith("quantized") else 2
        assert len(WAVES[name]) * 132 <= resident_programs(h100, TILES[name], itemsize=itemsize)


CHOICES = [
    # the shortest waves: the first five were the fastest on an H100 (bench/results); the others follow from the model
    (select_tile, (1024, 4096), {}, "large"),  # one wave of 128 tiles, against two of the medium ones
    (select_tile, (4096, 1280), {}, "medium"),  # 160 large tiles would take two waves for little more than one
    (select_tile, (2048, 512), {}, "small"),  # one per SM
    (select_tile, (2048, 4608), {}, "large"),  # three waves of 288 tiles against five
    (select_tile, (128, 13312), {}, "small"),  # decoding
    (select_tile, (16384, 512, 128, 128), {}, "medium"),  # two weights have 128 columns, half of a large tile's
    (select_tile, (128, 4096), {"chunks": 8}, "large"),  # one launch for all chunks
    (select_tile, (8, 4096), {"chunks": 32}, "small"),  # a large tile would pad 8 rows to 128
    (select_tile, (4096, 4096), {"operands": 3}, "medium"),
    # of few rows every SM gets a program
    (select_local_tile, (8, 13312), {}, "narrow"),  # 208 programs; 104 of the small tile
    (select_local_tile, (8, 768, 128, 128), {}, "narrowest"),  # 32 programs are all that there can be
    (select_local_tile, (128, 8192), {}, "small"),
    (select_local_tile, (129, 13312), {}, "large"),
    # the rows of a group
    (select_grouped_tile, (16384, 8, 28672), {}, "large"),  # Mixtral 8x7B on one GPU: 2048 rows a group
    (select_grouped_tile, (8192, 16, 1536), {}, "large"),  # Qwen3 30B on 8 GPUs: 512 rows a group
    (select_grouped_tile, (4096, 128, 2048), {}, "small"),  # 32 rows a group
    (select_grouped_tile, (64, 8, 28672), {}, "small"),
    # one shot gives every SM a program
    (select_all_reduce_tile, (8, 16384, 8), {}, "small"),  # 128 tiles for 132 SMs
    (select_all_reduce_tile, (16, 8192, 8), {}, "narrow"),
    (select_all_reduce_tile, (8, 12288, 8), {}, "narrow"),
    (select_all_reduce_tile, (32, 4096, 8), {}, "narrowest"),
    (select_all_reduce_tile, (8, 1024, 8), {}, "narrowest"),
    (select_all_reduce_tile, (65, 8192, 8), {}, "small"),  # two-shot: 8 chunks of 9 rows
    (select_all_reduce_tile, (4096, 8192, 8), {}, "large"),
]


@pytest.mark.parametrize("select, arguments, options, expected", CHOICES)
def test_tiles_that_are_picked_for_an_h100(h100, select, arguments, options, expected) -> None:
    assert select(h100, torch.bfloat16, *arguments, **options) == TILES[expected]
    assert select(h100, torch.float32, *arguments, **options) == TILES["exact"]
    rows, columns, *_ = arguments
    if select is select_all_reduce_tile and rows * columns <= 1 << 17 and columns >= 4096:
        assert math.ceil(columns / TILES[expected].n) >= configurations.BUSY * 132


@pytest.mark.parametrize("expected, rows, n, world", [
    (128, 512, 8192, 8),  # 128 tiles: one for each program
    (32, 128, 8192, 8),  # 32 tiles, of which each is added by four programs
    (64, 256, 8192, 8),
    (128, 2048, 8192, 2),
    (16, 128, 4096, 8),  # 16 tiles. With bands of 8 rows a program would wait for two of them
    (128, 8, 8192, 8),  # 8 rows are one piece
])  # fmt: skip
def test_the_program_with_the_most_bands_has_the_least_to_do(expected, rows, n, world) -> None:
    assert band_rows(rows, n, world, TILES["large"], 2, 132) == expected


@pytest.mark.parametrize("expected, tiles, programs, multiplying", [
    ((32, 119, 13), 128, 132, 40e-6),  # 8 turns, the last one of 100; 924 tiles have 115 places
    ((132, 119, 13), 128, 132, 10e-6),  # a tile is too short for 4 units
    ((132, 115, 17), 132, 132, 1.0),  # whole turns
    ((128, 112, 16), 16, 128, 1.0),  # one turn: every unit is late
    ((16, 14, 2), 16, 16, 1.0),
    ((1, 1, 1), 1, 1, 1.0),
])  # fmt: skip
def test_programs_without_a_last_tile_add(expected, tiles, programs, multiplying) -> None:
    assert share_sums(tiles, 8, 1, programs, 11e-6, multiplying) == expected


def test_small_sums_take_one_shot() -> None:
    # 64 rows are a tile's; without one shot a rank adds an eighth of them
    for rows, n, *found in ((16, 8192, True, 16), (64, 16384, True, 64), (65, 8192, False, 9), (65, 1024, True, 65)):
        assert [*plan_all_reduce(rows, n, 8, torch.bfloat16, None, gemms.TILE)[:2]] == found


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


def test_seconds():
    """Of 4 MiB to 7 peers: 11.0 us each at 380 GB/s, in which a pusher of 18 has 8 us for its pieces, and waits 2 us.
    A pusher of one has 32.8 GB/s, and one of 16 the 4 us of 2 pieces and a wait, while the links take 2.8 us."""
    assert plan.push_seconds(4 * MIB, 8, 18, H200) == pytest.approx(7 * 11.04e-6 + 2e-6, rel=1e-3)
    assert plan.push_seconds(4 * MIB, 8, 1, H200) == pytest.approx(7 * (128e-6 + 2e-6) + 2e-6)
    assert plan.push_seconds(MIB, 8, 16, H200) == pytest.approx(7 * 4e-6 + 2e-6)
    assert plan.copy_seconds(4 * MIB, 8, H200) == pytest.approx(7 * (11.04e-6 + 6.4e-6), rel=1e-3)
    assert plan.push_seconds(4 * MIB, 1, 18, H200) == plan.copy_seconds(4 * MIB, 1, H200) == 0


def test_all_flags_but_the_last_peer_s_come_when_every_group_had_its_turn():
    """A turn is as long as a group waits."""
    assert all(plan.TURN_PIECES * machine.load_latency >= RELEASE_SECONDS for machine in MACHINES)
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
    assert [plan.copies_hide_more(size * MIB, 8, H200) for size in (2, 3)] == [False, True]


TOO_SMALL = "^{0} needs {1} per writer, but the channel has 64 and {2}: size it by {3}_space"
NORMALISE = "finishes tiles, not whole rows: normalise its result instead"


@gemms.in_interpreter(1)
def test_what_cannot_run_is_refused() -> None:
    """What the fused GEMMs cannot run they refuse before a launch, and say what is missing."""
    two, one, wide = virtual_channel(2, 64, 1), virtual_channel(1, 64, 8), virtual_channel(1, 1 << 14, 8)
    a, w, matrices = torch.zeros(8, 16), torch.zeros(40, 16), torch.zeros(6, 4, 16)
    integers = torch.zeros(4, 3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    norm, tile = Finish(norm=Norm("rmsnorm", torch.ones(40), None, 1e-5)), {"tile": gemms.TILE}

    def too_small(launch: Callable, need: str, flags: int, sized_by: Callable) -> str:
        return TOO_SMALL.format(launch.__name__, need, flags, sized_by.__name__)

    shards = ("512 bytes per slot and 1 flags", 1, all_gather_matmul)
    partials = too_small(matmul_reduce_scatter, "3072 bytes per slot and 1 flags", 8, matmul_reduce_scatter)
    sums = too_small(matmul_all_reduce, "3072 bytes per slot and 3 flags", 8, matmul_all_reduce)
    for words, launch, arguments, options in (
        (too_small(all_gather_matmul, *shards), all_gather_matmul, (a, [w], two), tile),
        (too_small(await_gathered, *shards), await_gathered, (two, a), {"push": True}),
        (too_small(all_gather_grouped_matmul, *shards), all_gather_grouped_matmul, (a, matrices, two, *integers), tile),
        (r"shard is \(0, 16\) .*: give \(2, 16\)", all_gather_grouped_matmul, (a[:0], matrices, two, *integers), tile),
        (r"no empty \(8, 16\) or \(6, 0, 16\)", all_gather_grouped_matmul, (a, matrices[:, :0], two, *integers), tile),
        (partials, matmul_reduce_scatter, ([a], [w], one), tile),
        (sums, matmul_all_reduce, ([a], [w], one), tile),
        (NORMALISE, matmul_reduce_scatter, ([a], [w], wide, norm), tile),
        (NORMALISE, matmul_all_reduce, ([a], [w], wide, norm), tile),
    ):
        with pytest.raises(ValueError, match=words):
            launch(*arguments, **options)


def test_lists_that_share_out_the_same_tensors_in_another_way_have_plans_of_their_own() -> None:
    def description(*values: object) -> list:
        found: list = []
        describe_call(values, found, [], [], [])
        return found

    x, y, z = torch.zeros(3, 16).unbind()
    assert description([x, y], [z]) == description([y, z], [x])
    assert description([x, y], [z]) != description([x], [y, z])
    assert description(torch.nn.Parameter(y)) == description(x)
    held = [TILES["large"], 1, 0.5, "gelu", True, None, torch.float32, torch.device("cpu")]
    assert description(*held) == held
    assert description([x, y]) != description([x], y)
