"""AdamW and SGD as updates of each rank's parts of DTensors, by the kernels of kernels/update.

Belongs here: optimizers that work element by element. Muon is in muon.py; which one a run has, in optimizer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpformer.ops.implementation import implementation
from tpformer.parallel import MasterWeights, local_part


def local_parts(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """local_part of each tensor."""
    whole = not any(issubclass(kind, DTensor) for kind in set(map(type, tensors)))
    return tensors if whole else [local_part(each) for each in tensors]


class LocalUpdate(torch.optim.Optimizer):
    """An optimizer that updates each rank's part of DTensor parameters directly, by kernels/update.

    The update is elementwise, so its result is that of torch's optimizer. It saves the several milliseconds in which
    DTensor dispatches every operand of a step. For checkpoints, parameters and state stay DTensors. No communication.
    """

    STATE_NAMES: tuple[str, ...] = ()
    """The keys of the state that it may keep for a parameter, where state_names says nothing else."""
    masters: MasterWeights | None = None
    """The float32 masters whose 16-bit copies an update writes, too; None without copies."""
    found_inf: Tensor | None = None
    """The scalar that `update` calls skipped; torch.amp.GradScaler sets it, too."""
    _scale: float | Tensor = 1.0
    _step_group: Callable[..., None]
    """Update the parameters of a group by a module of kernels/update. The arguments are what `_groups` gives."""

    def state_names(self, parameter: Tensor) -> tuple[str, ...]:
        """The keys of the state that it may keep for this parameter."""
        return self.STATE_NAMES

    def update(self, lr: float | Tensor, skipped: Tensor, scale: float | Tensor = 1.0) -> None:
        """Take a step with this learning rate, and drop the gradients. The host waits for nothing.

        skipped: a float32 scalar on the device of the parameters. Where it is 1, and not 0, nothing changes: no
        parameter, no moment, no count of steps, whatever the gradients are. scale: what gradients are multiplied by.
        """
        for group in self.param_groups:
            group["lr"] = lr
        self.found_inf, self._scale = skipped, scale
        try:
            self.step()
        finally:
            self.found_inf, self._scale = None, 1.0
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. closure: called before; its result is returned."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for kernels, group, parameters, options in self._groups():
            self._step_group(kernels, group, parameters, options)
        return loss

    def _groups(self) -> Iterator[tuple[Any, dict[str, Any], list[nn.Parameter], dict[str, Any]]]:
        """Yield (module of the update's kernels, group, parameters, options) for each group with gradients.

        options: what the kernels take besides tensors. Update a group before taking the next one: its masters follow
        then. No communication. ValueError for an option of torch's optimizer that the kernels do not have.
        """
        for group in self.param_groups:
            if others := [name for name in ("amsgrad", "maximize", "dampening", "differentiable") if group.get(name)]:
                raise ValueError(f"{type(self).__name__} has no {others[0]}: leave it out, or take torch's optimizer")
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                first = local_part(parameters[0])
                scale = getattr(self, "grad_scale", None)  # that of GradScaler, which wants no attribute before
                options = {
                    "copies": None if self.masters is None else self.masters.copies_of(parameters),
                    "skipped": torch.zeros((), dtype=torch.float32, device=first.device)
                    if self.found_inf is None
                    else self.found_inf,
                    "scale": self._scale if scale is None else self._scale / scale,
                    "lr": group["lr"],
                    "weight_decay": group["weight_decay"],
                }
                yield implementation("update", first), group, parameters, options
                if self.masters is not None:
                    self.masters.follow(parameters)


class LocalAdamW(LocalUpdate, torch.optim.AdamW):
    """torch.optim.AdamW as a LocalUpdate."""

    STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")

    def _step_group(self, kernels, group, parameters, options) -> None:
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        self._init_group(group, *lists)  # torch's, which makes the state
        masters, gradients, firsts, seconds, _, steps = map(local_parts, lists)
        beta1, beta2 = group["betas"]
        options |= {"beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        kernels.adamw_(masters, gradients, firsts, seconds, steps, **options)


class LocalSGD(LocalUpdate, torch.optim.SGD):
    """torch.optim.SGD as a LocalUpdate. Momentum begins at 0, so that a first step that is skipped leaves none."""

    STATE_NAMES = ("momentum_buffer",)

    def _step_group(self, kernels, group, parameters, options) -> None:
        buffers = []
        for parameter in parameters if group["momentum"] else ():
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffers.append(state["momentum_buffer"])
        options |= {"momentum": group["momentum"], "nesterov": group["nesterov"]}
        gradients = [parameter.grad for parameter in parameters]
        kernels.sgd_(*map(local_parts, (parameters, gradients, buffers)), **options)
