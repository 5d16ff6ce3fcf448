"""The benches of memory-bound kernels: against a copy of as many bytes, torch.compile and Liger-Kernel.

Belongs here: the gate, what is timed beside what, the required ratios, the rows. What the operations are, and who can
do them, is in the files named after them.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tpformer.kernels.cost import Machine

from ..accuracy import require_accurate
from ..gpu_timing import FULL, QUICK, Call, Effort, flush_buffer, measure
from ..predict import present_machine
from ..runner import Bench, Row, make_row, mean_row
from ..timing import Comparison, compare
from . import liger
from .activation import activation_cases
from .case import COMPILED, LIGER, Case, Function, Work, each, flat
from .cross_entropy import cross_entropy_cases
from .dropout import dropout_cases
from .norm import norm_cases
from .rope import rope_cases

DEVICE, DTYPE = "cuda", torch.bfloat16
OURS, COPY = "tpformer", "copy"
REQUIRED = {COPY: 0.9, COMPILED: 1.0, LIGER: 1.0}
SAME = 0.05  # relative RMS error of a rival: wide enough for bfloat16 statistics, too narrow for another function

NOTE = (
    "GB/s: bytes by the operation's cost function (each operand once) over the time, cold L2. copy: Tensor.copy_ of a "
    "contiguous tensor that reads and writes as many bytes in all. torch.compile: the same formula in plain torch, its "
    "backward written out, one graph, default mode; where there is dropout, torch's own random numbers. Operands that "
    "a provider overwrites are restored before each call. Prediction: the bytes at the memory bandwidth "
    "(kernels/cost.py), a GEMM-bound one at the FLOP/s of large GEMMs. "
)
LIGER_NOTE = (
    f"{LIGER} is installed; its Functions are called without autograd, rmsnorm in its casting mode 'llama'."
    if liger.installed()
    else f"{LIGER} is not installed here: its rows are left out."
)
NOTES = {
    "norm": f"after finish: bias, dropout ({LIGER} has neither) and residual before the norm.",
    "activation": f"Backwards also give the activation again, for the weight's gradient: {LIGER} runs its forward for "
    "it, and without a bar its backward alone, as if the activation had been stored.",
    "cross_entropy": f"{LIGER} waits for the device in its forward (item()), which is in its time. linear cross "
    "entropy, forward and backward: bound by GEMMs, hence TFLOP/s; torch.compile holds all logits, hence no bar.",
}


def check(cases: Callable[[bool], Sequence[Case]]) -> None:
    for case in cases(False):
        check_case(case)
        free_memory()


def check_case(case: Case) -> None:
    """Ours by the accuracy rule; of the rivals, that they compute the same thing."""
    work = case.build(DEVICE, DTYPE)
    pristine = each(Tensor.clone, work.inputs)
    oracle = flat(work.plain(*each(lambda x: x.double() if x.is_floating_point() else x, work.inputs)))
    baseline = flat(work.plain(*work.inputs))

    def results(function: Function) -> list[Tensor]:
        holes = [torch.full_like(x, float("nan")) for x in baseline]
        del holes  # the memory that the allocator gives next: what a provider leaves out then shows
        found = [x.clone() for x in flat(function(*work.inputs))]
        for x, value in zip(flat(work.inputs), flat(pristine), strict=True):
            x.copy_(value)
        return found

    what = f"{case.name} {case.shape}"
    ours = results(work.ours)
    if len(ours) != len(oracle):
        raise AssertionError(f"{what}: {len(ours)} results, not {len(oracle)}")
    for index, (actual, exact, plain) in enumerate(zip(ours, oracle, baseline, strict=True)):
        require_accurate(f"{what}, result {index}", actual, exact, plain)
    for name, function in rivals(work).items():
        for index, (actual, exact) in enumerate(
            zip(results(function), oracle, strict=False)
        ):  # Liger gives no statistics
            require_same(f"{what}, result {index} of {name}", actual, exact, work.random)


def require_same(what: str, actual: Tensor, oracle: Tensor, random: bool) -> None:
    """AssertionError unless a rival computes what we do: its error is small beside the RMS.

    random: the error of its RMS, which is uncertain by about the root of the number of results.
    """
    if actual.shape != oracle.shape:
        raise AssertionError(f"{what}: {tuple(actual.shape)}, not {tuple(oracle.shape)}")
    size, tolerance = rms(oracle), SAME
    if random:
        error, tolerance = abs(rms(actual.double()) - size), SAME + 4 * oracle.numel() ** -0.5
    else:
        error = rms(actual.double() - oracle)
    if not error <= tolerance * size:  # NaN is not
        raise AssertionError(f"{what}: RMS error {error:.3g} of {size:.3g}: it is another operation")


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def rivals(work: Work) -> dict[str, Function]:
    return {name: function for name, function in work.rivals.items() if function is not None}


def copy_call(nbytes: int) -> Call:
    """Reads and writes nbytes in all."""
    source = torch.randint(256, (nbytes // 2,), dtype=torch.uint8, device=DEVICE)
    return Call(partial(torch.empty_like(source).copy_, source))


def calls_of(case: Case, work: Work) -> dict[str, Call]:
    prepare = restore(work) if work.mutated else None
    functions = {OURS: work.ours, **rivals(work)}
    calls = {name: Call(partial(function, *work.inputs), prepare) for name, function in functions.items()}
    return calls if case.nbytes is None else {**calls, COPY: copy_call(case.nbytes)}


def restore(work: Work) -> Callable[[], None]:
    """What puts the overwritten inputs back, and then leaves the L2 cold."""
    overwritten = [work.inputs[index] for index in work.mutated]
    pristine = [(x, x.clone()) for x in overwritten if x is not None]
    flushed = flush_buffer()

    def prepare() -> None:
        for x, value in pristine:
            x.copy_(value)
        flushed.zero_()

    return prepare


def case_rows(case: Case, effort: Effort) -> list[Row]:
    work = case.build(DEVICE, DTYPE)
    seconds = measure(calls_of(case, work), effort)
    return [case_row(case, name, compare(seconds[OURS], seconds[name])) for name in seconds if name != OURS]


def case_row(case: Case, baseline: str, comparison: Comparison) -> Row:
    """GEMM-bound: no bar but Liger's, which keeps as few logits."""
    memory_bound = case.nbytes is not None
    giga = (case.nbytes if case.nbytes is not None else case.flops / 1000) / 1e9
    return make_row(
        case=case.name,
        shape=case.shape,
        provider=OURS,
        baseline=baseline,
        unit="GB/s" if memory_bound else "TFLOP/s",
        convert=lambda seconds: giga / seconds,
        comparison=comparison,
        bar=REQUIRED.get(baseline) if memory_bound or baseline == LIGER else None,
    )


