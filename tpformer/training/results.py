"""The numbers of a step, which are read when the next step is queued, and what a run counts of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tpformer.config import RunConfig

from .batches import Batch
from .experts import load_numbers, named_loads
from .metrics import LossMean
from .norms import NoiseScale
from .schedules import batch_size
from .separation import context_balance
from .step import StepResult
from .transfers import Fetched

COUNTS = ("skipped", "skipped_in_a_row", "repeated")  # of steps, which checkpoints keep


class Launched(NamedTuple):
    """A step that is queued. numbers: of its StepResult, the half batch's gradient norm, and what ranks agreed on."""

    step: int
    lr: float
    batch: Batch
    result: StepResult
    numbers: Fetched


class Tally:
    """What a run counts and averages over its steps; equal on all ranks that take them together.

    replicas: how many take steps by themselves, each of its share of the batch; 1 if all ranks take them together.
    diverging: whether the last step was skipped, and not because a float16 run looks for its loss scale.
    """

    def __init__(self, config: RunConfig, replicas: int = 1) -> None:
        self.skipped = self.skipped_in_a_row = self.repeated = 0
        self.diverging = False
        self.losses, self.noise, self._config = LossMean(config.log.interval), NoiseScale(), config
        self._replicas = replicas

    def add(self, step: int, numbers: Mapping[str, Any]) -> dict[str, float]:
        """Count a step; its row but for the learning rate."""
        loss, skipped = numbers["loss"], bool(numbers["skipped"])
        self.diverging = skipped and not ("scale" in numbers and math.isfinite(loss))
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        row = {"step": step, "loss": self.losses.add(step, loss), "step_loss": loss, "grad_norm": numbers["norm"]}
        if "loads" in numbers:
            samples = batch_size(step, self._config.train) // self._replicas
            row |= load_numbers(self._config, numbers["loads"], samples)
        if "pairs" in numbers:
            row["context_balance"] = context_balance(numbers["pairs"], self._config.parallel.context_parallel)
        if "packing" in numbers:
            row |= self._packing(numbers["packing"])
        return row | ({"skipped": self.skipped} if self.skipped else {})

    def _packing(self, numbers: Sequence[float]) -> dict[str, float]:
        """What a row says of packed activations: the share of values that were escapes, how many tensors were left as
        they are, both in this step, and how many steps of the run were computed twice."""
        values, escapes, kept, repeated = numbers
        self.repeated += int(repeated)
        return {"pack_escapes": escapes / max(1, values), "pack_left": int(kept), "pack_repeats": self.repeated}

    def norms(self, step: int, numbers: Mapping[str, Any], names: list[str]) -> dict[str, float]:
        """The row of norms.jsonl but for its step, where measured: norms of these names, experts' loads, the noise."""
        found = dict(zip(names, numbers.get("measured", ()), strict=False))
        if found and "loads" in numbers:
            found |= named_loads(self._config, numbers["loads"])
        if "half_norm" in numbers:
            size = batch_size(step, self._config.train)
            found["noise_scale"] = self.noise.add(size, numbers["norm"], numbers["half_norm"])
        return found

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        counts = {name: getattr(self, name) for name in COUNTS}
        return {**counts, "losses": self.losses.state_dict(), "noise": self.noise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that state_dict returned; begin anew with what it lacks."""
        self.skipped, self.skipped_in_a_row, self.repeated = (int(state.get(name, 0)) for name in COUNTS)
        self.losses.load_state_dict(state.get("losses", {}))
        self.noise.load_state_dict(state.get("noise", {}))
