"""`python -m bench gpu` without a GPU: order, skipping, limits, what is left when it is killed, the table; items that
are toys, and the cheapest real one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from commands import ROOT
from rich.console import Console

from bench.__main__ import KERNELS
from bench.gpu import command, figures, schedule, state
from bench.gpu.items import INTO, ITEMS, Command, Item
from bench.gpu.schedule import FILL, REHEARSE, Session, Stop, order, run
from bench.gpu.state import FAILED, LIMIT, MEASURED, MISSED, STOPPED, UNFINISHED, State
from bench.gpu.table import LINES, table
from harness import sources

WRITES = 'import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(\'{"counts": {"passed": 3}}\')'
# neither it nor its child ends when it is asked to
LONG = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "300"], env=os.environ | {"STARTED_FOR": sys.argv[1]})
print("begun", os.getpid(), flush=True)
time.sleep(300)
"""


def toy(name: str, value: int = 10, seconds: int = 1, program: str = WRITES, sources: tuple[str, ...] = ()) -> Item:
    """An item that runs a program, which is told where its result goes."""
    of_program = Command(("-c", program, f"{INTO}/{name}.json"), f"{name}.json")
    return Item(name, value, seconds, of_program, of_program, sources, "a bar", "a prediction")


def session(folder: Path, items: Sequence[Item], seconds: float = 100.0, say: Callable = print, **machine) -> Session:
    of = {"GPU": "toy", **machine}
    return Session(items, folder, State(folder / "state.json", of), time.monotonic() + seconds, Stop(), say=say)


def outcomes(folder: Path) -> dict[str, str]:
    return {name: entry["outcome"] for name, entry in json.loads((folder / "state.json").read_text())["items"].items()}


def begun(folder: Path, items: Sequence[Item], seconds: float = 100.0, **machine) -> list[str]:
    """The items that a call begins, in order."""
    said: list[str] = []
    run(session(folder, items, seconds, said.append, **machine))
    return [text.partition(":")[0] for text in said if "begins" in text]


def test_the_order_is_value_per_second_and_what_failed_comes_first(tmp_path):
    items = [toy("slow", 20, 10), toy("quick", 20, 1), toy("wrong", 1, 1, "raise SystemExit(3)"), toy("long", 50, 10)]
    assert begun(tmp_path, items) == ["quick", "long", "slow", "wrong"]
    assert outcomes(tmp_path)["wrong"] == FAILED
    (tmp_path / "more").write_text("")
    more = [*items, toy("new", 30, 1)]
    assert begun(tmp_path, more) == ["wrong", "new"], "what is measured is skipped, what failed comes first"


def test_measured_seconds_replace_estimates(tmp_path):
    items = [toy("first", 10, 60), toy("second", 10, 50)]
    found = session(tmp_path, items)
    found.state.begin(items[0], "of another source")
    found.state.end(items[0], MEASURED, 2.0, "")
    assert [item.name for item in order(found)] == ["first", "second"]
    assert found.state.expected(items[0]) == 2.0 and found.state.expected(items[1]) == 50
    found.state.begin(items[0], "again")
    found.state.end(items[0], LIMIT, 300.0, "")
    assert found.state.expected(items[0]) == 2.0, "what it took until it was ended says nothing"