def run(cases: Callable[[bool], Sequence[Case]], quick: bool) -> list[Row]:
    rows: list[Row] = []
    for case in cases(quick):
        rows += case_rows(case, QUICK if quick else FULL)
        free_memory()
    return rows + means(rows)


def free_memory() -> None:
    """The next case's tensors have other sizes."""
    torch.cuda.empty_cache()


def means(rows: Sequence[Row]) -> list[Row]:
    """One for each baseline, over the rows that it has a bar in; the bars are the rows' own."""
    baselines: dict[str, list[Row]] = {}
    for row in rows:
        if row["unit"] == "GB/s":
            baselines.setdefault(row["baseline"], []).append(row)
    return [
        mean_row(chosen, case="geometric mean", shape=f"{len(chosen)} cases", provider=OURS)
        for chosen in baselines.values()
    ]


def prediction_row(case: Case, machine: Machine) -> Row:
    """The time of a copy of the case's bytes, or of its GEMMs."""
    seconds = case.nbytes / machine.memory if case.nbytes is not None else case.flops / machine.flops
    return make_row(
        case=f"prediction: {case.name}, 1 {machine.name}",
        shape=case.shape,
        provider="predicted",
        baseline=COPY if case.nbytes is not None else "GEMMs alone",
        unit="us",
        convert=lambda seconds: 1e6 * seconds,
        comparison=Comparison(seconds, seconds, 1.0, 1.0, 1.0),
    )


def predictions(cases: Callable[[bool], Sequence[Case]]) -> list[Row]:
    machine = present_machine()
    return [prediction_row(case, machine) for case in cases(False)]


def bench(name: str, what: str, cases: Callable[[bool], Sequence[Case]]) -> Bench:
    return Bench(
        name=name,
        description=f"{what} in bfloat16 against a copy's bandwidth, torch.compile and {LIGER} (1 GPU)",
        device="cuda",
        check=partial(check, cases),
        run=partial(run, cases),
        predict=partial(predictions, cases),
        note=f"{NOTE}{NOTES[name] + ' ' if name in NOTES else ''}{LIGER_NOTE}",
    )


BENCHES = (
    bench("norm", "LayerNorm and RMSNorm, forward, backward and after the reduction", norm_cases),
    bench("activation", "GELU, SwiGLU, GeGLU and squared ReLU, forward and backward", activation_cases),
    bench("rope", "rotary embedding of queries and keys, forward and backward", rope_cases),
    bench("dropout", "Philox dropout, with bias and residual, forward and backward", dropout_cases),
    bench("cross_entropy", "the loss of vocabulary slices, and fused with the output projection", cross_entropy_cases),
)
