"""Which linears could be cut together: one run of a model shows which linears' outputs reach which linears' inputs.

Belongs here: what counts as a linear, the example that is run, what is recorded of the run, and the regions in it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from tpformer.torch_private import (
    backward_hooks,
    forward_hooks,
    forward_pre_hooks,
    is_own_parameter,
    tree_leaves,
    tree_map,
)

from .kinds import Described, kind_of
from .linears import is_linear
from .measured import as_measured

# what may be asked of a tensor without its values or its length, and without its values
HARMLESS = {
    Tensor.is_floating_point,
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "ndim")),
}
OF_SHAPES = {*HARMLESS, Tensor.shape.__get__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_meta.__get__}
MOST_LINEARS = 16  # of the smallest module around a region, which the trial copies


@dataclass(frozen=True)
class Region:
    """Linears whose outputs reach the input of another one, `row`, and no other linear.

    Names are relative to `root`, the smallest module that holds them all.
    like: where it did not run, the row of a region of its kind that did.
    """

    root: str
    columns: tuple[str, ...]
    row: str
    like: str = ""

    @property
    def whole_columns(self) -> list[str]:
        """The names of its columns in the model."""
        return [join(self.root, name) for name in self.columns]


@dataclass
class Recording:
    """What one run of a model shows. Names are those of named_modules.

    inputs:  (args, kwargs) of the run.
    model:   what it is.
    linears: all linears. adapted: prefixes of what is in modules around which LoRA is.
    sources: for every linear that ran, in order, the linears whose outputs reach its inputs directly, call by call.
    results: the linears whose outputs reach the model's result directly.
    tied:    the ids of parameters that several modules hold.
    calls:   (args, kwargs) of the first call of every module that holds others or matrices; tensors are copies.
    outside: modules with a parameter that is used outside of their own forward.
    """

    inputs: tuple[tuple, dict]
    model: Described
    linears: tuple[str, ...]
    adapted: tuple[str, ...]
    sources: dict[str, list[frozenset[str]]] = field(default_factory=dict)
    results: frozenset[str] = frozenset()
    tied: frozenset[int] = frozenset()
    calls: dict[str, tuple[tuple, dict]] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)

    @property
    def patterns(self) -> dict[str, str]:
        """The pattern of every module."""
        return self.model.patterns


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is PEFT's LoRA around a linear: it has base_layer, and linears lora_A and lora_B by adapter."""
    parts = dict(module.named_children())
    matrices = (parts.get("lora_A"), parts.get("lora_B"))
    return "base_layer" in parts and all(isinstance(each, nn.ModuleDict) for each in matrices)


def linear_of(module: nn.Module) -> nn.Module | None:
    """The nn.Linear, or Conv1D of transformers, that a module is or that LoRA adapts. None for any other module, and
    for one whose forward or parameters have been replaced."""
    module = base_of(module)
    if "forward" in vars(module) or not (is_own_parameter(module, "weight") and is_own_parameter(module, "bias")):
        return None
    return module if is_linear(type(module)) else None


def has_matrices(module: nn.Module) -> bool:
    """Whether a module has parameters of its own with more than one dim."""
    return any(p.ndim > 1 and p.is_floating_point() for p in module.parameters(recurse=False))


def base_of(module: nn.Module) -> nn.Module:
    """The linear that LoRA adapts, or the module itself."""
    return module.base_layer if is_adapted(module) else module


def sizes_of(linear: nn.Module) -> tuple[int, int]:
    """(input features, output features) of an nn.Linear or a Conv1D."""
    size = linear.weight.shape
    return (size[1], size[0]) if isinstance(linear, nn.Linear) else (size[0], size[1])


def plain_linear(module: nn.Module) -> nn.Linear:
    """An nn.Linear of float64 without memory, of the sizes of the one that a module is or that LoRA adapts."""
    linear = linear_of(module)
    assert linear is not None
    return nn.Linear(*sizes_of(linear), linear.bias is not None, device="meta", dtype=torch.float64)


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """Every module, by name, that is a linear or a LoRA around one. What is inside of a LoRA is not listed."""
    found: dict[str, nn.Module] = {}
    adapted: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if linear_of(module) is not None and not name.startswith(adapted or "\n"):
            found[name] = module
            if is_adapted(module):
                adapted += (f"{name}.",)
    return found


def join(root: str, name: str) -> str:
    """The whole name of a module that is relative to root; either may be empty."""
    return ".".join(part for part in (root, name) if part)


