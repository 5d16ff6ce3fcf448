"""The bench runner on toy benches: the gate, the result file, --quick, the drawing."""

import argparse
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from harness import runner, timing
from harness.ranks import Ranks
from harness.ratios import Row, draw_ratios, make_row, ratios
from harness.runner import Bench, Report, WrongCall, main
from harness.timing import Comparison, compare, interleave, timed


def toy_rows(ratio: float = 2.0) -> list[Row]:
    comparison = Comparison(0.5, 0.5 * ratio, ratio, 0.9 * ratio, 1.1 * ratio)
    common: dict = {"unit": "calls/s", "amount": 1}
    return [
        make_row("addition", "3", "fast", "slow & <steady>", comparison, bar=1.5, **common),
        make_row("product", "4", "faster", "slow & <steady>", comparison, **common),
    ]


def toy(check: Callable[[bool], None] = lambda quick: None, ratio: float = 2.0, name: str = "toy") -> Bench:
    run = ratios(lambda quick: toy_rows(ratio))
    return Bench(name=name, description="a toy", check=check, run=run, draw=draw_ratios)


def wrong(quick: bool) -> None:
    raise AssertionError("5 is not 4")


@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_a_wrong_result_is_refused(quick, tmp_path, capsys):
    assert main(["toy", *quick], [toy(wrong)], tmp_path) == 1
    printed = capsys.readouterr()
    assert "nothing is timed" in printed.out and "calls/s" not in printed.out
    assert "5 is not 4" in printed.err and list(tmp_path.iterdir()) == []


def test_the_result_file_and_its_picture(tmp_path, capsys):
    assert main(["toy"], [toy()], tmp_path) == 0
    assert "all 1 bars hold" in capsys.readouterr().out
    result = json.loads((tmp_path / "cpu" / "toy.json").read_text())
    assert list(result) == "schema bench description date machine commit dirty versions rows".split()
    assert result["schema"] == 1 and result["bench"] == "toy"
    assert set(result["machine"]) == {"cpu", "cores", "threads", "gpu"}
    assert result["versions"]["torch"] == torch.__version__
    required, free = result["rows"]
    names = {"case": "addition", "shape": "3", "provider": "fast", "baseline": "slow & <steady>", "unit": "calls/s"}
    ratio = {"value": 2.0, "baseline_value": 1.0, "ratio": 2.0, "ratio_min": 1.8, "ratio_max": 2.2}
    assert required == {**names, **ratio, "bar": 1.5, "ok": True} and free["bar"] is None and free["ok"]
    texts = list(ElementTree.parse(tmp_path / "cpu" / "toy.svg").getroot().itertext())
    assert texts.count("2.00 (2 calls/s)") == 2


def test_results_are_overwritten_but_by_quick(tmp_path, capsys):
    for ratio, code, ok in ((2.0, 0, True), (1.4, 1, False)):
        assert main(["toy"], [toy(ratio=ratio)], tmp_path) == code
        rows = json.loads((tmp_path / "cpu" / "toy.json").read_text())["rows"]
        assert [row["ratio"] for row in rows] == [ratio, ratio] and rows[0]["ok"] == ok
    assert "1 of 1 bars missed: addition 3: 1.400 < 1.5" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in (tmp_path / "cpu").iterdir()}
    assert main(["toy", "--quick"], [toy(ratio=1.3)], tmp_path) == 0
    assert {path: path.read_bytes() for path in (tmp_path / "cpu").iterdir()} == before
    assert "nothing is written" in capsys.readouterr().out


def test_results_of_a_changed_tree_are_refused_before_they_are_measured(tmp_path, capsys, monkeypatch):
    git: dict = {"commit": "abc", "dirty": True}
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    monkeypatch.setattr(runner, "commit", lambda: dict(git))
    assert main(["toy"], [toy(lambda quick: print("checked"))], tmp_path) == 0
    printed = capsys.readouterr().out
    assert printed.index("files besides bench/results differ from the commit") < printed.index("checked")
    assert "all 1 bars hold" in printed and list(tmp_path.iterdir()) == []
    git = {"commit": "abc", "dirty": False}
    assert main(["toy"], [toy(lambda quick: git.update(commit="def"))], tmp_path) == 0
    path = tmp_path / "cpu" / "toy.json"
    assert json.loads(path.read_text())["commit"] == "abc", "the commit at which it began"
    assert "commit abc" in path.with_suffix(".svg").read_text()
    before = path.read_bytes()
    capsys.readouterr()
    assert main(["toy"], [toy(lambda quick: git.update(dirty=True))], tmp_path) == 0, "edited while it ran"
    git = {"commit": None, "dirty": None}  # not in git
    assert main(["toy"], [toy()], tmp_path) == 0
    assert capsys.readouterr().out.count("nothing is written: files besides bench/results differ") == 2
    assert path.read_bytes() == before


