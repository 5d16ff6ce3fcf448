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
import torch.nn.functional as F
from commands import ROOT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from turns import of_turn

Function = tuple[str, str]  # file in the repository, qualified name: ("tpformer/cli/run.py", "parse_run")
Order = dict[tuple[Function | None, Function], int]
PAGE = (ROOT / "docs/architecture.md").read_text()
ITEM = re.compile(r"^( *)- (?:`(?P<file>[\w/.]+)`: )?`(?P<name>[\w.]+)`", re.M)
# command -> whose ways are its
WAYS = {
    "data build text --out prose": (),
    "pretrain run.toml --train.steps 1": ("a batch", "a config key", "a checkpoint: saved"),
    "pretrain run.toml --train.steps 2 --run.resume True": ("a checkpoint: loaded",),
    "export runs/run --format hf --out model": (),
    "import model --out runs/imported": ("a weight: imported",),
    "generate model --max-new-tokens 2": ("a weight: loaded", "a token"),
}


@functools.cache
def library_file(name: str) -> str | None:
    """The file in the repository, by a code object's name of it; None for what is not of the library."""
    path = Path(name).resolve()  # tpformer/kernels is a link
    inside = path.is_file() and any(path.is_relative_to(ROOT / package) for package in ("tpformer", "kernels"))
    return str(path.relative_to(ROOT)) if inside else None


def function_of(frame: FrameType) -> Function | None:
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
    above: dict[int, Function] = {}  # by indentation
    found, file = [], ""
    for item in ITEM.finditer(section):
        file, depth = item["file"] or file, len(item[1])
        above = {each: function for each, function in above.items() if each < depth}
        found.append((above[max(above)] if above else None, (file, item["name"])))
        above[depth] = found[-1][1]
    assert len(found) == len(re.findall(r"^ *- ", section, re.M)), f"{title}: an item is not read"
    return found


def check(title: str, order: Order) -> None:
    found = items(title)
    assert len(found) > 4
    last: dict[Function | None, int] = {}
    for pair in found:
        caller, callee = pair
        names = f"{title}: {':'.join(callee)} is"
        assert (None, callee) in order, f"{names} not called"
        assert pair in order, f"{names} not called by {caller}, but by {[up for up, down in order if down == callee]}"
        assert order[pair] >= last.get(caller, -1), f"{names} called before the item above it"
        last[caller] = order[pair]


def _block() -> Order:
    from tpformer.layers import TensorParallel, transformer_block

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    tp = TensorParallel(mesh["tp"], sequence_parallel=True, transport="fused")
    block = transformer_block(8, n_heads=2, tp=tp)
    x = torch.randn(1, 2, 8, requires_grad=True)
    with recorded_calls() as order:
        block(x).sum().backward()
    return order


def test_the_way_of_an_x(interpreted):
    check("The way of an x", interpreted(2).run(_block)[0])


class Plain(nn.Module):
    """A layer of a model in plain PyTorch: two heads, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last_norm = nn.LayerNorm(8), nn.LayerNorm(8)
        self.n_heads, (self.query, self.key, self.value, self.out) = 2, (nn.Linear(8, 8) for _ in range(4))
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        linears = self.query, self.key, self.value
        heads = [linear(h).unflatten(2, (self.n_heads, -1)).transpose(1, 2) for linear in linears]
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.last_norm(x))))


def _in_place() -> Order:
    from tpformer import parallelize

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), Plain(), Plain(), nn.Linear(8, 16))
    tokens = torch.arange(12).view(2, 6)
    with recorded_calls() as order:
        parallelize(model, mesh["tp"], sequence_parallel=True, example=(tokens,))
        model(tokens)
    return order


def test_the_way_of_a_model(ranks):
    check("The way of a model: in place", ranks(2).run(_in_place)[0])


def recording(*arguments: str) -> None:
    """A `tpformer` command whose calls are written to the current directory when its process leaves."""
    from tpformer import cli
    from tpformer.inference import generate  # noqa: F401  torch's own imports are not recorded, as they take most of it
    from tpformer.training import export, importing, trainer  # noqa: F401

    with recorded_calls() as order:
        cli.main(list(arguments))
    Path("calls.json").write_text(json.dumps([[*pair, number] for pair, number in order.items()]))


def recorded(commands, line: str) -> Order:
    code, out, err = commands.call(recording, *line.split()).finish()
    assert code == 0, out + err
    rows = json.loads(Path("calls.json").read_text())
    return {(None if caller is None else tuple(caller), tuple(callee)): number for caller, callee, number in rows}


@pytest.fixture(scope="module")
def runs(commands, tmp_path_factory) -> dict[str, Order]:
    """A run of one process, one that continues it, an import of its export, and text from the export."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").mkdir()
    (folder / "text/a.txt").write_text("to be read, and read again. " * 200)
    model = "n_layers = 1\nhidden_size = 32\nn_heads = 2\nseq_length = 16\n"
    (folder / "run.toml").write_text(f'[data]\ntrain = ["prose"]\n[model]\n{model}[train]\nglobal_batch_size = 2\n')
    with chdir(folder):
        return {line: recorded(commands, line) for line in WAYS}


@of_turn(2)
@pytest.mark.parametrize(("line", "thing"), [(line, thing) for line, things in WAYS.items() for thing in things])
def test_the_way_of(runs, line, thing):
    check(f"The way of {thing}", runs[line])
