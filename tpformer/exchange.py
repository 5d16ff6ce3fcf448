"""An Exchange: how the gradients of replicas become one. The protocol, and FSDP2's own way.

Belongs here: what training asks of an Exchange, and how the text of parallel.exchange names one with its options.
Whoever builds a model makes one and hands it on. parallel/exchange.py finds one by that text, and parallel/diloco.py is
one; others, to learn from, are in tpformer/lessons/.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tpformer.config import Layout, RunConfig, check_known
from tpformer.config.ranges import check_inside
from tpformer.distributed.links import Link, all_reduce_seconds
from tpformer.words import shown

TRUTHS = {"true": True, "false": False}


class StepResult(NamedTuple):
    """What a step gave. Its tensors are where the parameters are, and reading one waits for the step.

    loss: the mean over the global batch. norm: of all gradients before clipping. Both are float64 scalars.
    skipped: a float32 scalar, 1 if loss or norm was not finite, so that nothing was updated, else 0.
    local: local_norms of this rank's gradients. measured: NormWatch.measured, if it was asked for.
    scale: the loss scale of the next step, float32; None without a LossScaler. loads: settle_experts'. packing:
    ModelParts.packing.
    All but `local` are equal on all ranks; with an Exchange that keeps replicas apart, on all ranks of a replica.
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
    """Whether losses depend on it, and with it on the layout; with keeps_apart on the number of replicas alone."""
    takes_steps = False
    """Whether `steps` does all of it, on ranks that hold whole parameters, without FSDP2."""
    keeps_apart = False
    """Whether replicas take steps by themselves, and meet when a round ends: loss, norm and a skipped step are then one
    replica's own."""
    every = 1
    """Steps of a round."""

    def meets(self, step: int) -> bool:
        """Whether all replicas agree after a step on what all ranks do together, such as to save and to stop."""
        return True

    def check(self, layout: Layout, run: RunConfig | None = None) -> None:
        """ValueError, with the remedy, for a layout that it does not go with, or a run around it."""

    def unit(self, name: str, shapes: Sequence[tuple[int, ...]], group: ProcessGroup) -> Callable[[Tensor], object]:
        """What adds up the gradients of one of FSDP2's units over the group, in place: (elements,) of its shards, which
        have these shapes. name: the unit's in the model. Asked for only with sums_replicas."""
        raise TypeError(f"{type(self).__name__} leaves sums over replicas to FSDP2")

    def settle(self, skipped: Tensor) -> None:
        """End a step's sums. skipped: a scalar, 1 if the step changed nothing, else 0, for which the host does not
        wait."""

    def join(
        self,
        parts: Sequence[nn.Module],
        replicas: ProcessGroup | None,
        tied: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:
        """Serve a rank's parts. replicas: the ranks that hold the same in all replicas, whose collectives are on the
        device. tied: parameters of which two pipeline stages have a copy. ModelParts calls it once."""

    def begin(self, *, anew: bool = False) -> None:
        """Take the parameters as what all replicas have in common, when a run begins. anew: also if it has begun."""

    def after(self, targets: Tensor, skipped: Tensor) -> None:
        """End a step, behind the optimizer's update. targets: a scalar, those of this replica's batch."""

    def finish(self) -> None:
        """End a run: all replicas have the same parameters afterwards."""

    def at(self, step: int) -> None:
        """So many steps lie behind, as the checkpoint says of which `load` has taken its part. ValueError, with the
        remedy, if another exchange took them and left what this one cannot go on from."""

    def common(self) -> Mapping[str, Tensor]:
        """What all replicas have in common of parameters and buffers, by name: the model of which a replica's own is a
        variant. {} where the parts have it."""
        return {}

    def showing_common(self) -> AbstractContextManager[None]:
        """Within, the parts have `common`."""
        return nullcontext()

    @property
    def replica(self) -> tuple[int, int] | None:
        """(This rank's replica, of how many), if each has a state of its own; else None."""
        return None

    @property
    def apart(self) -> bool:
        """Whether the parts have other values than `common` now."""
        return False

    def state(self) -> dict[str, Tensor]:
        """What this rank keeps for the next step, for a checkpoint, by names that other ranks have for the same
        only."""
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


@dataclass
class NamedExchange(Exchange):
    """An Exchange that has a name and options, which the text of parallel.exchange gives.

    Fields of a subclass are its options, all with defaults. text: the whole of parallel.exchange.
    """

    RANGES: ClassVar[dict[str, str]] = {}
    """The values that numbers among the options may have, as in config/ranges.py."""

    name: str
    text: str = field(compare=False)

    @classmethod
    def of(cls, name: str, text: str, options: Sequence[str]) -> Self:
        """With options such as "share=0.05". ValueError for one that is unknown, has no such value, or comes twice."""
        where, values = f"parallel.exchange={shown(text)}: ", dict[str, Any]()
        defaults = {field.name: field.default for field in dataclasses.fields(cls)[2:] if field.init}  # not name, text
        for option in options:
            key, equals, value = option.partition("=")
            if not equals or key in values:
                raise ValueError(f"{where}{shown(option)} is not one OPTION=VALUE more")
            if not defaults:
                raise ValueError(f"{where}{name} has no options: leave {shown(option)} out")
            check_known(key, defaults, f"option of {name}", where)
            values[key] = _value(f"{where}{key}", value, defaults[key])
            if key in cls.RANGES:
                check_inside(f"{where}{key}", values[key], cls.RANGES[key])
        return cls(name, text, **values)

    def check_replicas(self, layout: Layout) -> None:
        """ValueError if there is but one replica."""
        if layout.data_parallel_replicate == 1:
            raise ValueError(
                f"parallel.exchange={self.text!r} is about sums over replicas, of which there is one: set "
                f"data_parallel_replicate, or leave it out"
            )


def _value(where: str, text: str, default: Any) -> Any:
    """An option's value, of its default's type."""
    try:
        return TRUTHS[text] if isinstance(default, bool) else type(default)(text)
    except (KeyError, ValueError):
        wanted = "true or false" if isinstance(default, bool) else f"a value such as {default}"
        raise ValueError(f"{where}={shown(text)}: write {wanted}") from None
