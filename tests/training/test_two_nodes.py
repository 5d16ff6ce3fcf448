"""Two nodes that only a network joins: context-parallel ranks on both train the run of one process.

A node is a network and a process namespace of its own, so the ranks neither share memory nor reach a loopback that the
other listens on. It takes root and iproute2.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ROOT
from testing import assert_same
from tiny_runs import losses, write_run

RUN = {
    "model": {"seq_length": 32, "n_layers": 2, "hidden_size": 32, "n_heads": 4, "position": "rope", "dropout": 0.1},
    "train": {"steps": 3, "global_batch_size": 4, "dtype": "float64", "device": "cpu"},
    "log": {"interval": 1},
}
LAYOUTS = [{"context_parallel": 2}, {"context_parallel": 2, "tensor_parallel": 2}]


class Node:
    """A network namespace with one interface, and a process namespace in which commands run."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        forever = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "sleep", "infinity"]
        self.process = subprocess.Popen(forever, start_new_session=True)

    def inside(self, *words: str) -> list[str]:
        """A command in the node."""
        child = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0]
        return ["nsenter", f"--target={child}", "--net", "--pid", "--mount", *words]

    def connect(self) -> None:
        for words in (("addr", "add", f"{self.address}/24", "dev", self.name), *self._up()):
            subprocess.run(self.inside("ip", *words), check=True)

    def _up(self) -> Iterator[tuple[str, ...]]:
        for device in (self.name, "lo"):
            yield "link", "set", device, "up"


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    tools = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if tools or os.geteuid() != 0 or subprocess.run(["unshare", "--net", "--pid", "--fork", "true"]).returncode:
        pytest.skip(f"no network namespaces here: {', '.join(tools) or 'they need root'}")
    found = [Node("tpf0", "10.213.7.1"), Node("tpf1", "10.213.7.2")]
    try:
        while any(not Path(f"/proc/{n.process.pid}/task/{n.process.pid}/children").read_text() for n in found):
            pass
        ends = [[each.name, "netns", str(each.process.pid)] for each in found]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1]], check=True)
        for node in found:
            node.connect()
        yield found
    finally:
        for node in found:
            os.killpg(node.process.pid, 9)
            node.process.wait()


def train(nodes: list[Node], run: str, ranks: int) -> None:
    """`tpformer pretrain` with the ranks in order over the nodes, as a launcher would start them."""
    started, each = [], ranks // len(nodes)
    for rank in range(ranks):
        node = nodes[rank // each]
        told = {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each),
            "MASTER_ADDR": nodes[0].address, "MASTER_PORT": "29517", "GLOO_SOCKET_IFNAME": node.name,
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        words = node.inside(sys.executable, "-m", "tpformer.cli", "pretrain", run)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(words, env=os.environ | told, **pipes))
    for process in started:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output


@pytest.mark.proof
@pytest.mark.parametrize("parallel", LAYOUTS, ids=["cp", "cp and tp"])
def test_ranks_of_two_nodes_share_samples(commands, nodes, tmp_path, tiny_values, parallel) -> None:
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
            code, _, err = commands.run("pretrain", run)
            assert code == 0, err
    one, two = (losses(tmp_path / name / "run") for name in ("one", "two"))
    assert len(one) == 3
    assert_same(two, one)
