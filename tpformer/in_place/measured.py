"""While a model is measured its own code runs, and leaves nothing behind.

Belongs here: how a model is while it is measured, and what is given back to it and to the process afterwards.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tpformer.torch_private import backward_hooks, compiler_is_imported, forward_hooks, forward_pre_hooks

from .generators import Generators
from .recomputation import checkpoints_with_graphs

SETTINGS = {"_experts_implementation": "eager", "use_cache": False}  # of transformers' configurations
MOST = 1 << 20  # elements of a tensor that is no buffer, of which a copy is kept: matrices of large models have more
DEPTH = 3  # of containers and objects within what a module holds
OF_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has: its parameters, submodules, hooks and mode


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Within, a model may be measured: copies of its modules, and as_measured the model itself. Afterwards it is as it
    was. ValueError for a parameter of a lazy module that has not run.

    Experts of transformers' models run one after another, because torch multiplies no groups of float64 matrices, and
    none without strides, as stand-ins are. No caches are made, which a trial would find filled. What torch.compile has
    wrapped runs as it is written: each try, with its hooks and attributes, would be compiled by itself. A checkpoint
    whose forward makes no graph (use_reentrant=True) makes one, which shows where results go."""
    lazy = next((name for name, x in model.named_parameters() if nn.parameter.is_lazy(x)), None)
    if lazy is not None:
        raise ValueError(f"{lazy} has no shape yet: call the model once before it is planned")
    configs = {id(each): each for each in (getattr(module, "config", None) for module in model.modules())}
    before = [
        (each, name, getattr(each, name)) for each in configs.values() for name in SETTINGS if hasattr(each, name)
    ]
    eager = torch.compiler.set_stance("force_eager") if compiler_is_imported() else nullcontext()
    try:
        for config, name, _ in before:
            setattr(config, name, SETTINGS[name])
        with eager, _unchanged(model), checkpoints_with_graphs(), torch.enable_grad():
            yield
    finally:
        for config, name, was in before:
            setattr(config, name, was)


