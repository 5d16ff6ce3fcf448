"""Modules that multiply with parameters of their own, such as experts: ranks have parts, and results are summed.

Belongs here: how such a module can be divided, found by trying it in one process, and the module when it is. The trial
runs a copy in float64, whole and as each rank would run it: the ranks' results have to add up to the whole one, and so
have the gradients that they compute.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from tpformer.distributed.dtensor import local_part
from tpformer.layers import TensorParallel
from tpformer.ops.divided import enter_part, leave_part
from tpformer.ops.uncompiled import uncompiled
from tpformer.parallel.judge import RecordedCall, copy_of, departs, random_like, with_random_values
from tpformer.torch_private import tree_leaves, tree_map

from .alone import OUTSIDE
from .kinds import PLAIN, kind_of
from .linears import class_of, lay_out, reduced
from .regions import Recording
from .trial import Refused, short

MOST = 256  # divisions that are tried
ONCE, SUMMED = "once", "summed"  # of parameters that stay whole: the first rank uses it, or all do on their part


@dataclass(frozen=True)
class Division:
    """How a module's parameters are divided.

    dims:    the dim of each own parameter that is divided in chunks, by its name.
    others:  ONCE or SUMMED for each own parameter that is not.
    experts: if a rank has whole experts, the number of all; the module is then called with the numbers of its own ones,
             and where another rank has the expert with the number behind them, and a weight of zero.
    unused:  parameters that get no gradient.
    """

    dims: dict[str, int]
    others: dict[str, str] = field(default_factory=dict)
    experts: int = 0
    unused: tuple[str, ...] = ()

    def chunk(self, size: int, rank: int, t: int) -> slice:
        """A rank's part of a dim."""
        width = -(-size // t)
        return slice(rank * width, min((rank + 1) * width, size))

    def attributes(self, module: nn.Module, rank: int, t: int) -> dict[str, Any]:
        """What the module counts by, on one rank."""
        if not self.experts:
            return {}
        part = self.chunk(self.experts, rank, t)
        found: dict[str, Any] = {"_is_expert_parallel": True} if hasattr(module, "_is_expert_parallel") else {}
        return found | self.counts(module, part.stop - part.start)

    def counts(self, module: nn.Module, number: int) -> dict[str, int]:
        """The integers that count its experts, for another number of them: of that value, and if some are named so
        only those."""
        found = [name for name, value in vars(module).items() if type(value) is int and value == self.experts]
        return dict.fromkeys([name for name in found if "expert" in name] or found, number)

    def arguments(self, call: Any, rank: int, t: int) -> Any:
        """The arguments that a rank calls the module with."""
        if not self.experts:
            return call
        part = self.chunk(self.experts, rank, t)
        chosen = choice_of(call)
        assert chosen is not None
        own = (chosen >= part.start) & (chosen < part.stop)

        def change(x: Any) -> Any:
            if x is chosen:
                return torch.where(own, chosen - part.start, part.stop - part.start)
            if isinstance(x, Tensor) and x.is_floating_point() and x.shape == chosen.shape:
                return torch.where(own, x, torch.zeros_like(x))
            return x

        return tree_map(change, call)


def choice_of(call: Any) -> Tensor | None:
    """The argument that may be the numbers of experts: the first integers."""
    integers = (torch.int32, torch.int64)
    return next((x for x in tree_leaves(call) if isinstance(x, Tensor) and x.dtype in integers and x.ndim), None)


def experts_of(module: nn.Module, call: Any) -> int:
    """How many experts a module has, if it is called with their numbers, and each parameter has them as first dim."""
    chosen, sizes = choice_of(call), {p.shape[:1] for p in module.parameters(recurse=False)}
    if chosen is None or len(sizes) != 1 or not chosen.numel():
        return 0
    number = sizes.pop().numel()
    return number if 0 <= int(chosen.min()) and int(chosen.max()) < number else 0


def divisions(module: nn.Module, call: Any, t: int) -> Iterator[Division]:
    """What is tried: a dim inside that matrices share, else whole experts."""
    own = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    matrices = [shape for shape in own.values() if len(shape) > 1]
    most = max(map(len, matrices))
    sizes = dict.fromkeys(size for shape in matrices for size in shape if size % t == 0 and size > 1)
    for size in sorted(sizes, key=lambda size: -sum(size in shape for shape in matrices)):
        choices: dict[str, list[int | None]] = {}
        for name, shape in own.items():
            fitting = [dim for dim, length in enumerate(shape) if length in (size, 2 * size, 3 * size)]
            choices[name] = [*fitting, *[None] * (not fitting or len(shape) < most)]
        for dims in product(*choices.values()):
            divided = {name: dim for name, dim in zip(own, dims, strict=True) if dim is not None}
            rest = [name for name in own if name not in divided]
            if sum(len(own[name]) > 1 for name in divided) > 1:
                for kinds in product((SUMMED, ONCE), repeat=min(len(rest), 4)):
                    yield Division(divided, dict.fromkeys(rest, SUMMED) | dict(zip(rest, kinds, strict=False)))
    experts = experts_of(module, call)
    if experts > (t - 1) * -(-experts // t):
        yield Division(dict.fromkeys(own, 0), experts=experts)


def find_divisions(
    model: nn.Module, recording: Recording, styles: Mapping[str, str], t: int
) -> tuple[dict[str, Division], dict[str, str]]:
    """({name: how it is divided}, {pattern: why not}) of modules that multiply with parameters of their own.

    All of one pattern are divided, or none is. styles: of the modules that are cut already.
    """
    rows: dict[str, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        whole = name not in styles and not name.startswith(recording.adapted or "\n")
        if whole and name in recording.model.large and has_several(module):
            rows[recording.patterns[name]].append(name)
    tried: dict[Any, Division] = {}
    made: dict[str, Division] = {}
    kept: dict[str, str] = {}
    for pattern, names in rows.items():
        found: dict[str, Division] = {}
        try:
            for name in names:
                module = model.get_submodule(name)
                check_alone(name, module, styles, recording)
                call = recording.calls[name]
                key = kind_of(module, call), *(x for x in tree_leaves(call) if type(x) in PLAIN)
                if key not in tried:
                    tried[key] = find_division(module, recording.calls[name], t)
                found[name] = tried[key]
        except Refused as refused:
            kept[pattern] = str(refused)
        else:
            made |= found
    return made, kept


def has_several(module: nn.Module) -> bool:
    """Whether a module multiplies with several parameters of its own."""
    several = sum(p.ndim > 1 for p in module.parameters(recurse=False)) > 1
    return several and not isinstance(module, ParametrizationList)  # what makes a parameter, of tensors of one shape


def check_alone(name: str, module: nn.Module, styles: Mapping[str, str], recording: Recording) -> None:
    """Refused where something else than the module's own forward depends on its parameters."""
    if name not in recording.calls:
        raise Refused(f"a {type(module).__name__} is not an nn.Linear itself, and did not run in the example")
    parts = [part for part, _ in module.named_modules(prefix=name)]
    if any(part in recording.outside for part in parts):
        raise Refused(OUTSIDE)
    inside = next((part for part in parts if part in styles), None)
    if inside is not None:
        raise Refused(f"a {type(module).__name__} is not an nn.Linear itself, and {inside} in it is divided")
    if any(id(p) in recording.tied for p in module.parameters()):
        raise Refused("it is tied to another module")


def find_division(module: nn.Module, call: tuple[tuple, dict], t: int) -> Division:
    """How a module can be divided over t ranks; call: its (args, kwargs) in a run. Raises Refused with the reason."""
    name = type(module).__name__
    try:
        experts = experts_of(module, call)
        module, call = smaller(module, call, t)
        whole = Copy(module, call)
        results = whole.run(Division({}), 0, 1)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{name} cannot be tried alone ({short(error)})") from error
    tried = False
    for division in islice(divisions(module, call, t), MOST):
        tried = True
        try:
            if whole.adds_up(division, results, t):
                names = [name for name, p in module.named_parameters() if p.is_floating_point()]
                gradients = zip(names, results[len(results) - len(names) :], strict=True)
                unused = tuple(name for name, gradient in gradients if gradient is None)
                return replace(division, unused=unused, experts=division.experts and experts)
        except Exception:  # a shape that does not fit
            continue
    raise Refused(
        f"no division of the matrices of this {name} over {t} ranks gives results that add up"
        if tried
        else f"a {name} is not an nn.Linear itself, and has no matrices that {t} ranks can share"
    )


def smaller(module: nn.Module, call: Any, t: int) -> tuple[nn.Module, Any]:
    """A module that is called with numbers of experts, with two of them for each rank, all of which are chosen, the
    first ones most often, and with dims of the same ratios: a large model's would not fit into memory in float64."""
    every = experts_of(module, call)
    if not every:
        return module, call
    few = min(every, 2 * t - (every % t > 0))
    own = dict(module.named_parameters(recurse=False))
    sizes = {size for p in own.values() for size in p.shape[1:]}
    common = math.gcd(*sizes) if sizes else 1
    factor = common // next((n for n in range(2 * t, common, t) if common % n == 0), common)
    made = copy.copy(module)
    vars(made)["_parameters"] = {
        name: nn.Parameter(p.detach()[(slice(few), *(slice(size // factor) for size in p.shape[1:]))])
        for name, p in own.items()
    }
    counts = Division({}, experts=every).counts(module, few)
    scaled = {k: v // factor for k, v in vars(module).items() if type(v) is int and v in sizes and k not in counts}
    for name, value in (scaled | counts).items():
        setattr(made, name, value)
    chosen = choice_of(call)
    assert chosen is not None
    k = chosen.shape[-1] if chosen.ndim > 1 else 1
    order = torch.arange(chosen.numel(), device=chosen.device, dtype=chosen.dtype).view(chosen.shape)
    every_one = torch.where(order < -(-few // k) * k, order % few, order % k)  # a capacity shows where some get more

    def change(x: Any) -> Any:
        if x is chosen:
            return every_one
        features = isinstance(x, Tensor) and x.is_floating_point() and x.ndim and x.shape[-1] in sizes
        return x.detach()[..., : x.shape[-1] // factor].requires_grad_(x.requires_grad) if features else x

    return made, tree_map(change, call)


class Copy:
    """A copy of a module in float64 with random parameters, and the arguments of its trial."""

    def __init__(self, module: nn.Module, call: tuple[tuple, dict]) -> None:
        self.module, self.call = with_random_values(module), RecordedCall(call)

    def result(self, division: Division, rank: int, t: int) -> tuple[Tensor, list[Tensor]]:
        """What one rank computes, and the arguments and whole parameters that may have gradients."""
        module = copy_of(self.module)
        call, leaves = self.call.fresh()
        leaves += [p.requires_grad_() for p in module.parameters() if p.is_floating_point()]
        parts = {name: part_of(p, name, division, rank, t) for name, p in module.named_parameters(recurse=False)}
        for name, value in division.attributes(module, rank, t).items():
            setattr(module, name, value)
        before = _kept(module)
        for name, part in parts.items():
            delattr(module, name)
            setattr(module, name, part)
        with torch.random.fork_rng(devices=[]):
            result = self.called(module, call, division, rank, t)
        if not isinstance(result, Tensor):
            raise Refused(f"a {type(module).__name__} is not an nn.Linear itself, and returns more than one tensor")
        for key, value in _kept(module).items():
            if key.rpartition(".")[2] not in parts and (key not in before or not before[key].equal(value)):
                raise Refused(f"{type(module).__name__} keeps {key} when it runs, of which ranks would have parts")
        return result, leaves

    def called(self, module: nn.Module, call: Any, division: Division, rank: int, t: int) -> Any:
        """What the module of one rank makes of its part of the arguments."""
        args, kwargs = division.arguments(call, rank, t)
        return module(*args, **kwargs)

    def run(self, division: Division, rank: int, t: int) -> list[Tensor | None]:
        """[result, gradients of arguments and parameters] of one rank, of whole parameters' size."""
        with torch.enable_grad():
            result, leaves = self.result(division, rank, t)
        if not result.requires_grad:  # no expert of this rank was chosen
            return [result, *[None] * len(leaves)]
        gradients = torch.autograd.grad(result, leaves, random_like(result, 2), allow_unused=True)
        return [result.detach(), *gradients]

    def adds_up(self, division: Division, results: Sequence[Tensor | None], t: int) -> bool:
        """Whether the ranks' results and gradients are those of the whole module."""
        return not any(departs(found, expected) for found, expected in self._sums(division, results, t))

    def _sums(
        self, division: Division, results: Sequence[Tensor | None], t: int
    ) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """(the sum over ranks, what the whole module has) of the result, then of it again with all gradients."""
        with torch.no_grad():
            parts = [self.result(division, rank, t)[0] for rank in range(t)]
        unlike = next((part for part in parts if results[0] is None or part.shape != results[0].shape), None)
        yield sum(parts[1:], parts[0]) if unlike is None else unlike, results[0]
        ranks = [self.run(division, rank, t) for rank in range(t)]
        for expected, *found in zip(results, *ranks, strict=True):
            some = [x for x in found if x is not None]
            yield sum(some[1:], some[0]) if some else None, expected


def _kept(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the tensors that modules hold beside their parameters."""
    found = {name: x.clone() for name, x in module.named_buffers()}
    for name, part in module.named_modules():
        found |= {f"{name}.{key}": x.detach().clone() for key, x in vars(part).items() if isinstance(x, Tensor)}
    return found


def part_of(whole: Tensor, name: str, division: Division, rank: int, t: int) -> Tensor:
    """What a rank uses of an own parameter."""
    dim = division.dims.get(name)
    if dim is not None:
        part = division.chunk(whole.shape[dim], rank, t)
        return whole.narrow(dim, part.start, part.stop - part.start)
    return whole * (rank == 0) if division.others.get(name) == ONCE else whole * 1


def locals_of(module: nn.Module) -> dict[str, Tensor]:
    """What a rank has of each parameter of a module, by its name."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: local_part(x) for name, x in named}


@contextmanager
def seeing(module: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, the module's forward finds these tensors in the place of its parameters of these names."""
    tables = {name: vars(part)["_parameters"] for name, part in module.named_modules()}
    held = {name: dict(table) for name, table in tables.items()}
    try:
        for key, x in parameters.items():
            part, _, name = key.rpartition(".")
            tables[part][name] = x
        yield
    finally:
        for name, table in tables.items():
            table.update(held[name])


def make_matrices(module: nn.Module, division: Division, tp: TensorParallel) -> None:
    """Divide a module over ranks, in place. Its divided parameters become DTensors, Shard.

    Communication, per rank: forward an all-reduce of the result; backward one of the gradient of each argument that
    needs one, and of each parameter that is not divided.
    """
    own: Any = type(module)
    lay_out(module, tp, dict(division.dims))
    for name, value in division.attributes(module, tp.rank, tp.size).items():
        setattr(module, name, value)
    module.__class__ = class_of(_Divided, own)
    module.division, module.divided_over = division, tp.with_all_rows


class _Divided(nn.Module):
    """A module that runs with its rank's part of the parameters, and whose result is the sum over ranks."""

    division: Division
    divided_over: TensorParallel

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tp, division = self.divided_over, self.division
        parameters = locals_of(self)
        whole = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        used = {key: x for key, x in parameters.items() if x.requires_grad and key not in division.unused}
        whole += [x for key, x in used.items() if key not in division.dims]
        own = [x for key, x in used.items() if key in division.dims]
        entered = enter_part(whole, own, tp.group)
        became = {id(x): y for x, y in zip([*whole, *own], entered, strict=True)}
        args, kwargs = tree_map(lambda x: became.get(id(x), x), (args, kwargs))
        args, kwargs = division.arguments((args, kwargs), tp.rank, tp.size)
        for key, x in parameters.items():
            seen = became.get(id(x), x)
            parameters[key] = seen * (tp.rank == 0) if division.others.get(key) == ONCE else seen
        with seeing(self, parameters):
            result = super().forward(*args, **kwargs)
        return leave_part(result, entered, tp.group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(self, protocol)