def example_of(model: nn.Module, example: Any) -> tuple[tuple, dict]:
    """(args, kwargs) of the run that is recorded: the user's example, or one made from a transformers config.

    Errors: ValueError if there is neither.
    """
    if example is not None:
        if isinstance(example, Mapping):
            return (), {**example, **dict.fromkeys(("use_cache",) * bool(example.get("use_cache")), False)}
        return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    first = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    device = torch.device("cpu") if first.is_meta else first.device
    where: dict[str, Any] = {"device": device, "dtype": first.dtype}
    ids = torch.arange(8, device=device).view(2, 4) + 1
    kwargs: dict[str, Any]
    if name == "input_ids":
        kwargs = {name: ids % config.get_text_config().vocab_size}
    elif name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        kwargs = {name: torch.ones(1, getattr(config, "num_channels", 3), height, width, **where)}
    elif name == "input_features":
        frames = 2 * config.max_source_positions
        kwargs = {name: torch.ones(1, config.num_mel_bins, frames, **where)}
    else:
        raise ValueError(
            f"nothing tells what inputs {type(model).__name__} takes: give parallelize an example=, the arguments of "
            f"one small forward as a tuple, or as a dict of keyword arguments"
        )
    if getattr(config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = ids[: len(kwargs[name])] % config.vocab_size
    if hasattr(config, "use_cache"):
        kwargs["use_cache"] = False
    return (), kwargs


def inputs_of(model: nn.Module, example: Any) -> tuple[tuple, dict]:
    """example_of, with tensors that require a gradient: those of the example that do, or if none does all floating
    ones."""
    call = example_of(model, example)
    if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(call)):
        return call

    def floating(x: Any) -> Any:
        return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x

    return tree_map(floating, call)


