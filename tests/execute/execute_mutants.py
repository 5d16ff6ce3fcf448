"""The executor catches mutants of every kernel that communicates, and of matmul: a fixed sample of them, without those
that are listed with the reason why they compute the same.

`make execute` names this file. The whole table, about ten minutes: `python tests/execute/mutant_table.py`.
"""

import execution  # noqa: F401  (puts the repository on the path)
import pytest
from mutant_table import complaint, reason_of, stale
from mutant_trials import CASES, judge, mutants, sample
from turns import in_turns


@pytest.mark.parametrize("kernel", in_turns(dict.fromkeys(case.kernel for case in CASES.values()), proof=False))
def test_mutants_are_caught(kernel: str) -> None:
    verdicts = [(name, mutant, judge(name, mutant)) for name, mutant in sample(17, reason_of)[kernel]]
    assert verdicts
    wrong = [text for name, mutant, verdict in verdicts if verdict and (text := complaint(name, mutant, verdict))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", CASES)
def test_what_is_listed_exists(name: str) -> None:
    assert not stale(name, mutants(name))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.communicates])
def test_waits_and_no_other_loops_fall_through(name: str) -> None:
    places = [mutant.place for mutant in mutants(name) if mutant.kind == "wait falls through"]
    assert places and all(place.startswith("`poll: while ") for place in places), places
