"""What a model that was cut over ranks refuses when it is called, because its result would be silently wrong.

Belongs here: outputs that a rank has only a part of, adapters, hooks and modules that came after the model was cut, and
sampling where ranks would draw different tokens. What is compared between ranks in every forward is in guard.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from tpformer.layers import ColumnParallelLinear, ParallelModule, RowParallelLinear
from tpformer.layers.children import unwrapped
from tpformer.torch_private import backward_hooks, forward_hooks, forward_pre_hooks

from .adapters import cuts_adapters
from .regions import is_adapted

THEIRS = ("torch.", "tpformer.", "transformers.", "accelerate.")  # libraries whose hooks change no values


class Refusals:
    """Keeps the modules that may be wrong, so a forward asks only these."""

    def __init__(self, model: nn.Module, partial_attention: bool, divided: Iterable[nn.Module]) -> None:
        """divided: modules within which ranks compute with a part of the features or of the rows."""
        self.partial_attention = partial_attention
        self.cut: list[tuple[nn.Module, str, nn.Module]] = []
        self.inside: list[tuple[nn.Module, str, nn.Module]] = []
        for module in model.modules():
            for key, part in module.named_children():
                if isinstance(part, ParallelModule) or is_adapted(part):
                    self.cut.append((module, key, part))
        for root in divided:
            for module in root.modules():
                for key, part in module.named_children():
                    if not any(isinstance(each, ParallelModule) for each in part.modules()):
                        self.inside.append((module, key, part))
        seeing = [(key, part) for _, key, part in self.inside]
        seeing += [(key, part) for _, key, part in self.cut if is_part(part)]
        self.hooked = {part: (key, set(_hooks(part))) for key, part in seeing}  # the hooks that were there before
        self.last = RemovableHandle.next_id  # torch counts all hooks of the process

    def check(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        """ValueError as the module says."""
        for holder, key, part in self.cut:
            now = getattr(holder, key, None)
            if now is None:  # an adapter that was deleted
                continue
            if now is part and cuts_adapters(part):
                if "forward" in vars(part):
                    raise ValueError(f"the forward of {key} was replaced after it was cut: do that before parallelize")
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
        for holder, key, part in self.inside:
            if (now := getattr(holder, key, part)) is not part and unwrapped(now) is not part:
                raise ValueError(
                    f"{key} is another {type(now).__name__} than when the model was cut, and sees one rank's part of "
                    f"the features, with which it was not tried: do that before parallelize"
                )
        if self.last != RemovableHandle.next_id:
            self._check_hooks()
        self._check_attentions(model, kwargs)

    def _check_hooks(self) -> None:
        self.last = RemovableHandle.next_id
        for part, (key, before) in self.hooked.items():
            for number, hook in _hooks(part).items():
                origin = getattr(getattr(hook, "func", hook), "__module__", None) or ""
                if number not in before and not origin.startswith(THEIRS):
                    self.last = -1
                    raise ValueError(
                        f"{key} has a hook that would see one rank's part of the features: give it to the module that "
                        f"holds {key}, or before parallelize, which then leaves {key} whole"
                    )

    def _check_attentions(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("output_attentions")
        if asked is None:
            asked = getattr(getattr(model, "config", None), "output_attentions", False)
        if asked and self.partial_attention:
            raise ValueError(
                "output_attentions=True, but each rank has the attention weights of its own heads only: leave it out"
            )


def is_part(layer: nn.Module) -> bool:
    """Whether a layer gives or takes one rank's part of the features."""
    if isinstance(layer, ColumnParallelLinear):
        return not layer.gather_output
    return isinstance(layer, RowParallelLinear) and layer.input_is_parallel


def _hooks(module: nn.Module) -> dict[int, Any]:
    return {**forward_hooks(module), **forward_pre_hooks(module), **backward_hooks(module)}


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
