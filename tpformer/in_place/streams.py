"""Where the residual stream of a model runs, and how each layer that it passes runs on sequence shards.

Belongs here: what is found in one process, from one call of the model, before any parameter is sharded. A layer is a
member of a list of modules that has tensor-parallel linears. sequence_trial.py tries one layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from .alone import COLUMNS, EMBEDDING, EXPERTS, GATHERED, ROWS, SPLIT
from .kinds import kind_of
from .measured import as_measured
from .plan import Plan
from .regions import HARMLESS, example_of, is_adapted, join
from .sequence_trial import Layout, Linears, Misfit, call_tree, real_leaves, try_layer

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass
class Streams:
    """What sequence shards need: chains of layers with their layouts. kept: layers that run whole, and why."""

    chains: list[dict[str, Layout]] = field(default_factory=list)  # layers that pass on their shards, by name
    kept: dict[str, str] = field(default_factory=dict)

    def linears(self) -> set[str]:
        """The names of the tensor-parallel linears that gather or scatter the sequence."""
        return {
            f"{layer}.{name}" for chain in self.chains for layer, layout in chain.items() for name in layout.linears
        }


@dataclass
class _Call:
    name: str
    args: tuple
    kwargs: dict
    output: Any = None


class _Recorder(TorchFunctionMode):
    """Records calls of layers, and whether anything outside of them uses what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.open: list[_Call] = []
        self.used: dict[int, set[tuple[str, ...]]] = {}  # id of a tensor: the layers inside of which something used it

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in HARMLESS:
            self.use((args, kwargs))
        return func(*args, **(kwargs or {}))

    def use(self, values: Any) -> None:
        """Note that something uses these tensors now."""
        stack = tuple(call.name for call in self.open)
        for x in real_leaves(values).values():
            self.used.setdefault(id(x), set()).add(stack)

    def enter(self, name: str, _: nn.Module, args: tuple, kwargs: dict) -> None:
        """A pre-hook of a layer."""
        call = _Call(name, args, dict(kwargs))
        self.calls.append(call)
        self.open.append(call)

    def leave(self, _: nn.Module, __: Any, output: Any) -> None:
        """A hook of a layer."""
        call = self.open.pop()
        call.output = output
        inputs = set(map(id, real_leaves((call.args, call.kwargs)).values()))
        for x in real_leaves(output).values():  # alive from now on, but their ids may have been those of others
            if id(x) not in inputs:
                self.used.pop(id(x), None)


def streams_of(model: nn.Module, plan: Plan, given: Mapping[str, Tensor], example: Any) -> Streams:
    """The layers that may pass on sequence shards. Those that cannot are listed in plan.kept.

    given: what stands for what is on meta.
    Errors:  as find_streams; ValueError for a model with LoRA's adapters.
    """
    if any(is_adapted(module) for module in model.modules()):
        raise ValueError("sequence_parallel=True with LoRA's adapters is not supported: leave one of them out")
    named = [(name, plan.style(name)) for name, _ in model.named_modules()]
    styles = COLUMNS, ROWS, (*GATHERED, *SPLIT, *EMBEDDING, *EXPERTS)
    linears = Linears(*([name for name, style in named if style in some] for some in styles))
    streams = find_streams(model, linears, plan.outside, given, *example_of(model, example))
    for name, reason in streams.kept.items():
        plan.kept.setdefault(plan.patterns[name], f"runs on the whole sequence: {reason}")
    return streams


