"""Executes mutants of kernels, and says which check catches each.

Belongs here: the launches that a kernel is tried in, and the verdict. Which mutants there are is in ptx_mutants.py and
source_mutants.py; those that nothing catches are listed with reasons in mutant_table.py.
"""

import dataclasses
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import execution
import gemms
import test_all_gather_matmul_kernel as gathers
import test_matmul_all_reduce_kernel as all_reduces
import test_matmul_kernel as matmuls
import test_matmul_reduce_scatter_kernel as scatters
import torch
from execution import EPOCHS, GATHER_ALONE, TRIES, Execution, Try, communicate, expire, run_group, trying
from mutations import mutated
from ptx_mutants import Mutant, ptx_mutants
from source_mutants import HELPERS, source_mutants
from triton.runtime.jit import JITFunction

from checks.compile import ptx, rules, shipped, ttgir
from checks.compile.compiler import Compiled
from checks.execute.log import Log
from checks.execute.memory import Fault
from tpformer.kernels import protocol
from tpformer.kernels.all_gather_matmul import kernel as gathering
from tpformer.kernels.matmul_all_reduce.kernel import matmul_all_reduce_kernel
from tpformer.kernels.matmul_reduce_scatter import kernel as scattering

BF16 = torch.bfloat16
# Partial tiles in rows and columns. K is three steps, and a multiple of 16, without which Triton copies nothing
# asynchronously.
SHAPE = (17, 23, 48)
WIDE = (17, 39, 48)  # three tiles
# An all-reduce of two shots sends only the rows that exist, a third of all. With so many of 32 columns both warps store
# some of a tile and of its sums. Three tiles: a rank that gives up has one to compute yet.
BROAD, BROAD_TILE, ROOM = (35, 71, 48), execution.TILE._replace(n=32), 1 << 16

# rules that ask how fast the code is, need ptxas, or count what depends on the number of ranks
WAIVED = frozenset("flags in_flight wide_stores tensor_cores spills shared_memory tensor_memory serialized".split())


class Found(AssertionError):
    """The first report of an execution."""


class FirstReport(Log):
    """A log that ends the execution with its first report."""

    def report(self, kind: str, line: int, warp: int, other: int, other_line: int) -> None:
        super().report(kind, line, warp, other, other_line)
        raise Found(self.reports[-1])


class Case(NamedTuple):
    """Launches whose results are compared, of which one kernel is mutated."""

    kernel: str  # whose PTX is mutated
    shipped: str  # a case of the compile check (shipped.py), whose counts the kernel must show, too
    run: Callable[[Execution, Try], None]  # AssertionError if a result is wrong
    sources: tuple[JITFunction, ...] = ()  # functions whose source is mutated
    communicates: bool = True


def multiply(run: Execution, way: Try, transposed: bool) -> None:
    """C = A W^T, or from transposed operands, with a tile of three stages."""
    (m, n, k), tile = WIDE, execution.TILE._replace(stages=3)
    a, w = matmuls.draw(1, BF16, "cpu", (k, m) if transposed else (m, k), (k, n) if transposed else (n, k))
    options = {"a_transposed": transposed, "b_transposed": transposed}
    matmuls.close(matmuls.matmul(a, [w], tile=tile, **options)[0], matmuls.matmul_reference, a, w, **options)


def gather(run: Execution, way: Try, world: int) -> None:
    """A gather without a GEMM, for each epoch; if ranks are absent, without the copy of what it has gathered."""
    if way.expires:
        shard = torch.ones(17, 24, dtype=BF16)
        expire(run, lambda channel: gathering.await_gathered(channel, shard, True), world, way)
    else:
        run_group(GATHER_ALONE, run, world, BF16, (17, 1, 24), EPOCHS)


def on_ranks(gemm: gemms.Gemm, world: int) -> Callable:
    return partial(communicate, gemm=gemm, world=world, shape=SHAPE)


