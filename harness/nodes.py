"""Nodes that only a network joins, on one machine: each a network and a process namespace of its own.

Belongs here: making and ending them, and starting the ranks of a run in them. It takes root, or a user namespace, and
iproute2. Ranks in different nodes neither share memory nor reach a loopback that the other listens on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
PORT = "29517"
BURST = "256kb"  # what a limited link lets through at once


def obstacle(rate: str | None = None) -> str | None:
    """What this machine lacks; None if nodes can be made here. rate: whether links are to be limited."""
    tools = [name for name in ("ip", "unshare", "nsenter", *(["tc"] if rate else [])) if shutil.which(name) is None]
    if tools:
        return f"nodes need {', '.join(tools)}"
    if os.geteuid() != 0:
        return "network namespaces need root: put `unshare --map-root-user --net` before the command"
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True)
    return "network namespaces are not allowed here" if tried.returncode else None


class Node:
    """A network namespace with one interface, and a process namespace in which commands run."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        forever = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "sleep", "infinity"]
        self.process = subprocess.Popen(forever, start_new_session=True)
        self._children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")

    @property
    def ready(self) -> bool:
        """Whether commands can run in it."""
        return bool(self._children.read_text())

    def inside(self, *words: str) -> list[str]:
        """A command in the node."""
        child = self._children.read_text().split()[0]
        return ["nsenter", f"--target={child}", "--net", "--pid", "--mount", *words]

    def connect(self, rate: str | None) -> None:
        """Give the interface its address. rate: of what it sends, as tc writes it, such as 1gbit."""
        limit = f"tc qdisc add dev {self.name} root tbf rate {rate} burst {BURST} latency 400ms".split()
        for words in (
            ["ip", "addr", "add", f"{self.address}/24", "dev", self.name],
            *(["ip", "link", "set", device, "up"] for device in (self.name, "lo")),
            *([limit] if rate else []),
        ):
            subprocess.run(self.inside(*words), check=True)


def sent_bytes(interface: str) -> int:
    """What this process' network namespace has sent over an interface."""
    found = subprocess.run(["ip", "-s", "-j", "link", "show", interface], check=True, capture_output=True, text=True)
    return json.loads(found.stdout)[0]["stats64"]["tx"]["bytes"]


@contextmanager
def two_nodes(rate: str | None = None) -> Iterator[list[Node]]:
    """Two nodes that a link joins, of unlimited rate unless one is given."""
    found = [Node("tpf0", "10.213.7.1"), Node("tpf1", "10.213.7.2")]
    try:
        while not all(node.ready for node in found):
            time.sleep(0.01)
        ends = [[each.name, "netns", str(each.process.pid)] for each in found]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1]], check=True)
        for node in found:
            node.connect(rate)
        yield found
    finally:
        for node in found:
            os.killpg(node.process.pid, 9)
            node.process.wait()


def start_ranks(
    nodes: Sequence[Node], ranks: int, words: Sequence[str], told: Mapping[str, str] | None = None
) -> list[subprocess.Popen]:
    """A command on each rank, in order over the nodes, as a launcher would start them. told: further variables."""
    started, each = [], ranks // len(nodes)
    for rank in range(ranks):
        node = nodes[rank // each]
        place = {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each),
            "MASTER_ADDR": nodes[0].address, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": node.name,
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        started.append(
            subprocess.Popen(
                node.inside(*words),
                env={**os.environ, **place, **(told or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return started
