"""The executor catches mutants of every kernel that communicates, and of matmul: a fixed sample of them. Those that it
lets pass are listed with the reason why they compute the same.

`make execute` names this file. The whole table, about ten minutes: `python tests/execute/mutant_table.py`.
"""

import execution  # noqa: F401  (puts the repository on the path)
import pytest

pytest.importorskip("triton")

from mutant_survivors import complaint
from mutant_trials import CASES, judge, sample


@pytest.mark.parametrize("name", CASES)
def test_mutants_are_caught(name: str) -> None:
    verdicts = [(mutant, judge(name, mutant)) for mutant in sample(seed=17)[name]]
    assert verdicts
    assert [text for mutant, verdict in verdicts if verdict and (text := complaint(name, mutant, verdict))] == []
