"""Sums of gradients over replicas in fewer bytes, as Exchanges.

Belongs here: which layouts and runs compression is refused for, and what a checkpoint has of it. How values are
compressed is in compression.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config import Layout, RunConfig
from tpformer.exchange import NamedExchange

from .compression import BFloat16, Compression, Int8, PowerSGD, TopK

ROUNDED = {"bfloat16": BFloat16, "int8": Int8}
TO_THE_LAST_BIT = ("int8", "topk")  # what they leave out depends on all values of a shard


@dataclass
class Compressed(NamedExchange):
    """bfloat16 or int8: values of fewer bits. What is lost of a gradient is added to the next step's.

    feedback: whether it is. units: what compresses each unit's sums, by the unit's name.
    Communicates: what its Compression says, for the elements of a unit's shards, once a step.
    """

    sums_replicas = changes_losses = True
    feedback: bool = True
    units: dict[str, Compression] = field(default_factory=dict, init=False)

    def check(self, layout: Layout, run: RunConfig | None = None) -> None:
        """What is kept of a step's gradients must be in the next step's units, and be kept once a step."""
        self.check_replicas(layout)
        what = f"parallel.exchange={self.text!r}"
        if layout.reduce_dtype != "float32":
            raise ValueError(
                f"{what} with reduce_dtype={layout.reduce_dtype!r}: gradients are compressed from float32, leave "
                f"reduce_dtype out"
            )
        if self.name in TO_THE_LAST_BIT and layout.tensor_parallel > 1:
            # a shard holds parameters that tensor-parallel ranks share and some that they do not; a block's scale, or a
            # choice of the largest, would make another part of the shared ones on each rank
            raise ValueError(
                f"{what} with tensor_parallel={layout.tensor_parallel}: what is left out would differ between "
                f"tensor-parallel ranks, and with it their copies of norms and biases; choose bfloat16 or powersgd"
            )
        if run is not None and run.train.dtype == "float16":
            raise ValueError(
                f"{what} keeps errors of gradients, and train.dtype=float16 scales each step's in another way: set "
                f'train.dtype = "bfloat16"'
            )
        if run is not None and run.log.noise_interval:
            raise ValueError(
                f"{what} keeps errors of gradients once a step, and log.noise_interval={run.log.noise_interval} takes "
                f"gradients twice in one: leave one of them out"
            )

    def compression(self, group: ProcessGroup, shapes: Sequence[tuple[int, ...]]) -> Compression:
        """What compresses the sums of a unit whose shards have these shapes."""
        return ROUNDED[self.name](group, self.feedback, sum(map(math.prod, shapes)))

    def unit(self, name: str, shapes: Sequence[tuple[int, ...]], group: ProcessGroup) -> Callable[[Tensor], None]:
        """The compressed sum."""
        self.units[name] = self.compression(group, shapes)
        return partial(self._add, self.units[name])

    def _add(self, compression: Compression, x: Tensor) -> None:
        if len(x) != compression.elements:
            raise RuntimeError(
                f"parallel.exchange={self.text!r} needs the gradients of all parameters of a unit, "
                f"{compression.elements} elements, and got {len(x)}: train all parameters, or leave it out"
            )
        compression.settle(x.new_zeros(()))  # a loop of one's own that has no skipped steps need not do it
        compression.add(x)

    def settle(self, skipped: Tensor) -> None:
        """A step that is skipped changes nothing of what is kept."""
        for each in self.units.values():
            each.settle(skipped)

    def _named(self) -> dict[str, Compression]:
        """Units by names with this rank in them, and of how many: each rank loses its own."""
        place = f"{dist.get_rank()}-of-{dist.get_world_size()}" if self.units else ""
        return {f"{place}.{type(each).__name__}.{name}.": each for name, each in self.units.items()}

    def state(self) -> dict[str, Tensor]:
        """What was lost, and what the next step begins with."""
        return {name + key: value for name, each in self._named().items() for key, value in each.state.items()}

    def load(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """State of another compression is ignored, and so are PowerSGD's factors of another rank, which are then drawn
        again. ValueError if it is of another layout, whose ranks have lost other parts of the gradients."""
        for name, each in self._named().items():
            kind = type(each).__name__
            own = {key.removeprefix(name): value for key, value in saved.items() if key.startswith(name)}
            fits = {key: value for key, value in own.items() if tuple(value.shape) == each.shapes.get(key)}
            lost = {key for key in own.keys() - fits.keys() if not key.startswith("right.")}
            if lost or (not own and any(key.split(".")[1] == kind for key in saved)):
                raise ValueError(
                    "holds what compression has left out of gradients, for the ranks of another layout: go on in the "
                    "layout that saved it, or without compression (--parallel.exchange library --run.changes "
                    "parallel.exchange)"
                )
            each.state = {key: torch.empty_like(value, device="cpu") for key, value in fits.items()}
        return self.state()

    def kept_bytes(self, elements: float, itemsize: int) -> float:
        """The errors of the step before, and of this one."""
        return 2 * itemsize * elements if self.feedback else 0.0


@dataclass
class TopKSums(Compressed):
    """topk. share: of a unit's values, what a replica sends."""

    RANGES = {"share": "(0, 1]"}
    share: float = 0.01

    def compression(self, group: ProcessGroup, shapes: Sequence[tuple[int, ...]]) -> Compression:
        """TopK."""
        return TopK(group, self.feedback, sum(map(math.prod, shapes)), self.share)


@dataclass
class PowerSGDSums(Compressed):
    """powersgd. rank: the columns of the two thin matrices that stand for a matrix."""

    RANGES = {"rank": "[1, inf)"}
    rank: int = 4

    def compression(self, group: ProcessGroup, shapes: Sequence[tuple[int, ...]]) -> Compression:
        """PowerSGD."""
        return PowerSGD(group, self.feedback, self.rank, shapes)
