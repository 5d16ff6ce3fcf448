"""Linears and embeddings that are divided each by itself: their results are whole on every rank.

Belongs here: the words of plans, which modules are divided so, and why others stay whole.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .kinds import LARGE, matches
from .regions import Recording, linear_of, sizes_of

COLUMNS, ROWS, SUMMED = ("colwise", "packed_colwise"), ("rowwise",), ("replicated_with_grad_allreduce",)
GATHERED, SPLIT = ("colwise_gather_output", "colwise_rep"), ("rowwise_split_input", "rowwise_rep")
EMBEDDING, EXPERTS, WHOLE = ("embedding_rowwise",), ("moe_tp_experts",), ("replicate",)
STYLES = (*COLUMNS, *ROWS, *SUMMED, *GATHERED, *SPLIT, *EMBEDDING, *EXPERTS, *WHOLE)
OUTSIDE = "a parameter of it is also used outside of its own forward"


def transformers_plan(model: nn.Module) -> dict[str, str]:
    """The plan that a transformers model brings, with names from `model`; empty for other models."""
    for name, module in model.named_modules():
        if isinstance(getattr(type(module), "tp_plan", None), property):
            return {f"{name}.{pattern}".lstrip("."): style for pattern, style in (module.tp_plan or {}).items()}
    return {}


class Alone:
    """What of a model is divided alone over t ranks. styles: of the modules that are cut already."""

    def __init__(self, model: nn.Module, recording: Recording, t: int, styles: Mapping[str, str]) -> None:
        self.model, self.recording, self.t = model, recording, t
        adapted = recording.adapted or "\n"
        whole = {name: module for name, module in model.named_modules() if name not in styles}
        self.named = {name: module for name, module in whole.items() if not name.startswith(adapted)}
        self.tied: dict[int, list[str]] = defaultdict(list)
        for name, module in model.named_modules():
            if isinstance(getattr(module, "weight", None), nn.Parameter) and not name.startswith(adapted):
                self.tied[id(module.weight)].append(name)
        self.ran = {recording.patterns[name] for name in recording.sources}  # not all run: experts without tokens
        self.given = transformers_plan(model)
        get_head = getattr(model, "get_output_embeddings", None)
        self.head = get_head() if callable(get_head) else None

    def found(self, divided: tuple[str, ...]) -> Iterator[tuple[str, str, str | None]]:
        """(name, style, None), or (name, "replicate", why it stays whole). divided: modules that are already."""
        wanted: dict[str, str] = {}
        for name, module in self.named.items():
            if f"{name}.".startswith(tuple(f"{each}." for each in divided) or "\n"):
                continue
            own = next((style for pattern, style in self.given.items() if matches(pattern, name)), None)
            if own is not None and own not in STYLES:
                yield name, WHOLE[0], f"the style {own} of the model's own plan is not supported"
            elif module is self.head:
                wanted[name] = GATHERED[0]
            elif own in (*GATHERED, *SPLIT, *EMBEDDING):
                wanted[name] = own
            elif name in self.recording.model.large and (
                isinstance(module, nn.Embedding)
                or (name in self.recording.linears and self.recording.patterns[name] in self.ran)
            ):
                wanted[name] = self._style(name)
        for names in self.tied.values():
            if any(name in wanted for name in names):
                yield from self._tied(names, wanted)

    def is_head(self, name: str) -> bool:
        """Whether a linear is an output layer: the model says so, or it is tied to a table of words."""
        module = self.model.get_submodule(name)
        tied = self.tied[id(module.weight)] if isinstance(getattr(module, "weight", None), nn.Parameter) else ()
        return module is self.head or any(isinstance(self.model.get_submodule(each), nn.Embedding) for each in tied)

    def _tied(self, names: list[str], wanted: dict[str, str]) -> Iterator[tuple[str, str, str | None]]:
        """All that have one weight, or none."""
        styles = {name: wanted.get(name, self._style(name)) for name in names}
        reasons = {name: self._why_not(name, style) for name, style in styles.items()}
        refused = next((name for name, reason in reasons.items() if reason is not None), None)
        for name, style in styles.items():
            tie = "" if refused == name else f"it is tied to {refused}, and "
            yield (name, style, None) if refused is None else (name, WHOLE[0], f"{tie}{reasons[refused]}")

    def _style(self, name: str) -> str:
        return EMBEDDING[0] if isinstance(self.model.get_submodule(name), nn.Embedding) else GATHERED[0]

    def _why_not(self, name: str, style: str) -> str | None:
        if name in self.recording.outside:
            return OUTSIDE
        module = self.model.get_submodule(name)
        if style in EMBEDDING and isinstance(module, nn.Embedding) and type(module) is not nn.Embedding:
            tied = (
                each for each in self.tied[id(module.weight)] if type(self.model.get_submodule(each)) is type(module)
            )
            call = next((self.recording.calls[each] for each in tied if each in self.recording.calls), None)
            if call is not None and only_looks_up(module, call):
                return why_not(nn.Embedding(*module.weight.shape, device="meta"), style, self.t)
        return why_not(module, style, self.t)


@torch.no_grad()
def only_looks_up(module: nn.Embedding, call: tuple[tuple, dict]) -> bool:
    """Whether a class that derives from nn.Embedding uses its weight by nn.Embedding's forward alone: in a copy, that
    forward gets values, and everything else NaN."""
    own: Any = type(module)
    values = torch.randn(tuple(module.weight.shape), generator=torch.Generator().manual_seed(0))

    class Table(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.embedding(ids, values.to(self.weight), self.padding_idx)

    def result(weight: Tensor, *bases: Any) -> Any:
        made = copy.copy(module)
        made.__class__ = type(own.__name__, bases, {})
        vars(made)["_parameters"] = {"weight": nn.Parameter(weight)}
        return made(*call[0], **call[1])

    device = "cpu" if module.weight.is_meta else module.weight.device
    values = values.to(device, module.weight.dtype)
    try:
        found, expected = result(torch.full_like(values, float("nan")), own, Table), result(values, own)
    except Exception:
        return False
    return isinstance(found, Tensor) and found.equal(expected)


def why_not(module: nn.Module, style: str, t: int) -> str | None:
    """Why a module cannot have one of the styles that need no region; None if it can."""
    if style in EMBEDDING:
        if type(module) is not nn.Embedding:
            return f"a {type(module).__name__} is not an nn.Embedding itself"
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return "max_norm, scale_grad_by_freq and sparse gradients need the whole table"
        size = module.num_embeddings
    else:
        linear = linear_of(module)
        if linear is None:
            return f"a {type(module).__name__} is not an nn.Linear itself"
        size = sizes_of(linear)[style in GATHERED]
    return None if size > (t - 1) * -(-size // t) else f"{t} ranks cannot share {size} features or rows"


def reasons_of_the_rest(model: nn.Module, recording: Recording, styles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(name, reason) for every module with matrices of its own that is not divided, and is no linear."""
    listed = {part for name in recording.linears for part in model.get_submodule(name).modules()}
    for name, module in model.named_modules():
        large = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        if not large or module in listed or name in styles:
            continue
        if isinstance(module, nn.Embedding):
            yield name, f"with less than {LARGE:.0%} of the parameters it is not worth a communication"
        elif type(module) is nn.Linear:
            yield name, "its forward has been replaced, or its parameters"
        else:
            yield name, f"a {type(module).__name__} is not an nn.Linear itself"
