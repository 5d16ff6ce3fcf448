"""An Exchange: how the gradients of replicas become one. The protocol, and FSDP2's own way.

Belongs here: what training asks of an Exchange. Whoever builds a model makes one and hands it on. parallel/exchange.py
finds one by the text of parallel.exchange; other ways than FSDP2's, to learn from, are in tpformer/lessons/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config import Layout, RunConfig
from tpformer.distributed.links import Link, all_reduce_seconds


class StepResult(NamedTuple):
    """What a step gave. Its tensors are where the parameters are, and reading one waits for the step.

    loss: the mean over the global batch. norm: of all gradients before clipping. Both are float64 scalars.
    skipped: a float32 scalar, 1 if loss or norm was not finite, so that nothing was updated, else 0.
    local: local_norms of this rank's gradients. measured: NormWatch.measured, if it was asked for.
    scale: the loss scale of the next step, float32; None without a LossScaler. loads: settle_experts'. packing:
    ModelParts.packing.
    All but `local` are equal on all ranks.
    """

    loss: Tensor
    norm: Tensor
    skipped: Tensor
    local: Tensor
    measured: Tensor | None
    scale: Tensor | None
    loads: Tensor | None
    packing: Tensor | None


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

    def steps(
        self, take_step: Callable[..., StepResult], model: Any, optimizers: Sequence[Any], loss: Callable[..., Tensor]
    ) -> Callable[..., StepResult]:
        """What takes the steps of a ModelParts and its optimizers: take_step, or what stands in its place.

        loss(part, batch, first_sample): the summed loss of one of the model's parts, or of a copy of it.
        """
        return take_step

    def seconds(self, nbytes: float, inside: int, nodes: int, fast: Link, slow: Link) -> float:
        """Of an all-reduce, as all_reduce_seconds, for the planner."""
        return all_reduce_seconds(nbytes, inside, nodes, fast, slow)

    def kept_bytes(self, elements: float, itemsize: int) -> float:
        """What a rank keeps beside so many gradients of this size, for the planner."""
        return 0.0
