"""How near is our GEMM to cuBLAS on one GPU, on every layer of the shape list, in every layout?

Belongs here: layouts, providers, what must agree, the required mean. The shapes are in shapes.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpformer.kernels.cost import gemm_seconds
from tpformer.ops.transports.interface import GATHER, SCATTER

from .accuracy import poisoned, require_accurate
from .predict import ITEMSIZE, present_machine, share_row
from .ratios import Row, compared, draw_ratios, mean_row, ratios, table
from .runner import Bench
from .shapes import DECODE_ROWS, ROWS, Shape, shapes
from .timing import FULL, QUICK, Call, measure

DEVICE, DTYPE = "cuda", torch.bfloat16
LIBRARY, OURS = "torch.matmul", "tpformer"
FORWARD, DGRAD, WGRAD, DECODE, EPILOGUE = "forward", "dgrad", "wgrad", "decode", "bias and gelu"
BACKWARD_ROWS = (2048, 8192)
REQUIRED = 0.95  # of cuBLAS, geometric mean over all shapes and layouts


class Gemm(NamedTuple):
    """case: FORWARD (x W^T), DGRAD (dy W), WGRAD (dy^T x), or DECODE, which is FORWARD with few rows."""

    case: str
    shape: Shape

    @property
    def transposed(self) -> tuple[bool, bool]:
        """Whether A, and whether B, is stored the other way round than in the forward."""
        return self.case == WGRAD, self.case in (DGRAD, WGRAD)

    def operands(self) -> tuple[Tensor, Tensor]:
        """Normal numbers, scaled so that products are of order 1. On zeros a GPU is faster than on data."""
        m, n, k = self.shape.m, self.shape.n, self.shape.k
        a_shape, b_shape, width = {
            DGRAD: ((m, n), (n, k), n),
            WGRAD: ((m, n), (m, k), m),
        }.get(self.case, ((m, k), (n, k), k))
        options: dict = {"device": DEVICE, "dtype": DTYPE}
        return torch.randn(a_shape, **options), torch.randn(b_shape, **options) * width**-0.5

    def library(self, a: Tensor, b: Tensor) -> Tensor:
        """The product by torch."""
        a_transposed, b_transposed = self.transposed
        return torch.matmul(a.t() if a_transposed else a, b if b_transposed else b.t())


def ours(gemm: Gemm, a: Tensor, b: Tensor, tile: str, programs: int | None = None) -> Tensor:
    """Our kernel with the shipped tile configuration of that name."""
    from tpformer.kernels.configurations import TILES
    from tpformer.kernels.matmul.kernel import matmul

    a_transposed, b_transposed = gemm.transposed
    options: dict = {"tile": TILES[tile], "programs": programs}
    return matmul(a, [b], a_transposed=a_transposed, b_transposed=b_transposed, **options)[0]


def candidates(gemm: Gemm) -> tuple[str, list[str]]:
    """(the name of the tile that select_tile picks, all names of this GPU)."""
    from tpformer.kernels.configurations import TILES, select_tile, tile_names

    device, shape = torch.device(DEVICE), gemm.shape
    rows, columns = {DGRAD: (shape.m, shape.k), WGRAD: (shape.n, shape.k)}.get(gemm.case, (shape.m, shape.n))
    major, minor = torch.cuda.get_device_capability(device)
    names = tile_names(10 * major + minor, DTYPE.itemsize)
    picked = select_tile(device, DTYPE, rows, columns)
    return next(name for name in names if TILES[name] == picked), list(names)


def gemms(quick: bool) -> list[Gemm]:
    """Forward over the whole list, the gradients over two numbers of rows, decoding; quick: one model, few rows."""

    def both(rows: Sequence[int]) -> list[Shape]:
        found = shapes(GATHER, rows) + shapes(SCATTER, rows)
        return [shape for shape in found if not quick or (shape.model == "8B" and shape.m == rows[0])]

    return [
        *(Gemm(FORWARD, shape) for shape in both(ROWS)),
        *(Gemm(case, shape) for case in (DGRAD, WGRAD) for shape in both(BACKWARD_ROWS)),
        *(Gemm(DECODE, shape) for shape in both(DECODE_ROWS)),
    ]


def epilogue_calls(x: Tensor, w: Tensor, bias: Tensor, **options: Any) -> dict[str, Callable[[], Tensor]]:
    """gelu(x W^T + bias), fused and by torch: one kernel against two. options: of our matmul."""
    from tpformer.kernels.matmul.kernel import matmul

    return {
        OURS: lambda: matmul(x, [w], [bias], activation="gelu_tanh", **options)[0],
        LIBRARY: lambda: F.gelu(F.linear(x, w, bias), approximate="tanh"),
    }


def epilogue_inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    x, w = Gemm(FORWARD, shape).operands()
    return x, w, torch.randn(shape.n, device=DEVICE, dtype=DTYPE)


def epilogue_shapes(quick: bool) -> list[Shape]:
    """GPT-3's up projection, the list's one layer with such an epilogue."""
    return [shape for shape in shapes(GATHER, ROWS[:1] if quick else ROWS) if shape.layer == "up"]


def check() -> None:
    for gemm in gemms(quick=False):
        check_gemm(gemm)
    for shape in epilogue_shapes(quick=False):
        x, w, bias = epilogue_inputs(shape)
        calls = epilogue_calls(x, w, bias)
        oracle = F.gelu(F.linear(x.double(), w.double(), bias.double()), approximate="tanh")
        baseline = calls[LIBRARY]()
        require_accurate(f"{EPILOGUE} {shape}", poisoned(calls[OURS], baseline), oracle, baseline)


def check_gemm(gemm: Gemm) -> None:
    """Every tile that is timed against float64; a function of its own, so that its operands are freed."""
    a, b = gemm.operands()
    oracle, baseline = gemm.library(a.double(), b.double()), gemm.library(a, b)
    for tile in candidates(gemm)[1]:
        actual = poisoned(lambda tile=tile: ours(gemm, a, b, tile), baseline)
        require_accurate(f"{gemm.case} {gemm.shape} {tile}", actual, oracle, baseline)


def timed_rows(case: str, shape: Shape, calls: dict[str, Callable[[], Tensor]], quick: bool) -> list[Row]:
    """Every provider against the library, in the order of the calls."""
    seconds = measure({name: Call(call) for name, call in calls.items()}, QUICK if quick else FULL)
    pairs = [(name, LIBRARY) for name in calls if name != LIBRARY]
    return compared(case, shape, seconds, pairs, unit="TFLOP/s", amount=shape.flops / 1e12)


def gemm_rows(gemm: Gemm, quick: bool) -> list[Row]:
    """The row of the tile that is picked, then those of the other candidates."""
    a, b = gemm.operands()
    picked, names = candidates(gemm)
    calls: dict[str, Callable[[], Tensor]] = {LIBRARY: lambda: gemm.library(a, b)}
    calls[f"{OURS} ({picked})"] = lambda: ours(gemm, a, b, picked)
    calls |= {name: lambda name=name: ours(gemm, a, b, name) for name in names if name != picked}  # type: ignore[misc]
    return timed_rows(gemm.case, gemm.shape, calls, quick)


def rows(quick: bool) -> list[Row]:
    by_gemm = [gemm_rows(gemm, quick) for gemm in gemms(quick)]
    epilogues: list[Row] = []
    for shape in epilogue_shapes(quick):
        epilogues += timed_rows(EPILOGUE, shape, epilogue_calls(*epilogue_inputs(shape)), quick)
    best = [max(found, key=lambda row: row["ratio"]) for found in by_gemm]
    return [*(row for found in by_gemm for row in found), *epilogues, *means([found[0] for found in by_gemm], best)]


def means(picked: Sequence[Row], best: Sequence[Row]) -> list[Row]:
    """By case; over all, if the best candidate were picked everywhere; and over all as it is, which is required."""

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


BENCH = Bench(
    name="matmul",
    description="the Triton GEMM against cuBLAS in bfloat16, cold L2: forward, gradients, decoding; every tile (1 GPU)",
    device="cuda",
    check=check,
    run=ratios(rows),
    predict=lambda: table(predictions()),
    draw=draw_ratios,
    note="The model of a GEMM: max(2 M N K / F, bytes / memory bandwidth), F what large GEMMs sustain "
    "(kernels/cost.py). Measured rows name the tile; tpformer (tile) is the one that select_tile picks.",
)
