"""What all ranks of a run agree on after a step, before they do something together.

Belongs here: flags, and when replicas that take steps by themselves ask one another for theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpformer.distributed import all_reduce

from .model import ModelParts
from .results import Tally
from .transfers import to_device


class Agreement:
    """Of the ranks of a model's run. steps: of the run, after the last of which all agree."""

    def __init__(self, model: ModelParts, device: torch.device, steps: int) -> None:
        self.model, self.device, self.steps = model, device, steps

    def flags(self, found: Sequence[bool], device: torch.device) -> Tensor:
        """Which flags any rank has, of those that take a step together; on the device, where nothing waits for it.

        Communication: an all-reduce of these numbers per mesh axis of these ranks.
        """
        flags = to_device(torch.tensor([float(flag) for flag in found]), device)
        for group in self.model.groups.values():
            flags = all_reduce(flags, group, op="max")
        return flags

    def meets(self, step: int) -> bool:
        """Whether replicas that take steps by themselves agree after a step, so that it is read before the next one."""
        return self.model.replicas is not None and (self.model.exchange.meets(step) or step == self.steps)

    def agreed(self, step: int, flags: list[float], tally: Tally, row: dict[str, float]) -> list[float]:
        """The flags of a step of all ranks. Replicas that take steps by themselves ask one another when they meet, also
        whether the run diverges, and for the loss over all their targets; before that no flag is acted upon.

        Communication: then two all-reduces over replicas, of five numbers and of two.
        """
        if self.model.replicas is None:
            return flags
        if not self.meets(step):
            tally.diverging = False
            return [0.0] * len(flags)
        found = to_device(torch.tensor([*flags, float(tally.diverging)]), self.device)
        *flags, diverging = self.model.over_replicas(found, "max").tolist()
        tally.diverging = bool(diverging)
        targets = float(self.model.targets)
        sums = torch.tensor([row["step_loss"] * targets, targets], dtype=torch.float64)
        total, targets = self.model.over_replicas(to_device(sums, self.device)).tolist()
        row["replicas_loss"] = total / max(targets, 1.0)
        return flags