SCATTER, GATHER = "matmul_reduce_scatter_kernel", "all_gather_matmul_kernel"
REDUCE, AWAIT = "matmul_all_reduce_kernel", "await_gathered_kernel"
ONE_SHOT, TWO_SHOTS = (all_reduces.gemm(1, False, one_shot) for one_shot in (True, False))
CASES = {
    "matmul": Case("matmul_kernel", "matmul_kernel plain", partial(multiply, transposed=False), (), False),
    "matmul, transposed operands": Case(
        "matmul_kernel", "matmul_kernel wgrad", partial(multiply, transposed=True), (), False),
    "all_gather_matmul": Case(GATHER, f"{GATHER} dgrad", on_ranks(gathers.linear(1), 3), (
        gathering.all_gather_matmul_kernel, gathering.push_rows)),
    "all_gather_matmul, 3 weights": Case(GATHER, f"{GATHER} 3 weights, push", on_ranks(gathers.linear(3, "gelu"), 2)),
    "await_gathered": Case(AWAIT, f"{AWAIT} 8 ranks", partial(gather, world=3), (
        gathering.await_gathered_kernel, gathering.push_rows, gathering.copy_slot_kernel)),
    "matmul_reduce_scatter": Case(SCATTER, f"{SCATTER} finish", on_ranks(scatters.gemm(1), 2), (
        scattering.matmul_reduce_scatter_kernel, scattering.push_tile)),
    "matmul_reduce_scatter, finished": Case(
        SCATTER, f"{SCATTER} finish", on_ranks(scatters.gemm(1, gemms.FINISH), 3)),
    "matmul_all_reduce, one shot": Case(
        REDUCE, f"{REDUCE} one-shot", on_ranks(ONE_SHOT, 2), (matmul_all_reduce_kernel,)),
    "matmul_all_reduce, two shots": Case(REDUCE, f"{REDUCE} two-shot", partial(
        communicate, gemm=TWO_SHOTS, world=3, shape=BROAD, tile=BROAD_TILE, capacity=ROOM
    ), (matmul_all_reduce_kernel,)),
    "bump": Case("bump_kernel", "bump_kernel 1 rank", partial(gather, world=2), (protocol.bump_kernel,), False),
}  # fmt: skip


class Verdict(NamedTuple):
    """How a mutant was found out."""

    executor: str  # race, hang, fault or wrong; empty if it survives
    message: str
    compile_check: tuple[str, ...]  # the rules of the compile check that it breaks
    number: int  # which of TRIES was the last

    @property
    def caught(self) -> bool:
        """Whether any check finds it."""
        return bool(self.executor or self.compile_check)


class Trial(NamedTuple):
    """One execution of a case."""

    found: str  # as Verdict.executor
    message: str
    kernels: dict[str, Any]  # what Triton compiled, by the names of the functions


def attempt(case: Case, number: int, mutate: Callable[[str, str], str] | None = None) -> Trial:
    """Execute a case in one of TRIES."""
    way, kernels = TRIES[number], dict[str, Any]()
    try:
        with trying(way, mutate) as run:
            run.log = FirstReport()
            launch = run.launch

            def watched(name, kernel, *rest):
                kernels[name] = kernel
                launch(name, kernel, *rest)

            run.launch = watched  # type: ignore[method-assign]
            case.run(run, way)
    except (AssertionError, Fault) as error:
        message = str(error)
        usual = "fault" if isinstance(error, Found | Fault) else "wrong"
        return Trial(next((way for way in ("race", "hang") if message.startswith(way)), usual), message, kernels)
    return Trial("", "", kernels)


def search(case: Case, mutate: Callable[[str, str], str] | None = None) -> tuple[Trial, int]:
    """The first try that finds anything, and its number; if none does, the last one."""
    for number in (n for n, way in enumerate(TRIES) if case.communicates or not way.expires):
        trial = attempt(case, number, mutate)
        if trial.found:
            break
    return trial, number


@cache
def usual(name: str, number: int = 0) -> dict[str, Any]:
    """The kernels of a case as they are. AssertionError if this try of them finds anything."""
    trial = attempt(CASES[name], number)
    assert not trial.found, (name, TRIES[number], trial.message)
    return trial.kernels


