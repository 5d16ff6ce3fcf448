"""The norm inside the reduce-scatter's finishing band against the norm as a kernel after it, on one GPU.

Belongs here: shapes, rows and prediction of this one comparison. How both are done is in band_gemm.py.
"""

from functools import partial
from typing import NamedTuple

import torch

from tpformer.kernels.cost import gemm_seconds
from tpformer.kernels.norm.reference import norm_cost
from tpformer.ops.transports.interface import SCATTER

from ..gpu_timing import FULL, QUICK, Call, measure
from ..predict import present_machine
from ..runner import Row, make_row, mean_row
from ..shapes import Shape, shapes
from ..timing import Comparison, compare
from .case import ITEMSIZE

CASE = "in the finishing band"
FUSED, SEPARATE = "fused", "separate"
ROWS, RANKS = 8192, (2, 4, 8)
NOTE = (
    f"norm {CASE}: matmul_reduce_scatter with residual and norm in its finishing band against the same without the "
    "norm, then norm_forward. virtual: the whole group in one launch; 1 of 8: rank 1 alone, its peers' partial sums in "
    "its slot. Rule: layers ask the band for the norm if the geometric mean of these ratios is above 1. Its prediction:"
    " the GEMMs, a pass over their partial sums, and the norm's bytes, of which the band saves the read."
)


class BandCase(NamedTuple):
    """kind: of the norm. virtual: all ranks in one launch, else one alone."""

    kind: str
    shape: Shape
    virtual: bool

    def __str__(self) -> str:
        t = self.shape.t
        return f"{self.shape}, {f'{t} virtual' if self.virtual else f'1 of {t}'}"


def band_cases(quick: bool) -> list[BandCase]:
    """The down projections of 8B and 70B, with both norms; one rank alone only where it is one of most."""
    listed = [
        BandCase(kind, shape, virtual)
        for t in RANKS
        for shape in shapes(SCATTER, (ROWS,), t)
        if shape.layer == "down" and shape.model in ("8B", "70B")
        for kind in ("layernorm", "rmsnorm")
        for virtual in (True, False)
        if virtual or t == max(RANKS)
    ]
    return listed[:2] if quick else listed


def check_band(device: str, dtype: torch.dtype) -> None:
    from . import band_gemm

    for case in band_cases(quick=False):
        band_gemm.check(
            band_gemm.build(case.kind, case.shape, device, dtype, case.virtual), f"{case.kind} {CASE}, {case}"
        )


def band_rows(device: str, dtype: torch.dtype, quick: bool) -> list[Row]:
    rows = [band_row(case, device, dtype, quick) for case in band_cases(quick)]
    return [*rows, mean_row(rows, case="geometric mean", shape=f"norm {CASE}, {len(rows)} cases", provider=FUSED)]


def band_row(case: BandCase, device: str, dtype: torch.dtype, quick: bool) -> Row:
    from .. import fused_gemm
    from . import band_gemm

    group = band_gemm.build(case.kind, case.shape, device, dtype, case.virtual)
    begin = partial(fused_gemm.begin, group.gemm)
    fused, separate = band_gemm.providers(group)
    seconds = measure({FUSED: Call(fused, begin), SEPARATE: Call(separate, begin)}, QUICK if quick else FULL)
    fused_gemm.require_no_expiry(group.gemm, str(case))
    return us_row(f"{case.kind} {CASE}", case, FUSED, SEPARATE, compare(seconds[FUSED], seconds[SEPARATE]))


def us_row(name: str, case: BandCase, provider: str, baseline: str, comparison: Comparison) -> Row:
    return make_row(
        case=name,
        shape=str(case),
        provider=provider,
        baseline=baseline,
        unit="us",
        convert=lambda seconds: 1e6 * seconds,
        comparison=comparison,
    )


def band_prediction_rows() -> list[Row]:
    """Served ranks one after another; separate: the norm's bytes besides; fused: those but the read of z."""
    machine, rows = present_machine(), []
    for case in band_cases(quick=False):
        (m, n, k, t), served = case.shape[3:], case.shape.t if case.virtual else 1
        written = served * m // t  # rows of z
        one = written * n * ITEMSIZE
        common = served * gemm_seconds(m, n, k, ITEMSIZE, machine) + (t + 2) * one / machine.memory
        norm = norm_cost(written, n, ITEMSIZE, case.kind).bytes
        fused, separate = (common + nbytes / machine.memory for nbytes in (norm - one, norm))
        comparison = Comparison(fused, separate, *[separate / fused] * 3)
        name = f"prediction: {case.kind} {CASE}, 1 {machine.name}"
        rows.append(us_row(name, case, "predicted", SEPARATE, comparison))
    return rows
