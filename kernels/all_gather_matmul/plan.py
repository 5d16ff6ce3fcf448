"""How the shards of a gather travel: pushed by how many programs, or by copy engines, and how long that takes.

Belongs here: arithmetic on the host with the numbers of cost.py, which nobody has measured on several GPUs. The
kernels are in kernel.py.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..configurations import TILES, select_tile, tile_names
from ..cost import MACHINES, RELEASE_SECONDS, Machine, machine_for, tile_seconds
from ..launch import Tile, is_interpreted, packed_width, persistent_programs, resident_programs
from ..quantize.format import shard_bytes

# Bytes that a pusher has asked for before it stores the first of them: of each of 256 threads 8 loads of 16 bytes.
IN_FLIGHT = 32 << 10
# Pushers of so many groups wait one after the other until what they stored has arrived. A group's turn is as long as
# two pieces take, which is as long as such a wait (RELEASE_SECONDS).
TURNS = 3
TURN_PIECES = 2
INTERPRETED_PUSHERS = 2  # at most: a program takes about 10 ms


class Work(NamedTuple):
    """A rank's part of a gather and of the GEMM that takes the rows."""

    nbytes: int
    """Bytes of the rank's shard, with the columns that are added to its rows."""
    world: int
    tiles: int
    """Tiles of the chunks of all ranks."""
    seconds: float
    """Seconds of the GEMM, by the model, on all SMs."""
    itemsize: int = 2
    """Bytes of a number of the GEMM's operands."""


class Push(NamedTuple):
    """Which programs of a launch push, and when they take tiles."""

    pushers: int
    """The first so many programs push. 0: copies send the shard."""
    joins: int
    """The first of a rank's chunks of which pushers take tiles, counted from 0, the own one. The number of ranks:
    they take none."""


NO_PUSH = Push(0, 0)


def machine_of(device: torch.device, itemsize: int = 2) -> Machine:
    """The machine of a CUDA device; the table's first one stands for what is not in it. itemsize: of the GEMMs'
    operands; 1 is for blocks of e4m3, at the rate of 16 bits where theirs is not known."""
    found = (machine_for(torch.cuda.get_device_name(device)) if device.type == "cuda" else None) or MACHINES[0]
    return found.of_blocks or found if itemsize == 1 else found


def sent_bytes(rows: int, k: int, itemsize: int) -> int:
    """Bytes of a shard of (rows, k) as a kernel sends it; itemsize 1 is of blocks of e4m3."""
    return shard_bytes(rows, k) if itemsize == 1 else rows * packed_width(k, itemsize) * itemsize


def filling_pushers(machine: Machine) -> int:
    """How many pushers fill a GPU's links while the others wait in their turn, by Little's law: bandwidth * latency /
    bytes that each has in flight."""
    return math.ceil(machine.link * machine.load_latency / IN_FLIGHT * TURNS / (TURNS - 1))


def pushers_of(nbytes: int, machine: Machine) -> int:
    """How many programs should push a shard: so many as fill the links, but no more than it has pieces."""
    most = INTERPRETED_PUSHERS if is_interpreted() else filling_pushers(machine)
    return min(most, math.ceil(nbytes / IN_FLIGHT))


def push_arrivals(nbytes: int, world: int, pushers: int, machine: Machine) -> list[float]:
    """Seconds until the chunks of a rank are there, the own one first, if each has so many pushers.

    A peer takes as long as the links take for a shard, or as one pusher takes for its share and for the wait until that
    has arrived. This assumes that the others fill the links while some wait, as they do so in turns, whose last group
    sets the flag. With the last peer all wait at once.
    """
    pieces = math.ceil(nbytes / IN_FLIGHT / pushers)
    peer = max(nbytes / machine.link, pieces * machine.load_latency + RELEASE_SECONDS)
    put_off = min((TURNS - 1) * TURN_PIECES, pieces) * machine.load_latency
    between = [step * peer + put_off + RELEASE_SECONDS for step in range(1, world - 1)]
    return [0.0, *between, (world - 1) * peer + RELEASE_SECONDS][:world]


