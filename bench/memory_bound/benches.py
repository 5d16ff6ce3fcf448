"""How memory-bound kernels compare with a copy of as many bytes and with torch.compile.

Belongs here: the gate, what is timed beside what, the required ratios, the rows. The operations are in cases.py.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from harness.accuracy import require_accurate
from harness.ratios import Row, compared, means, ratio_bench
from harness.runner import Bench
from harness.timing import FULL, QUICK, Call, Effort, copying, flush_buffer, measure

from ..predict import present_machine
from .case import COMPILED, TORCH, Case, Function, Work, each, flat
from .cases import CASES

DEVICE, DTYPE = "cuda", torch.bfloat16
OURS, COPY = "tpformer", "copy"
REQUIRED = {COMPILED: 1.0, TORCH: 1.0}  # and of a copy a case's share
SAME = 0.05  # a rival's largest relative RMS error: bfloat16 statistics stay below it, another function does not
Cases = Callable[[bool], Sequence[Case]]

NOTE = (
    "GB/s: bytes by the operation's cost function (each operand once) over the time, cold L2. copy: Tensor.copy_ of a "
    "contiguous tensor that reads and writes as many bytes in all. torch.compile: the same formula in plain torch, its "
    "backward written out, one graph, default mode; where there is dropout, torch's own random numbers. Operands are "
    "restored before each call. Prediction: the bytes at the memory bandwidth (kernels/cost.py), a GEMM-bound one at "
    "the FLOP/s of large GEMMs. "
)
NOTES = {
    "norm": "after finish: bias, dropout and residual before the norm. ",
    "activation": "Backwards also give the activation again, for the weight's gradient. ",
    "cross_entropy": "linear cross entropy, forward and backward: bound by GEMMs, hence TFLOP/s; torch.compile holds "
    "all logits, hence no bar. ",
    "update": f"AdamW, and SGD with momentum: float32 masters, 16-bit gradients and copies. {TORCH}: its fused "
    "optimizer, which takes float32 gradients, with casts before and after. ",
    "route": "In float32, without the router's GEMM. The prediction leaves out comparisons, K rounds over all scores. ",
}


def check(cases: Cases, quick: bool) -> None:
    for case in cases(quick):
        check_case(case, quick)
        torch.cuda.empty_cache()  # the next case's tensors have other sizes


def check_case(case: Case, quick: bool = False) -> None:
    """Check our results by the accuracy rule, and that rivals that are timed compute the same function."""
    work = case.build(DEVICE, DTYPE)
    pristine = each(Tensor.clone, work.inputs)
    oracle = flat(work.plain(*each(lambda x: x.double() if x.is_floating_point() else x, work.inputs)))
    baseline = flat(work.plain(*work.inputs))

    def results(function: Function) -> list[Tensor]:
        holes = [torch.full_like(x, float("nan")) for x in baseline if x.is_floating_point()]
        del holes  # the allocator gives this memory next, so elements that a provider does not write are NaN
        found = [x.clone() for x in flat(function(*work.inputs))]
        for x, value in zip(flat(work.inputs), flat(pristine), strict=True):
            x.copy_(value)
        return found

    what = f"{case.name} {case.shape}"
    ours = results(work.ours)
    if len(ours) != len(oracle):
        raise AssertionError(f"{what}: {len(ours)} results, not {len(oracle)}")
    for index, (actual, exact, plain) in enumerate(zip(ours, oracle, baseline, strict=True)):
        require_right(f"{what}, result {index}", actual, exact, plain)
    for name, function in rivals(work, quick).items():
        for index, (actual, exact) in enumerate(zip(results(function), oracle, strict=True)):
            require_same(f"{what}, result {index} of {name}", actual, exact.double(), work.random)


def require_right(what: str, actual: Tensor, oracle: Tensor, baseline: Tensor) -> None:
    """AssertionError unless a result is accurate, or equal if it has integers."""
    if oracle.is_floating_point():
        require_accurate(what, actual, oracle, baseline)
    elif actual.dtype != oracle.dtype or not torch.equal(actual, oracle):
        raise AssertionError(f"{what}: other integers")


def require_same(what: str, actual: Tensor, oracle: Tensor, random: bool) -> None:
    """AssertionError unless a rival's RMS error is small beside the oracle's RMS.

    random: rivals draw other random numbers, so only the RMS of results is compared. Chance alone moves the RMS of n
    results by a share of about n**-0.5.
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


