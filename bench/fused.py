"""The benches `all_gather_matmul`, `matmul_reduce_scatter` and `matmul_all_reduce`: what one GPU can say honestly.

Belongs here: what is timed, the required ratio, the rows. On one GPU nothing crosses a link, so no row measures a
gain: the measured ones bound what fusing costs, the predicted ones say what it should bring on t GPUs.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch

from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER

from .gpu_timing import FULL, QUICK, Call, Effort, measure
from .predict import MODEL, prediction_row, present_machine
from .runner import Bench, Row, make_row, mean_row
from .shapes import DECODE_ROWS, Shape, operation_shapes, shapes
from .timing import compare

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
    ALL_REDUCE: "Flag tax: rank 1 of 8 alone, its peers' flags set and their partial sums in its slot, against the "
    "bare GEMM. It contains the reduction, and for two-shot sizes the second hop's stores and copies.",
}
COMMON_NOTE = (
    "with bump: and the one-thread kernel before it, which moves the epoch. Virtual ranks: all ranks' GEMMs in one "
    "launch that shares the SMs, what they push goes to memory, against the same GEMMs one after the other: an upper "
    "bound of what the protocol costs, no measure of a gain. Fewer SMs: the bare GEMM on the GPU less some SMs."
)


def us_row(case: str, shape: Shape, provider: str, baseline: str, seconds: dict[str, list[float]]) -> Row:
    return make_row(
        case=case,
        shape=str(shape),
        provider=provider,
        baseline=baseline,
        unit="us",
        convert=lambda seconds: 1e6 * seconds,
        comparison=compare(seconds[provider], seconds[baseline]),
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


def check(op: str) -> None:
    for shape in taxed_shapes(op, quick=False):
        check_shape(shape, virtual=False)
    for shape in virtual_shapes(op, quick=False):
        check_shape(shape, virtual=True)


def check_shape(shape: Shape, virtual: bool) -> None:
    """Both ways to gather, each with both parities, as they are timed."""
    from . import fused_gemm

    gemm = fused_gemm.build(shape, DEVICE, DTYPE, virtual=virtual)
    for push in (False, True) if shape.op == GATHER and not virtual else (True,):
        for _ in range(2):
            fused_gemm.check(gemm, push=push)
    del gemm
    free_memory()


def free_memory() -> None:
    """Slots of one shape are several GB, and the next one's have another size."""
    torch.cuda.empty_cache()


def tax_rows(shape: Shape, effort: Effort) -> list[Row]:
    """The fused kernel of one rank whose peers have all arrived, against the bare GEMM; then the prediction from it."""
    from tpformer.kernels.matmul.kernel import matmul

    from . import fused_gemm

    gemm = fused_gemm.build(shape, DEVICE, DTYPE)
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
    case = f"flag tax, rank of {shape.t}"
    rows = [us_row(case, shape, ours, other, seconds) for ours, other in pairs if {ours, other} <= set(calls)]
    return [*rows, prediction_row(shape, present_machine(), median(seconds[BARE]), median(seconds[LIBRARY]))]


def virtual_row(shape: Shape, effort: Effort) -> Row:
    """All ranks in one launch against their bare GEMMs, one after the other."""
    from tpformer.kernels.matmul.kernel import matmul

    from . import fused_gemm

    gemm = fused_gemm.build(shape, DEVICE, DTYPE, virtual=True)
    weights = gemm.w.chunk(shape.t)
    inputs = [gemm.a] * shape.t if shape.op == GATHER else gemm.a.chunk(shape.t)
    many = f"{shape.t} x {BARE}"
    calls = {
        FUSED: Call(lambda: fused_gemm.launch(gemm), partial(fused_gemm.begin, gemm)),
        many: Call(lambda: [matmul(x, [w]) for x, w in zip(inputs, weights, strict=True)]),
    }
    seconds = measure(calls, effort)
    fused_gemm.require_no_expiry(gemm, str(shape))
    return us_row(f"{shape.t} virtual ranks", shape, FUSED, many, seconds)


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
    seconds = measure(calls, effort)
    return [us_row("fewer SMs", shape, name, "all SMs", seconds) for name in calls if name != "all SMs"]


def run(op: str, quick: bool) -> list[Row]:
    effort = QUICK if quick else FULL
    taxes: list[Row] = []
    for shape in taxed_shapes(op, quick):
        taxes += tax_rows(shape, effort)
        free_memory()
    rows = taxes[:]
    for shape in virtual_shapes(op, quick):
        rows.append(virtual_row(shape, effort))
        free_memory()
    for shape in carved_shapes(op, quick):
        rows += carved_rows(shape, effort)
    rows.sort(key=lambda row: row["case"].startswith("prediction"))
    return rows + means(taxes)


def means(taxes: Sequence[Row]) -> list[Row]:
    """One mean for each pair that was compared; the required one last."""
    pairs: dict[tuple[str, str], list[Row]] = {}
    for row in taxes:
        pairs.setdefault((row["provider"], row["baseline"]), []).append(row)
    required = (FUSED, BARE)
    return [
        mean_row(
            pairs[pair],
            case="geometric mean",
            shape=f"{len(pairs[pair])} shapes",
            provider=pair[0],
            bar=REQUIRED if pair == required else None,
        )
        for pair in sorted(pairs, key=lambda pair: pair == required)
    ]


def predictions(op: str) -> list[Row]:
    machine = present_machine()
    return [prediction_row(shape, machine) for shape in operation_shapes(op)]


def fused_bench(op: str, what: str) -> Bench:
    return Bench(
        name=op,
        description=f"{what} on 1 GPU: flag tax, virtual ranks, fewer SMs; and predictions for 8 GPUs",
        device="cuda",
        check=partial(check, op),
        run=partial(run, op),
        predict=partial(predictions, op),
        note=f"{MODEL} {NOTES[op]} {COMMON_NOTE}",
    )


BENCHES = (
    fused_bench(GATHER, "the GEMM fused with its all-gather"),
    fused_bench(SCATTER, "the GEMM fused with its reduce-scatter"),
    fused_bench(ALL_REDUCE, "the GEMM fused with its all-reduce"),
)