def test_a_folder_gets_results_of_a_part_and_of_a_changed_tree(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "commit", lambda: {"commit": "abc", "dirty": True})
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    asked: list[bool] = []
    for options in ([], ["--quick"]):
        arguments = ["toy", *options, "--into", str(tmp_path / "there")]
        assert main(arguments, [toy(asked.append)], tmp_path / "results") == 0
    assert asked == [False, True] and not (tmp_path / "results").exists()
    assert "differ from the commit" not in capsys.readouterr().out
    whole, quick = (json.loads((tmp_path / "there" / name).read_text()) for name in ("toy.json", "toy-quick.json"))
    assert whole["dirty"] and quick["dirty"] and "options" not in whole and quick["options"] == {"quick": True}
    assert (tmp_path / "there" / "toy-quick.svg").exists()


def test_a_folder_may_have_the_name_of_a_bench(tmp_path, monkeypatch, capsys):
    """The folder's bench was run, or the folder was taken off the command."""
    monkeypatch.chdir(tmp_path)
    benches = [toy(name="other"), toy(name="toy")]
    for folder in ("other", "toy"):
        assert main(["toy", "--quick", "--into", folder], benches, tmp_path) == 0
        assert [path.name for path in (tmp_path / folder).rglob("*.json")] == ["toy-quick.json"]


def test_the_list_of_benches(capsys, tmp_path):
    benches = [toy(wrong, name="one"), toy(wrong, name="two")]
    assert main([], benches, tmp_path) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]
    assert main(["three"], benches, tmp_path) == 2
    assert "three" in capsys.readouterr().err


def test_options_problems_and_further_files(tmp_path, capsys):
    def run(options: argparse.Namespace) -> Report:
        if options.size == 0:
            raise WrongCall("--size 0 is nothing")
        return Report(["a table"], {"size": options.size}, ["too small"], "", lambda folder: (folder / "more").touch())

    options = {"--size": {"type": int}}
    bench = Bench(name="sized", description="", run=run, draw=lambda path: None, options=options, note="a note")
    assert main(["sized", "--size", "4"], [toy(), bench], tmp_path) == 1
    printed = capsys.readouterr().out
    assert "nothing is written: called with an option" in printed and "sized: too small" in printed
    assert list(tmp_path.iterdir()) == []
    assert main(["sized", "--size", "0"], [toy(), bench], tmp_path) == 2
    assert "sized: --size 0 is nothing" in capsys.readouterr().out
    assert main(["sized"], [toy(), bench], tmp_path) == 1 and (tmp_path / "cpu" / "more").exists()
    assert json.loads((tmp_path / "cpu" / "sized.json").read_text())["note"] == "a note"


def test_ratios_are_taken_round_by_round():
    assert compare([1.0, 2.0, 4.0], [2.0, 2.0, 12.0]) == Comparison(2.0, 2.0, ratio=2.0, ratio_min=1.0, ratio_max=3.0)


def test_samples_are_interleaved_in_alternating_order():
    calls: list[str] = []
    samples = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in ("a", "b")}
    assert interleave(samples, 3) == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}
    assert calls == ["a", "b", "b", "a", "a", "b"]


def test_a_sample_leaves_out_its_first_call(monkeypatch):
    clock, calls = [0.0], iter([100.0, 1.0, 2.0, 6.0])  # seconds that each takes
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert timed(lambda: clock.insert(0, clock[0] + next(calls)), 3)() == 3.0 and not list(calls)


def rank_calls(factor: int) -> dict[str, Callable]:
    rank = torch.distributed.get_rank()
    return {"seconds": lambda: float(factor * rank), "threads": torch.get_num_threads, "fail": lambda: 1 / rank}


def test_ranks_run_calls_and_report_failures(forked):
    with Ranks(2, 1, rank_calls, 3) as ranks:
        assert ranks.call("threads") == [1, 1]
        assert ranks.sample("seconds") == 3.0
        with pytest.raises(RuntimeError, match="rank 0 of 2: (.|\n)*ZeroDivisionError"):
            ranks.call("fail")
