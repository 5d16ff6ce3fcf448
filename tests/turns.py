"""The longest tests take turns, which the commit's hash chooses: a few commits run them all, and `TURN=all` does so.

Belongs here: how many turns there are, and whose a case is. They are for proofs and files of `make execute` that take
minutes: what checks the checks, as mutants do, large matrices, whose most telling cases the suite has, and pages.
"""

from collections.abc import Iterable
from typing import Any

import pytest

TURNS = 3


def in_turns(cases: Iterable[Any], *, proof: bool = True) -> list[Any]:
    """Cases of `parametrize`, tuples if there are several names, each a proof of the turn that its place gives.

    proof: False if the whole file is one, or if `make execute` names it.
    """
    marks = [pytest.mark.proof] if proof else []
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*each, marks=[*marks, pytest.mark.rotates(n % TURNS)]) for n, each in enumerate(values)]
