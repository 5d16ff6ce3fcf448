"""What a model that was cut over ranks refuses when it is called, because its result would be silently wrong.

Belongs here: outputs that a rank has only a part of, adapters that were added to linears after these were cut, and
sampling where ranks would draw different tokens. What is compared between ranks in every forward is in guard.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from tpformer.layers import ParallelModule
from tpformer.layers.children import unwrapped

from .adapters import cuts_adapters
from .regions import is_adapted


class Refusals:
    """Keeps the modules that may be wrong, so a forward asks only these."""

    def __init__(self, model: nn.Module, partial_attention: bool) -> None:
        self.partial_attention = partial_attention
        self.cut: list[tuple[nn.Module, str, nn.Module]] = []
        for module in model.modules():
            for key, part in module.named_children():
                if isinstance(part, ParallelModule) or is_adapted(part):
                    self.cut.append((module, key, part))

    def check(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        """ValueError as the module says."""
        for holder, key, part in self.cut:
            now = getattr(holder, key)
            if now is part and cuts_adapters(part):
                continue
            if is_adapted(now):
                raise ValueError(
                    f"{key} has an adapter that was added to a tensor-parallel linear: call parallelize(model) again, "
                    f"which cuts it and lets the adapter be saved"
                )
            if not isinstance(unwrapped(now), ParallelModule) and not hasattr(now, "modules_to_save"):
                raise ValueError(
                    f"{key} is a {type(now).__name__}, put in the place of a tensor-parallel module, and made for one "
                    f"rank's features: do that before parallelize"
                )
        asked = kwargs.get("output_attentions")
        if asked is None:
            asked = getattr(getattr(model, "config", None), "output_attentions", False)
        if asked and self.partial_attention:
            raise ValueError(
                "output_attentions=True, but each rank has the attention weights of its own heads only: leave it out"
            )


def sample_alike(model: nn.Module) -> None:
    """Let generate() of transformers' models refuse to sample where ranks would draw different tokens."""
    for part in model.modules():
        if hasattr(type(part), "generate"):
            part.generate = partial(_generate, part)


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """generate of the module's class. For sampling the ranks' random states are compared."""
    samples = kwargs.get("do_sample")
    if samples is None:
        config = kwargs.get("generation_config") or getattr(self, "generation_config", None)
        samples = getattr(config, "do_sample", False)
    if samples:
        next(part.guard for part in self.modules() if isinstance(part, ParallelModule)).check_random_states()
    return type(self).generate(self, *args, **kwargs)
