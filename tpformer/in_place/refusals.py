"""What a model that was cut over ranks refuses when it is called, because its result would be silently wrong.

Belongs here: ranks that get different inputs or would draw different tokens, dropout, whose masks would differ between
ranks, outputs that a rank has only a part of, and adapters that were added to linears after these were cut.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpformer.distributed.collectives import all_reduce
from tpformer.layers import ParallelModule, TensorParallel
from tpformer.layers.children import DROPOUTS
from tpformer.ops.uncompiled import uncompiled
from tpformer.torch_private import forward_pre_hooks, tree_leaves

from .adapters import cuts_adapters
from .regions import is_adapted


def drawing(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """(name of the module, module, attribute) for each probability of dropout in a model."""
    found: list[tuple[str, nn.Module, str]] = []
    for name, module in model.named_modules():
        if isinstance(module, DROPOUTS):
            found.append((name, module, "p"))
        else:
            floats = [key for key, value in vars(module).items() if type(value) is float and "drop" in key]
            found += [(name, module, key) for key in floats]
    return found


class Refusals:
    """A pre-hook of the model. It keeps the modules that may be wrong, so a forward asks only these."""

    def __init__(self, model: nn.Module, partial_attention: bool, tp: TensorParallel) -> None:
        self.partial_attention, self.tp, self.compared = partial_attention, tp, False
        self.look(model)

    def look(self, model: nn.Module) -> None:
        """Find the modules that may be wrong; again after adapters have been cut."""
        self.drawing = drawing(model)
        self.cut: list[tuple[nn.Module, str, nn.Module]] = []
        for module in model.modules():
            for key, part in module.named_children():
                if isinstance(part, ParallelModule) or is_adapted(part):
                    self.cut.append((module, key, part))

    @uncompiled
    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """ValueError as the module says. The first call compares the ranks' inputs, by an all-reduce of 16 bytes."""
        if not self.compared:
            self.compared = True
            _check_inputs((args, kwargs), self.tp)
        for name, module, key in self.drawing if model.training else ():
            if module.training and getattr(module, key) > 0:
                raise ValueError(
                    f"{name}.{key} is {getattr(module, key)} in training mode: its masks would differ between "
                    f"tensor-parallel ranks; set it to 0, in a transformers model by its config"
                )
        for holder, key, part in self.cut:
            now = getattr(holder, key)
            if (now is not part or not isinstance(now, ParallelModule)) and not cuts_adapters(now):
                raise ValueError(
                    f"{key} has an adapter that was added to a tensor-parallel linear: call parallelize(model) again, "
                    f"which cuts it"
                )
        asked = kwargs.get("output_attentions")
        if asked is None:
            asked = getattr(getattr(model, "config", None), "output_attentions", False)
        if asked and self.partial_attention:
            raise ValueError(
                "output_attentions=True, but each rank has the attention weights of its own heads only: leave it out"
            )


@torch.no_grad()
def _check_inputs(inputs: Any, tp: TensorParallel) -> None:
    """ValueError if the tensors differ between the ranks. Communicates: an all-reduce of 16 bytes."""
    total = torch.zeros((), dtype=torch.float64)
    for x in tree_leaves(inputs):
        if isinstance(x, Tensor) and not x.is_complex():
            values = x.detach().double().flatten()
            places = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=x.device).sqrt()
            total += values.nan_to_num().dot(places).cpu() + values.numel()
    device = "cpu" if tp.mesh is None else tp.mesh.device_type
    largest, smallest = all_reduce(torch.stack([total, -total]).to(device), tp.group, "max").tolist()
    if largest != -smallest:
        raise ValueError(
            "tensor-parallel ranks got different inputs, but they compute one batch together: give all the same "
            "samples, by a sampler whose rank is that of the data-parallel axis"
        )


def sample_alike(model: nn.Module) -> None:
    """Let generate() of transformers' models refuse to sample where ranks would draw different tokens."""
    for part in model.modules():
        if hasattr(type(part), "generate"):
            part.generate = partial(_generate, part)


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """generate of the module's class. For sampling the ranks' random states are compared, by 16 bytes each."""
    samples = kwargs.get("do_sample")
    if samples is None:
        config = kwargs.get("generation_config") or getattr(self, "generation_config", None)
        samples = getattr(config, "do_sample", False)
    if samples:
        _check_random_states(next(part.tp for part in self.modules() if isinstance(part, ParallelModule)))
    return type(self).generate(self, *args, **kwargs)


def _check_random_states(tp: TensorParallel) -> None:
    device = "cpu" if tp.mesh is None else tp.mesh.device_type
    state = torch.get_rng_state() if device == "cpu" else torch.get_device_module(device).get_rng_state()
    own = torch.tensor(zlib.crc32(state.cpu().numpy().tobytes()), dtype=torch.float64)
    largest, smallest = all_reduce(torch.stack([own, -own]).to(device), tp.group, "max").tolist()
    if largest != -smallest:
        raise ValueError(
            "tensor-parallel ranks have different random states, and would draw different tokens: call "
            "torch.manual_seed with the same number on all of them before generate()"
        )


def refuse_in_forward(model: nn.Module, partial_attention: bool, tp: TensorParallel) -> None:
    """Give the model its Refusals; those that it has look at it again."""
    found = next((hook for hook in forward_pre_hooks(model).values() if isinstance(hook, Refusals)), None)
    if found is not None:
        found.look(model)
    else:
        model.register_forward_pre_hook(Refusals(model, partial_attention, tp), with_kwargs=True)
