"""Experts of transformers' models, run one after another while a model is measured."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

CHOICE = "_experts_implementation"  # of transformers' configurations


@contextmanager
def eager_experts(model: nn.Module) -> Iterator[None]:
    """Within, experts of transformers' models run one after another: torch multiplies no groups of float64 matrices,
    and none without strides, as stand_ins are."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    before = {id(config): (config, getattr(config, CHOICE)) for config in configs if hasattr(config, CHOICE)}
    try:
        for config, _ in before.values():
            setattr(config, CHOICE, "eager")
        yield
    finally:
        for config, was in before.values():
            setattr(config, CHOICE, was)
