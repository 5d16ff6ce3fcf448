"""The command that executes every mutant of every case, and writes checks/results/execute.md.

Belongs here: the table, and the list of mutants that the executor lets pass, each with the reason. Names are those that
Triton 3.7 gives. The exit code is 1 if a mutant survives that is not listed, or a listed one does not.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import execution  # noqa: F401  (puts the repository on the path)
import torch
import triton
from mutant_trials import CASES, Verdict, judge, mutants
from ptx_mutants import Mutant

from checks.compile.summary import clean_commit, keep_page

PAGE = Path(__file__).resolve().parents[2] / "checks" / "results" / "execute.md"
INTRODUCTION = """\
# Mutants of the compiled kernels

`python tests/execute/mutant_table.py` breaks each kernel in every way that tests/execute/ptx_mutants.py and
tests/execute/source_mutants.py know, and executes the compiled code (sm_80, bfloat16, small tiles, three epochs) until
the executor finds something, or lets it pass twelve times: in other schedules, with other numbers of programs, and with
ranks that are absent, so that waits expire. `make execute` does so with a sample.

The executor ends with what it finds first: a race, a hang, another fault (an access outside of memory, a barrier that
some warps do not reach, shared memory that nothing has written), or a wrong result. The compile check's rules of the
protocol judge the same code; they stand beside it for comparison.
"""
WAYS = ("race", "hang", "fault", "wrong")
REASONS = {
    "counter": "Equivalent: the barrier by which all warps get the counter's value stands between their stores and the "
    "release, and no warp stores into the slot after it.",
    "report": "Equivalent: one thread stores all words of the report, and the same thread releases the first of them.",
    "first use": "Equivalent: the program has not used shared memory before.",
    "end": "Equivalent: it stands behind the K loop, and the program ends there.",
    "answer": "Equivalent with this layout: a barrier stands behind the last reads of shared memory, and of the copies "
    "of zeros behind that one the same thread makes the one to the word in which the next poll puts its answer.",
    "next barrier": "Equivalent: behind it stands a wait, which has a barrier before it uses shared memory.",
    "last group": "Equivalent with this layout: the copies of the last group bring zeros to the second operand's "
    "buffer, in which nothing is put after the K loop.",
}
BARRIER = 'barrier deleted, `barrier: tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, `'
LOAD = "barrier deleted, `load_block: block = tl.load(source + rows.to(tl.int64)[:, No`"
POLL = 'barrier deleted, `poll: seen = tl.atomic_add(flags, 0, sem="acquire", scope="s`'
PUSH_ROWS = "for `push_rows(me, shard, reach(limit, WORLD), program, pushers, `"
PUSH_TILES = "for `push_tiles(problem, (a0, a1, a2), (b0, b1, b2), me, program,`"
LINEAR_TILES = "for `linear_tiles(problem, a, b0, b1, b2, 0, 0, tl.program_id(0),`"
OWN_TILES = "for `linear_tiles(problem, a, b0, b1, b2, virtual * rows, me.rank`"
GATHERED_TILES = "for `linear_tiles(problem, slot, b0, b1, b2, first, chunk, start,`"
WAIT = "for `limit = wait(me, own_flags, chunk, limit)`"
WAIT_ALL = "for `limit = wait(me, own_flags + row_block, 0, limit, WORLD)`"
WAIT_TILE = "for `limit = wait(me, own_flags + tile, 0, limit, WORLD)`"
WAIT_SUM = "for `limit = wait(me, own_flags + tiles + summed, owner, limit)`"
K_LOOP = "for i in range(tl.cdiv(end - begin, programs) "
SCATTER = {
    f"{BARRIER} {PUSH_TILES} in 1 loop #2": "counter",
    f"barrier deleted, `push_tiles: {K_LOOP}* ` {PUSH_TILES} #1": "next barrier",
    f"wait for one copy fewer, `push_tiles: {K_LOOP}* ` {PUSH_TILES} #1": "last group",
    f"{BARRIER} {WAIT_ALL} in 1 loop #1": "report",
}


def last_steps(tiles: str) -> dict[str, str]:
    edits = ("barrier deleted", "wait for copies deleted", "wait for one copy fewer")
    return {f"{edit}, `linear_tiles: {K_LOOP}` {tiles} #1": "end" for edit in edits}


COUNTED = dict.fromkeys((f"{BARRIER} {PUSH_ROWS} #{number}" for number in (1, 2)), "counter")
# by case: the mutant's name -> a key of REASONS
SURVIVORS: dict[str, dict[str, str]] = {
    "matmul": {f"{LOAD} {LINEAR_TILES} #1": "first use", **last_steps(LINEAR_TILES)},
    "matmul_reduce_scatter": SCATTER,
    "matmul_reduce_scatter, finished": SCATTER,
    "await_gathered": {
        **COUNTED, f"{BARRIER} {WAIT} #1": "report", f"{BARRIER} {WAIT} #2": "report", f"{POLL} {WAIT} #1": "first use",
    },
    "all_gather_matmul": {
        **COUNTED, f"{BARRIER} {WAIT} in 1 loop #1": "report",
        f"barrier deleted, `linear_tiles: {K_LOOP}` {OWN_TILES} #1": "answer",
        f"barrier deleted, `linear_tiles: {K_LOOP}` {GATHERED_TILES} in 1 loop #1": "answer",
    },
    "all_gather_matmul, 3 weights": {
        f"{BARRIER} {PUSH_ROWS} #1": "counter", f"{BARRIER} {WAIT} #1": "report",
        f"barrier deleted, `linear_tiles: {K_LOOP}` {OWN_TILES} #1": "answer", **last_steps(GATHERED_TILES),
    },
    "matmul_all_reduce, one shot": {f"{BARRIER} {WAIT_TILE} in 2 loops #1": "report"},
    "matmul_all_reduce, two shots": {
        f"{BARRIER} {place} in 2 loops #1": "report" for place in (WAIT_TILE, WAIT_SUM)
    },
}  # fmt: skip


def reason_of(name: str, mutant: Mutant) -> str | None:
    """The key of the reason why a mutant is equivalent; None if it is not listed."""
    return SURVIVORS.get(name, {}).get(mutant.name)


def complaint(name: str, mutant: Mutant, verdict: Verdict) -> str | None:
    """A sentence if a mutant survives that is not listed, or one is caught that is: what it is, and what to do."""
    listed, which = reason_of(name, mutant), f"{name}: {mutant.name} ({mutant.where})"
    if verdict.executor and listed:
        return f"{which} is listed as {listed!r}, and the executor finds: {verdict.message}. Remove it from SURVIVORS"
    if verdict.executor or listed:
        return None
    return (
        f"{which} survives, and is not listed. Either let CASES or TRIES in mutant_trials.py take a path that shows "
        "it, or, if it computes the same on every path, list it with that reason in SURVIVORS"
    )


def stale(name: str, mutants: Iterable[Mutant]) -> set[str]:
    """The names that are listed, and that none of the case's mutants has."""
    return SURVIVORS.get(name, {}).keys() - {mutant.name for mutant in mutants}


