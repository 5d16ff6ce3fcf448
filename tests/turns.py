"""Proofs take turns, which the commit's hash chooses: some commits run them all, and `TURN=all` does so.

Belongs here: how many turns there are, and whose a case is. They are for what takes minutes, what checks the checks, as
mutants do, and the cases of a matrix that reach little which others do not. test_turns.py has the Makefile's number.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

TURNS = 6
# two have long proofs of their own: `make train`; and pages whose commands train, beside the Makefile's other triton
TRAIN, TRAINING_PAGES = 1, 2
OTHERS = [turn for turn in range(TURNS) if turn not in (TRAIN, TRAINING_PAGES)]
PARTS = len(OTHERS)  # of a large matrix, one in each of the others
FIRST = 3  # of a list, which so has its first cases, and those beyond a multiple of TURNS, in the others
EXTRAS = 4  # the turn that installs what tests of tpformer[eval,parquet,wandb] need


def of_another_turn(item: pytest.Item, turn: str) -> bool:
    """Whether a test waits for other commits. turn: a number, or "all". AssertionError if it would wait for ever."""
    rotates = item.get_closest_marker("rotates")
    if rotates is None:
        return False
    assert rotates.args in [(n,) for n in range(TURNS)], f"{item.nodeid} would never run: {rotates}"
    return turn not in ("all", str(rotates.args[0]))


def in_parts() -> list[Any]:
    """The numbers of PARTS, each for `parametrize` and a proof of its own turn."""
    return [pytest.param(n, marks=[pytest.mark.proof, pytest.mark.rotates(turn)]) for n, turn in enumerate(OTHERS)]


def of_turn(turn: int) -> Callable[[Any], Any]:
    """A decorator: a proof of one turn, with all of its cases."""
    return lambda test: pytest.mark.proof(pytest.mark.rotates(turn)(test))


# a proof of the turn that has installed the extras, each of which it may take for granted
needs_extras = of_turn(EXTRAS)


def in_turns(cases: Iterable[Any], *, first: int = FIRST, proof: bool = True) -> list[Any]:
    """Cases of `parametrize`, tuples if there are several names, each a proof of the turn that its place gives.

    first: the turn of the first case, so that lists of one case do not all meet in one turn.
    proof: False if the whole file is one, or if `make execute` names it.
    """
    marks = [pytest.mark.proof] if proof else []
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*each, marks=[*marks, pytest.mark.rotates((first + n) % TURNS)]) for n, each in enumerate(values)
    ]
