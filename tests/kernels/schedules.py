"""Orders of events between two ranks in which a broken protocol must show; they are arranged, not left to timing.

Belongs here: the communicating operations of a package of kernels (tpformer.kernels or a mutated copy of it), and the
schedules, each of which runs one of them. Workers import it with the interpreter on. The mutations are in the test.
"""

import contextlib
import importlib
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
from channels import real_channel
from gemms import TILE
from torch import Tensor

from tpformer.distributed.shared_memory import SharedMemory
from tpformer.kernels.protocol import Channel

ROWS, K, N = 6, 8, 20  # two tiles side by side
WEIGHT = torch.arange(N * K).view(N, K).remainder(5).float() - 2  # small integers: sums are exact
CAPACITY, WRITER_FLAGS = 1 << 15, 16
BEFORE = 2**31 - 2  # the epoch before: the first operation's is positive as int32, the second's wraps
LIMIT = 20  # polls of a wait that is over at once or never
PATIENCE = 30  # seconds
FOLDERS = ("all_gather_matmul", "all_gather_grouped_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


class Side(NamedTuple):
    """One rank's part of a schedule."""

    package: str
    memory: SharedMemory
    channel: Channel

    def kernel(self, folder: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{folder}.kernel")


class Operation(NamedTuple):
    launch: Callable[[Side, Tensor], Tensor]
    expected: Callable[[Tensor, int], Tensor]
    """(all ranks' inputs (ranks, rows, K), rank) -> what `launch` returns."""
    waits: int = 0
    """How many waits a rank of an operation of two phases has before the last one."""
    following: tuple[str, int] | None = None
    """(operation, rows) whose pushes could overwrite what the last phase reads; by default the same operation."""


@contextlib.contextmanager
def gathering(side: Side, folder: str) -> Iterator[ModuleType]:
    """The kernel of a gather, whose pushers send so few bytes at a time that every one has some."""
    with mock.patch.object(side.kernel(folder).plan, "IN_FLIGHT", 16):
        yield side.kernel(folder)


def await_gathered(side: Side, x: Tensor) -> Tensor:
    with gathering(side, "all_gather_matmul") as module:
        module.await_gathered(side.channel, x, push=True)
        return module.gathered_copy(side.channel, x)


def all_gather_matmul(side: Side, x: Tensor) -> Tensor:
    with gathering(side, "all_gather_matmul") as module:
        return module.all_gather_matmul(x, [WEIGHT], side.channel, tile=TILE)[0]


def all_gather_grouped_matmul(side: Side, x: Tensor) -> Tensor:
    """Both experts of a rank take all tokens."""
    world = side.channel.world
    counts = torch.full((world, 2), len(x), dtype=torch.int32)
    tokens = torch.arange(world * len(x), dtype=torch.int32).repeat(2)
    weights = torch.stack([WEIGHT, -WEIGHT])
    with gathering(side, "all_gather_grouped_matmul") as module:
        return module.all_gather_grouped_matmul(x, weights, side.channel, counts, tokens, tile=TILE)


def matmul_reduce_scatter(side: Side, x: Tensor) -> Tensor:
    return side.kernel("matmul_reduce_scatter").matmul_reduce_scatter([x], [WEIGHT], side.channel, tile=TILE)


def matmul_all_reduce(side: Side, x: Tensor, one_shot: bool) -> Tensor:
    module = side.kernel("matmul_all_reduce")
    return module.matmul_all_reduce([x], [WEIGHT], side.channel, one_shot=one_shot, tile=TILE)


def total_product(inputs: Tensor, rank: int) -> Tensor:
    return inputs.sum(0) @ WEIGHT.T


OPERATIONS = {
    "await_gathered": Operation(await_gathered, lambda inputs, rank: inputs.flatten(0, 1)),
    "all_gather_matmul": Operation(all_gather_matmul, lambda inputs, rank: inputs.flatten(0, 1) @ WEIGHT.T),
    "all_gather_grouped_matmul": Operation(
        all_gather_grouped_matmul, lambda inputs, rank: torch.cat([*inputs, *-inputs]) @ WEIGHT.T
    ),
    "matmul_reduce_scatter": Operation(
        matmul_reduce_scatter, lambda inputs, rank: total_product(inputs, rank).chunk(len(inputs))[rank]
    ),
    "matmul_all_reduce, one shot": Operation(partial(matmul_all_reduce, one_shot=True), total_product),
    # 2 tiles
    "matmul_all_reduce, two shots": Operation(
        partial(matmul_all_reduce, one_shot=False), total_product, 2, ("matmul_all_reduce, one shot", 48)
    ),
}
NAMES = set(OPERATIONS)
TWO_PHASES = {name for name, operation in OPERATIONS.items() if operation.waits}


def join(package: str, limit: int = 10**8, epoch: int = BEFORE, extra: int = 0) -> Side:
    """Make a fresh channel; collective. extra: bytes behind it, zeroed."""
    importlib.invalidate_caches()
    return Side(package, *real_channel(CAPACITY, WRITER_FLAGS, epoch, PATIENCE, limit, extra))


def run(side: Side, name: str, index: int = 0, rows: int = ROWS) -> str:
    """Run the index-th operation, and return "right", "wrong", or "error" if a wait has reported one."""
    generator = torch.Generator().manual_seed(index)
    inputs = torch.randint(-4, 5, (side.channel.world, rows, K), generator=generator).float()
    importlib.import_module(f"{side.package}.protocol").bump(side.channel)
    out = OPERATIONS[name].launch(side, inputs[side.channel.rank])
    if side.channel.error.any():
        return "error"
    return "right" if torch.equal(out, OPERATIONS[name].expected(inputs, side.channel.rank)) else "wrong"


@contextlib.contextmanager
def hooked(side: Side, hook: Callable, *names: str) -> Iterator[None]:
    """Within, kernels call hook(function, ...) instead of the device functions of these names."""
    protocol = importlib.import_module(f"{side.package}.protocol")
    with contextlib.ExitStack() as stack:
        for folder, name in itertools.product(FOLDERS, names):
            if hasattr(side.kernel(folder), name):
                stack.enter_context(
                    mock.patch.object(side.kernel(folder), name, partial(hook, getattr(protocol, name)))
                )
        yield


def late(package: str, name: str) -> str:
    """Rank 1 reads at the first moment that its waits allow. Rank 0 moves only while rank 1 cannot, and stands still
    whenever it has set a flag, or those of an announcement."""
    side, everybody = join(package, epoch=BEFORE + 1, extra=16), 7  # an epoch that wraps
    turn = side.memory.peer(0, (4,), torch.int32, side.memory.nbytes - 16)[:1]
    if side.channel.rank == 0:
        turn.fill_(1)
    side.memory.barrier()

    def stand_still() -> None:
        deadline = time.monotonic() + PATIENCE
        while turn.item() not in (side.channel.rank, everybody):
            time.sleep(1e-4)
            assert time.monotonic() < deadline, f"rank {side.channel.rank} got no turn in {PATIENCE} s"

    def pass_turn() -> None:
        if turn.item() != everybody:
            turn.fill_(1 - side.channel.rank)
        stand_still()

    def publishing(publish: Callable, *arguments) -> None:
        publish(*arguments)
        pass_turn()

    def waiting(wait: Callable, me, flag, first, limit, *peers):
        while not wait(me, flag, first, limit * 0 + 1, *peers) > 0:
            side.channel.error.zero_()
            side.channel.stopped.zero_()
            pass_turn()
        return limit

    stand_still()
    with hooked(side, waiting, "wait") if side.channel.rank == 1 else hooked(side, publishing, "publish", "announce"):
        verdict = run(side, name)
    if side.channel.rank == 1:
        turn.fill_(everybody)
    side.memory.barrier()
    return verdict


def ahead(package: str, name: str) -> str:
    """Rank 1 stands still before its last phase until rank 0 has pushed the next operation."""
    side = join(package)
    seen = 0

    def pausing(wait: Callable, me, flag, first, limit, *peers):
        nonlocal seen
        if seen == OPERATIONS[name].waits:
            side.memory.wait(0)
        seen += 1
        return wait(me, flag, first, limit if seen <= OPERATIONS[name].waits else limit * 0 + LIMIT, *peers)

    def pushed(wait: Callable, me, flag, first, limit, *peers):
        nonlocal seen
        if seen == 0:
            side.memory.signal(1)
        seen += 1
        return limit * 0  # what it would receive is of no interest

    if side.channel.rank == 0:
        verdict = run(side, name)
        following, rows = OPERATIONS[name].following or (name, ROWS)
        with hooked(side, pushed, "wait"):
            run(side, following, index=1, rows=rows)
    else:
        with hooked(side, pausing, "wait"):
            verdict = run(side, name)
    side.memory.barrier()
    return verdict


def gave_up(package: str, name: str) -> tuple[str, bool]:
    """Rank 0 waits in vain for rank 1, then runs two more operations, the second in the same slots; then rank 1 comes.
    Returns the verdict on the first operation, and whether the other two left rank 1's slots and flags as they were."""
    side = join(package, limit=LIMIT)
    if side.channel.rank == 1:
        side.memory.wait(0)
    verdict, untouched = run(side, name), True
    if side.channel.rank == 0:
        memory = side.memory.peer(1, (side.memory.nbytes,), torch.uint8)
        before = memory.clone()
        for index in (1, 2):
            run(side, name, index)
        untouched = torch.equal(memory, before)
        side.memory.signal(1)
    side.memory.barrier()
    return verdict, untouched


def absent(package: str, name: str) -> list[int]:
    """Of three ranks the last never comes, and the others have set all their flags for one another: the absent one is
    asked last by one of them, and first by the other. Returns a rank's error words (expired, peer, epoch seen, epoch
    wanted)."""
    side = join(package, limit=LIMIT)
    if side.channel.rank < 2:
        at = 2 * CAPACITY + 4 * WRITER_FLAGS * side.channel.rank
        side.memory.peer(1 - side.channel.rank, (WRITER_FLAGS,), torch.int32, at).fill_(BEFORE + 1)
    side.memory.barrier()
    if side.channel.rank < 2:
        run(side, name)
    side.memory.barrier()
    return side.channel.error[0].tolist()


SCHEDULES: dict[str, Callable] = {"late": late, "ahead": ahead, "gave up": gave_up, "absent": absent}


def run_all(schedule: str, package: str, names: set[str]) -> dict[str, object]:
    """This rank's result of a schedule for each operation."""
    return {name: SCHEDULES[schedule](package, name) for name in sorted(names)}
