"""The whole model, run in one process as one of t ranks would run it: what the trial of one block cannot show.

Belongs here: runs of the real model on the example, in which linears that would be cut give one rank's features, or
other numbers. Linears that end a region get and give what they did in an ordinary run, so nothing is communicated. This
shows layers, calls and modes of a block that differ from the one that was tried, integers that are also read elsewhere,
and uses of a region's values that autograd does not see: detached, as a number, or kept by a module.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tpformer.layers.children import DROPOUTS
from tpformer.parallel.judge import FLOAT32, departs, same_values
from tpformer.torch_private import tree_leaves

from .measured import as_measured, kept_by
from .narrowed import Narrowed
from .regions import Recording, join, values_of
from .ways import Way

Found = Mapping[str, Way]  # ways by the names of regions' last linears, with names relative to the model
Hook = Callable[..., Any]
ELSEWHERE = "what its linears compute is also used elsewhere: detached, as a number, or kept by a module"


class _Departs(Exception):
    """One rank's run is not its part of the ordinary run."""


def faults(model: nn.Module, recording: Recording, regions: Found, t: int) -> dict[str, str]:
    """{row: why} for regions that have to stay whole, because they are not right in the whole model."""
    if not regions:
        return {}
    rehearsal = Rehearsal(model, recording, regions, t)
    fault = rehearsal.fault(regions)
    if fault is None:
        return {}
    blocks: dict[str, dict[str, Way]] = defaultdict(dict)
    for row, found in regions.items():
        blocks[recording.patterns[row]][row] = found
    found_in = {pattern: rehearsal.fault(some) for pattern, some in blocks.items()}
    right = {row: found for row, found in regions.items() if found_in[recording.patterns[row]] is None}
    if right and rehearsal.fault(right) is not None:
        right = {}  # only several together show it
    return {row: found_in[recording.patterns[row]] or fault for row in regions if row not in right}


