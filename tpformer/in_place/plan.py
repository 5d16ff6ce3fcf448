"""Plans: which modules of a model are cut over tensor-parallel ranks, and why the others stay whole.

Belongs here: the plan as users see it, a dict of patterns and styles, how it is measured, and how a user's own is
checked against what was measured.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from tpformer.torch_private import tree_leaves

from .alone import (
    COLUMNS,
    EXPERTS,
    GATHERED,
    OUTSIDE,
    ROWS,
    SPLIT,
    STYLES,
    SUMMED,
    WHOLE,
    Alone,
    reasons_of_the_rest,
    why_not,
)
from .matrices import Division, find_division
from .measured import unchanged
from .regions import (
    Recording,
    Region,
    find_region,
    join,
    linears,
    matches,
    pattern_of,
    record,
)
from .rehearsal import Rehearsal
from .trial import Refused, find_way
from .ways import Way

INDEX = ("layer_idx", "layer_id", "layer_number", "layer_index", "training")  # integers that change no computation


class Plan(dict[str, str]):
    """{pattern: style} for the modules that are cut, '*' in a pattern stands for a number. print() shows a table.

    It may be edited as any dict; parallelize checks it again. The styles are those of transformers' plans:
    colwise, packed_colwise: this rank's output features; rowwise: this rank's input features, then a sum over ranks;
    colwise_gather_output: as colwise, then all features on every rank; rowwise_split_input: as rowwise, from all
    features; embedding_rowwise: this rank's part of the vocabulary, then a sum; replicated_with_grad_allreduce:
    whole on every rank, with gradients summed over ranks; replicate: whole.
    t:       the number of tensor-parallel ranks.
    kept:    {pattern: reason} for modules with matrices that stay whole on every rank.
    gathered: {pattern: reason} for linears that are cut each by itself, because they cannot be cut together.
    outside: the names of modules with a parameter that is used outside of their own forward.
    divisions: how the parameters of modules with matrices of their own, such as experts, are divided.
    regions: how the linears of a region are cut together, by the name of its last linear.
    model:   identity() of the model that was measured.
    """

    def __init__(
        self,
        entries: Mapping[str, str],
        t: int,
        kept: Mapping[str, str],
        regions: Mapping[str, tuple[Region, Way]],
        model: int,
        gathered: Mapping[str, str] = MappingProxyType({}),
        outside: Collection[str] = (),
        divisions: Mapping[str, Division] = MappingProxyType({}),
    ) -> None:
        super().__init__(entries)
        self.t, self.kept, self.regions, self.model = t, dict(kept), dict(regions), model
        self.gathered, self.outside, self.divisions = dict(gathered), frozenset(outside), dict(divisions)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        more = self.gathered, self.outside, self.divisions
        return Plan, (dict(self), self.t, self.kept, self.regions, self.model, *more)

    def style(self, name: str) -> str:
        """The style of a module by its name; "replicate" if the plan does not have it."""
        return next((style for pattern, style in self.items() if matches(pattern, name)), "replicate")

    def __str__(self) -> str:
        """Both lists, as a table."""
        lines = [f"plan for {self.t} tensor-parallel ranks"]
        width = max(map(len, (*self, *self.kept)), default=0)
        for pattern, style in self.items():
            why = f"  ({self.gathered[pattern]})" if pattern in self.gathered and style not in COLUMNS else ""
            lines.append(f"  {pattern:{width}}  {style}{why}")
        lines += ["whole on every rank"] * bool(self.kept)
        return "\n".join(lines + [f"  {pattern:{width}}  {reason}" for pattern, reason in self.kept.items()])


@torch.enable_grad()
def auto_plan(model: nn.Module, t: int, *, example: Any = None) -> Plan:
    """A plan for t ranks, found by measuring. The model is not changed, and nothing is communicated.

    The model runs once on a small example, in evaluation mode; that shows which linears follow one another. What they
    are part of is then tried as t ranks would compute it, once for each kind of block (in_place/trial.py). What passes
    is cut. Output layers (lm_head) are cut over the vocabulary, and embeddings if they are tied to one, or if the
    model's own plan (transformers' tp_plan) says so; that plan also serves for linears that did not pass.
    example: arguments of the run, a tuple, or a dict of keyword arguments; None for transformers models.
    Errors:  ValueError if there is no example, or if the model cannot run it.
    """
    check_shapes(model)
    with unchanged(model):
        return _measured(model, t, example)


def check_shapes(model: nn.Module) -> None:
    """ValueError for a parameter of a lazy module that has not run."""
    lazy = next((name for name, x in model.named_parameters() if is_lazy(x)), None)
    if lazy is not None:
        raise ValueError(f"{lazy} has no shape yet: call the model once before it is planned")


def _measured(model: nn.Module, t: int, example: Any) -> Plan:
    recording = record(model, example)
    patterns = {name: pattern_of(name, model) for name in linears(model)}
    plan = Plan({}, t, {}, {}, identity(model), outside=recording.outside)
    _add_regions(plan, model, recording, patterns)
    _rehearse(plan, model, example)
    alone = Alone(model, recording, t, plan.style)
    _add_matrices(plan, model, recording, alone)
    for name, style, reason in list(alone.found(tuple(plan.divisions))):
        pattern = pattern_of(name, model)
        if reason is None:
            plan[pattern] = style
            why = plan.kept.pop(pattern, None)
            if why is not None and not alone.is_head(name):  # a head is never cut together with others
                plan.gathered[pattern] = why
        else:
            plan.kept[pattern] = reason
    for name, reason in reasons_of_the_rest(model, plan.style):
        plan.kept.setdefault(pattern_of(name, model) if name else "", reason)
    return plan


def _add_regions(plan: Plan, model: nn.Module, recording: Recording, patterns: Mapping[str, str]) -> None:
    """Measure regions in the order of their rows. All rows of one pattern are cut, or none is."""
    rows: dict[str, list[str]] = defaultdict(list)
    for name in (*recording.sources, *patterns):
        if name not in rows[patterns[name]]:
            rows[patterns[name]].append(name)
    tried: dict[Any, Way | str] = {}
    taken: set[str] = set()
    for pattern, names in rows.items():
        found: dict[str, tuple[Region, Way]] = {}
        for name in names:
            known = None if name in recording.sources else _like(model, name, found)
            region = find_region(model, name, recording) if known is None else known[0]
            members = {name} if isinstance(region, str) else {name, *_columns(region)}
            if isinstance(region, str) or members & taken:
                reason = region if isinstance(region, str) else "the linear that feeds it is cut already"
                plan.kept.setdefault(pattern, reason)
                break
            way = _tried(model, region, recording, plan.t, tried) if known is None else known[1]
            if isinstance(way, str):
                for member in members:
                    plan.kept[patterns[member]] = way
                break
            found[name] = region, way
        else:
            for name, (region, way) in found.items():
                taken |= {name, *_columns(region)}
                plan.regions[name] = region, way
                for member, style in styles_of(name, region, way).items():
                    plan.kept.pop(patterns.get(member, member), None)
                    plan[pattern_of(member, model)] = style


def _like(model: nn.Module, row: str, found: Mapping[str, tuple[Region, Way]]) -> tuple[Region, Way] | None:
    """The region of a linear that did not run, such as that of an expert without tokens, after one that did."""

    def looks(root: nn.Module) -> Any:
        return type(root), repr(root), _settings(root), [parameter.shape for parameter in root.parameters()]

    for region, way in found.values():
        root = row.removesuffix(f".{region.row}")
        if root != row and looks(model.get_submodule(root)) == looks(model.get_submodule(region.root)):
            return Region(root, region.columns, region.row), way
    return None


def _add_matrices(plan: Plan, model: nn.Module, recording: Recording, alone: Alone) -> None:
    """Divide modules that multiply with parameters of their own. All of one pattern are divided, or none is."""
    rows: dict[str, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        several = sum(p.ndim > 1 for p in module.parameters(recurse=False)) > 1
        if isinstance(module, ParametrizationList):  # what makes a parameter, of tensors of one shape only
            continue
        if several and alone.is_large(name) and plan.style(name) == WHOLE[0]:
            rows[pattern_of(name, model)].append(name)
    tried: dict[Any, Division] = {}
    for pattern, names in rows.items():
        found: dict[str, Division] = {}
        for name in names:
            module = model.get_submodule(name)
            try:
                _check_alone(name, module, plan, recording)
                call = recording.calls[name]
                shapes = [getattr(x, "shape", x) for x in (*module.parameters(), *tree_leaves(call))]
                key = (type(module), repr(module), *_settings(module), *shapes)
                if key not in tried:
                    tried[key] = find_division(module, call, plan.t)
                found[name] = tried[key]
            except Refused as refused:
                plan.kept[pattern] = str(refused)
                break
        else:
            plan[pattern] = EXPERTS[0]
            plan.divisions |= found


def _check_alone(name: str, module: nn.Module, plan: Plan, recording: Recording) -> None:
    """Refused where something else than the module's own forward depends on its parameters."""
    if name not in recording.calls:
        raise Refused(f"a {type(module).__name__} is not an nn.Linear itself, and did not run in the example")
    parts = [part for part, _ in module.named_modules(prefix=name)]
    if any(part in recording.outside for part in parts):
        raise Refused(OUTSIDE)
    inside = next((part for part in parts if plan.style(part) != WHOLE[0]), None)
    if inside is not None:
        raise Refused(f"a {type(module).__name__} is not an nn.Linear itself, and {inside} in it is divided")
    if any(id(p) in recording.tied for p in module.parameters()):
        raise Refused("it is tied to another module")


