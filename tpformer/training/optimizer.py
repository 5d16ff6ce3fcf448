"""AdamW with weight-decay groups, and its update of DTensors."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpformer.config import OptimizerSection


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates each rank's part of DTensor parameters directly.

    The update is elementwise, so its result is that of torch.optim.AdamW. It saves the several milliseconds in which
    DTensor dispatches every operand of a step. For checkpoints, parameters and state stay DTensors. No communication.
    """

    found_inf: Tensor | None = None  # torch's fused optimizers look for it, as torch.amp.GradScaler sets it

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

    def _init_group(self, group, *lists):
        result = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return result


def build_optimizer(model: nn.Module, config: OptimizerSection) -> LocalAdamW:
    """Fused AdamW. Weight decay applies to matrices, not to vectors (biases, norm weights). No communication."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return LocalAdamW([g for g in groups if g["params"]], lr=config.lr, betas=betas, eps=config.eps, fused=True)