class _Graph:
    """Finds the linears whose outputs reach a tensor. A linear's output is cut from the graph behind it: a leaf."""

    def __init__(self) -> None:
        self.leaves: dict[int, tuple[Tensor, str]] = {}
        self.found: dict[Any, frozenset[str]] = {}  # holds the nodes, so that they stay the same objects

    def cut(self, output: Tensor, name: str) -> Tensor:
        leaf = output.detach().requires_grad_()
        self.leaves[id(leaf)] = leaf, name
        return leaf.clone()  # not the leaf itself, which must not be written in place

    def sources(self, values: Any) -> frozenset[str]:
        nodes = [leaf.grad_fn for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        return frozenset().union(*(self._reached(node) for node in nodes))

    def _reached(self, node: Any) -> frozenset[str]:
        todo = [node]
        while todo:
            top = todo[-1]
            below = [each for each, _ in top.next_functions if each is not None]
            missing = [each for each in below if each not in self.found]
            if missing and top not in self.found:
                todo += missing
                continue
            if top not in self.found:
                _, name = self.leaves.get(id(getattr(top, "variable", None)), (None, None))
                own = frozenset() if name is None else frozenset([name])
                self.found[top] = own.union(*(self.found[each] for each in below))
            todo.pop()
        return self.found[node]


class _Uses(TorchFunctionMode):
    """Notes the modules whose parameters are used while their own forward does not run. given: what stands in for
    parameters."""

    def __init__(self, model: nn.Module, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        used = {id(parameter): given.get(name, parameter) for name, parameter in model.named_parameters()}
        self.held = [x for x in used.values()]  # alive, so that their ids stay theirs
        self.modules: dict[str, nn.Module] = {}
        self.holders: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            own = base_of(module)
            for parameter in own.parameters(recurse=False):
                self.modules[name] = module
                self.holders.setdefault(id(used[id(parameter)]), []).append(name)
        self.running: list[str] = []
        self.outside: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in OF_SHAPES:
            for x in tree_leaves((args, kwargs)):
                names = self.holders.get(id(x)) if isinstance(x, Tensor) else None
                if names is not None and not any(name in self.running for name in names):
                    self.outside.update(names)
        return func(*args, **(kwargs or {}))

    def attach(self) -> list[Any]:
        """Hooks that say when a module's forward runs."""

        def hooks(name: str, module: nn.Module) -> list[Any]:
            enter = module.register_forward_pre_hook(lambda *_: self.running.append(name))
            return [enter, module.register_forward_hook(lambda *_: self.running.remove(name), always_call=True)]

        return [hook for name, module in self.modules.items() for hook in hooks(name, module)]


def record(model: nn.Module, known: Described, example: Any) -> Recording:
    """Run a model once, in evaluation mode and without a cache, and return what the run shows.

    known: what the model is.
    Errors: ValueError if no example is given and none can be made, or if the model cannot run it.
    """
    args, kwargs = inputs_of(model, example)
    units = linears(model)
    adapted = tuple(f"{name}." for name, module in model.named_modules() if is_adapted(module))
    recording = Recording((args, kwargs), known, tuple(units), adapted)
    graph, hooks, uses = _Graph(), list[Any](), _Uses(model, known.given)
    inside = {part for unit in units.values() for part in unit.modules()}

    def keep(value: Any) -> Any:
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    def calls(name: str) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if name not in recording.calls:
                recording.calls[name] = tree_map(keep, args), tree_map(keep, kwargs)

        return hook

    def arrives(name: str) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            recording.sources.setdefault(name, []).append(graph.sources((args, kwargs)))

        return hook

    def leaves(name: str) -> Any:
        return lambda module, args, output: graph.cut(output, name)

    for name, module in model.named_modules():
        if name in units:
            hooks.append(module.register_forward_pre_hook(arrives(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(leaves(name)))
        elif module not in inside and (any(module.children()) or has_matrices(module)):
            hooks.append(module.register_forward_pre_hook(calls(name), with_kwargs=True))
    try:
        hooks += uses.attach()
        with as_measured(model), uses:
            result = functional_call(model, known.given, args, kwargs)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot run the example that shows how its linears follow one another "
            f"({type(error).__name__}: {error}): give a small one that it can run, example="
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    recording.outside = uses.outside
    recording.results = graph.sources(values_of(result))
    times = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    recording.tied = frozenset(key for key, number in times.items() if number > 1)
    return recording


def values_of(result: Any) -> Any:
    """A model's result as containers that tree_leaves knows: transformers returns a dict of its own class."""
    if isinstance(result, Mapping):
        return [values_of(value) for value in result.values()]
    if isinstance(result, tuple | list):
        return [values_of(value) for value in result]
    return result


def find_regions(model: nn.Module, recording: Recording) -> dict[str, dict[str, Region | str]]:
    """{pattern: {row: the region that ends there, or why there is none}}, of all linears in the order of their runs."""
    found: dict[str, dict[str, Region | str]] = {}
    for row in dict.fromkeys((*recording.sources, *recording.linears)):
        beside = found.setdefault(recording.patterns[row], {})
        region = find_region(model, row, recording)
        beside[row] = region if row in recording.sources else _like(model, row, beside) or region
    return found


def _like(model: nn.Module, row: str, beside: Mapping[str, Region | str]) -> Region | None:
    """The region of a linear that did not run, such as that of an expert without tokens, after one that did."""
    for other, region in beside.items():
        root = "" if isinstance(region, str) else row.removesuffix(f".{region.row}")
        if isinstance(region, str) or root == row:
            continue
        if kind_of(model.get_submodule(root)) == kind_of(model.get_submodule(region.root)):
            return Region(root, region.columns, region.row, region.like or other)
    return None


def find_region(model: nn.Module, row: str, recording: Recording) -> Region | str:
    """The region that ends in the linear `row`, or why there is none."""
    calls = recording.sources.get(row)
    if calls is None:
        return "it did not run in the example"
    columns = calls[0]
    if not columns:
        return "no other linear's output reaches it"
    if any(call != columns for call in calls):
        return "its calls in the example get outputs of different linears"
    for name in sorted(columns):
        reached = [other for other, calls in recording.sources.items() if any(name in call for call in calls)]
        others = [other for other in reached if other != row]
        if others or name in recording.results:
            where = others[0] if others else "the result"
            return f"the output of {name} reaches it, and also {where}"
    for name in (*columns, row):
        if name in recording.outside:
            return f"a parameter of {name} is also used outside of its own forward"
        reason = _why_whole(model.get_submodule(name), recording.tied, is_row=name == row)
        if reason is not None:
            return f"{name} {reason}"
    names = [name.split(".") for name in (*columns, row)]
    depth = next(i for i in range(len(names[-1])) if len({name[i] for name in names if i < len(name)}) > 1)
    while depth and ".".join(names[0][:depth]) not in recording.calls:
        depth -= 1  # a list of modules is not called itself
    root = ".".join(names[0][:depth])
    holder = model.get_submodule(root)
    if any(name[depth].isdigit() and any(holder.get_submodule(name[depth]).children()) for name in names):
        return f"the linears that feed it are in other blocks: {', '.join(sorted(columns)[:3])}"
    beside = len(linears(holder)) - len(names)
    if beside > MOST_LINEARS:
        return f"the smallest module that also holds {min(columns)} has {beside} other linears"
    order = [name for name in recording.sources if name in columns]
    cut = len(root) + 1 if root else 0
    return Region(root, tuple(name[cut:] for name in order), row[cut:])


def _why_whole(linear: nn.Module, tied: frozenset[int], is_row: bool) -> str | None:
    """Why a linear of a region cannot be cut in place, whatever is computed between; None if it can."""
    base = base_of(linear)
    if any(id(p) in tied for p in base.parameters(recurse=False)):
        return "is tied to another module"
    for module in {linear, base}:
        if (forward_pre_hooks if is_row else forward_hooks)(module) or backward_hooks(module):
            return "has a hook, which would see one rank's features only"
    return None
