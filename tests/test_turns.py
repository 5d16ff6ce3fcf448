"""Over all turns each proof that rotates runs once, and the Makefile's turns are those of tests/turns.py."""

import os
import re
import subprocess
from types import SimpleNamespace

import pytest
from commands import ROOT
from turns import EXTRAS, PARTS, TRAIN, TRAINING_PAGES, TURNS, in_parts, in_turns, of_another_turn

EVERY = [*map(str, range(TURNS))]


def item(*marks: pytest.MarkDecorator) -> SimpleNamespace:
    return SimpleNamespace(nodeid="a test", get_closest_marker={each.name: each.mark for each in marks}.get)


@pytest.mark.parametrize("first", [0, TURNS - 1])
def test_every_case_has_one_turn(first):
    """Of twice as many cases and one, each is run in one turn, and one turn has three, the first case's."""
    cases = [item(*case.marks) for case in in_turns(range(2 * TURNS + 1), first=first)]
    assert all(case.get_closest_marker("proof") for case in cases)
    ran = {turn: [n for n, case in enumerate(cases) if not of_another_turn(case, turn)] for turn in [*EVERY, "all"]}
    assert ran.pop("all") == sorted(sum(ran.values(), [])) == [*range(2 * TURNS + 1)]
    assert {turn: len(own) for turn, own in ran.items()} == {turn: 2 + (turn == str(first)) for turn in EVERY}


def test_a_large_matrix_has_a_part_in_each_turn_without_long_proofs_of_its_own():
    parts = [item(*part.marks) for part in in_parts()]
    for turn in EVERY:
        assert sum(not of_another_turn(part, turn) for part in parts) == (int(turn) not in (TRAIN, TRAINING_PAGES))
    assert len(parts) == PARTS and all(part.get_closest_marker("proof") for part in parts)


def test_what_does_not_rotate_runs_in_every_turn():
    assert not any(of_another_turn(item(pytest.mark.proof), turn) for turn in [*EVERY, "all"])


@pytest.mark.parametrize("turn", [(), (TURNS,), (-1,), ("0",)])
def test_a_turn_that_no_commit_has_is_an_error(turn):
    with pytest.raises(AssertionError, match="a test would never run"):
        of_another_turn(item(pytest.mark.rotates(*turn)), "all")


def printed(target: str, *variables: str, given: str = "--old-file=.venv/ready --old-file=.venv/eval") -> str:
    """The commands that make would run, if what is given were there. Nothing reaches it of a make that runs the tests,
    which may have a TURN."""
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "TURN")}
    command = ["make", "--dry-run", *given.split(), target, *variables]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=own).stdout


def test_the_commit_chooses_one_of_them():
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for target in ("proofs-together", "proofs-alone", "execute"):
        assert f" --turn {int(commit[:7], 16) % TURNS} " in printed(target), target


def test_one_turn_installs_the_extras():
    for turn in EVERY:
        commands = printed("proofs-together", f"TURN={turn}", given="--old-file=.venv/ready --assume-new=.venv/ready")
        assert ("lm_eval" in commands) == (turn == str(EXTRAS))


def test_each_turn_compiles_its_share_and_one_has_another_triton():
    for turn in [*EVERY, "all"]:
        commands = printed("proofs-compiled", f"TURN={turn}")
        assert (f"--share {turn}/{TURNS}\n" in commands) == (turn != "all") == ("--share" in commands)
        assert (".venv/gpu/bin/python -m checks.compile" in commands) == (turn in ("2", "all"))


def test_the_other_triton_compiles_every_variant_of_every_kernel():
    """And a turn of the present triton every kernel."""
    pytest.importorskip("triton")
    from checks.compile.check import DEFAULT, load_cases

    commands = printed("proofs-compiled", "TURN=2", given="--old-file=.venv/ready --old-file=.venv/gpu/ready")
    here, *other = re.findall("--only '(.*?)'", commands)
    cases = {key: case for key, case in load_cases(DEFAULT.cases).items() if case.capability == 90}

    def compiled(*patterns: str) -> set[tuple[str, str]]:
        found = [case for key, case in cases.items() if any(re.search(each, key) for each in patterns)]
        return {(case.kernel, case.name) for case in found}

    every = compiled("")
    assert not every - compiled(*other)
    assert {kernel for kernel, _ in every} == {kernel for kernel, _ in compiled(here)}