@contextmanager
def as_measured(model: nn.Module) -> Iterator[None]:
    """Within, the model is in evaluation mode, and all its parameters require gradients; afterwards it is as it was."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    with _unchanged(model), torch.enable_grad():
        model.eval()
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """What the model's code changes within is undone, if an exception leaves it, too: random generators, buffers, what
    modules keep as attributes (numbers, tensors, containers), gradients, and parameters of up to MOST elements.

    Tensors stay the same objects in the same memory."""
    undo: dict[int, Callable[[], None]] = {}
    _remember(model, undo, DEPTH)
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with Generators(model).given_back(), torch.random.fork_rng(devices=gpus):
        try:
            yield
        finally:
            for step in undo.values():
                step()


def _remember(value: Any, undo: dict[int, Callable[[], None]], depth: int) -> None:
    """Note how a value becomes what it is now, and those within it."""
    if id(value) in undo or depth < 0 or isinstance(value, type | ModuleType):
        return
    within: Any = ()
    if isinstance(value, nn.Module):
        depth = DEPTH
        undo |= {id(buffer): _of_tensor(buffer) for buffer in value.buffers(recurse=False)}
        undo[id(value)] = partial(_restore, value, type(value), dict(vars(value)))
        within = [*vars(value).values(), *_named_by(value)]
    elif isinstance(value, Tensor):
        if value.numel() <= MOST and not nn.parameter.is_lazy(value):
            undo[id(value)] = _of_tensor(value)
    elif isinstance(value, dict | list | deque | set):
        within = [] if isinstance(value, set) else _within(value)
        undo[id(value)] = partial(_refill, value, _items(value))
    elif isinstance(value, tuple):
        within = _within(value)
    elif hasattr(value, "__dict__") and not callable(value):
        undo[id(value)] = partial(_restore, value, type(value), dict(vars(value)))
        within = list(vars(value).values())
    for each in within:
        _remember(each, undo, depth - 1)


def kept_by(value: Any, depth: int = DEPTH) -> list[Any]:
    """Tensors and numbers that a module keeps itself, or in containers and objects; not those of its submodules."""
    if isinstance(value, Tensor | int | float):
        return [value]
    if depth < 0 or isinstance(value, type | ModuleType) or (isinstance(value, nn.Module) and depth < DEPTH):
        return []
    within: Any = ()
    if isinstance(value, nn.Module):
        within = [x for key, x in vars(value).items() if key not in OF_TORCH] + _named_by(value)
    elif isinstance(value, dict | list | deque | tuple):
        within = _within(value)
    elif hasattr(value, "__dict__") and not callable(value):
        within = list(vars(value).values())
    return [x for each in within for x in kept_by(each, depth - 1)]


def _named_by(module: nn.Module) -> list[Any]:
    """Tensors, numbers and containers that a module's forward and its hooks name, and no module holds: global ones, and
    those of closures. Functions of torch and of this package keep nothing."""
    hooks, found = (forward_pre_hooks(module), forward_hooks(module), backward_hooks(module)), list[Any]()
    for function in (module.forward, *(hook for each in hooks for hook in each.values())):
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is None or (function.__module__ or "").startswith(("torch.", "tpformer.")):
            continue
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # of a cell that has no value yet
                found.append(cell.cell_contents)
        found += [function.__globals__[name] for name in _names(code) if name in function.__globals__]
    return [x for x in found if isinstance(x, Tensor | int | float | dict | list | deque | set)]


def _names(code: CodeType) -> list[str]:
    """What the code of a function and of those within it may name."""
    return [*code.co_names, *(name for x in code.co_consts if isinstance(x, CodeType) for name in _names(x))]


def _items(container: Any) -> list[Any]:
    """What a container holds, pairs of a dict, read by the built-in class's own way: a class of the user's may make or
    load something where one of its items is asked for, as transformers' table of activations does."""
    if isinstance(container, dict):
        return list((OrderedDict if isinstance(container, OrderedDict) else dict).items(container))
    kind = next(each for each in (list, deque, set, tuple) if isinstance(container, each))
    return list(kind.__iter__(container))


def _within(container: Any) -> list[Any]:
    items = _items(container)
    return [x for _, x in items] if isinstance(container, dict) else items


def _refill(container: Any, before: list[Any]) -> None:
    """Give a container its items again, unless they are the same objects: then it is not touched."""
    now, keyed = _items(container), isinstance(container, dict)
    pairs = [pair for each in zip(before, now, strict=False) for pair in (zip(*each, strict=True) if keyed else [each])]
    if len(now) == len(before) and all(x is y for x, y in pairs):
        return
    container.clear()
    if keyed:
        for key, x in before:
            container[key] = x
    else:
        (container.update if isinstance(container, set) else container.extend)(before)


def _restore(value: Any, kind: type, before: dict[str, Any]) -> None:
    """The attributes of a module or another object, unless it has become one of another class, as lazy modules do."""
    held = vars(value)
    if type(value) is kind and (held.keys() != before.keys() or any(held[key] is not x for key, x in before.items())):
        held.clear()
        held.update(before)


def _of_tensor(x: Tensor) -> Callable[[], None]:
    """What gives a tensor its memory, its values and its gradient back."""
    gradient = x.grad if x.is_leaf else None
    if type(x) not in (Tensor, nn.Parameter) or x.is_meta or x.is_inference() or x.layout is not torch.strided:
        return lambda: None
    memory, values = x.detach(), x.detach().clone()

    def undo() -> None:
        if x.is_leaf and x.grad is not gradient:
            x.grad = gradient
        if x.data_ptr() != memory.data_ptr() or x.shape != memory.shape or x.dtype != memory.dtype:
            x.data = memory
        if not torch.equal(memory, values):
            memory.data.copy_(values)

    return undo