def _rehearse(plan: Plan, model: nn.Module, example: Any) -> None:
    """Leave regions whole that are not right in the whole model (in_place/rehearsal.py)."""
    if not plan.regions:
        return
    rehearsal = Rehearsal(model, example, plan.regions, plan.t)
    fault = rehearsal.fault(plan.regions)
    if fault is None:
        return
    blocks: dict[str, dict[str, tuple[Region, Way]]] = defaultdict(dict)
    for row, found in plan.regions.items():
        blocks[pattern_of(row, model)][row] = found
    faults = {pattern: rehearsal.fault(regions) for pattern, regions in blocks.items()}
    right = {row: found for pattern, regions in blocks.items() if not faults[pattern] for row, found in regions.items()}
    if right and rehearsal.fault(right) is not None:
        right = {}  # only several together show it
    members = {row: styles_of(row, *found) for row, found in plan.regions.items()}
    for row in plan.regions.keys() - right.keys():
        for name, style in members[row].items():
            plan.pop(pattern_of(name, model), None)
            if style not in SUMMED:
                plan.kept[pattern_of(name, model)] = faults[pattern_of(row, model)] or fault
    plan.regions = right
    for row in right:
        plan.update({pattern_of(name, model): style for name, style in members[row].items()})


def _columns(region: Region) -> list[str]:
    return [join(region.root, name) for name in region.columns]


