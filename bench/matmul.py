"""How near is our GEMM to cuBLAS on one GPU, on every layer of the shape list, in every layout?

Belongs here: layouts, providers, what must agree, the required mean. The shapes are in shapes.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.accuracy import poisoned, require_accurate
from harness.ratios import Row, compared, mean_row, ratio_bench
from harness.timing import FULL, QUICK, Call, measure
from tpformer.kernels.cost import gemm_seconds
from tpformer.ops.transports.interface import GATHER, SCATTER

from .predict import ITEMSIZE, present_machine, share_row
from .shapes import DECODE_ROWS, ROWS, Shape, shapes

DEVICE, DTYPE = "cuda", torch.bfloat16
LIBRARY, OURS = "torch.matmul", "tpformer"
FORWARD, DGRAD, WGRAD, DECODE, EPILOGUE = "forward", "dgrad", "wgrad", "decode", "bias and gelu"
BACKWARD_ROWS = (2048, 8192)
REQUIRED = 0.95  # of cuBLAS, geometric mean over all shapes and layouts


class Gemm(NamedTuple):
    """case: FORWARD (x W^T), DGRAD (dy W), WGRAD (dy^T x), DECODE (few rows of it), EPILOGUE (gelu(x W^T + bias))."""

    case: str
    shape: Shape

    @property
    def transposed(self) -> tuple[bool, bool]:
        """Whether A, and whether B, is stored the other way round than in the forward."""
        return self.case == WGRAD, self.case in (DGRAD, WGRAD)

    def operands(self) -> list[Tensor]:
        """Normal numbers, scaled so that products are of order 1. On zeros a GPU is faster than on data."""
        m, n, k = self.shape.m, self.shape.n, self.shape.k
        a, b, width = {DGRAD: ((m, n), (n, k), n), WGRAD: ((m, n), (m, k), m)}.get(self.case, ((m, k), (n, k), k))
        sizes = [a, b, (n,)][: 3 if self.case == EPILOGUE else 2]
        operands = [torch.randn(size, device=DEVICE, dtype=DTYPE) for size in sizes]
        operands[1] *= width**-0.5
        return operands

    def library(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """The result by torch: one kernel, or two with the epilogue."""
        if bias is not None:
            return F.gelu(F.linear(a, b, bias), approximate="tanh")
        a_transposed, b_transposed = self.transposed
        return torch.matmul(a.t() if a_transposed else a, b if b_transposed else b.t())

    def ours(self, a: Tensor, b: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
        """The result by our kernel; options: of kernels/matmul."""
        from tpformer.kernels.matmul.kernel import matmul

        if bias is not None:
            return matmul(a, [b], [bias], activation="gelu_tanh", **options)[0]
        a_transposed, b_transposed = self.transposed
        return matmul(a, [b], a_transposed=a_transposed, b_transposed=b_transposed, **options)[0]


def candidates(gemm: Gemm) -> tuple[str, list[str]]:
    """(the name of the tile that the kernel takes, all names of this GPU for so many rows)."""
    from tpformer.kernels.configurations import FEW_ROWS, TILES, narrow_tile_names, select_local_tile, tile_names

    device, shape = torch.device(DEVICE), gemm.shape
    rows, columns = {DGRAD: (shape.m, shape.k), WGRAD: (shape.n, shape.k)}.get(gemm.case, (shape.m, shape.n))
    major, minor = torch.cuda.get_device_capability(device)
    capability = 10 * major + minor
    names = tile_names(capability, DTYPE.itemsize)
    if rows <= FEW_ROWS:
        names = (*names[:-1], *narrow_tile_names(capability, DTYPE.itemsize))
    picked = select_local_tile(device, DTYPE, rows, columns)
    return next(name for name in names if TILES[name] == picked), list(names)


def gemms(quick: bool) -> list[Gemm]:
    """Forward over the whole list, the gradients over two numbers of rows, decoding, and GPT-3's up projection, the
    list's one layer with such an epilogue; quick: one model, few rows."""

    def both(rows: Sequence[int]) -> list[Shape]:
        found = shapes(GATHER, rows) + shapes(SCATTER, rows)
        return [shape for shape in found if not quick or (shape.model == "8B" and shape.m == rows[0])]

    return [
        *(Gemm(FORWARD, shape) for shape in both(ROWS)),
        *(Gemm(case, shape) for case in (DGRAD, WGRAD) for shape in both(BACKWARD_ROWS)),
        *(Gemm(DECODE, shape) for shape in both(DECODE_ROWS)),
        *(Gemm(EPILOGUE, shape) for shape in shapes(GATHER, ROWS[:1] if quick else ROWS) if shape.layer == "up"),
    ]


