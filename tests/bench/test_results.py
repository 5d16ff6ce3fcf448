"""The committed results: pictures, pages and further files are those of their numbers, and a wrong number is named.

Belongs here: what is asked of every bench with results in the same way. What a bench measures is in a file of its own.
"""

import copy
import json
import math
import re
import shutil
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import optimizers, planner, pretrain
from bench.__main__ import BENCHES
from bench.data_parallel import page as data_parallel
from bench.data_parallel import servers, strategies
from bench.families import matrix as families
from bench.families import page as families_page
from bench.families.cells import RIGHT, THEIRS, WRONG
from harness import marks
from harness.provenance import RESULTS, ROOT

FILES = {f"{path.parent.name}-{bench.name}": (bench, path) for bench in BENCHES
         for path in sorted(RESULTS.glob(f"*/{bench.name}.json"))}  # fmt: skip


def committed(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / "cpu" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", FILES)
def test_a_picture_shows_its_results(name, tmp_path):
    bench, path = FILES[name]
    shutil.copy(path, tmp_path)
    bench.draw(tmp_path / path.name)
    made = (tmp_path / path.name).with_suffix(".svg")
    assert ElementTree.parse(made).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    if bench.name != "pretrain":  # its committed pictures have other scales than it draws now
        assert made.read_text() == path.with_suffix(".svg").read_text(), f"run python -m bench {bench.name}"


PAGES = {
    "data_parallel": (data_parallel.PAGE, data_parallel.page),
    "families": (families_page.PAGE, lambda *_: families_page.page(RESULTS / "cpu" / "families.json")),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_tables_of_its_results(name):
    path, page = PAGES[name]
    assert page(path.read_text(), committed(name)) == path.read_text(), f"run python -m bench {name}"


def test_make_bench_names_benches():
    listed = re.search(r"for name in ([\w ]+); do", (ROOT / "Makefile").read_text())
    assert listed and set(listed[1].split()) <= {bench.name for bench in BENCHES}


def test_the_old_part_of_a_page_is_replaced():
    old = "before\n<!-- table: x -->\nold\n<!-- end -->\nafter\n"
    assert marks.filled(old, {"x": "new"}, "page.md") == old.replace("old", "\nnew\n")
    with pytest.raises(ValueError, match="page.md has no mark '<!-- table: y -->'"):
        marks.filled(old, {"y": "new"}, "page.md")


def test_further_files_are_those_of_the_results(tmp_path):
    result = committed("data_parallel")
    data_parallel.draw_all(result, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in data_parallel.PICTURES.iterdir()}
    for path in tmp_path.iterdir():
        assert path.read_text() == (data_parallel.PICTURES / path.name).read_text(), path.name
    strategies.write_csv(result, tmp_path / "curves.csv")
    assert (tmp_path / "curves.csv").read_bytes() == (RESULTS / "cpu" / "data_parallel.csv").read_bytes()


def of_planner(result: dict[str, Any]) -> list[str]:
    return [problem for name in planner.MODELS for problem in planner.judge(result["rows"], name)[1]]


PROBLEMS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "data_parallel": lambda result: [*servers.problems(result["servers"]), *strategies.problems(result)],
    "families": lambda result: families.problems(result["rows"]),
    "optimizers": lambda result: optimizers.problems(result["rows"], optimizers.STEPS),
    "planner": of_planner,
    "pretrain": lambda result: pretrain.problems(result["rows"][0]),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_committed_results_are_as_required(name):
    assert PROBLEMS[name](committed(name)) == []


def test_cells_of_families_are_right_and_divided():
    rows = committed("families")["rows"]
    assert [row["family"] for row in rows] == [family.name for family in families.FAMILIES]
    assert all(row["cells"].keys() == families.COLUMNS.keys() for row in rows)
    ours = {column for column in families.COLUMNS if THEIRS not in column}
    assert {row["cells"][column]["verdict"] for row in rows for column in ours} == {RIGHT}
    for cell in (cell for row in rows for cell in row["cells"].values()):
        cell["share"] = 0.0
    (said,) = families.problems(rows)
    assert said.startswith("only 0 of ") and said.endswith("are right and divided, fewer than 80%")


# (results, where in them is another value, the value, what is said of it)
@pytest.mark.parametrize("name, where, value, said", [
    ("data_parallel", "servers times 1 slow", 1.8, "a slow worker makes a stale step 1.61 times as long, not 1.0"),
    ("data_parallel", "servers counts 1 ok", False, "the server on 4 ranks is not as its formula says"),
    ("data_parallel", "strategies 0 valid 0", math.nan, "synchronous ends at no number"),
    ("data_parallel", "depths 2 versions", [1, 2, 2, 1], "4 stages hold [1, 2, 2, 1] versions"),
    ("families", "rows 0 cells", {"verdict": WRONG, "reason": "a gradient"}, "Llama, tp 2: WRONG: a gradient"),
    ("optimizers", "rows 27 valid 4 1", 2.3, "seed 1234: 2.3000 after 125 steps of Muon at 0.024, and 2.2751"),
    ("planner", "rows 11 predicted", 1e-3, "4 layers of 256: Spearman 0.40 < 0.8"),
    ("planner", "rows 6 predicted", 1e-3, "schedule=ZBVZeroBubble takes 12.0% longer than tp=2,microbatch=8"),
    ("pretrain", "rows 0 final_loss", 2.59, "final loss 2.5900, not below 0.8 of 3.2265"),
    ("pretrain", "rows 0 losses 7", math.inf, "GPT tiny: a loss is not finite"),
])  # fmt: skip
def test_a_wrong_number_is_named(name, where, value, said):
    result = copy.deepcopy(committed(name))
    *path, last = (int(part) if part.isdigit() else part for part in where.split())
    inner = result
    for part in path:
        inner = inner[part]
    inner[last] = dict.fromkeys(inner[last], value) if last == "cells" else value
    assert said in "\n".join(PROBLEMS[name](result))
