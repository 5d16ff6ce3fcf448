"""The collectives part of the bench `cpu`: shared memory against gloo, by size.

Belongs here: sizes, the collectives over both backends, their gate and rows.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from tpformer.distributed import all_gather, all_reduce, reduce_scatter, use_backend

from .ranks import Calls, Ranks
from .runner import Row, make_row
from .timing import compare, interleave, timed

RANKS = 2
SHARED, GLOO = "shared memory", "gloo"
# bytes of the whole tensor (gathered, to be scattered, or to be reduced) -> repetitions per timed sample
QUICK_SIZES = {2**12: 20, 2**20: 5}
SIZES = {2**12: 1000, 2**16: 500, 2**20: 100, 2**24: 10}
COLLECTIVES: dict[str, Callable] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
}


def collective_calls(sizes: dict[int, int]) -> Calls:
    """A rank's timed collectives over both backends, and whether they give the same result."""
    groups = {SHARED: dist.new_group(), GLOO: dist.new_group()}
    use_backend(groups[SHARED], "shared")
    use_backend(groups[GLOO], "gloo")
    calls: dict[str, Callable] = {}
    for (name, collective), (size, repetitions) in product(COLLECTIVES.items(), sizes.items()):
        nbytes = size // dist.get_world_size() if name == "all_gather" else size
        x = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        both = [partial(collective, x, groups[backend]) for backend in (SHARED, GLOO)]
        calls[f"{name} {size} gate"] = lambda both=both: torch.equal(both[0](), both[1]())
        for backend, call in zip((SHARED, GLOO), both, strict=True):
            calls[f"{name} {size} {backend}"] = timed(call, repetitions)
    return calls


def check_collectives() -> None:
    sizes = QUICK_SIZES | SIZES
    with Ranks(RANKS, 1, collective_calls, sizes) as ranks:
        for name, size in product(COLLECTIVES, sizes):
            if not all(ranks.call(f"{name} {size} gate")):
                raise AssertionError(f"{name} of {size} bytes: {SHARED} and {GLOO} differ")


def collective_rows(quick: bool, rounds: int) -> list[Row]:
    rows, sizes = [], QUICK_SIZES if quick else SIZES
    with Ranks(RANKS, 1, collective_calls, sizes) as ranks:
        for name, size in product(COLLECTIVES, sizes):
            samples = {backend: partial(ranks.sample, f"{name} {size} {backend}") for backend in (SHARED, GLOO)}
            seconds = interleave(samples, rounds)
            rows.append(
                make_row(
                    case=f"{name}, {RANKS} ranks",
                    shape=f"{size // 1024} KiB" if size < 2**20 else f"{size // 2**20} MiB",
                    provider=SHARED,
                    baseline=GLOO,
                    unit="us",
                    convert=lambda seconds: 1e6 * seconds,
                    comparison=compare(seconds[SHARED], seconds[GLOO]),
                    bar=5.0 if size == 2**20 else None,
                )
            )
    return rows
