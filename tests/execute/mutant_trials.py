"""Executes mutants of kernels, and says which check catches each.

Belongs here: the launches that a kernel is tried in, and the verdict. Which mutants there are is in ptx_mutants.py and
source_mutants.py; those that nothing catches are listed with reasons in mutant_survivors.py.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import execution
import gemms
import test_all_gather_matmul_kernel as gathers
import test_matmul_all_reduce_kernel as all_reduces
import test_matmul_kernel as matmuls
import test_matmul_reduce_scatter_kernel as scatters
import torch
from execution import PLAIN, Execution, Schedule, executing, group, run_group
from mutations import mutated
from ptx_mutants import Mutant, ptx_mutants
from source_mutants import HELPERS, source_mutants
from triton.runtime.jit import JITFunction

from checks.compile import ptx, rules, shipped, ttgir
from checks.compile.compiler import Compiled
from checks.execute import schedule as scheduler
from checks.execute.log import Log
from checks.execute.memory import Fault
from tpformer.kernels import protocol
from tpformer.kernels.all_gather_matmul import kernel as all_gather_matmul
from tpformer.kernels.all_gather_matmul.kernel import await_gathered, gathered_copy
from tpformer.kernels.matmul_all_reduce import kernel as matmul_all_reduce
from tpformer.kernels.matmul_reduce_scatter import kernel as matmul_reduce_scatter
from tpformer.kernels.protocol import bump

BF16 = torch.bfloat16
# Partial tiles in rows and columns. K is three steps, and a multiple of 16, without which Triton copies nothing
# asynchronously.
SHAPE = (17, 23, 48)
EPOCHS = 3  # the third writes into the slots of the first
# (schedule, SMs with room for one program each), until one of them shows the mutant
TRIES = (
    (Schedule(1, lockstep=False), 4),
    (PLAIN, 2),
    (Schedule(2, lockstep=False, priorities=True), 6),
    (Schedule(3, lockstep=False), 3),
    (Schedule(4, lockstep=False), 8),
    (Schedule(5, lockstep=False, priorities=True), 3),
)
# rules that ask how fast the code is, or need ptxas
WAIVED = frozenset(("wide_stores", "tensor_cores", "spills", "shared_memory", "tensor_memory", "serialized"))


class Found(AssertionError):
    """The first report of an execution."""


class FirstReport(Log):
    """A log that ends the execution with its first report."""

    def report(self, kind: str, line: int, warp: int, other: int, other_line: int) -> None:
        super().report(kind, line, warp, other, other_line)
        raise Found(self.reports[-1])


class Case(NamedTuple):
    """Launches whose results are compared, of which one kernel is mutated."""

    kernel: str
    """The kernel whose PTX is mutated."""
    run: Callable[[Execution], None]
    """AssertionError if a result is wrong."""
    shipped: str
    """A case of the compile check (shipped.py), whose counts the kernel must show, too."""
    sources: tuple[JITFunction, ...] = ()
    """Functions whose source is mutated."""


def multiply(run: Execution, transposed: bool) -> None:
    """C = A W^T, or from transposed operands, with a tile of three stages."""
    (m, n, k), tile = SHAPE, execution.TILE._replace(stages=3)
    n += 16  # three tiles
    a, w = matmuls.draw(1, BF16, "cpu", (k, m) if transposed else (m, k), (k, n) if transposed else (n, k))
    options = {"a_transposed": transposed, "b_transposed": transposed}
    matmuls.close(matmuls.matmul(a, [w], tile=tile, **options)[0], matmuls.matmul_reference, a, w, **options)


def communicate(run: Execution, gemm: gemms.Gemm, world: int) -> None:
    """An operation on each rank, for each epoch."""
    run_group(gemm, run, world, BF16, SHAPE, EPOCHS)


def gather(run: Execution, world: int) -> None:
    """A gather without a GEMM, and the copy of what it has gathered, for each epoch."""
    channels, rows = group(world), SHAPE[0]
    shards = [
        [torch.full((rows, 24), 10.0 * epoch + rank, dtype=BF16) for rank in range(world)] for epoch in range(EPOCHS)
    ]
    copies: list[list[torch.Tensor]] = [[] for _ in range(EPOCHS)]
    run.share(*channels[0].slots)
    for rank, channel in enumerate(channels):
        with run.on(rank):
            for epoch in range(EPOCHS):
                bump(channel)
                await_gathered(channel, shards[epoch][rank], push=True)
                copies[epoch].append(gathered_copy(channel, shards[epoch][rank]))
    run.run()
    for epoch in range(EPOCHS):
        assert all(torch.equal(copy, torch.cat(shards[epoch])) for copy in copies[epoch]), f"epoch {epoch} is wrong"
    assert not any(channel.error.any() for channel in channels), "a wait has expired"


SCATTER, GATHER = "matmul_reduce_scatter_kernel", "all_gather_matmul_kernel"
REDUCE, AWAIT = "matmul_all_reduce_kernel", "await_gathered_kernel"
FINISHED = scatters.gemm(1, scatters.gemms.FINISH)
SEVERAL = gathers.linear(3, "gelu")
CASES = {
    "matmul": Case("matmul_kernel", partial(multiply, transposed=False), "matmul_kernel plain"),
    "matmul, transposed operands": Case("matmul_kernel", partial(multiply, transposed=True), "matmul_kernel wgrad"),
    "all_gather_matmul": Case(
        GATHER, partial(communicate, gemm=gathers.linear(1), world=3), f"{GATHER} dgrad",
        (all_gather_matmul.all_gather_matmul_kernel, all_gather_matmul.push_rows),
    ),
    "all_gather_matmul, 3 weights": Case(
        GATHER, partial(communicate, gemm=SEVERAL, world=2), f"{GATHER} 3 weights, push"
    ),
    "await_gathered": Case(
        AWAIT, partial(gather, world=3), f"{AWAIT} 8 ranks",
        (all_gather_matmul.await_gathered_kernel, all_gather_matmul.push_rows, all_gather_matmul.copy_slot_kernel),
    ),
    "matmul_reduce_scatter": Case(
        SCATTER, partial(communicate, gemm=scatters.gemm(1), world=2), f"{SCATTER} finish",
        (matmul_reduce_scatter.matmul_reduce_scatter_kernel,),
    ),
    "matmul_reduce_scatter, finished": Case(
        SCATTER, partial(communicate, gemm=FINISHED, world=3), f"{SCATTER} finish"
    ),
    "matmul_all_reduce, one shot": Case(
        REDUCE, partial(communicate, gemm=all_reduces.gemm(1, False, True), world=2), f"{REDUCE} one-shot",
        (matmul_all_reduce.matmul_all_reduce_kernel,),
    ),
    "matmul_all_reduce, two shots": Case(
        REDUCE, partial(communicate, gemm=all_reduces.gemm(1, False, False), world=3), f"{REDUCE} two-shot",
        (matmul_all_reduce.matmul_all_reduce_kernel,),
    ),
    "bump": Case("bump_kernel", partial(gather, world=2), "bump_kernel 1 rank", (protocol.bump_kernel,)),
}  # fmt: skip


class Verdict(NamedTuple):
    """How a mutant was found out."""

    executor: str
    """race, hang, fault or wrong; empty if it survives."""
    message: str
    compile_check: tuple[str, ...]
    """The rules of the compile check that it breaks."""
    number: int
    """Which of TRIES was the last."""

    @property
    def caught(self) -> bool:
        """Whether any check finds it."""
        return bool(self.executor or self.compile_check)


@contextlib.contextmanager
def small_machine(multiprocessors: int) -> Iterator[None]:
    """Launchers find so many SMs, each with room for one program of the tests' tile, and two pushers of a gather, each
    with something to push. A hang is seen as soon as each program has polled in vain a few times."""
    device = SimpleNamespace(multi_processor_count=multiprocessors, shared_memory_per_multiprocessor=2048)
    values = (
        (execution, "DEVICE", device),
        (all_gather_matmul, "PUSHERS", 2),
        (all_gather_matmul, "PUSH_BLOCK", 256),
        (scheduler, "PATIENCE", 100),
    )
    with contextlib.ExitStack() as stack:
        for module, name, value in values:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


class Trial(NamedTuple):
    """One execution of a case."""

    found: str
    """As Verdict.executor."""
    message: str
    kernels: dict[str, Any]
    """What Triton compiled, by the names of the functions."""


def attempt(case: Case, number: int, mutate: Callable[[str, str], str] | None = None) -> Trial:
    """Execute a case in one of TRIES."""
    schedule, multiprocessors = TRIES[number]
    kernels: dict[str, Any] = {}
    try:
        with small_machine(multiprocessors), executing(schedule, mutate) as run:
            run.log = FirstReport()
            launch = run.launch

            def watched(name, kernel, *rest):
                kernels[name] = kernel
                launch(name, kernel, *rest)

            run.launch = watched  # type: ignore[method-assign]
            case.run(run)
    except (AssertionError, Fault) as error:
        message = str(error)
        usual = "fault" if isinstance(error, Found | Fault) else "wrong"
        return Trial(next((way for way in ("race", "hang") if message.startswith(way)), usual), message, kernels)
    return Trial("", "", kernels)


def search(case: Case, mutate: Callable[[str, str], str] | None = None) -> tuple[Trial, int]:
    """The first try that finds anything, and its number; if none does, the last one."""
    for number in range(len(TRIES)):
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
    return ptx_mutants(usual(name)[case.kernel].asm["ptx"]) + source_mutants(case.sources)


@cache
def sample(seed: int) -> dict[str, list[Mutant]]:
    """Mutants by case: of each case one of each kind of edits of PTX. Those of the source have to be compiled: of these
    there is one of each kind in all."""
    generator = random.Random(seed)
    found: dict[str, list[Mutant]] = {}
    sources: dict[str, list[tuple[str, Mutant]]] = {}
    for name in CASES:
        kinds: dict[str, list[Mutant]] = {}
        for mutant in mutants(name):
            if mutant.function:
                sources.setdefault(mutant.kind, []).append((name, mutant))
            else:
                kinds.setdefault(mutant.kind, []).append(mutant)
        found[name] = [generator.choice(several) for several in kinds.values()]
    for several in sources.values():
        name, mutant = generator.choice(several)
        found[name].append(mutant)
    return found


def judge(name: str, mutant: Mutant) -> Verdict | None:
    """Execute a mutant until something is found; None if its code is that of the case as it is."""
    case, kernels = CASES[name], usual(name)
    if mutant.function:
        trial, number = search_source(case, mutant)
        if all(code_of(kernel) == code_of(kernels[function]) for function, kernel in trial.kernels.items()):
            return None
        rules_broken = broken_rules(case, trial.kernels[case.kernel])
    else:
        text = kernels[case.kernel].asm["ptx"]
        edited = mutant.edit(text)
        assert edited != text, mutant.name
        trial, number = search(case, lambda _, ptx: edited if ptx == text else ptx)
        rules_broken = broken_rules(case, kernels[case.kernel], edited)
    usual(name, number)
    return Verdict(trial.found, trial.message, rules_broken, number)


def search_source(case: Case, mutant: Mutant) -> tuple[Trial, int]:
    """As `search`, for a mutant of the source."""
    (function,) = (function for function in case.sources if function.__name__ == mutant.function)
    with mock.patch.dict(function.__globals__, HELPERS), mutated(function, mutant.edit):
        return search(case)


def code_of(kernel: Any) -> list[str]:
    """The instructions of a compiled kernel, without the places that they come from."""
    body = kernel.asm["ptx"].split("\t.section\t.debug")[0]
    return [line for line in (line.split("//")[0].strip() for line in body.splitlines()) if not line.startswith(".loc")]


def broken_rules(case: Case, kernel: Any, edited: str | None = None) -> tuple[str, ...]:
    """The rules of the compile check that a compiled kernel breaks. edited: PTX in place of the kernel's own."""
    (expected,) = (each for each in shipped_cases() if f"{each.kernel} {each.name}" == case.shipped)
    text = edited or kernel.asm["ptx"]
    compiled = Compiled(case.kernel, text, kernel.asm["ttgir"], 0, kernel.metadata.num_warps, 0, 0, 0, 0, ())
    program, module = ptx.parse(text), ttgir.parse(compiled.ttgir)
    row = {**rules.empty_row(expected), **rules.counts(compiled, program, module)}
    expected = dataclasses.replace(expected, tile=None, waived=WAIVED)
    return tuple(
        sorted({text.partition(":")[0] for text in rules.violations(expected, compiled, program, module, row)})
    )


@cache
def shipped_cases() -> list:
    """The compile check's cases of the executed architecture, dtype and one tile."""
    found = {}
    for case in shipped.cases():
        if case.capability == 80 and case.dtype in (BF16, torch.int32):
            found.setdefault(f"{case.kernel} {case.name}", case)
    return list(found.values())
