"""Families of transformers, parallel in place, are one process's models: two in every test run, all in a proof.

Belongs here: the cells of `python -m bench families` as tests. What a cell is: bench/families.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the repository is not installed as a whole

from bench.families.cells import PLAIN, RIGHT, SEQUENCE, Cell, attempt, joined, prepare, quiet  # noqa: E402
from bench.families.models import FAMILIES  # noqa: E402
from tpformer.distributed import build_mesh  # noqa: E402

RESULTS = ROOT / "bench/results/cpu/families.json"


def on_rank(name: str, directory: Path, way: str) -> Cell:
    quiet()
    family = next(family for family in FAMILIES if family.name == name)
    return attempt(family, directory, build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"], way)


@pytest.mark.parametrize("name", ["Falcon", "DeepSeek-V3"])
def test_a_family_is_that_of_one_process(ranks, tmp_path, name):
    """One has a fused projection and parallel blocks, one has experts and latent keys."""
    quiet()
    prepare(next(family for family in FAMILIES if family.name == name), tmp_path)
    for way in (PLAIN, SEQUENCE):
        cell = joined(ranks(2).run(on_rank, name, tmp_path, way))
        assert cell.verdict == RIGHT and cell.share > 0.3, (way, cell)


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_the_whole_matrix(tmp_path):
    """Its column with sequence parallelism on two ranks: the bench has four, ours without it, whose plans are the same,
    and transformers' own way, which does not change with our code."""
    run = "import json, sys; from pathlib import Path; from bench.families import cells, matrix; "
    run += "ours = {name: each for name, each in matrix.COLUMNS.items() if each == (cells.SEQUENCE, 2)}; "
    run += "matrix.COLUMNS = ours; Path(sys.argv[1]).write_text(json.dumps(matrix.rows(matrix.FAMILIES)))"
    path = tmp_path / "families.json"
    command, environment = [sys.executable, "-c", run, str(path)], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    def verdicts(rows: list) -> dict:
        return {(row["family"], column): cell["verdict"] for row in rows for column, cell in row["cells"].items()}

    found, committed = verdicts(json.loads(path.read_text())), verdicts(json.loads(RESULTS.read_text())["rows"])
    assert len(found) > 30 and found.items() <= committed.items()