def styles_of(row: str, region: Region, way: Way) -> dict[str, str]:
    """The style of each module of a region, by its whole name."""
    styles = {}
    for name in region.columns:
        styles[join(region.root, name)] = "colwise" if len(way.cuts[name].blocks) == 1 else "packed_colwise"
    styles |= {join(region.root, name): SUMMED[0] for name in way.seen_by_rank()}
    return styles | {row: "rowwise"}


def _settings(root: nn.Module) -> list[tuple[str, str, Any]]:
    """(module, attribute, value) of all that may decide what a module computes, beside its class and its tensors."""
    return [
        (name, key, value)
        for name, module in root.named_modules()
        for key, value in vars(module).items()
        if type(value) in (int, float, bool, str) and key not in INDEX
    ]


def identity(model: nn.Module) -> int:
    """A number that differs between models that differ in classes, settings or shapes, but not for their values."""
    classes = [type(module).__qualname__ for module in model.modules()]
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    return zlib.crc32(repr((classes, _settings(model), shapes)).encode())


def _tried(model: nn.Module, region: Region, recording: Recording, t: int, tried: dict[Any, Way | str]) -> Way | str:
    """How a region is cut, or why it is not; equal modules with equal arguments are tried once."""
    root, call = model.get_submodule(region.root), recording.calls[region.root]
    shapes = [getattr(x, "shape", type(x)) for x in tree_leaves(call)]
    key = (type(root), repr(root), *_settings(root), *shapes, region.columns, region.row)
    if key not in tried:
        try:
            tried[key] = find_way(root, region.columns, region.row, call, t)
        except Refused as refused:
            tried[key] = str(refused)
    return tried[key]


