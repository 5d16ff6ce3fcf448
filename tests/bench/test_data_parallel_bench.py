"""The bench of data-parallel strategies: counts are compared with formulas, a wrong formula fails it, and the page's
tables and pictures are those of its results."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from testing import build_small_split

from bench.data_parallel import bench, messages, page, servers, strategies
from bench.provenance import RESULTS
from bench.runner import main
from tpformer.distributed.algorithms import Traffic
from tpformer.distributed.reductions import RUNNABLE

TEXT = "{http://www.w3.org/2000/svg}text"
COMMITTED = json.loads((RESULTS / "cpu" / "data_parallel.json").read_text())


@pytest.mark.timeout(300)
def test_counts_and_formulas(forked: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(messages, "TIMED", (256, 4096))
    assert messages.cost_of("all_pairs", 4, 4).values == 48 and messages.cost_of("hierarchical", 4, 4).values == 24
    assert main(["data_parallel", "--quick", "--only", "messages"], [bench.BENCH]) == 0
    assert "counts equal formulas" in capsys.readouterr().out
    right = messages.cost_of
    wrong = {"ring": Traffic(6, 24, 25, 6)}
    monkeypatch.setattr(messages, "cost_of", lambda name, size, values: wrong.get(name) or right(name, size, values))
    assert main(["data_parallel", "--quick", "--only", "messages"], [bench.BENCH]) == 1
    assert "ring on 4 ranks is not as its formula says" in " ".join(capsys.readouterr().out.split())


@pytest.mark.timeout(300)
def test_strategies_train_and_send(forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "QUICK_STEPS", 4)
    monkeypatch.setattr(strategies, "build_stdlib", build_small_split)
    content = strategies.measure(quick=True)
    sent = {row["strategy"]: row["bytes"] for row in content["strategies"]}
    whole = sent["synchronous"]
    assert sent["bfloat16"] == pytest.approx(whole / 2, rel=0.01) and sent["int8"] < 0.27 * whole
    assert sent["stale server"] == pytest.approx(2 * whole, rel=0.01), (
        "four updates, of a push and a pull for each worker"
    )
    assert sent["top-k 1 %"] < 0.06 * whole and sent["PowerSGD 4"] < 0.12 * whole
    assert [row["stages"] for row in content["depths"]] == [1, 2, 4, 8]
    # 4 minibatches are fewer than a deep pipeline has in flight
    assert strategies.problems(content)[0] == "4 stages hold [1, 2, 2, 1] versions"


def test_a_slow_worker_that_delays_otherwise_is_a_problem() -> None:
    times = [{"server": "sync", "even": 1.0, "slow": 4.0}, {"server": "stale", "even": 1.0, "slow": 1.6}]
    (said,) = servers.problems({"counts": [], "times": times})
    assert said == "a slow worker makes a stale step 1.60 times as long, not 1.0 to 1.5"
    for server, span in (("sync", 24), ("stale", 8)):
        turns = servers.turns(server)
        assert len(turns) == 24 and max(end for *_, end in turns) == span


def test_the_page_has_the_tables_of_the_results() -> None:
    text = page.PAGE.read_text()
    assert page.page(text, COMMITTED) == text
    with pytest.raises(ValueError, match="has no mark '<!-- table: ring -->'"):
        page.page(text.replace("<!-- table: ring -->", ""), COMMITTED)


def test_pictures_are_those_of_the_results(tmp_path: Path) -> None:
    page.draw_all(COMMITTED, tmp_path)
    for path in sorted(page.PICTURES.glob("*.svg")):
        assert (tmp_path / path.name).read_text() == path.read_text(), path.name
    assert {path.stem for path in tmp_path.glob("*.svg")} >= {
        *RUNNABLE,
        "parameter_server",
        "turns",
        "pipedream",
        "depths",
        "curves",
    }
    words = [each.text for each in ElementTree.parse(tmp_path / "ring.svg").getroot().iter(TEXT)]
    assert "step 6" in words and "step 7" not in words and any("24 values in all" in each for each in words if each)


def test_the_drawing_has_a_bar_for_each_algorithm(tmp_path: Path) -> None:
    (tmp_path / "data_parallel.json").write_text(json.dumps(COMMITTED))
    root = ElementTree.parse(bench.draw(tmp_path / "data_parallel.json")).getroot()
    words = {text.text for text in root.iter(TEXT)}
    assert {"ring", "tree", "4,096 bytes"} <= words


def test_the_curves_are_a_table_for_other_programs(tmp_path: Path) -> None:
    strategies.write_csv(COMMITTED, tmp_path / "curves.csv")
    lines = (tmp_path / "curves.csv").read_text().splitlines()
    assert lines[0] == "strategy,seed,step,bytes,loss"
    assert len(lines) == 1 + 7 * 3 * strategies.STEPS // strategies.WINDOW
