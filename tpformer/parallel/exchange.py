"""An Exchange: how the gradients of replicas become one. The protocol, FSDP2's own way, and the door to other ways.

Belongs here: what training asks of an Exchange, and finding one by the text of parallel.exchange. Whoever builds a
model makes one and hands it on. Other ways, to learn from, are in tpformer/lessons/, which only the door knows of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config import Layout, RunConfig
from tpformer.distributed.links import Link, all_reduce_seconds


class Exchange:
    """FSDP2's reduce-scatter and all-reduce. Another way overrides what it does otherwise."""

    sums_replicas = False
    """Whether `unit` adds up over dp_replicate, in FSDP2's place."""
    changes_losses = False
    """Whether losses depend on it, and with it on the layout."""
    takes_steps = False
    """Whether `steps` does all of it, on ranks that hold whole parameters, without FSDP2."""

    def check(self, layout: Layout, run: RunConfig | None = None) -> None:
        """ValueError, with the remedy, for a layout that it does not go with, or a run around it."""

    def unit(self, name: str, shapes: Sequence[tuple[int, ...]], group: ProcessGroup) -> Callable[[Tensor], object]:
        """What adds up the gradients of one of FSDP2's units over the group, in place: (elements,) of its shards, which
        have these shapes. name: the unit's in the model. Asked for only with sums_replicas."""
        raise TypeError(f"{type(self).__name__} leaves sums over replicas to FSDP2")

    def settle(self, skipped: Tensor) -> None:
        """End a step. skipped: a scalar, 1 if the step changed nothing, else 0; the host does not wait for it."""

    def state(self) -> dict[str, Tensor]:
        """What this rank keeps for the next step, by names that no other rank has, for a checkpoint."""
        return {}

    def load(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Empty tensors for what this rank takes of a checkpoint, which are filled then. saved: all that `state` has
        given, on the meta device. ValueError, with the remedy, for the state of another layout."""
        return {}

    def samples(self, first: int, number: int, rank: int, ranks: int) -> tuple[int, int]:
        """(first, number) of the samples of a data-parallel rank, of a batch of `number` from `first` on."""
        return first + rank * (number // ranks), number // ranks

    def steps(self, take_step: Callable, model: Any, optimizers: Sequence[Any]) -> Callable:
        """What takes the steps of a ModelParts and its optimizers: take_step, or what stands in its place."""
        return take_step

    def seconds(self, nbytes: float, inside: int, nodes: int, fast: Link, slow: Link) -> float:
        """Of an all-reduce, as all_reduce_seconds, for the planner."""
        return all_reduce_seconds(nbytes, inside, nodes, fast, slow)

    def kept_bytes(self, elements: float, itemsize: int) -> float:
        """What a rank keeps beside so many gradients of this size, for the planner."""
        return 0.0


def exchange_named(text: str) -> Exchange:
    """A new Exchange, by the text of parallel.exchange. ValueError, with what there is, for an unknown one."""
    if text == Layout.exchange:
        return Exchange()
    # by its name: lessons use training, which asks here
    return import_module("tpformer.lessons").lesson(text)


def exchange_of(config: RunConfig, exchange: Exchange | None = None) -> Exchange:
    """The Exchange of a run: that given, or a new one of its name. ValueError, with the remedy, for an unknown one, or
    one that cannot serve the run."""
    exchange = exchange or exchange_named(config.parallel.exchange)
    exchange.check(config.parallel, config)
    return exchange
