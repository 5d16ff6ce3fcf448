"""The kinds of faults of `python -m bench faults`, a part in a turn, and what its table counts."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from commands import python
from turns import PARTS, in_parts

from checks.faults import EACH, KINDS, draw, table_line
from harness.runner import machine

FINE = {"seconds": 1.0, "lost": [], "hung": False, "named": True, "identical": True}


@pytest.mark.parametrize("found, line", [({}, "0 0"), ({"lost": [3, 6]}, "2 0"), ({"hung": True}, "0 1")])
def test_the_table_counts_what_ended_otherwise(found, line):
    rows = [{"kind": "raise", **FINE, **found}, {"kind": "kill -9", **FINE, "named": False}]
    assert " ".join(table_line("raise", rows)) == f"raise 1 {line} 0 0 1.0 1.0"
    assert table_line("kill -9", rows)[4] == "1"


def test_the_drawing_has_a_bar_for_each_kind(tmp_path):
    assert len(KINDS) * EACH == 120
    head = {"bench": "faults", "machine": machine(), "versions": {"torch": "2"}, "date": "2026-01-01", "commit": None}
    (tmp_path / "faults.json").write_text(json.dumps({**head, "rows": [{"kind": kind, **FINE} for kind in KINDS]}))
    root = ElementTree.parse(draw(tmp_path / "faults.json")).getroot()
    assert KINDS.keys() <= {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}


SOME = """
import sys
from pathlib import Path
from harness.runner import main
from checks import faults
faults.KINDS = dict([*faults.KINDS.items()][int(sys.argv[2])::int(sys.argv[3])])
sys.exit(main(["faults", "--quick"], [faults.BENCH], Path(sys.argv[1])))
"""


@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", in_parts())
def test_one_fault_of_each_kind(tmp_path, part):
    printed = python("-c", SOME, tmp_path, part, PARTS)
    assert f"{len([*KINDS][part::PARTS])} faults: nothing lost" in printed
