"""The lists of docs/architecture.md are true: each function is called by the one above it, in the list's order."""

import functools
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parent.parent
Function = tuple[str, str]  # file in the repository, qualified name: ("tpformer/cli/run.py", "parse_run")
Order = dict[tuple[Function | None, Function], int]
PAGE = (ROOT / "docs/architecture.md").read_text()
ITEM = re.compile(r"^( *)- (?:`(?P<file>[\w/.]+)`: )?`(?P<name>[\w.]+)`", re.M)


@functools.cache
def library_file(name: str) -> str | None:
    """The file in the repository, by a code object's name of it; None for what is not of the library."""
    path = Path(name).resolve()  # tpformer/kernels is a link
    inside = path.is_file() and any(path.is_relative_to(ROOT / package) for package in ("tpformer", "kernels"))
    return str(path.relative_to(ROOT)) if inside else None


def function_of(frame: FrameType) -> Function | None:
    """The function of the library that a frame runs; None for what is not of the library."""
    file = library_file(frame.f_code.co_filename)
    return None if file is None else (file, frame.f_code.co_qualname)


@contextmanager
def recorded_calls() -> Iterator[Order]:
    """Yield (caller, callee) -> how many pairs had been seen before, of this thread and those that it starts.

    Callers are all functions that had not yet returned, and None, which says when a function was first called. A trace
    function is called for functions alone, a profile function for C's and for every return as well: in Triton's
    interpreter that is three times as often.
    """
    order: Order = {}

    def called(frame: FrameType, event: str, _: object) -> None:
        function, above = function_of(frame), frame.f_back
        if function is not None:
            order.setdefault((None, function), len(order))
            while above is not None:
                order.setdefault((function_of(above), function), len(order))
                above = above.f_back

    before = sys.gettrace()
    threading.settrace(called)
    sys.settrace(called)
    try:
        yield order
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]


def items(title: str) -> list[tuple[Function | None, Function]]:
    """The (caller, callee) pairs of a section's list, in order. An item without a file has that of the item above."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    above: list[tuple[int, Function]] = []
    found: list[tuple[Function | None, Function]] = []
    file = ""
    for item in ITEM.finditer(section):
        file = item["file"] or file
        function = (file, item["name"])
        above = [each for each in above if each[0] < len(item[1])]
        found.append((above[-1][1] if above else None, function))
        above.append((len(item[1]), function))
    assert len(found) == len(re.findall(r"^ *- ", section, re.M)), f"{title}: an item is not read"
    return found


def check(title: str, order: Order) -> None:
    found = items(title)
    assert len(found) > 4
    last: dict[Function | None, int] = {}
    for pair in found:
        caller, callee = pair
        names = ":".join(callee)
        assert (None, callee) in order, f"{title}: {names} is not called"
        callers = sorted({":".join(up) for up, down in order if down == callee and up is not None})
        assert pair in order, f"{title}: {names} is not called by {caller}, but by {callers}"
        assert order[pair] >= last.get(caller, -1), f"{title}: {names} is called before the item above it"
        last[caller] = order[pair]


def _block() -> Order:
    from tpformer.layers import TensorParallel, TransformerBlock

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    tp = TensorParallel(mesh["tp"], sequence_parallel=True, transport="fused")
    block = TransformerBlock(8, n_heads=2, tp=tp)
    x = torch.randn(1, 2, 8, requires_grad=True)
    with recorded_calls() as order:
        block(x).sum().backward()
    return order


def test_the_way_of_an_x(interpreted):
    check("The way of an x", interpreted(2).run(_block)[0])


def recording(*arguments: str) -> None:
    """A `tpformer` command whose calls are written to the current directory when its process leaves."""
    from tpformer import cli
    from tpformer.inference import generate  # noqa: F401  torch's own imports are not recorded, as they take most of it
    from tpformer.training import export, importing, trainer  # noqa: F401

    with recorded_calls() as order:
        cli.main(list(arguments))
    Path("calls.json").write_text(json.dumps([[*pair, number] for pair, number in order.items()]))


def recorded(commands, *arguments: str) -> Order:
    code, out, err = commands.call(recording, *arguments).finish()
    assert code == 0, out + err
    rows = json.loads(Path("calls.json").read_text())
    return {(None if caller is None else tuple(caller), tuple(callee)): number for caller, callee, number in rows}


@pytest.fixture(scope="module")
def runs(commands, tmp_path_factory) -> list[Order]:
    """A run of one process, one that continues it, an import of its export, and text from the export."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").mkdir()
    (folder / "text/a.txt").write_text("to be read, and read again. " * 200)
    model = "n_layers = 1\nhidden_size = 32\nn_heads = 2\nseq_length = 16\n"
    (folder / "run.toml").write_text(f'[data]\ntrain = ["prose"]\n[model]\n{model}[train]\nglobal_batch_size = 2\n')
    with chdir(folder):
        assert commands.run("data", "build", "text", "--out", "prose")[0] == 0
        trained = [
            recorded(commands, "pretrain", "run.toml", "--train.steps", "1"),
            recorded(commands, "pretrain", "run.toml", "--train.steps", "2", "--run.resume", "True"),
        ]
        assert commands.run("export", "runs/run", "--format", "hf", "--out", "model")[0] == 0
        return [
            *trained,
            recorded(commands, "import", "model", "--out", "runs/imported"),
            recorded(commands, "generate", "model", "--max-new-tokens", "2"),
        ]


@pytest.mark.parametrize(
    ("title", "number"),
    [
        ("The way of a batch", 0),
        ("The way of a config key", 0),
        ("The way of a checkpoint: saved", 0),
        ("The way of a checkpoint: loaded", 1),
        ("The way of a weight: imported", 2),
        ("The way of a weight: loaded", 3),
        ("The way of a token", 3),
    ],
)
def test_the_way_of(runs, title, number):
    check(title, runs[number])
