"""The bench `matmul`: our GEMM against cuBLAS on one GPU, on every layer of the shape list, in every layout.

Belongs here: layouts, providers, what must agree, the required mean. The shapes are in shapes.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpformer.ops.transports.interface import GATHER, SCATTER

from .accuracy import poisoned, require_accurate
from .gpu_timing import FULL, QUICK, Call, Effort, measure
from .predict import gemm_prediction_rows
from .runner import Bench, Row, make_row, mean_row
from .shapes import DECODE_ROWS, ROWS, Shape, shapes
from .timing import compare

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


def gemm_rows(gemm: Gemm, effort: Effort) -> tuple[Row, list[Row]]:
    """(the row of the tile that is picked, the rows of the other candidates)."""
    a, b = gemm.operands()
    picked, names = candidates(gemm)
    calls = {LIBRARY: Call(lambda: gemm.library(a, b))}
    calls |= {name: Call(lambda name=name: ours(gemm, a, b, name)) for name in names}
    seconds = measure(calls, effort)

    def row(name: str) -> Row:
        return tflops_row(
            gemm.case, gemm.shape, f"{OURS} ({name})" if name == picked else name, seconds[name], seconds[LIBRARY]
        )

    return row(picked), [row(name) for name in names if name != picked]


def tflops_row(case: str, shape: Shape, provider: str, seconds: list[float], baseline: list[float]) -> Row:
    return make_row(
        case=case,
        shape=str(shape),
        provider=provider,
        baseline=LIBRARY,
        unit="TFLOP/s",
        convert=lambda seconds: shape.flops / seconds / 1e12,
        comparison=compare(seconds, baseline),
    )


def run(quick: bool) -> list[Row]:
    effort = QUICK if quick else FULL
    rows: list[Row] = []
    picked: list[Row] = []
    best: list[Row] = []
    for gemm in gemms(quick):
        own, others = gemm_rows(gemm, effort)
        rows += [own, *others]
        picked.append(own)
        best.append(max([own, *others], key=lambda row: row["ratio"]))
    for shape in epilogue_shapes(quick):
        calls = {name: Call(run) for name, run in epilogue_calls(*epilogue_inputs(shape)).items()}
        seconds = measure(calls, effort)
        rows.append(tflops_row(EPILOGUE, shape, OURS, seconds[OURS], seconds[LIBRARY]))
    return rows + means(picked, best)


def means(picked: Sequence[Row], best: Sequence[Row]) -> list[Row]:
    """By case; over all, if the best candidate were picked everywhere; and over all as it is, which is required."""

    def mean(name: str, chosen: Sequence[Row], provider: str, bar: float | None = None) -> Row:
        shape = f"{name}, {len(chosen)} shapes"
        return mean_row(chosen, case="geometric mean", shape=shape, provider=provider, bar=bar)

    cases = list(dict.fromkeys(row["case"] for row in picked))
    rows = [mean(case, [row for row in picked if row["case"] == case], OURS) for case in cases]
    return [*rows, mean("all", best, "best tile"), mean("all", picked, OURS, REQUIRED)]


BENCH = Bench(
    name="matmul",
    description="the Triton GEMM against cuBLAS in bfloat16, cold L2: forward, gradients, decoding; every tile (1 GPU)",
    device="cuda",
    check=check,
    run=run,
    predict=lambda: gemm_prediction_rows([g.shape for g in gemms(quick=False) if g.case in (FORWARD, DECODE)]),
    note="The model of a GEMM: max(2 M N K / F, bytes / memory bandwidth), F what large GEMMs sustain "
    "(kernels/cost.py). Measured rows name the tile; tpformer (tile) is the one that select_tile picks.",
)