class _Ordinary:
    """What an ordinary run shows: calls of the rows as (input, output), and everything that the run leaves."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.results: list[Any] = []


class Rehearsal:
    """A model with its example, and ordinary runs of it: in evaluation, and in training if nothing is random there."""

    def __init__(self, model: nn.Module, recording: Recording, rows: Iterable[str], t: int) -> None:
        self.model, self.stand_ins, self.t = model, recording.model.given, t
        self.args, self.kwargs = recording.inputs
        self.rows = list(rows)
        self.ordinary = {False: self._ordinary(False, 0)}
        try:
            training, again = (self._ordinary(True, seed) for seed in (0, 1))
        except Exception:  # it cannot run in training mode, for example on one sample
            return
        if len(training.results) == len(again.results) and all(map(same_values, training.results, again.results)):
            self.ordinary[True] = training

    def _ordinary(self, training: bool, seed: int) -> _Ordinary:
        made = _Ordinary()

        def keep(name: str) -> Hook:
            return lambda _, args, output: made.calls[name].append((args[0].detach().clone(), output.detach().clone()))

        results = self._run({}, {name: keep(name) for name in self.rows}, training, seed)
        made.results = [x.detach().clone() if isinstance(x, Tensor) else x for x in results]
        return made

    def _run(
        self, before: dict[str, Hook], after: dict[str, Hook], training: bool, seed: int = 0,
        ways: Iterable[Way] = (), rank: int = 0,
    ) -> list[Any]:  # fmt: skip
        """All that a run leaves: its result, buffers, and what modules keep. ways: where a rank sees parts."""
        narrowed = [made for way in ways for made in Narrowed.of(way, self.t)]
        handles = [handle for each in narrowed for handle in each.attach(self.model)]
        handles += [self.model.get_submodule(name).register_forward_pre_hook(hook) for name, hook in before.items()]
        handles += [self.model.get_submodule(name).register_forward_hook(hook) for name, hook in after.items()]
        buffers = {name: x.clone() for name, x in self.model.named_buffers() if not x.is_meta}
        try:
            with as_measured(self.model), _mode(self.model, training):
                self.held = {**dict(self.model.named_parameters()), **self.stand_ins, **buffers}
                given = {**self.stand_ins, **buffers}
                for module, parts in (each for way in ways for each in way.parts.items()):
                    for name, dim in ((join(module, part), dim) for part, dim in parts.items()):
                        given[name] = self.held[name].unflatten(dim, (self.t, -1)).select(dim, rank)
                torch.manual_seed(seed)
                result = functional_call(self.model, given, self.args, self.kwargs)
                kept = [x for module in self.model.modules() for x in kept_by(module)]
        finally:
            for handle in handles:
                handle.remove()
        return [*tree_leaves(values_of(result)), *kept, *(given[name] for name in buffers)]

    def fault(self, regions: Found) -> str | None:
        """Why these regions cannot all be cut; None if they can."""
        for training, ordinary in self.ordinary.items():
            try:
                self._with_other_numbers(regions, training, ordinary)
                for rank in {0, self.t - 1}:
                    self._as_rank(regions, rank, training, ordinary)
            except _Departs as departs:
                return f"{departs}{' in training mode' * training}"
            except Exception as error:
                return f"the model raises {type(error).__name__} as one of {self.t} ranks{' in training' * training}"
        return None

    def _with_other_numbers(self, regions: Found, training: bool, ordinary: _Ordinary) -> None:
        """Nothing else may change with what the columns compute, or use what is summed over ranks."""
        generator = torch.Generator().manual_seed(0)

        def other(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            return torch.randn(output.shape, generator=generator).to(output) * (1 + output.detach().abs().max())

        columns = {name: other for way in regions.values() for name in way.cuts}
        before, after = self._ends(regions, ordinary, None)
        results = self._run({}, columns | after, training)
        if self._departs(results, training, ordinary):
            raise _Departs(ELSEWHERE)
        summed = {name for way in regions.values() for name in way.summed}
        parameters = [p for name, p in self.held.items() if name in summed and p.requires_grad]
        tops = [x.sum() for x in results if isinstance(x, Tensor) and x.requires_grad]
        if parameters and tops and any(g is not None for g in torch.autograd.grad(tops, parameters, allow_unused=True)):
            raise _Departs("a parameter is used on one rank's features in it, and also elsewhere")

    def _as_rank(self, regions: Found, rank: int, training: bool, ordinary: _Ordinary) -> None:
        """Every call of every row has to get this rank's part of what it got, and the result has to stay."""

        def part(slices: tuple[slice, ...]) -> Hook:
            return lambda _, args, output: torch.cat([output[..., each] for each in slices], -1)

        columns: dict[str, Hook] = {}
        attributes: list[tuple[nn.Module, str, Any]] = []
        for way in regions.values():
            columns |= {name: part(cut.rows(rank, self.t)) for name, cut in way.cuts.items()}
            for holder, changes in way.attributes.items():
                attributes += [(self.model.get_submodule(holder), *change) for change in changes.items()]
        before, after = self._ends(regions, ordinary, rank)
        with _changed(attributes):
            results = self._run(before, columns | after, training, ways=regions.values(), rank=rank)
        if self._departs(results, training, ordinary, counts=False):
            raise _Departs("an integer of one rank's part is also used elsewhere, or what its linears compute is")

    def _departs(self, results: list[Any], training: bool, ordinary: _Ordinary, counts: bool = True) -> bool:
        """Whether a run left something else than the ordinary one, but for what differs in each run, such as a time.

        counts: compare integers, too, of which a rank has its own."""
        if len(results) != len(ordinary.results):
            return True
        pairs = enumerate(zip(results, ordinary.results, strict=True))
        other = [i for i, (x, y) in pairs if not same_values(x, y) and (counts or not isinstance(y, int))]
        again = self._run({}, {}, training) if other else []
        return any(same_values(again[i], ordinary.results[i]) for i in other)

    def _ends(self, regions: Found, ordinary: _Ordinary, rank: int | None) -> tuple[dict[str, Hook], dict[str, Hook]]:
        """Hooks that give each row its ordinary input and output, and compare what it gets with a rank's part of it."""
        done: Counter[str] = Counter()

        def enter(name: str) -> Hook:
            def hook(_: nn.Module, args: tuple) -> tuple:
                expected = ordinary.calls[name][done[name]][0]
                size = -(-expected.shape[-1] // self.t)
                own = expected[..., (rank or 0) * size : ((rank or 0) + 1) * size]
                if departs(args[0], own, eps=max(FLOAT32, torch.finfo(own.dtype).eps)):  # the model's own dtype
                    again = f" in its call {done[name] + 1}" * (done[name] > 0)
                    raise _Departs(f"with one rank's features of {self.t}, {name} does not get that rank's part{again}")
                return (expected.clone(), *args[1:])

            return hook

        def leave(name: str) -> Hook:
            def hook(_: nn.Module, args: tuple, output: Tensor) -> Tensor:
                done[name] += 1
                return ordinary.calls[name][done[name] - 1][1].clone()

            return hook

        before = {} if rank is None else {name: enter(name) for name in regions}
        return before, {name: leave(name) for name in regions}


def drawing(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """(name of the module, module, attribute) for what looks like a probability of dropout in a model."""
    found: list[tuple[str, nn.Module, str]] = []
    for name, module in model.named_modules():
        if isinstance(module, DROPOUTS):
            found.append((name, module, "p"))
        else:
            floats = [key for key, value in vars(module).items() if type(value) is float and "drop" in key]
            found += [(name, module, key) for key in floats]
    return found


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Within, the model is in training mode without dropout, if that is asked for."""
    if not training:
        yield
        return
    drawn = [(module, name, 0.0) for _, module, name in drawing(model)]
    model.train()
    with _changed(drawn):
        yield


@contextmanager
def _changed(attributes: list[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Within, attributes of modules have other values."""
    before = [(module, name, getattr(module, name)) for module, name, _ in attributes]
    try:
        for module, name, value in attributes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
