"""How long messages between ranks take, for models of cost.

Belongs here: a link, and the library's all-reduce over links. No process groups, no tensors.
"""

from __future__ import annotations

from typing import NamedTuple


class Link(NamedTuple):
    """A way between ranks: seconds of an empty message, and bytes/s of each rank's sends."""

    latency: float
    bandwidth: float

    def seconds(self, steps: float, nbytes: float) -> float:
        """Alpha-beta: steps * latency + bytes / bandwidth."""
        return steps * self.latency + nbytes / self.bandwidth


def all_reduce_seconds(nbytes: float, inside: int, nodes: int, fast: Link, slow: Link) -> float:
    """Seconds of the library's all-reduce of `nbytes`, a ring, over nodes of `inside` ranks each.

    It takes 2 (P-1) steps, in each of which every rank sends a P-th. fast: between ranks of a node. slow: one rank's
    way to other nodes; each adapter of a node carries a ring of its own.
    """
    ranks = inside * nodes
    if ranks == 1:
        return 0.0
    steps, busiest = 2 * (ranks - 1), 2 * (ranks - 1) * nbytes / ranks
    if nodes == 1:
        return fast.seconds(steps, busiest)
    bandwidth, hops = min(fast.bandwidth, inside * slow.bandwidth), steps * nodes / ranks
    latency = hops * slow.latency + (steps - hops) * fast.latency
    return latency + busiest / bandwidth


def all_to_all_seconds(nbytes: float, inside: int, nodes: int, fast: Link, slow: Link) -> float:
    """Seconds in which ranks, as in all_reduce_seconds, each send a part of their `nbytes` to every other one.

    All messages leave at once: those to other nodes by a rank's own adapter, beside those within its node.
    """
    ranks = inside * nodes
    if ranks == 1:
        return 0.0
    within = fast.seconds(1, (inside - 1) * nbytes / ranks)
    return within if nodes == 1 else max(within, slow.seconds(1, (ranks - inside) * nbytes / ranks))
