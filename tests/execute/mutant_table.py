"""The command that executes every mutant of every case, and writes checks/results/execute.md.

Belongs here: the table. The exit code is 1 if a mutant survives that is not listed, or a listed one does not.
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
from mutant_survivors import REASONS, complaint, reason_of, stale
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
Results = dict[str, list[tuple[Mutant, Verdict]]]


def evaluate(names: Iterable[str], say: Callable[[str], None] = print) -> Results:
    """Execute all mutants of these cases, and say of each what became of it."""
    results: Results = {}
    for name in names:
        results[name] = []
        every = mutants(name)
        for number, mutant in enumerate(every, 1):
            start = time.monotonic()
            verdict = judge(name, mutant)
            outcome = (
                "the same code" if verdict is None else f"{verdict.executor or 'survives'}, {verdict.number + 1} tries,"
            )
            seconds = time.monotonic() - start
            say(f"{name} {number}/{len(every)}: {mutant.where}: {mutant.name}: {outcome} {seconds:.1f} s")
            if verdict is not None:
                results[name].append((mutant, verdict))
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
        lines += [f"{REASONS.get(reason, reason)}", "", *(f"- {each}" for each in several), ""]
    return "\n".join(lines).rstrip() + "\n"


def shortfalls(results: Results) -> list[str]:
    """What is asserted of the whole table, where it is not so."""
    every = [each for group in results.values() for each in group]
    caught = sum(verdict.caught for _, verdict in every)
    found = [text for name, group in results.items() for each in group if (text := complaint(name, *each))]
    found += [text for name in results for text in stale(name, mutants(name))]
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