def rivals(work: Work, quick: bool) -> dict[str, Function]:
    """The rivals; quick: without torch.compile, which compiles for long."""
    return {name: function for name, function in work.rivals.items() if not (quick and name == COMPILED)}


def calls_of(case: Case, work: Work, quick: bool = False) -> dict[str, Call]:
    """The calls to time. Before each, inputs are restored and the L2 cache is flushed."""
    pristine, flushed = each(Tensor.clone, work.inputs), flush_buffer()

    def restore() -> None:
        for x, value in zip(flat(work.inputs), flat(pristine), strict=True):
            x.copy_(value)
        flushed.zero_()

    functions = {OURS: work.ours, **rivals(work, quick)}
    calls = {name: Call(partial(function, *work.inputs), restore) for name, function in functions.items()}
    if case.nbytes is not None:  # read and written in all
        calls[COPY] = Call(copying(case.nbytes // 2, DEVICE))
    return calls


def case_rows(case: Case, seconds: dict[str, list[float]]) -> list[Row]:
    """A case's rows. A GEMM-bound one has no bar."""
    bars = {**REQUIRED, COPY: case.share} if case.nbytes is not None else {}
    pairs = [(OURS, name, bars.get(name)) for name in (COMPILED, TORCH, COPY)]
    if case.nbytes is None:
        return compared(case.name, case.shape, seconds, pairs, unit="TFLOP/s", amount=case.flops / 1e12)
    return compared(case.name, case.shape, seconds, pairs, unit="GB/s", amount=case.nbytes / 1e9)


def rows(cases: Cases, quick: bool) -> list[Row]:
    """The rows of all cases, and the means of those in GB/s."""
    effort: Effort = QUICK if quick else FULL
    found: list[Row] = []
    for case in cases(quick):
        found += case_rows(case, measure(calls_of(case, case.build(DEVICE, DTYPE), quick), effort))
        torch.cuda.empty_cache()
    return found + means(row for row in found if row["unit"] == "GB/s")


def predictions(cases: Cases) -> list[Row]:
    """Rows with predicted times: a case takes as long as a copy of its bytes, or as its GEMMs."""
    machine, found = present_machine(), []
    for case in cases(False):
        copied = case.nbytes is not None
        baseline = COPY if copied else "GEMMs alone"
        seconds = (case.nbytes or 0) / machine.memory if copied else case.flops / machine.flops
        label = f"prediction: {case.name}, 1 {machine.name}"
        found += compared(label, case.shape, {"predicted": [seconds], baseline: [seconds]}, [("predicted", baseline)])
    return found


def bench(name: str, what: str) -> Bench:
    """The bench of the cases of this name."""
    cases = CASES[name]
    return ratio_bench(
        partial(rows, cases),
        partial(predictions, cases),
        name=name,
        description=f"{what} in bfloat16 against a copy's bandwidth and torch.compile (1 GPU)",
        device="cuda",
        check=partial(check, cases),
        note=f"{NOTE}{NOTES.get(name, '')}".strip(),
    )


BENCHES = (
    bench("norm", "LayerNorm and RMSNorm, forward, backward and after the reduction"),
    bench("activation", "GELU, SwiGLU, GeGLU and squared ReLU, forward and backward"),
    bench("rope", "rotary embedding of queries and keys, forward and backward"),
    bench("dropout", "Philox dropout, with bias and residual, forward and backward"),
    bench("cross_entropy", "the loss of vocabulary slices, and fused with the output projection"),
    bench("route", "a router's choice of experts, forward and backward,"),
    bench("weighted_activation", "an expert's SwiGLU times each row's weight, forward and backward"),
    bench("combine", "the sum of each token's rows from several experts"),
    bench("update", "the optimizers' update of every tensor of a model"),
)