def mutants(name: str) -> list[Mutant]:
    """All of a case."""
    case = CASES[name]
    every = ptx_mutants(usual(name)[case.kernel].asm["ptx"]) + source_mutants(case.sources)
    assert len({mutant.name for mutant in every}) == len(every), "mutants of one name"
    return every


@cache
def sample(seed: int, left_out: Callable[[str, Mutant], object]) -> dict[str, list[tuple[str, Mutant]]]:
    """(case, mutant) by kernel: of each kernel one of each kind of edits of PTX. Those of the source have to be
    compiled: of these there is one of each kind in all, and one of a kernel that has no others."""
    generator = random.Random(seed)
    kinds: dict[str, dict[str, list[tuple[str, Mutant]]]] = {case.kernel: {} for case in CASES.values()}
    sources: dict[str, list[tuple[str, Mutant]]] = {}
    for name, case in CASES.items():
        for mutant in mutants(name):
            if left_out(name, mutant):
                continue
            group = sources if mutant.function else kinds[case.kernel]
            key = mutant.kind if kinds[case.kernel] or not mutant.function else case.kernel
            group.setdefault(key, []).append((name, mutant))
    found = {kernel: [generator.choice(several) for several in of.values()] for kernel, of in kinds.items()}
    for several in sources.values():
        name, mutant = generator.choice(several)
        found[CASES[name].kernel].append((name, mutant))
    return found


def judge(name: str, mutant: Mutant) -> Verdict | None:
    """Execute a mutant until something is found; None if its code is that of the case as it is."""
    case, kernels = CASES[name], usual(name)
    if mutant.function:
        (function,) = (function for function in case.sources if function.__name__ == mutant.function)
        with mock.patch.dict(function.__globals__, HELPERS), mutated(function, mutant.edit):
            trial, number = search(case)
        if all(code_of(each.asm["ptx"]) == code_of(trial.kernels[key].asm["ptx"]) for key, each in kernels.items()):
            return None
        rules_broken = broken_rules(case, trial.kernels[case.kernel])
    else:
        text = kernels[case.kernel].asm["ptx"]
        edited, usual_code = mutant.edit(text), code_of(text)
        assert edited != text, mutant.name
        # of the same kernel, compiled elsewhere, Triton may find PTX with other paths in its cache
        trial, number = search(case, lambda _, ptx: mutant.edit(ptx) if code_of(ptx) == usual_code else ptx)
        rules_broken = broken_rules(case, kernels[case.kernel], edited)
    usual(name, number)
    return Verdict(trial.found, trial.message, rules_broken, number)


@cache
def code_of(ptx: str) -> list[str]:
    """The instructions of a kernel, without the places that they come from."""
    lines = [line.split("//")[0].strip() for line in ptx.split("\t.section\t.debug")[0].splitlines()]
    return [line for line in lines if not line.startswith((".loc", ".file"))]


def broken_rules(case: Case, kernel: Any, edited: str | None = None) -> tuple[str, ...]:
    """The rules of the compile check that a compiled kernel breaks. edited: PTX in place of the kernel's own."""
    expected = shipped_cases()[case.shipped]
    text = edited or kernel.asm["ptx"]
    compiled = Compiled(case.kernel, text, kernel.asm["ttgir"], 0, kernel.metadata.num_warps, 0, 0, 0, 0, ())
    program, module = ptx.parse(text), ttgir.parse(compiled.ttgir)
    row = {**rules.empty_row(expected), **rules.counts(compiled, program, module)}
    expected = dataclasses.replace(expected, tile=None, waived=WAIVED)
    violations = rules.violations(expected, compiled, program, module, row)
    return tuple(sorted({violation.partition(":")[0] for violation in violations}))


@cache
def shipped_cases() -> dict[str, Any]:
    """The compile check's cases of the executed architecture, dtype and one tile."""
    ours = [case for case in shipped.cases() if case.capability == 80 and case.dtype in (BF16, torch.int32)]
    return {f"{case.kernel} {case.name}": case for case in reversed(ours)}  # of several tiles the first
