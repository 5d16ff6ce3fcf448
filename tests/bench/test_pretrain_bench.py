"""The bench pretrain as a whole on a tiny model for a few steps: it ends, and writes results with every row.

It joins and leaves a process group, and so has a process of its own.
"""

import json
import math
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_results import PROBLEMS
from testing import build_small_split

from bench import pretrain
from bench.__main__ import BENCHES
from harness.runner import main
from tpformer.models import GPTConfig

TINY = GPTConfig(vocab_size=257, seq_length=16, n_layers=1, hidden_size=16, n_heads=2)


def run_small(results: Path) -> None:
    """The bench, made smaller: --quick, which writes nothing, then as a whole."""
    pretrain.build_stdlib, pretrain.STEPS = build_small_split, 6
    pretrain.MODELS = {"cpu": (pretrain.Model("small", TINY, 2, 1e-3),)}
    assert main(["pretrain", "--quick"], BENCHES, results) == 0 and not results.exists()
    sys.exit(main(["pretrain"], BENCHES, results))


def test_pretrain(commands, tmp_path):
    code, out, err = commands.call(run_small, tmp_path / "results", CUDA_VISIBLE_DEVICES="").finish()
    assert code in (0, 1), err
    path = tmp_path / "results" / "cpu" / "pretrain.json"
    ElementTree.parse(path.with_suffix(".svg"))
    result = json.loads(path.read_text())
    head = "schema bench description date machine commit dirty versions note"
    assert list(result)[:9] == head.split() and result["bench"] == "pretrain"
    assert code == bool(PROBLEMS["pretrain"](result)), "few steps may miss what is required"
    assert "nothing is written: called with an option" in out
    assert "pretrain: small: final loss" in out and "not below 0.8 of" in out
    (row,) = result["rows"]
    assert len(row["losses"]) == row["steps"] == 6 and row["first_loss"] == row["losses"][0]
    assert row["final_loss"] == pytest.approx(math.fsum(row["losses"]) / 6)
    assert row["mfu"] is None and row["peak_bytes"] > 2**26
    assert row["tokens_per_second"] > 0 and row["saved_bytes"] > 0 and 2 < row["unigram_entropy"] < 4
