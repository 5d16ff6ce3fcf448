"""What does fusing a GEMM with its collective cost, as far as one GPU can say it honestly?

Belongs here: which shapes, the required ratio, what the rows mean; fused_gemm.py times them. On one GPU nothing
crosses a link, so no row measures a gain: the measured ones bound what fusing costs, the predicted ones say what it
should bring on t GPUs.
"""

from functools import partial

from harness.ratios import Row, means, ratio_bench
from harness.runner import Bench
from harness.timing import FULL, QUICK
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER

from .predict import MODEL, predicted_rows
from .shapes import BARE, DECODE_ROWS, FUSED, Shape, operation_shapes, shapes

REQUIRED = 0.97  # of the bare GEMM: flags and waits may cost 3 %
VIRTUAL_RANKS = (2, 4, 8)
OTHER_ROWS = 4096  # of the virtual ranks and of the GEMM on fewer SMs

NOTES = {
    GATHER: "Flag tax: rank 1 of 8 alone, its peers' flags set and their shards in its slot, against the bare GEMM. "
    "fused: as with copy engines, which carry the shard while the kernel only waits: the bar is about this. SM push: "
    "some of the kernel's programs first store the shard 7 times, here to memory: transport, not flags, hence no bar.",
    SCATTER: "Flag tax: rank 1 of 8 alone, its peers' flags set and their partial sums in its slot, against the bare "
    "GEMM. It contains the reduction, a pass over M x N partial sums; beside it, the GEMM and torch.sum of the same.",
    ALL_REDUCE: "Flag tax: rank 1 of 8 alone, its peers' flags set and their partial sums in its slot, against the "
    "bare GEMM. It contains the reduction, and for two-shot sizes the second hop's stores and copies.",
}
COMMON_NOTE = (
    "with bump: and the one-thread kernel before it, which moves the epoch. Virtual ranks: all ranks' GEMMs in one "
    "launch that shares the SMs, what they push goes to memory, against the same GEMMs one after the other: an upper "
    "bound of what the protocol costs, no measure of a gain. Fewer SMs: the bare GEMM on the GPU less some SMs."
)


def selected(shape: Shape, quick: bool) -> bool:
    """Whether a shape of the full list is also one of --quick: one model, and little work."""
    return not quick or (shape.model == "8B" and shape.m in (DECODE_ROWS[0], 1024, OTHER_ROWS))


def taxed_shapes(op: str, quick: bool) -> list[Shape]:
    return [shape for shape in operation_shapes(op) if selected(shape, quick)]


def virtual_shapes(op: str, quick: bool) -> list[Shape]:
    rows = (DECODE_ROWS[1], OTHER_ROWS) if op == ALL_REDUCE else (OTHER_ROWS,)
    return [shape for t in VIRTUAL_RANKS for shape in shapes(op, rows, t) if selected(shape, quick)]


def carved_shapes(op: str, quick: bool) -> list[Shape]:
    return [shape for shape in shapes(op, (OTHER_ROWS,)) if selected(shape, quick)]


def check(op: str, quick: bool) -> None:
    from . import fused_gemm

    for shape in taxed_shapes(op, quick):
        fused_gemm.check_shape(shape, virtual=False)
    for shape in virtual_shapes(op, quick):
        fused_gemm.check_shape(shape, virtual=True)


def rows(op: str, quick: bool) -> list[Row]:
    """Measured rows, predicted ones after them, the means of the flag tax."""
    from . import fused_gemm

    effort = QUICK if quick else FULL
    taxes = [row for shape in taxed_shapes(op, quick) for row in fused_gemm.tax_rows(shape, effort)]
    others = [row for shape in virtual_shapes(op, quick) for row in fused_gemm.virtual_rows(shape, effort)]
    others += [row for shape in carved_shapes(op, quick) for row in fused_gemm.carved_rows(shape, effort)]
    ordered = sorted([*taxes, *others], key=lambda row: row["case"].startswith("prediction"))
    return ordered + means(taxes, required={(FUSED, BARE): REQUIRED})


def fused_bench(op: str, what: str) -> Bench:
    """The bench of one operation."""
    return ratio_bench(
        partial(rows, op),
        lambda: predicted_rows(operation_shapes(op)),
        name=op,
        description=f"{what} on 1 GPU: flag tax, virtual ranks, fewer SMs; and predictions for 8 GPUs",
        device="cuda",
        check=partial(check, op),
        note=f"{MODEL} {NOTES[op]} {COMMON_NOTE}",
    )


BENCHES = (
    fused_bench(GATHER, "the GEMM fused with its all-gather"),
    fused_bench(SCATTER, "the GEMM fused with its reduce-scatter"),
    fused_bench(ALL_REDUCE, "the GEMM fused with its all-reduce"),
)