def push_seconds(nbytes: int, world: int, pushers: int, machine: Machine) -> float:
    """Seconds in which so many pushers send a shard to all peers, one after the other."""
    return push_arrivals(nbytes, world, pushers, machine)[-1] if pushers else 0.0


def copy_seconds(nbytes: int, world: int, machine: Machine) -> float:
    """Seconds in which a copy engine sends a shard to all peers, one after the other."""
    return (world - 1) * (machine.copy_start + nbytes / machine.link)


def plan_push(work: Work, pushers: int, programs: int, machine: Machine) -> Push:
    """When the pushers of a launch of so many programs join the others.

    It is with the first chunk that begins after they have pushed, because a tile that waits for a pusher delays the
    end. They never join where the others have one tile each at most, nor in the interpreter, in which a program runs to
    its end before the next one begins: a pusher would wait for peers that wait for the next pusher.
    """
    computing = programs - pushers
    if computing == 0:
        return Push(pushers, 0)
    if is_interpreted() or work.tiles <= computing:
        return Push(pushers, work.world)
    chunk = work.seconds / work.world * programs / computing
    return Push(pushers, min(work.world, math.ceil(push_seconds(work.nbytes, work.world, pushers, machine) / chunk)))


def plan_launch(
    work: Work, device: torch.device, tile: Tile, push: bool, programs: int | None, served: int, spare: int
) -> tuple[int, Push]:
    """(programs of a rank, its pushers among them). By default all that are resident, but at most one for each tile and
    for each pusher; no more than half of them push. programs, served, spare: as in persistent_programs."""
    machine = machine_of(device)
    pushers = pushers_of(work.nbytes, machine) if push and work.world > 1 else 0
    room = persistent_programs(device, work.tiles + pushers, tile, programs, served, spare, work.itemsize)
    if not pushers:
        return room, NO_PUSH
    if is_interpreted() and programs is None:
        room += pushers
    return room, plan_push(work, min(pushers, max(1, room // 2)), room, machine)


def select_gather_tile(
    device: torch.device, dtype: torch.dtype, rows: int, columns: Sequence[int], k: int, world: int, operands: int = 1
) -> Tile:
    """The tile for a gather of shards of (rows, k), and for its weights' columns: select_tile's, unless the links take
    longer than that GEMM. The chunk that arrives last is multiplied behind them, so then it is the tile with which a
    chunk takes the least time, if the whole GEMM with it does not take longer than the links.
    """
    chosen = select_tile(device, dtype, rows, *columns, chunks=world, operands=operands)
    if is_interpreted() or world == 1:
        return chosen
    (major, minor), itemsize = torch.cuda.get_device_capability(device), dtype.itemsize
    processors, machine = torch.cuda.get_device_properties(device).multi_processor_count, machine_of(device, itemsize)
    links = (world - 1) * sent_bytes(rows, k, itemsize) / machine.link

    def seconds(tile: Tile, chunks: int) -> float:
        tiles = chunks * math.ceil(rows / tile.m) * sum(math.ceil(n / tile.n) for n in columns)
        programs = resident_programs(device, tile, itemsize=itemsize)
        # beside the others on its SM: while the last chunk is multiplied, those of the one before still are
        return math.ceil(tiles / programs) * tile_seconds(tile[:2], k, programs // processors, machine, processors)

    tiles = [TILES[name] for name in tile_names(10 * major + minor, itemsize, operands)]
    hidden = [tile for tile in (chosen, *tiles) if seconds(tile, world) <= links]
    return min(hidden, key=lambda tile: seconds(tile, 1)) if chosen in hidden else chosen


def copies_hide_more(nbytes: int, world: int, machine: Machine) -> bool:
    """Whether copy engines, rather than pushers, should send a shard of `nbytes` while another kernel runs.

    Beside it no pusher runs, so a push would begin after it. Copies hide all but their beginnings, as that kernel
    reduces as many bytes.
    """
    return (world - 1) * machine.copy_start < push_seconds(nbytes, world, pushers_of(nbytes, machine), machine)
