"""Does the GEMM gain by loads in warps of their own, or by a fourth stage?

Belongs here: the two trials, their shapes, and the gate that they have to pass. What ships is timed in matmul.py.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from harness.accuracy import poisoned, require_accurate
from harness.ratios import Row, compared, means, ratio_bench
from harness.timing import FULL, QUICK, Call, measure

from .matmul import FORWARD, LIBRARY, OURS, Gemm, candidates
from .shapes import GATHER, SCATTER, shapes

LARGE = f"{OURS} (large)"
TRIALS = FOUR_STAGES, PRODUCERS, BOTH = "4 stages", "producer warps", "both"
TRIAL = "geometric mean of a trial"
ROWS = (2048, 8192)


def gemms(quick: bool) -> list[Gemm]:
    """Forward, for few and for many waves of tiles, with K from 512 on; quick: of one model."""
    found = shapes(GATHER, ROWS) + shapes(SCATTER, ROWS)
    return [Gemm(FORWARD, shape) for shape in found if shape.model == "8B" or not quick]


def calls_of(gemm: Gemm, operands: list[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """torch's GEMM, ours with the tile that it takes and with the large one, and the trials, whose tile is the large
    one."""
    from tpformer.kernels.configurations import TILES

    from .specialised import TILE, specialised

    picked, _ = candidates(gemm)
    large = TILES["large"]
    return {
        LIBRARY: partial(gemm.library, *operands),
        OURS: partial(gemm.ours, *operands, tile=TILES[picked]),
        LARGE: partial(gemm.ours, *operands, tile=large),
        FOUR_STAGES: partial(gemm.ours, *operands, tile=large._replace(stages=large.stages + 1)),
        PRODUCERS: partial(specialised, *operands),
        BOTH: partial(specialised, *operands, TILE.stages + 1),
    }


def check(quick: bool) -> None:
    for gemm in gemms(quick):
        check_gemm(gemm)


def check_gemm(gemm: Gemm) -> None:
    """Each trial against float64, in a function of its own, so that operands are freed."""
    operands = gemm.operands()
    calls = calls_of(gemm, operands)
    oracle, baseline = gemm.library(*(x.double() for x in operands)), calls[LIBRARY]()
    for name in TRIALS:
        require_accurate(f"{gemm.shape} {name}", poisoned(calls[name], baseline), oracle, baseline)


def gemm_rows(gemm: Gemm, quick: bool) -> list[Row]:
    calls = calls_of(gemm, gemm.operands())
    seconds = measure({name: Call(call) for name, call in calls.items()}, QUICK if quick else FULL)
    pairs = [*((name, LARGE) for name in TRIALS), *((name, LIBRARY) for name in (OURS, *TRIALS))]
    return compared(gemm.case, gemm.shape, seconds, pairs, unit="TFLOP/s", amount=gemm.shape.flops / 1e12)


def rows(quick: bool) -> list[Row]:
    found = [row for gemm in gemms(quick) for row in gemm_rows(gemm, quick)]
    return [*found, *means([row for row in found if row["baseline"] == LARGE], case=TRIAL)]


BENCH = ratio_bench(
    rows,
    name="matmul_trials",
    description="a fourth stage, and loads by warps of their own, beside our GEMM's large tile, cold L2 (1 GPU)",
    device="cuda",
    check=check,
    note="Expected of what ships: 4 stages 1.01 to 1.02; producer warps 1.02 to 1.05 where waves are few, 0.95 with K "
    "below 1024, as each launch makes its descriptors.",
)