Results = dict[str, list[tuple[Mutant, Verdict]]]


def evaluate(names: Iterable[str], say: Callable[[str], None] = print) -> Results:
    """Execute all mutants of these cases, and say of each what became of it."""
    results: Results = {name: [] for name in names}
    for name, judged in results.items():
        every = mutants(name)
        for number, mutant in enumerate(every, 1):
            start = time.monotonic()
            outcome = "the same code"
            if verdict := judge(name, mutant):
                outcome = f"{verdict.executor or 'survives'}, {verdict.number + 1} tries,"
                judged.append((mutant, verdict))
            seconds = time.monotonic() - start
            say(f"{name} {number}/{len(every)}: {mutant.where}: {mutant.name}: {outcome} {seconds:.1f} s")
    return results


def table(first: str, groups: dict[str, list[tuple[Mutant, Verdict]]]) -> list[str]:
    """Lines of a table with one line for each group, and one for all."""
    columns = (first, "mutants", "caught", "race", "hang", "fault", "wrong result", "compile check", "survivors")
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for title, several in {**groups, "all": [each for group in groups.values() for each in group]}.items():
        ways = Counter(verdict.executor for _, verdict in several)
        caught = sum(verdict.caught for _, verdict in several)
        checked = sum(bool(verdict.compile_check) for _, verdict in several)
        cells = [title, len(several), caught, *(ways[way] for way in WAYS), checked, len(several) - caught]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def page_body(results: Results) -> str:
    """All of the page that follows from the code and the compiler."""
    kinds: dict[str, list[tuple[Mutant, Verdict]]] = {}
    passed: dict[str, list[str]] = {}
    for name, pairs in results.items():
        for mutant, verdict in pairs:
            kinds.setdefault(mutant.kind, []).append((mutant, verdict))
            if not verdict.executor:
                also = f" (the compile check finds it: {', '.join(verdict.compile_check)})" if verdict.caught else ""
                passed.setdefault(reason_of(name, mutant) or "not listed", []).append(f"{name}: {mutant.name}{also}")
    lines = [f"Compiled by torch {torch.__version__}, triton {triton.__version__}.", "", *table("kernel", results), ""]
    lines += [*table("mutation", dict(sorted(kinds.items()))), "", "## What the executor lets pass", ""]
    for reason, several in passed.items():
        lines += [REASONS.get(reason, reason), "", *(f"- {each}" for each in several), ""]
    return "\n".join(lines).rstrip() + "\n"


def shortfalls(results: Results) -> list[str]:
    """What is asserted of the whole table, where it is not so."""
    every = [each for group in results.values() for each in group]
    caught = sum(verdict.caught for _, verdict in every)
    found = [text for name, group in results.items() for each in group if (text := complaint(name, *each))]
    found += [f"{name}: {each} is listed, and no mutant" for name in results for each in stale(name, mutants(name))]
    return found + ([f"only {caught} of {len(every)} mutants are caught"] if caught < 0.95 * len(every) else [])


def main() -> int:
    """`python tests/execute/mutant_table.py [CASE ...]`; only the whole table is written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {'; '.join(CASES)} (all)")
    chosen = parser.parse_args().cases or list(CASES)
    if unknown := set(chosen) - set(CASES):
        parser.error(f"there is no case {sorted(unknown)}")
    commit, obstacle = clean_commit(PAGE.parent)
    results = evaluate(chosen)
    print("\n".join(table("kernel", results)))
    wrong = shortfalls(results)
    if len(chosen) == len(CASES):
        print(keep_page(PAGE, commit, INTRODUCTION, page_body(results)) if commit else f"no page: {obstacle}")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
