"""All-reduce algorithms of data parallelism: what each sends, step by step, and the seconds that this takes.

Belongs here: one cost function for each algorithm, without process groups or tensors. reductions.py runs them.

P ranks hold N values each and end with the sum. With P not a power of two, the butterfly and halving-doubling fold:
P - 2^k ranks send theirs to a partner first, and get the sums last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from tpformer.distributed import links
from tpformer.distributed.links import Link


class Traffic(NamedTuple):
    """What one all-reduce sends."""

    steps: int
    """Messages that wait for one another, one after the other."""
    messages: int
    """Messages that all ranks together send."""
    values: float
    """Values in all messages together."""
    busiest: float
    """Values that the rank with the most to send sends."""


def driver(ranks: int, values: float) -> Traffic:
    """All send to one rank, which adds and sends the sum back, one message after the other: 2 (P-1) of N values."""
    return Traffic(2 * (ranks - 1), 2 * (ranks - 1), 2 * (ranks - 1) * values, (ranks - 1) * values)


def all_pairs(ranks: int, values: float) -> Traffic:
    """Every rank sends all of its values to every other one: P (P-1) messages of N values."""
    return Traffic(ranks - 1, ranks * (ranks - 1), ranks * (ranks - 1) * values, (ranks - 1) * values)


def ring(ranks: int, values: float) -> Traffic:
    """Reduce-scatter and all-gather around a ring: 2 (P-1) steps, in each of which every rank sends N / P values."""
    steps = 2 * (ranks - 1)
    return Traffic(steps, ranks * steps, steps * values, steps * values / ranks)


def tree(ranks: int, values: float) -> Traffic:
    """Sums go up a binary tree and come down: 2 (P-1) messages of N values, from a rank with children at most 3."""
    steps, children = 2 * math.floor(math.log2(ranks)), min(2, ranks - 1)
    inner = ranks > 4  # then a rank has a parent and two children
    return Traffic(steps, 2 * (ranks - 1), 2 * (ranks - 1) * values, (children + inner) * values)


def butterfly(ranks: int, values: float) -> Traffic:
    """Recursive doubling: in log2 P steps every rank exchanges all of its values with a partner."""
    doublings, folded = levels(ranks)
    core = (ranks - folded) * doublings
    messages, most = core + 2 * folded, doublings + (folded > 0)
    return Traffic(doublings + 2 * (folded > 0), messages, messages * values, most * values)


def halving_doubling(ranks: int, values: float) -> Traffic:
    """Recursive halving, then doubling: 2 log2 P steps, in which a rank sends 2 (P-1) / P of its values."""
    doublings, folded = levels(ranks)
    core = ranks - folded
    each = 2 * (core - 1) / core * values
    return Traffic(
        2 * doublings + 2 * (folded > 0),
        2 * doublings * core + 2 * folded,
        core * each + 2 * folded * values,
        each + (folded > 0) * values,
    )


def parameter_server(ranks: int, values: float) -> Traffic:
    """Each rank serves 1 / P of the values, to which the others push gradients and from which they pull the sums."""
    each = 2 * (ranks - 1) / ranks * values
    return Traffic(2 * (ranks - 1), 2 * ranks * (ranks - 1), ranks * each, each)


def hierarchical(inside: int, nodes: int, values: float) -> Traffic:
    """A ring in each node of `inside` ranks adds up the values, each rank's part goes around a ring across the nodes,
    and the rings in the nodes collect the parts."""
    here, across = ring(inside, values), ring(nodes, values / inside)
    return Traffic(
        here.steps + across.steps,
        nodes * here.messages + inside * across.messages,
        nodes * here.values + inside * across.values,
        here.busiest + across.busiest,
    )


def levels(ranks: int) -> tuple[int, int]:
    """(log2 of the largest power of two among the ranks, how many ranks it leaves out)."""
    found = ranks.bit_length() - 1
    return found, ranks - (1 << found)


COSTS = (driver, all_pairs, ring, tree, butterfly, halving_doubling, parameter_server)
ALGORITHMS: dict[str, Callable[[int, float], Traffic]] = {cost.__name__: cost for cost in COSTS}
HIERARCHICAL = "hierarchical"


def all_reduce_seconds(algorithm: str, nbytes: float, inside: int, nodes: int, fast: Link, slow: Link) -> float:
    """Seconds of an all-reduce of `nbytes` over nodes of `inside` ranks each.

    fast: between ranks of a node. slow: one rank's way to other nodes. ring: each adapter of a node carries a ring of
    its own. hierarchical: the ranks of a node reduce the bytes in a ring, and each rank's part goes around a ring
    across the nodes. The others send over the slow links as soon as there are several nodes.
    """
    ranks = inside * nodes
    if ranks == 1:
        return 0.0
    if algorithm == HIERARCHICAL:
        here, across = ring(inside, nbytes), ring(nodes, nbytes / inside)
        return fast.seconds(here.steps, here.busiest) + slow.seconds(across.steps, across.busiest)
    if algorithm == "ring":
        return links.all_reduce_seconds(nbytes, inside, nodes, fast, slow)
    found = ALGORITHMS[algorithm](ranks, nbytes)
    return (fast if nodes == 1 else slow).seconds(found.steps, found.busiest)