def find_streams(
    model: nn.Module, cut: Linears, outside: Collection[str], given: Mapping[str, Tensor], args: tuple,
    kwargs: dict[str, Any],
) -> Streams:  # fmt: skip
    """Find the layers that may run on sequence shards, with one call model(*args, **kwargs) in eval mode.

    cut:     the names of the modules that will be cut over ranks. Their weights are still whole.
    outside: those with a parameter that is used outside of their own forward, where nothing would sum its gradient.
    No communication. The model is as it was.
    Errors:  ValueError with the reasons, if there is no such layer.
    """
    streams = Streams()
    recorder = _record_layers(model, list(_layers(model, cut)), given, args, kwargs)
    layouts: dict[str, Layout] = {}
    tried: dict[Any, Layout | Misfit] = {}
    for name, layer in _layers(model, cut):
        if any(name.startswith(f"{other}.") for other in layouts):
            continue
        call = next((call for call in recorder.calls if call.name == name), None)
        if call is None:
            streams.kept[name] = "the example does not run it"
            continue
        own = cut.inside(name)
        key = kind_of(layer, (call.args, call.kwargs)), tuple(call.kwargs), *map(tuple, own)
        if key not in tried:
            try:
                tried[key] = try_layer(layer, call.args, call.kwargs, own)
            except Misfit as misfit:
                tried[key] = misfit
        found = tried[key]
        if isinstance(found, Layout) and (used := [part for part in found.summed if join(name, part) in outside]):
            found = Misfit(min(used), "its parameter is used on a rank's tokens, but outside of its own forward")
        if isinstance(found, Layout):
            layouts[name] = found
        else:
            where = f"{found.name}: " if found.name else ""
            streams.kept[name] = f"a {type(layer).__name__} computes something else from a part of it; {where}{found}"
    for name in _sharing(model, layouts):  # a linear runs in one way at a time, and so do the hooks of a part
        streams.kept[name] = f"a {type(model.get_submodule(name)).__name__} has a part that is also outside of it"
        del layouts[name]
    if not layouts:
        why = "; ".join(f"{name} ({reason})" for name, reason in list(streams.kept.items())[:3])
        raise ValueError(
            f"sequence_parallel=True: no layer of this {type(model).__name__} can run on sequence shards: "
            f"{why or 'no list of layers has tensor-parallel linears'}; leave sequence_parallel out"
        )
    streams.kept = {
        name: why for name, why in streams.kept.items() if not any(other.startswith(f"{name}.") for other in layouts)
    }
    streams.chains = list(_chains([call for call in recorder.calls if call.name in layouts], layouts, recorder.used))
    return streams


def _sharing(model: nn.Module, layouts: Mapping[str, Layout]) -> list[str]:
    """The layers that would change how a part runs which is also outside of them, under another name."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    found = []
    for layer, layout in layouts.items():
        changed = {*layout.linears, *layout.summed, *layout.gathered, *layout.scattered, *layout.unseen}
        own = tuple(f"{name}." for name in names[id(model.get_submodule(layer))])
        parts = (id(model.get_submodule(join(layer, part))) for part in changed)
        if not all(f"{name}.".startswith(own) for part in parts for name in names[part]):
            found.append(layer)
    return found


def _layers(model: nn.Module, cut: Linears) -> Iterator[tuple[str, nn.Module]]:
    """The members of lists that have column and row linears, outer ones first."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if name and isinstance(modules[name.rpartition(".")[0]], LISTS) and not isinstance(module, LISTS):
            inside = cut.inside(name)
            if inside.columns and inside.rows:
                yield name, module


def _record_layers(
    model: nn.Module, layers: list[tuple[str, nn.Module]], given: Mapping[str, Tensor], args: tuple, kwargs: dict
) -> _Recorder:
    """The calls of layers in one call of the model, in the order in which they began."""
    recorder, hooks = _Recorder(), []
    for name, layer in layers:
        hooks.append(layer.register_forward_pre_hook(partial(recorder.enter, name), with_kwargs=True))
        hooks.append(layer.register_forward_hook(recorder.leave))
    try:
        with as_measured(model), recorder:
            output = functional_call(model, dict(given), args, kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    recorder.use(output)
    return recorder


def _chains(calls: list[_Call], layouts: Mapping[str, Layout], used: Mapping[int, set]) -> Iterator[dict[str, Layout]]:
    """Layers in the order of their calls, cut where something but the next layer uses what a layer returns."""
    taken = {x for x, stacks in used.items() if any(layouts.keys().isdisjoint(stack) for stack in stacks)}
    for call in calls:
        inputs = real_leaves(call_tree(call.args, call.kwargs))
        taken.update(id(x) for path, x in inputs.items() if path != layouts[call.name].stream)
    times = Counter(call.name for call in calls)
    chain: dict[str, Layout] = {}
    seen: set[str] = set()
    result: Tensor | None = None  # what the layer before has returned, if only the next layer takes it
    for call in calls:
        if call.name in seen:
            continue  # a layer that runs several times is a chain of its own, each time
        seen.add(call.name)
        layout = layouts[call.name]
        x = real_leaves(call_tree(call.args, call.kwargs))[layout.stream]
        if chain and (x is not result or times[call.name] > 1):
            yield chain
            chain = {}
        chain[call.name] = layout
        result = real_leaves(call.output)[layout.result]
        if id(result) in taken or times[call.name] > 1:
            result = None
    yield chain
