"""Plans: which modules of a model are cut over tensor-parallel ranks, and why the others stay whole.

Belongs here: the plan as users see it, a dict of patterns and styles, how it is measured, and how a user's own is
checked against what was measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

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
from .kinds import Described, describe, matches
from .matrices import Division, find_divisions
from .measured import measuring
from .regions import Recording, find_regions, record
from .rehearsal import faults
from .trial import find_ways
from .ways import Way


@dataclass(eq=False, repr=False)
class Plan(dict[str, str]):
    """{pattern: style} for the modules that are cut. print() shows a table.

    '*' in a pattern stands for the numbers of blocks of one class. Where these are not cut alike, their modules have
    entries by their names.

    It may be edited as any dict; parallelize checks it again. The styles are those of transformers' plans:
    colwise, packed_colwise: this rank's output features; rowwise: this rank's input features, then a sum over ranks;
    colwise_gather_output: as colwise, then all features on every rank; rowwise_split_input: as rowwise, from all
    features; embedding_rowwise: this rank's part of the vocabulary, then a sum; replicated_with_grad_allreduce:
    whole on every rank, with gradients summed over ranks; replicate: whole.
    t:       the number of tensor-parallel ranks.
    model:   the identity of the model that was measured.
    patterns: the pattern of each of its modules.
    kept:    {pattern: reason} for modules with matrices that stay whole on every rank.
    regions: how the linears of a region are cut together, by the name of its last linear.
    gathered: {pattern: reason} for linears that are cut each by itself, because they cannot be cut together.
    outside: the names of modules with a parameter that is used outside of their own forward.
    divisions: how the parameters of modules with matrices of their own, such as experts, are divided.
    apart:   {name: style} for modules that may be cut each by itself, as measured.
    """

    styles: InitVar[Mapping[str, str]]
    t: int
    model: int = 0
    patterns: Mapping[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    regions: dict[str, Way] = field(default_factory=dict)
    gathered: Mapping[str, str] = field(default_factory=dict)
    outside: Collection[str] = frozenset()
    divisions: dict[str, Division] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self, styles: Mapping[str, str]) -> None:
        self.enter(styles)

    def style(self, name: str) -> str:
        """The style of a module by its name; "replicate" if the plan does not have it."""
        return self.get(name) or self.get(self.patterns.get(name, ""), WHOLE[0])

    def enter(self, styles: Mapping[str, str]) -> None:
        """Enter modules with their styles, by their pattern, or by their names if another module of that pattern has
        another style, as one of another width may, or one that a user leaves whole."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, pattern in self.patterns.items():
            found[pattern].add(styles.get(name, WHOLE[0]))
        for name, style in styles.items():
            pattern = self.patterns[name]
            self[pattern if len(found[pattern]) == 1 else name] = style
        self.kept = {pattern: why for pattern, why in self.kept.items() if WHOLE[0] in found[pattern]}

    def leave_to_exchanges(self, names: Collection[str]) -> None:
        """Let these modules get all tokens of tensor-parallel ranks, which they send elsewhere."""
        for name in names:
            self.divisions.pop(name, None)
        self.enter(dict.fromkeys(names, EXPERTS[0]))

    def __str__(self) -> str:
        """Both lists, as a table."""
        lines = [f"plan for {self.t} tensor-parallel ranks"]
        width = max(map(len, (*self, *self.kept)), default=0)
        for pattern, style in self.items():
            why = self.gathered.get(self.patterns.get(pattern, pattern))
            lines.append(f"  {pattern:{width}}  {style}" + f"  ({why})" * (why is not None and style not in COLUMNS))
        lines += ["whole on every rank"] * bool(self.kept)
        return "\n".join(lines + [f"  {pattern:{width}}  {reason}" for pattern, reason in self.kept.items()])


def plan_of(model: nn.Module, plan: str | Mapping[str, str], t: int, recording: Recording | None) -> Plan:
    """The plan that a user asks for: "auto", or entries. One rank divides nothing.

    recording: None if a Plan needs none, as is_measured says."""
    if t == 1:
        return Plan({}, t, patterns={} if recording is None else recording.patterns)
    if recording is not None and not is_measured(plan, t, recording.model):
        measured = _measured(model, recording, t)
    else:
        assert isinstance(plan, Plan)
        measured = plan
    return check_plan(plan, model, measured) if isinstance(plan, Mapping) else measured