def calls_of(gemm: Gemm) -> tuple[list[Tensor], dict[str, Callable[[], Tensor]]]:
    """Operands, and by provider what is called: the library, the tile that is picked, the other candidates."""
    from tpformer.kernels.configurations import TILES

    operands = gemm.operands()
    calls: dict[str, Callable[[], Tensor]] = {LIBRARY: partial(gemm.library, *operands)}
    if gemm.case == EPILOGUE:
        return operands, calls | {OURS: partial(gemm.ours, *operands)}
    picked, names = candidates(gemm)
    tiles = {f"{OURS} ({picked})": picked, **{name: name for name in names if name != picked}}
    return operands, calls | {each: partial(gemm.ours, *operands, tile=TILES[name]) for each, name in tiles.items()}


def check(quick: bool) -> None:
    for gemm in gemms(quick):
        check_gemm(gemm)


def check_gemm(gemm: Gemm) -> None:
    """Every tile that is timed against float64; a function of its own, so that its operands are freed."""
    operands, calls = calls_of(gemm)
    oracle, baseline = gemm.library(*(x.double() for x in operands)), calls.pop(LIBRARY)()
    for name, call in calls.items():
        require_accurate(f"{gemm.case} {gemm.shape} {name}", poisoned(call, baseline), oracle, baseline)


def gemm_rows(gemm: Gemm, quick: bool) -> list[Row]:
    """The row of the tile that is picked, then those of the other candidates."""
    calls = calls_of(gemm)[1]
    seconds = measure({name: Call(call) for name, call in calls.items()}, QUICK if quick else FULL)
    pairs = [(name, LIBRARY) for name in calls if name != LIBRARY]
    return compared(gemm.case, gemm.shape, seconds, pairs, unit="TFLOP/s", amount=gemm.shape.flops / 1e12)


def rows(quick: bool) -> list[Row]:
    by_gemm = [gemm_rows(gemm, quick) for gemm in gemms(quick)]
    layouts = [found for found in by_gemm if found[0]["case"] != EPILOGUE]
    best = [max(found, key=lambda row: row["ratio"]) for found in layouts]
    return [*(row for found in by_gemm for row in found), *means([found[0] for found in layouts], best)]


def means(picked: Sequence[Row], best: Sequence[Row]) -> list[Row]:
    """Mean ratios: of each case; of all, with the best candidate everywhere; of all as they are, which have a bar."""

    def mean(name: str, chosen: Sequence[Row], provider: str, bar: float | None = None) -> Row:
        return mean_row(chosen, shape=f"{name}, {len(chosen)} shapes", provider=provider, bar=bar)

    cases = dict.fromkeys(row["case"] for row in picked)
    by_case = [mean(case, [row for row in picked if row["case"] == case], OURS) for case in cases]
    return [*by_case, mean("all", best, "best tile"), mean("all", picked, OURS, REQUIRED)]


def predictions() -> list[Row]:
    """What the model assumes of the bare GEMMs."""
    machine, listed = present_machine(), [g.shape for g in gemms(quick=False) if g.case in (FORWARD, DECODE)]
    return [
        share_row("matmul", shape, gemm_seconds(shape.m, shape.n, shape.k, ITEMSIZE, machine), shape.flops)
        for shape in listed
    ]


BENCH = ratio_bench(
    rows,
    predictions,
    name="matmul",
    description="the Triton GEMM against cuBLAS in bfloat16, cold L2: forward, gradients, decoding; every tile (1 GPU)",
    device="cuda",
    check=check,
    note="The model of a GEMM: max(2 M N K / F, bytes / memory bandwidth), F what large GEMMs sustain "
    "(kernels/cost.py). Measured rows name the tile; tpformer (tile) is the one that select_tile picks.",
)
