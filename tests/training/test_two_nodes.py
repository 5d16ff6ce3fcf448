"""Two nodes that only a network joins (harness/nodes.py): context-parallel ranks on both train the run of one process,
and replicas that train by themselves send what the formula says over a slow link."""

import json
import sys
from collections.abc import Iterator

import pytest
from commands import python
from testing import assert_same
from tiny_runs import losses, write_run
from turns import in_turns, of_turn

from harness.nodes import Node, obstacle, start_ranks, two_nodes

RUN = {
    "model": {"seq_length": 32, "n_layers": 2, "hidden_size": 32, "n_heads": 4, "position": "rope", "dropout": 0.1},
    "train": {"steps": 3, "global_batch_size": 4, "dtype": "float64", "device": "cpu"},
    "log": {"interval": 1},
}
LAYOUTS = [{"context_parallel": 2}, {"context_parallel": 2, "tensor_parallel": 2}]


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    if reason := obstacle():
        pytest.skip(reason)
    with two_nodes() as found:
        yield found


def train(nodes: list[Node], run: str, ranks: int) -> None:
    """`tpformer pretrain` with the ranks in order over the nodes."""
    for process in start_ranks(nodes, ranks, [sys.executable, "-m", "tpformer.cli", "pretrain", run]):
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output


@pytest.mark.parametrize("parallel", in_turns(LAYOUTS, first=5), ids=["cp", "cp and tp"])
def test_ranks_of_two_nodes_share_samples(done, nodes, tmp_path, tiny_values, parallel) -> None:
    """With tensor parallelism each node has the two ranks of a group, which share memory; keys cross the network."""
    data = {"data": {"train": tiny_values["data"]["train"]}}
    for name, layout in (("one", {}), ("two", parallel)):
        folder = tmp_path / name
        folder.mkdir()
        values = {**RUN, **data, "parallel": layout, "run": {"dir": str(folder / "run")}}
        run = write_run(folder, values)
        if layout:
            train(nodes, run, 2 * layout.get("tensor_parallel", 1))
        else:
            done("pretrain", run)
    one, two = (losses(tmp_path / name / "run") for name in ("one", "two"))
    assert len(one) == 3
    assert_same(two, one)


@of_turn(2)
def test_replicas_on_two_sites_send_what_the_formula_says(tmp_path) -> None:
    """Bytes by the kernel's count: those of a round's parameters, and of headers and notes what every step sends."""
    if reason := obstacle("any"):
        pytest.skip(reason)
    python("-m", "bench", "two_sites", "--rate", "10Gb/s", "--quick", "--into", str(tmp_path))
    (path,) = tmp_path.glob("*.json")
    rows = {row["exchange"]: row for row in json.loads(path.read_text())["rows"]}
    assert len(rows) == 7
    for exchange, row in rows.items():
        assert row["formula_sent"] <= row["sent"] <= 1.03 * row["formula_sent"] + 4096, exchange
    sent = {exchange: row["sent"] for exchange, row in rows.items()}
    assert sent["diloco every=1"] > 5 * sent["diloco every=10"] > 5 * sent["diloco every=100"]
