"""Which modules are of one kind: what is found of one holds for all of them, and a plan names them by one pattern."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpformer.torch_private import tree_leaves

LARGE = 0.01  # of a model's parameters: what modules of one pattern must have, for a result to be communicated
INDEX = ("layer_idx", "layer_id", "layer_number", "layer_index", "training")  # integers that change no computation
PLAIN = (int, float, bool, str, type(None))


class Described(NamedTuple):
    """What a model is before it runs.

    patterns: the pattern of every module.
    identity: a number that differs between models that differ in classes, settings or shapes, but not for their values.
    large:    modules of patterns with so many parameters that a result may be communicated.
    given:    what stands for what is on meta, by name: all ones, in the memory of a single one.
    """

    patterns: dict[str, str]
    identity: int
    large: frozenset[str]
    given: dict[str, Tensor]


def describe(model: nn.Module) -> Described:
    """What a model is before it runs."""
    classes = [type(module).__qualname__ for module in model.modules()]
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    settings = [each for each in _settings(model) if each[2] is not None]  # a first forward may fill what is empty
    identity = zlib.crc32(repr((classes, settings, shapes)).encode())
    patterns, sizes = _patterns_of(model), Counter[str]()
    for name, module in model.named_modules():
        sizes[patterns[name]] += sum(p.numel() for p in module.parameters(recurse=False))
    least = LARGE * sum(parameter.numel() for parameter in model.parameters())
    large = frozenset(name for name, pattern in patterns.items() if name and sizes[pattern] >= least)
    named = [*model.named_parameters(), *model.named_buffers()]
    ones = {name: torch.ones((), dtype=x.dtype, device="cpu").expand(x.shape) for name, x in named if x.is_meta}
    given = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in ones.items()}
    return Described(patterns, identity, large, given)


def _patterns_of(model: nn.Module) -> dict[str, str]:
    """Each module's name with '*' for the number of each block: a numbered module that holds others, beside one of its
    class."""
    found, modules = {"": ""}, dict(model.named_modules())
    for name, module in modules.items():
        parent, dot, part = name.rpartition(".")
        if part.isdigit() and any(module.children()):
            beside = modules[parent].children()
            part = "*" if sum(type(each) is type(module) for each in beside) > 1 else part
        found[name] = f"{found[parent]}{dot}{part}"
    return found


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of a plan, in which '*' stands for a number, is a module's name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def kind_of(module: nn.Module, call: Any = ()) -> tuple[Any, ...]:
    """What has to be equal for modules to compute alike in calls with arguments of such shapes and classes."""
    shapes = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    given = [tuple(x.shape) if isinstance(x, Tensor) else x if type(x) is bool else type(x) for x in tree_leaves(call)]
    return type(module), repr(module), *_settings(module), *shapes, *given


def _settings(root: nn.Module) -> list[tuple[str, str, Any]]:
    """(module, attribute, value) of all that may decide what a module computes, beside its class and its tensors."""
    return [
        (name, key, value)
        for name, module in root.named_modules()
        for key, value in vars(module).items()
        if key not in INDEX and _is_plain(value)
    ]


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(map(_is_plain, value)))
