"""Which optimizer a configuration asks for: AdamW, SGD or Muon, with their groups of weight decay."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import nn

from tpformer.config import OptimizerSection
from tpformer.distributed.mesh import DEFAULT_TIMEOUT

from .model import ModelParts
from .muon import build_muon
from .updates import LocalAdamW, LocalSGD, LocalUpdate


def build_optimizer(
    model: nn.Module, config: OptimizerSection, groups: dict | None = None, timeout: timedelta = DEFAULT_TIMEOUT
) -> LocalUpdate:
    """The fused optimizer of a configuration. Weight decay applies to matrices, not to vectors (biases, norm weights).

    groups: process groups by their ranks, which parts of a model share; timeout: that of new ones. Muon makes those,
    collectively over the ranks of a pipeline stage; others communicate nothing.
    """
    if config.name == "muon":
        return build_muon(model, config, groups, timeout)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    of_decay: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    of_decay = [group for group in of_decay if group["params"]]
    if config.name == "sgd":
        return LocalSGD(of_decay, lr=config.lr, momentum=config.kept_momentum, nesterov=config.nesterov, fused=True)
    return LocalAdamW(of_decay, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def build_optimizers(
    model: ModelParts, config: OptimizerSection, timeout: timedelta = DEFAULT_TIMEOUT
) -> list[LocalUpdate]:
    """build_optimizer of each part, which keeps the part's copies to compute with up to date."""
    groups: dict = {}
    optimizers = [build_optimizer(part, config, groups, timeout) for part in model.parts]
    for optimizer in optimizers:
        optimizer.masters = model.masters
    if model.masters is not None:
        model.masters.narrow = True
    return optimizers
