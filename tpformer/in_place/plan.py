"""Plans: which modules of a model are cut over tensor-parallel ranks, and why the others stay whole.

Belongs here: the plan as users see it, a dict of patterns and styles, how it is measured, and how a user's own is
checked against what was measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

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
from .kinds import identity, matches, patterns_of
from .matrices import Division, find_divisions, has_several
from .measured import check_shapes, unchanged
from .regions import Recording, Region, record
from .rehearsal import faults
from .trial import find_ways
from .ways import Way


class Plan(dict[str, str]):
    """{pattern: style} for the modules that are cut, '*' in a pattern stands for a number. print() shows a table.

    Modules of one pattern that are not cut alike have entries by their names.

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

    def enter(self, styles: Mapping[str, str], patterns: Mapping[str, str]) -> dict[str, str]:
        """Enter modules with their styles. Gives the key of each: its pattern, or its name if another module of that
        pattern has another style, as one of another class or width may, or one that a user leaves whole."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, pattern in patterns.items():
            found[pattern].add(styles.get(name, WHOLE[0]))
        keys = {name: patterns[name] if len(found[patterns[name]]) == 1 else name for name in styles}
        self.update({keys[name]: style for name, style in styles.items()})
        return keys

    def leave_to_exchanges(self, patterns: Collection[str], names: Collection[str]) -> None:
        """Let these modules, of these patterns, get all tokens of tensor-parallel ranks, which they send elsewhere."""
        for name in names:
            self.divisions.pop(name, None)
        for pattern in patterns:
            self[pattern] = EXPERTS[0]
            self.kept.pop(pattern, None)

    def __str__(self) -> str:
        """Both lists, as a table."""
        lines = [f"plan for {self.t} tensor-parallel ranks"]
        width = max(map(len, (*self, *self.kept)), default=0)
        for pattern, style in self.items():
            why = f"  ({self.gathered[pattern]})" if pattern in self.gathered and style not in COLUMNS else ""
            lines.append(f"  {pattern:{width}}  {style}{why}")
        lines += ["whole on every rank"] * bool(self.kept)
        return "\n".join(lines + [f"  {pattern:{width}}  {reason}" for pattern, reason in self.kept.items()])


def plan_of(model: nn.Module, plan: str | Mapping[str, str], t: int, example: Any) -> Plan:
    """The plan that a user asks for: "auto", or entries. One rank divides nothing."""
    if t == 1:
        return Plan({}, t, {}, {}, identity(model))
    if not isinstance(plan, Mapping):
        return auto_plan(model, t, example=example)
    return check_plan(plan, model, t, example)


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
        recording = record(model, example)
        regions, kept = find_ways(model, recording, t)
        ways = {row: way.within(region.root) for row, (region, way) in regions.items()}
        wrong = faults(model, recording, ways, t)
        right = {row: found for row, found in regions.items() if row not in wrong}
        plan = Plan({}, t, kept, right, recording.model, outside=recording.outside)
        styles: dict[str, str] = {}
        for row, way in ways.items():
            if row not in wrong:
                styles |= way.styles(row)
            else:
                linear = (name for name, style in way.styles(row).items() if style not in SUMMED)
                plan.kept |= {recording.patterns[name]: wrong[row] for name in linear}
        plan.enter(styles, recording.patterns)
        _add_alone(plan, model, recording)
    plan.kept = {pattern: why for pattern, why in plan.kept.items() if pattern not in plan}
    return plan


def _add_alone(plan: Plan, model: nn.Module, recording: Recording) -> None:
    """What is cut each by itself, and why the rest is not."""
    patterns = recording.patterns
    alone = Alone(model, recording, plan.t, plan.style)
    wanted = [name for name, module in alone.named.items() if has_several(module) and alone.is_large(name)]
    plan.divisions, refused = find_divisions(model, recording, wanted, plan.style, plan.t)
    plan.enter(dict.fromkeys(plan.divisions, EXPERTS[0]), patterns)
    plan.kept |= refused
    found = list(alone.found(tuple(plan.divisions)))
    keys = plan.enter({name: style for name, style, reason in found if reason is None}, patterns)
    for name, key in keys.items():
        why = plan.kept.get(patterns[name])
        if why is not None and not alone.is_head(name):  # a head is never cut together with others
            plan.gathered[key] = why
    for name, _, reason in found:
        if reason is not None:
            plan.kept[patterns[name]] = reason
    for name, reason in reasons_of_the_rest(model, recording, plan.style):
        plan.kept.setdefault(patterns[name], reason)


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
    names, patterns = dict(model.named_modules()), patterns_of(model)
    styles: dict[str, str] = {}
    for pattern, style in sorted(entries.items(), key=lambda entry: -entry[0].count("*")):  # a name before a pattern
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
        members = way.within(region.root).styles(row)
        asked = {name for name in members if styles.get(name, "replicate") != "replicate"}
        linear = {name for name, style in members.items() if style not in SUMMED}
        if linear.isdisjoint(asked) or {styles[name] for name in asked} <= {*GATHERED, *SPLIT}:
            plan.kept |= {patterns[name]: "the plan does not have it" for name in linear - asked}
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
            reason = reasons.get(name) or reasons.get(patterns[name], "nothing that is cut uses it")
            raise ValueError(f"{name} cannot be {style!r} on {t} ranks: {reason}")
        if measured.style(name) == style:
            continue
        refused = OUTSIDE if name in measured.outside else why_not(names[name], style, t)
        if refused is not None:
            raise ValueError(f"{name} cannot be {style!r} on {t} ranks: {refused}")
    plan.enter({name: style for name, style in styles.items() if style not in WHOLE}, patterns)
    plan.kept = {pattern: why for pattern, why in plan.kept.items() if pattern not in plan}
    return plan
