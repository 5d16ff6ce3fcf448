"""The samples that a step of a run takes, on their way to the device."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tpformer.config import RunConfig

from .data import Samples
from .model import ModelParts
from .schedules import batch_size, samples_before
from .step import batch
from .transfers import to_device


class Batch(NamedTuple):
    """This data-parallel rank's samples of a step, int64 (samples, seq_length + 1): on the host, and on the device.

    first: the global index of the first. half: those of the first half of the batch, if its gradient norm is wanted.
    """

    host: Tensor
    rows: Tensor
    first: int
    half: "Batch | None" = None


class Batches:
    """The batches of a run, by step."""

    def __init__(self, config: RunConfig, model: ModelParts, samples: Samples, device: torch.device) -> None:
        self.config, self.model, self.samples, self.device = config, model, samples, device
        # of steps before the run was resumed: what was taken more than the present settings would have taken
        self._more = {"samples": 0, "tokens": 0}

    def taken(self, step: int) -> dict[str, int]:
        """Samples and tokens of all steps up to this one, for rows and checkpoints."""
        samples = samples_before(step + 1, self.config.train)
        by_settings = {"samples": samples, "tokens": samples * self.config.model.seq_length}
        return {name: count + self._more[name] for name, count in by_settings.items()}

    def go_on(self, step: int, taken: Mapping[str, int]) -> None:
        """Take the samples that follow those of the steps up to this one, whatever batch these had.

        taken: what `taken` returned after that step; of an earlier version's checkpoint nothing.
        """
        self._more = {name: taken.get(name, count) - count for name, count in self.taken(step).items()}

    def take(self, step: int) -> Batch:
        """This rank's part of a step's batch. On a GPU the copy waits for what is queued."""
        interval = self.config.log.noise_interval
        size = batch_size(step, self.config.train)
        half = self._part(step, size // 2) if interval and step % interval == 0 else None
        return self._part(step, size)._replace(half=half)

    def pairs(self, step: int, taken: Batch) -> Tensor | None:
        """ModelParts.context_pairs of a step whose row is written by its number; None for any other.

        Communication: that of ModelParts.context_pairs.
        """
        logged = step % self.config.log.interval == 0 or step == self.config.train.steps
        return self.model.context_pairs(taken.rows) if logged else None

    def _part(self, step: int, size: int) -> Batch:
        """The first `size` samples of a step, shared by all data-parallel ranks."""
        first, share = self.model.own_samples(self.taken(step - 1)["samples"], size)
        rows = batch(self.samples, first, share)
        return Batch(rows, to_device(rows, self.device), first)