def test_a_result_is_of_its_sources_its_machine_and_its_command(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.provenance.ROOT", tmp_path)
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b.py").write_text("1")
    items, folder = [toy("of a", sources=("a*.py",)), toy("of b", sources=("b*.py",))], tmp_path / "results"
    assert begun(folder, items) == ["of a", "of b"] and begun(folder, items) == []
    (tmp_path / "a.py").write_text("2")
    assert begun(folder, items) == ["of a"]
    (tmp_path / "b2.py").write_text("")
    assert begun(folder, items) == ["of b"]
    assert begun(folder, items, triton="3.6") == ["of a", "of b"]
    assert begun(folder, [toy("of a", program=WRITES + " # changed", sources=("a*.py",))], triton="3.6") == ["of a"]


def test_an_item_begins_only_if_its_time_is_left(tmp_path):
    items = [toy("large", 1000, 90), toy("small", 1, 2)]
    assert begun(tmp_path, items, seconds=20) == ["small"]
    assert begun(tmp_path, items, seconds=8) == []


def test_outcomes_by_exit_code_and_by_the_result(tmp_path):
    programs = {"missed": WRITES + "; sys.exit(1)", "nothing": "print('a word')", "broken": WRITES + "; sys.exit(2)"}
    run(session(tmp_path, [toy(name, program=program) for name, program in programs.items()]))
    assert outcomes(tmp_path) == {"missed": MISSED, "nothing": FAILED, "broken": FAILED}
    items = json.loads((tmp_path / "state.json").read_text())["items"]
    assert items["missed"]["figure"] == "3 passed" and items["nothing"]["figure"] == "a word"


def sleepers(folder: Path) -> set[str]:
    """The processes that are alive of the sleeps that LONG has started for a test with this folder."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            of_test = str(folder).encode() in (path.parent / "environ").read_bytes()
            found |= {path.parent.name} if of_test and path.read_bytes() == b"sleep\x00300\x00" else set()
    return found


def test_an_item_is_ended_at_its_limit_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(Item, "limit", property(lambda item: item.seconds))
    monkeypatch.setattr(schedule, "GRACE", 0.1)
    monkeypatch.setattr(schedule, "SPARE", 0)
    run(session(tmp_path, [toy("endless", 100, 1, LONG), toy("next", 1, 60)]))
    assert outcomes(tmp_path) == {"endless": LIMIT, "next": MEASURED} and not sleepers(tmp_path)
    monkeypatch.setattr(schedule, "MARGIN", 0)
    run(session(tmp_path / "another", [toy("endless", 10, 60, LONG)], seconds=1))
    assert outcomes(tmp_path / "another") == {"endless": STOPPED}, "the time was over"


def call_with_toys(folder: str) -> None:
    """`python -m bench gpu` with two items, of which the second one does not end."""
    os.chdir(folder)
    schedule.GRACE = 0.5
    command.ITEMS = (toy("first", 100, 1), toy("endless", 1, 1, LONG))
    command.cache.FOLDER, command.cache.PACKED = Path(folder, "cache"), Path(folder, "packed")
    command.torch.cuda.is_available = lambda: True
    command.torch.cuda.get_device_name = lambda: "toy"
    command.torch.backends.cudnn.version = lambda: 0  # a build of torch with cuDNN asks the GPU
    sys.exit(command.main(["--out", folder]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_is_done_outlives_the_call(number, commands, tmp_path):
    running = commands.call(call_with_toys, str(tmp_path))
    log = tmp_path / "logs" / "endless.txt"
    running.wait_until(lambda: log.exists() and "begun" in log.read_text(), "the second item has begun")
    running.wait_until(lambda: bool(sleepers(tmp_path)), "its child, a moment later, has the command's name")
    os.kill(running.pid, number)
    code, out, _ = running.finish(60)
    assert outcomes(tmp_path) == {"first": MEASURED, "endless": STOPPED if number == signal.SIGTERM else UNFINISHED}
    if number == signal.SIGTERM:
        assert code == 1 and not sleepers(tmp_path)
        assert "first" in out and "3 passed" in out and STOPPED in out, "the table comes"
    own = log.read_text().split()[1]
    deadline = time.monotonic() + 60
    while Path("/proc", own).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path("/proc", own).exists(), "an item ends with the call, even if that is killed"
    for pid in sleepers(tmp_path):  # of the call that could end nobody
        os.kill(int(pid), signal.SIGKILL)


def printed(found: Session, **identity: str) -> list[str]:
    console = Console(width=command.WIDTH, record=True, file=open(os.devnull, "w"))
    for part in table(found, identity):
        console.print(part, highlight=False, no_wrap=True, crop=True)
    return console.export_text().splitlines()


def test_the_table_has_at_most_40_lines_and_shows_what_failed(tmp_path):
    items = [*(toy(f"item {number}", 10) for number in range(80)), toy("wrong", 1)]
    found = session(tmp_path, items)
    for item in items[:60] + items[-1:]:
        found.state.begin(item, found.key(item))
        found.state.end(item, FAILED if item.name == "wrong" else MEASURED, 1.0, "a figure " * 40)
    lines = printed(found, GPU="toy")
    assert len(lines) <= LINES == 40 and max(map(len, lines)) <= command.WIDTH
    assert any(line.startswith("wrong") and FAILED in line for line in lines)
    assert any(line.startswith("not begun: 20: item 60, item 61") for line in lines)
    assert any(line.startswith("not shown: 30: item") for line in lines)


def test_a_changed_tree_and_an_older_source_are_marked(tmp_path, monkeypatch):
    git = {"commit": "abc", "dirty": True}
    monkeypatch.setattr(state, "commit", lambda: dict(git))
    items = [toy("measured", 20), toy("later", 10)]
    run(session(tmp_path, items[:1]))
    assert json.loads((tmp_path / "state.json").read_text())["items"]["measured"]["dirty"] is True
    git["dirty"] = False
    found = session(tmp_path, items)
    run(found)
    measured, later = (next(line for line in printed(found) if line.startswith(name)) for name in ("measured", "later"))
    assert "measured, changed tree" in measured and "changed" not in later
    found = session(tmp_path, items, triton="another")
    assert all("measured, older source" in line for line in printed(found) if line.startswith(("measured", "later")))


def test_a_tool_that_is_not_there_leaves_its_item_out(tmp_path):
    items = [toy("profile")._replace(tool=("no-such-profiler",))]
    found = session(tmp_path, items)
    assert order(found) == [] and "without their tool: profile (no-such-profiler)" in printed(found)
    assert [item.name for item in order(found._replace(way=REHEARSE))] == ["profile"]
    lines = printed(found._replace(items=ITEMS, way=FILL))
    assert any(line.startswith("without their tool: memcheck") for line in lines) and len(lines) <= LINES


def test_figures_of_every_kind_of_result(tmp_path):
    def row(case: str, provider: str, baseline: str, value: float, ratio: float, bar: float | None = None) -> dict:
        held = bar is None or ratio >= bar
        return {"case": case, "provider": provider, "baseline": baseline, "value": value, "unit": "us", "ratio": ratio,
                "bar": bar, "ok": held}  # fmt: skip

    rows = [
        row("x", "fused", "matmul", 9, 0.9, 0.97),
        row("geometric mean", "fused", "matmul", 9, 0.91, 0.97),
        row("geometric mean", "torch", "matmul", 9, 0.5),
        row("prediction: x", "predicted fused", "y", 9, 2.0),
    ]
    cases = {
        "0.910 of matmul, 0 of 2 bars": rows,
        "0.900 of matmul, 0 of 1 bars": rows[:1],
        "release 0.9 us; poll 0.2 us": [row("release", "measured", "kernels/cost.py", 1.2, 2.0),
                                        row("release", "measured", "kernels/cost.py", 0.9, 2.0),
                                        row("poll", "measured", "kernels/cost.py", 0.2, 1.0)],
        "490,415 tokens/s; 61,798 tokens/s": [{"tokens_per_second": 490415.2}, {"tokens_per_second": 61798.0}],
        "1 of 2 pass, not norm": [{"gate": "norm", "said": "error"}, {"gate": "rope", "said": ""}],
    }  # fmt: skip
    for words, found in cases.items():
        (tmp_path / "result.json").write_text(json.dumps({"rows": found}))
        assert figures.figure(tmp_path / "result.json") == words
    assert figures.figure(tmp_path / "ncu_matmul.txt") == "see ncu_matmul.txt"


def test_items_are_in_their_order_and_have_all_kernels():
    ordered = sorted(ITEMS, key=lambda item: -item.value / item.seconds)
    assert [item.name for item in ordered] == [item.name for item in ITEMS], "by value per second"
    assert len({item.name for item in ITEMS}) == len({item.command.result for item in ITEMS}) == len(ITEMS)
    assert "kernels/philox/kernel.py" in sources.files(["kernels/dropout/*.py"]), "what kernels import counts"
    for bench in KERNELS:
        assert {bench.name, f"whole {bench.name}"} <= {item.name for item in ITEMS}
    for item in ITEMS:
        assert sources.files(item.sources), item.name
        assert item.prediction or item.name.startswith("ncu "), f"{item.name}: it would be predicted afterwards"
    assert [item.name for item in command.chosen(["*tests*"], ITEMS)] == ["tests of fused kernels", "other tests"]
    with pytest.raises(ValueError, match="no item is called 'noorm'"):
        command.chosen(["noorm"], ITEMS)


@pytest.mark.proof
def test_a_rehearsal_of_a_real_item(tmp_path):
    """In a process of its own, as Triton looks for its driver once."""
    cheapest = ["-m", "bench", "gpu", "--rehearse", "--only", "ceilings", "--only", "update", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, *cheapest], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ceilings  ", "update  "))]
    assert len(lines) == 2 and all(line.count("rehearsed") == 2 for line in lines)
    written = json.loads((tmp_path / "update-quick.json").read_text())
    assert "rehearsal" in written["machine"]["gpu"] and written["rows"][0]["case"] == "adamw"
    assert {entry["figure"] for entry in json.loads((tmp_path / "state.json").read_text())["items"].values()} == {""}


@pytest.mark.proof
def test_a_backward_pretends_too(tmp_path):
    program = "import torch; x = torch.ones(1, device='cuda', requires_grad=True)"
    (tmp_path / "x.py").write_text(f"{program}; x.register_hook(lambda dx: print(dx.is_cuda)); x.sum().backward()")
    call = [sys.executable, "-m", "checks.driver.pretend", str(tmp_path / "x.py")]
    assert subprocess.run(call, cwd=ROOT, capture_output=True, text=True).stdout == "True\n", "or no kernel is taken"


def test_without_a_gpu_it_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: False)
    assert command.main(["--out", str(tmp_path)]) == 0 and "no CUDA device" in capsys.readouterr().out
    assert command.main(["--only", "noorm"]) == 2 and not list(tmp_path.iterdir())