def is_measured(plan: str | Mapping[str, str], t: int, known: Described) -> bool:
    """Whether a plan was measured for t ranks and such a model."""
    return isinstance(plan, Plan) and (plan.t, plan.model) == (t, known.identity)


def auto_plan(model: nn.Module, t: int, *, example: Any = None) -> Plan:
    """A plan for t ranks, found by measuring. The model is not changed, and nothing is communicated.

    The model runs once on a small example, in evaluation mode; that shows which linears follow one another. What they
    are part of is then tried as t ranks would compute it, once for each kind of block (in_place/trial.py). What passes
    is cut. Output layers (lm_head) are cut over the vocabulary, and embeddings if they are tied to one, or if the
    model's own plan (transformers' tp_plan) says so; that plan also serves for linears that did not pass.
    example: arguments of the run, a tuple, or a dict of keyword arguments; None for transformers models.
    Errors:  ValueError if there is no example, or if the model cannot run it, and for no number of ranks.
    """
    if not isinstance(t, int) or t < 1:
        raise ValueError(f"a plan for {t!r} ranks: give the number of tensor-parallel ranks, at least 1")
    with measuring(model):
        return _measured(model, record(model, describe(model), example), t)


def _measured(model: nn.Module, recording: Recording, t: int) -> Plan:
    """auto_plan of a model that has run."""
    patterns, styles = recording.patterns, dict[str, str]()
    ways, kept = find_ways(model, recording, find_regions(model, recording), t)
    wrong = faults(model, recording, ways, t)
    for row, way in ways.items():
        if row not in wrong:
            styles |= way.styles
        else:
            kept |= {patterns[name]: wrong[row] for name, style in way.styles.items() if style not in SUMMED}
    divisions, refused = find_divisions(model, recording, styles, t)
    styles |= dict.fromkeys(divisions, EXPERTS[0])
    kept |= refused
    alone = Alone(model, recording, t, styles)
    found = list(alone.found(tuple(divisions)))
    apart = {name: style for name, style, reason in found if reason is None}
    own = {patterns[name] for name in apart if not alone.is_head(name)}  # a head is never cut together with others
    gathered = {pattern: why for pattern, why in kept.items() if pattern in own}
    styles |= apart
    kept |= {patterns[name]: reason for name, _, reason in found if reason is not None}
    for name, reason in reasons_of_the_rest(model, recording, styles):
        kept.setdefault(patterns[name], reason)
    right, outside = {row: way for row, way in ways.items() if row not in wrong}, frozenset(recording.outside)
    return Plan(styles, t, recording.model.identity, patterns, kept, right, gathered, outside, divisions, apart)


def check_plan(entries: Mapping[str, str], model: nn.Module, measured: Plan) -> Plan:
    """The plan of a user's own entries, where each is right by what was measured.

    Errors: ValueError for an unknown style, for a pattern of no module, and for an entry that is not right, with the
            reason.
    """
    t, patterns = measured.t, measured.patterns
    styles: dict[str, str] = {}
    for pattern, style in sorted(entries.items(), key=lambda entry: -entry[0].count("*")):  # a name before a pattern
        own = isinstance(entries, Plan) and pattern in patterns.values()  # not of a block that has its number
        found = [name for name in patterns if (patterns[name] == pattern if own else matches(pattern, name))]
        if style not in STYLES:
            raise ValueError(
                f"{pattern}: the style {style!r} is not supported: it has to be one of {', '.join(STYLES)}"
            )
        if not found:
            raise ValueError(f"{pattern}: no module of {type(model).__name__} has this name; '*' stands for a number")
        styles |= dict.fromkeys(found, style)
    plan = replace(measured, styles={}, kept=dict(measured.kept), regions={}, divisions={})
    needed: set[str] = set()
    for row, way in measured.regions.items():
        members = way.styles
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
        plan.regions[row] = way
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
            reason = reasons.get(patterns[name], "nothing that is cut uses it")
            raise ValueError(f"{name} cannot be {style!r} on {t} ranks: {reason}")
        if measured.apart.get(name) == style:
            continue
        refused = OUTSIDE if name in measured.outside else why_not(model.get_submodule(name), style, t)
        if refused is not None:
            raise ValueError(f"{name} cannot be {style!r} on {t} ranks: {refused}")
    plan.enter({name: style for name, style in styles.items() if style not in WHOLE})
    return plan
