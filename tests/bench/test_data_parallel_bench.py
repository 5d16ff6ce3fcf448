"""The bench of all-reduce algorithms: its counts are compared with formulas, and a wrong formula fails it."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository is not installed as a whole

from bench import data_parallel as bench  # noqa: E402
from bench.runner import main  # noqa: E402
from tpformer.distributed.algorithms import Traffic  # noqa: E402


@pytest.mark.timeout(300)
def test_counts_and_formulas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert bench.cost_of("all_pairs", 4, 4).values == 48 and bench.cost_of("hierarchical", 4, 4).values == 24
    assert main(["data_parallel", "--quick"], [bench.BENCH]) == 0
    assert "7 counts equal formulas" in capsys.readouterr().out
    right = bench.cost_of
    wrong = {"ring": Traffic(6, 24, 25, 6)}
    monkeypatch.setattr(bench, "cost_of", lambda name, size, values: wrong.get(name) or right(name, size, values))
    assert main(["data_parallel", "--quick"], [bench.BENCH]) == 1
    assert "ring on 4 ranks is not as its formula says" in " ".join(capsys.readouterr().out.split())


def test_the_drawing_has_a_bar_for_each_algorithm(tmp_path: Path) -> None:
    times = [
        {"algorithm": name, "bytes": size, "us": 100.0, "fit": 90.0}
        for name in ("ring", "tree")
        for size in (1024, 4096)
    ]
    head = {
        "bench": "data_parallel",
        "machine": bench_machine(),
        "versions": {"torch": "2"},
        "date": "2026-01-01",
        "commit": None,
    }
    (tmp_path / "data_parallel.json").write_text(json.dumps({**head, "times": times}))
    root = ElementTree.parse(bench.draw(tmp_path / "data_parallel.json")).getroot()
    words = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"ring", "tree", "4,096 bytes", "0.10"} <= words


def bench_machine() -> dict:
    return {"cpu": "a CPU", "cores": 2, "threads": 1, "gpu": None}
