"""What does fusing a GEMM with its collective cost, as far as one GPU can say it honestly?

Belongs here: what is timed, the required ratio, the rows. On one GPU nothing crosses a link, so no row measures a
gain: the measured ones bound what fusing costs, the predicted ones say what it should bring on t GPUs.
"""

from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch

from tpformer.ops.transports.interface import ALL, GATHER, SCATTER

from .predict import MODEL, predicted_rows
from .ratios import Row, compared, draw_ratios, means, ratios, table
from .runner import Bench
from .shapes import DECODE_ROWS, Shape, operation_shapes, shapes
from .timing import FULL, QUICK, Call, Effort, measure

if TYPE_CHECKING:
    from .fused_gemm import FusedGemm

DEVICE, DTYPE = "cuda", torch.bfloat16
BARE, LIBRARY, SUMMED = "matmul", "torch.matmul", "matmul, torch.sum"
FUSED, PUSHED, BUMPED = "fused", "fused, SM push", "fused, with bump"
REQUIRED = 0.97  # of the bare GEMM: flags and waits may cost 3 %
VIRTUAL_RANKS = (2, 4, 8)
OTHER_ROWS = 4096  # of the virtual ranks and of the GEMM on fewer SMs
CARVED = (4, 8, 16, 32)

NOTES = {
    GATHER: "Flag tax: rank 1 of 8 alone, its peers' flags set and their shards in its slot, against the bare GEMM. "
    "fused: as with copy engines, which carry the shard while the kernel only waits: the bar is about this. SM push: 8 "
    "of the kernel's programs also store the shard 7 times, here to memory: transport, not flags, hence no bar.",
    SCATTER: "Flag tax: rank 1 of 8 alone, its peers' flags set and their partial sums in its slot, against the bare "
    "GEMM. It contains the reduction, a pass over M x N partial sums; beside it, the GEMM and torch.sum of the same.",
    ALL: "Flag tax: rank 1 of 8 alone, its peers' flags set and their partial sums in its slot, against the bare GEMM. "
    "It contains the reduction, and for two-shot sizes the second hop's stores and copies.",
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
    rows = (DECODE_ROWS[1], OTHER_ROWS) if op == ALL else (OTHER_ROWS,)
    return [shape for t in VIRTUAL_RANKS for shape in shapes(op, rows, t) if selected(shape, quick)]


def carved_shapes(op: str, quick: bool) -> list[Shape]:
    return [shape for shape in shapes(op, (OTHER_ROWS,)) if selected(shape, quick)]


def check(op: str) -> None:
    for shape in taxed_shapes(op, quick=False):
        check_shape(shape, virtual=False)
    for shape in virtual_shapes(op, quick=False):
        check_shape(shape, virtual=True)


def build(shape: Shape, *, virtual: bool = False) -> "FusedGemm":
    """In memory that nothing else takes: slots of one shape are several GB, and the next one's have another size."""
    from . import fused_gemm

    torch.cuda.empty_cache()
    return fused_gemm.build(shape, DEVICE, DTYPE, virtual=virtual)


def check_shape(shape: Shape, virtual: bool) -> None:
    """Both ways to gather, each with both parities, as they are timed."""
    from . import fused_gemm

    gemm = build(shape, virtual=virtual)
    for push in (False, True) if shape.op == GATHER and not virtual else (True,):
        for _ in range(2):
            fused_gemm.check(gemm, push=push)


def tax_rows(shape: Shape, effort: Effort) -> list[Row]:
    """The fused kernel of one rank whose peers have all arrived, against the bare GEMM; then the prediction from it."""
    from tpformer.kernels.matmul.kernel import matmul

    from . import fused_gemm

    gemm = build(shape)
    begin = partial(fused_gemm.begin, gemm)
    x = fused_gemm.gathered(gemm) if shape.op == GATHER else gemm.a
    calls = {
        BARE: Call(lambda: matmul(x, [gemm.w])),
        LIBRARY: Call(lambda: torch.matmul(x, gemm.w.t())),
        FUSED: Call(lambda: fused_gemm.launch(gemm, push=False), begin),
        BUMPED: Call(lambda: (begin(), fused_gemm.launch(gemm, push=False))),
    }
    if shape.op == GATHER:
        calls[PUSHED] = Call(lambda: fused_gemm.launch(gemm, push=True), begin)
    if shape.op == SCATTER:
        terms = fused_gemm.received(gemm)
        calls[SUMMED] = Call(lambda: (matmul(x, [gemm.w]), terms.sum(0, dtype=torch.float32).to(x.dtype)))
    seconds = measure(calls, effort)
    fused_gemm.require_no_expiry(gemm, str(shape))
    pairs = [(FUSED, BARE), (BUMPED, BARE), (PUSHED, BARE), (FUSED, SUMMED), (BARE, LIBRARY)]
    rows = compared(f"flag tax, rank of {shape.t}", shape, seconds, pairs)
    return [*rows, *predicted_rows([shape], median(seconds[BARE]), median(seconds[LIBRARY]))]


def virtual_rows(shape: Shape, effort: Effort) -> list[Row]:
    """All ranks in one launch against their bare GEMMs, one after the other."""
    from tpformer.kernels.matmul.kernel import matmul

    from . import fused_gemm

    gemm = build(shape, virtual=True)
    weights = gemm.w.chunk(shape.t)
    inputs = [gemm.a] * shape.t if shape.op == GATHER else gemm.a.chunk(shape.t)
    many = f"{shape.t} x {BARE}"
    calls = {
        FUSED: Call(lambda: fused_gemm.launch(gemm), partial(fused_gemm.begin, gemm)),
        many: Call(lambda: [matmul(x, [w]) for x, w in zip(inputs, weights, strict=True)]),
    }
    seconds = measure(calls, effort)
    fused_gemm.require_no_expiry(gemm, str(shape))
    return compared(f"{shape.t} virtual ranks", shape, seconds, [(FUSED, many)])


def carved_rows(shape: Shape, effort: Effort) -> list[Row]:
    """The bare GEMM with the programs of fewer SMs, as if the others moved data."""
    from tpformer.kernels.configurations import select_tile
    from tpformer.kernels.launch import resident_programs
    from tpformer.kernels.matmul.kernel import matmul

    device = torch.device(DEVICE)
    x = torch.randn(shape.m, shape.k, device=device, dtype=DTYPE)
    w = torch.randn(shape.n, shape.k, device=device, dtype=DTYPE) * shape.k**-0.5
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    each = resident_programs(device, select_tile(device, x.dtype, shape.m, shape.n)) // sms

    def call(fewer: int) -> Call:
        return Call(lambda: matmul(x, [w], programs=each * (sms - fewer)))

    calls = {"all SMs": call(0)} | {f"{fewer} SMs fewer": call(fewer) for fewer in CARVED}
    return compared("fewer SMs", shape, measure(calls, effort), [(name, "all SMs") for name in list(calls)[1:]])


def rows(op: str, quick: bool) -> list[Row]:
    """Measured rows, predicted ones after them, the means of the flag tax."""
    effort = QUICK if quick else FULL
    taxes = [row for shape in taxed_shapes(op, quick) for row in tax_rows(shape, effort)]
    others = [row for shape in virtual_shapes(op, quick) for row in virtual_rows(shape, effort)]
    others += [row for shape in carved_shapes(op, quick) for row in carved_rows(shape, effort)]
    ordered = sorted([*taxes, *others], key=lambda row: row["case"].startswith("prediction"))
    return ordered + means(taxes, required={(FUSED, BARE): REQUIRED})


def fused_bench(op: str, what: str) -> Bench:
    """The bench of one operation."""
    return Bench(
        name=op,
        description=f"{what} on 1 GPU: flag tax, virtual ranks, fewer SMs; and predictions for 8 GPUs",
        device="cuda",
        check=partial(check, op),
        run=ratios(partial(rows, op)),
        predict=lambda: table(predicted_rows(operation_shapes(op))),
        draw=draw_ratios,
        note=f"{MODEL} {NOTES[op]} {COMMON_NOTE}",
    )


BENCHES = (
    fused_bench(GATHER, "the GEMM fused with its all-gather"),
    fused_bench(SCATTER, "the GEMM fused with its reduce-scatter"),
    fused_bench(ALL, "the GEMM fused with its all-reduce"),
)
