"""AdamW and SGD with weight-decay groups, and their updates of DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.sgd import sgd

from tpformer.config import OptimizerSection
from tpformer.parallel import MasterWeights, local_part

from .model import ModelParts


class LocalUpdate(torch.optim.Optimizer):
    """An optimizer that updates each rank's part of DTensor parameters directly.

    The update is elementwise, so its result is that of torch's optimizer. It saves the several milliseconds in which
    DTensor dispatches every operand of a step. For checkpoints, parameters and state stay DTensors. No communication.
    """

    STATE_NAMES: tuple[str, ...] = ()
    """What it may keep for a parameter, by the keys of its state."""
    found_inf: Tensor | None = None  # torch's fused optimizers look for it, as torch.amp.GradScaler sets it
    masters: MasterWeights | None = None
    """Whose copies to compute with follow each update."""

    def update(self, lr: float, skipped: Tensor) -> None:
        """Take a step with this learning rate, and drop the gradients. The host waits for nothing.

        skipped: a float32 scalar on the device of the parameters. Where it is 1, and not 0, nothing changes: no
        parameter, no moment, no count of steps, whatever the gradients are.
        """
        for group in self.param_groups:
            group["lr"] = lr
        self.found_inf = skipped
        self.step()
        self.found_inf = None
        self.zero_grad()
        if self.masters is not None:
            self.masters.refresh(everything=True)


class LocalAdamW(LocalUpdate, torch.optim.AdamW):
    """torch.optim.AdamW as a LocalUpdate."""

    STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")

    def _init_group(self, group, *lists):
        result = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return result


class LocalSGD(LocalUpdate, torch.optim.SGD):
    """torch.optim.SGD as a LocalUpdate. Momentum begins at 0, so that a first step that is skipped leaves none."""

    STATE_NAMES = ("momentum_buffer",)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient. closure: not used."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            buffers: list[Tensor | None] = []
            for parameter in parameters if group["momentum"] else ():
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffers.append(local_part(state["momentum_buffer"]))
            options = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "fused")
            sgd(
                [local_part(parameter) for parameter in parameters],
                [local_part(parameter.grad) for parameter in parameters],
                buffers,
                found_inf=self.found_inf,
                **{name: group[name] for name in options},
            )


def build_optimizer(model: nn.Module, config: OptimizerSection) -> LocalUpdate:
    """The fused optimizer of a configuration. Weight decay applies to matrices, not to vectors (biases, norm weights).
    No communication."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return LocalSGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True)
    return LocalAdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def build_optimizers(model: ModelParts, config: OptimizerSection) -> list[LocalUpdate]:
    """build_optimizer of each part, which keeps the part's copies to compute with up to date. No communication."""
    optimizers = [build_optimizer(part, config) for part in model.parts]
    for optimizer, masters in zip(optimizers, model.masters, strict=True):
        optimizer.masters = masters
    return optimizers