@torch.enable_grad()
def check_plan(entries: Mapping[str, str], model: nn.Module, t: int, example: Any = None) -> Plan:
    """The plan of a user's own entries, where each is right. A Plan that was measured for t and such a model is not
    measured again.

    Errors: ValueError for an unknown style, for a pattern of no module, and for an entry that is not right, with the
            reason.
    """
    if isinstance(entries, Plan) and (entries.t, entries.model) == (t, identity(model)):
        measured = entries
    else:
        measured = auto_plan(model, t, example=example)
    names = dict(model.named_modules())
    styles: dict[str, str] = {}
    for pattern, style in entries.items():
        found = [name for name in names if matches(pattern, name)]
        if style not in STYLES:
            raise ValueError(
                f"{pattern}: the style {style!r} is not supported: it has to be one of {', '.join(STYLES)}"
            )
        if not found:
            raise ValueError(f"{pattern}: no module of {type(model).__name__} has this name; '*' stands for a number")
        styles |= dict.fromkeys(found, style)
    plan = Plan({}, t, measured.kept, {}, measured.model, measured.gathered, measured.outside)
    needed: set[str] = set()
    for row, (region, way) in measured.regions.items():
        members = styles_of(row, region, way)
        asked = {name for name in members if styles.get(name, "replicate") != "replicate"}
        linear = {name for name, style in members.items() if style not in SUMMED}
        if linear.isdisjoint(asked) or {styles[name] for name in asked} <= {*GATHERED, *SPLIT}:
            plan.kept |= {pattern_of(name, model): "the plan does not have it" for name in linear - asked}
            continue
        for name, style in members.items():
            if styles.get(name, style if name not in linear else None) != style:
                raise ValueError(
                    f"{name} has the style {styles.get(name, 'replicate')!r}, but {', '.join(members)} are cut "
                    f"together and it has to be {style!r}: give all of them their styles, or leave all whole"
                )
        plan.regions[row] = region, way
        styles |= members
        needed |= members.keys()
    for name, style in styles.items():
        if style in WHOLE or name in needed:
            continue
        if style in EXPERTS and name in measured.divisions:
            plan.divisions[name] = measured.divisions[name]
            continue
        if style in (*COLUMNS, *ROWS, *SUMMED, *EXPERTS):
            reasons = {**measured.kept, **measured.gathered}
            reason = reasons.get(pattern_of(name, model), "nothing that is cut uses it")
            raise ValueError(f"{name} cannot be {style!r} on {t} ranks: {reason}")
        if measured.get(pattern_of(name, model)) == style:
            continue
        refused = OUTSIDE if name in measured.outside else why_not(names[name], style, t)
        if refused is not None:
            raise ValueError(f"{name} cannot be {style!r} on {t} ranks: {refused}")
    for name, style in styles.items():
        if style not in WHOLE:
            plan[pattern_of(name, model)] = style
            plan.kept.pop(pattern_of(name, model), None)
    return plan
