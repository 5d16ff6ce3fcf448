"""Whether a region's linears can be cut over t ranks, found by trying it in one process, without communication.

Belongs here: the copies that stand for ranks, and what has to agree between them. What is tried: ways.py.

The module around the region is copied in float64 and gets random parameters, so that no zero bias or norm of ones hides
anything. It runs whole, and then as each rank would run it. Whatever it computes between its linears (heads, gates,
positions, norms), it may be cut if every rank's input of the last linear is its part of the whole one, and if the
gradients that ranks compute are the whole ones, or add up to them where something adds them up.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from tpformer.parallel.judge import RecordedCall, Values, copy_of, departs, largest, random_like, with_random_values

from .kinds import kind_of
from .regions import Recording, Region, join, plain_linear
from .ways import Shown, Way, guesses

MOST = 300  # ways that are tried
NOISE = 1e-12  # of the largest of all gradients: what rounding leaves of those that are zero, as of biases of keys


# An example: a region of heads, each divided by its sum. `up` has 4 output features, n_heads is 2, scale is (1, 10).
#
#     heads = self.up(x).abs().unflatten(-1, (self.n_heads, -1))
#     return self.row((heads / heads.sum(-1, keepdim=True) * self.scale).flatten(-2))
#
# Let `up` give (1, 3, 2, 2). In one process the heads are (1, 3) and (2, 2), so `row` gets (0.25, 7.5, 0.5, 5). Rank 0
# of 2 has the first two rows of `up`, which give (1, 3), and should get the first half, (0.25, 7.5).
# - With n_heads = 2 its heads are (1) and (3). Each divided by itself is 1, so `row` would get (1, 10, 1, 10): refused.
# - With n_heads = 1 its head is (1, 3), and `row` gets (0.25, 7.5). Rank 1 has (2, 2), and its `row` (0.5, 5). Right.
# Then gradients, if `row` sends back ones. That of scale is (0.25, 0.75) + (0.5, 0.5) = (0.75, 1.25) in one process,
# (0.25, 0.75) on rank 0 and (0.5, 0.5) on rank 1. The parts differ and add up, so ranks will have to sum them. Found is
#     Way(cuts={"up": Cut(((4, 2),))}, attributes={"": {"n_heads": 1}}, summed=("scale",))
# If all features were divided by their common sum, 8, rank 0 would divide by 4: no way is right, and the region is
# refused. tests/in_place/test_plan.py tries both.


class Refused(Exception):
    """The reason why a region cannot be cut in some way."""


class _Arrived(Exception):
    """The run has come to the region's last linear."""


def find_ways(
    model: nn.Module, recording: Recording, regions: Mapping[str, Mapping[str, Region | str]], t: int
) -> tuple[dict[str, Way], dict[str, str]]:
    """({row: how the region that ends there is cut}, {pattern: why not}), in the order of the rows.

    regions: those of find_regions. All rows of one pattern are cut, or none is. Equal modules with equal arguments are
    tried once.
    """
    kept: dict[str, str] = {}
    tried: dict[Any, Way | str] = {}
    ways: dict[str, Way] = {}
    taken: set[str] = set()
    for pattern, rows in regions.items():
        found: dict[str, tuple[Region, Way]] = {}
        for row, region in rows.items():
            members = {row} if isinstance(region, str) else {row, *region.whole_columns}
            if isinstance(region, str) or members & taken:
                reason = region if isinstance(region, str) else "the linear that feeds it is cut already"
                kept.setdefault(pattern, reason)
                break
            way = found[region.like][1] if region.like else _tried_once(model, region, recording, t, tried)
            if isinstance(way, str):
                kept |= {recording.patterns[member]: way for member in members}
                break
            found[row] = region, way
        else:
            ways |= {row: way.within(region.root, region.row) for row, (region, way) in found.items()}
            taken |= {name for row, (region, _) in found.items() for name in (row, *region.whole_columns)}
    return ways, kept


def _tried_once(model: nn.Module, region: Region, recording: Recording, t: int, tried: dict) -> Way | str:
    """How a region is cut, or why it is not."""
    root, call = model.get_submodule(region.root), recording.calls[region.root]
    key = (kind_of(root, call), region.columns, region.row)
    if key not in tried:
        try:
            tried[key] = find_way(root, region.columns, region.row, call, t)
        except Refused as refused:
            tried[key] = str(refused)
    return tried[key]


def find_way(root: nn.Module, columns: Sequence[str], row: str, call: tuple[tuple, dict], t: int) -> Way:
    """How the region can be cut over t ranks.

    call: (args, kwargs) of root in a run. Raises Refused with the reason if no way is right.
    """
    linears = {name: plain_linear(root.get_submodule(name)) for name in (*columns, row)}
    width = linears[row].in_features
    if width <= (t - 1) * -(-width // t):
        raise Refused(f"its {width} input features are too few for {t} ranks")
    for name in columns:
        if (features := linears[name].out_features) <= (t - 1) * -(-features // t):  # even if ranks share heads
            raise Refused(f"the {features} output features of {name} are too few for {t} ranks to hold some each")
    try:
        trial = _Trial(root, linears, row, call)
        whole = trial.run(None)
        shown = whole.shown(width, t)
    except Exception as error:
        raise Refused(f"{type(root).__name__} cannot be tried alone ({short(error)})") from error
    reason = ""
    outputs = {name: module.get_parameter("weight").shape[0] for name, module in trial.linears.items()}
    for way in islice(guesses(root, outputs, shown, t), MOST):
        try:
            return _tried(trial, whole, way, width, t)
        except Refused as refused:
            reason = reason or str(refused)
        except Exception as error:
            reason = reason or f"with one rank's features of {t}, {type(root).__name__} raises {short(error)}"
    raise Refused(reason or f"{t} ranks cannot share the {max(outputs.values())} features of {max(outputs)}")


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A plain linear with these parameters, which it shares."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta", dtype=weight.dtype)
    made.weight = nn.Parameter(weight)
    if bias is not None:
        made.bias = nn.Parameter(bias)
    return made


class _Trial:
    """A copy of root with random values, plain linears in the place of the columns, and the row only as a shape."""

    def __init__(self, root: nn.Module, linears: Mapping[str, nn.Linear], row: str, call: tuple[tuple, dict]) -> None:
        self.row, self.call, values = row, RecordedCall(call), Values(1)
        self.linears: dict[str, nn.Linear] = {}
        for name, shape in linears.items():
            if name != row:
                like = next(root.get_submodule(name).parameters())
                bias = None if shape.bias is None else values.normal(shape.bias.shape, like)
                weight = values.normal(shape.weight.shape, like) * shape.in_features**-0.5
                self.linears[name] = _linear(weight, bias)
        instead = {root.get_submodule(name): self.linears.get(name, shape) for name, shape in linears.items()}
        self.module = with_random_values(root, instead)

    def run(self, way: Way | None, rank: int = 0, t: int = 1) -> "_Run":
        """The run of one rank in this way, or of one process."""
        instead: dict[nn.Module, nn.Module] = {}
        for name, linear in self.linears.items():
            rows = [slice(None)] if way is None else way.cuts[name].rows(rank, t)
            weight, bias = (_rows(x, rows) for x in (linear.weight, linear.bias))
            instead[linear] = _linear(weight, bias)
        return _Run(self, copy_of(self.module, instead), way, (rank, t))


def _rows(x: Tensor | None, rows: Sequence[slice]) -> Tensor | None:
    """Some rows of a parameter; a copy, which is what a try of a large model costs, only where they are several."""
    if x is None or len(rows) == 1:
        return None if x is None else x.detach()[rows[0]]
    return torch.cat([x.detach()[part] for part in rows])


class _Run:
    """One run of a copy up to the row: its input there, and where gradients can be asked for."""

    def __init__(self, trial: _Trial, module: nn.Module, way: Way | None, at: tuple[int, int]) -> None:
        self.columns, self.row = list(trial.linears), trial.row
        linears = {id(p) for name in (*self.columns, self.row) for p in module.get_submodule(name).parameters()}
        # of modules by one name each, as patterns have them; a tied parameter by all of its names
        named = [
            (join(holder, name), p)
            for holder, part in module.named_modules()
            for name, p in part.named_parameters(recurse=False)
        ]
        self.parameters = {key: p for key, p in named if id(p) not in linears and p.is_floating_point()}
        self.integers: dict[str, dict[str, int]] = {}
        self.entered: tuple[str, str] | None = None
        self.before: dict[str, Tensor] = {}  # what enters the columns
        self.entering: dict[str, Tensor] = {}  # the same, cut from the graph above
        self.narrowed, self.t = None if way is None else way.narrowed, at[1]
        held: list[tuple[nn.Module, str, Tensor]] = []
        if way is None:
            _watch_integers(module, (*self.columns, self.row), self.integers)
        else:
            for holder, changes in way.attributes.items():
                for name, value in changes.items():
                    setattr(module.get_submodule(holder), name, value)
            for holder, parts in way.parts.items():
                part = module.get_submodule(holder)
                for name, dim in parts.items():
                    held.append((part, name, getattr(part, name)))
                    delattr(part, name)
                    setattr(part, name, held[-1][2].unflatten(dim, (at[1], -1)).select(dim, at[0]))
        (args, kwargs), self.inputs = trial.call.fresh()
        self.arriving = self._run(module, args, kwargs)
        for part, name, whole in held:  # what a checkpoint recomputes would see all of it
            setattr(part, name, whole)

    def _run(self, module: nn.Module, args: tuple, kwargs: dict) -> Tensor:
        arrived: list[Tensor] = []
        given: dict[str, tuple[Tensor, Tensor]] = {}  # of the module that is called with what enters the columns
        parents = {name.rpartition(".")[0] for name in self.columns}
        parent = parents.pop() if len(parents) == 1 else ""

        def called(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            tree = {**{str(index): x for index, x in enumerate(args)}, **kwargs}
            for key, x in tree.items():
                if isinstance(x, Tensor) and x.is_floating_point():
                    if self.narrowed is not None and key == self.narrowed[1]:
                        tree[key] = x[..., : x.shape[-1] // self.t]
                    given[key] = tree[key], x
            return tuple(tree[str(index)] for index in range(len(args))), {key: tree[key] for key in kwargs}

        def entering(name: str) -> Any:
            def hook(_: nn.Module, args: tuple) -> tuple:
                if arrived:  # a checkpoint recomputes what has run
                    return (self.entering[name].clone(), *args[1:])
                if name in self.before:
                    raise Refused(f"{name} runs twice before {self.row}")
                key, x = next(((key, x) for key, (seen, x) in given.items() if seen is args[0]), ("", args[0]))
                self.entered = (parent, key) if key and (not self.before or (parent, key) == self.entered) else None
                self.before[name] = x
                self.entering[name] = x.detach().requires_grad_()
                return (self.entering[name].clone(), *args[1:])

            return hook

        def stop(_: nn.Module, args: tuple) -> None:
            arrived.append(args[0])
            raise _Arrived

        for name in self.columns:
            module.get_submodule(name).register_forward_pre_hook(entering(name))
        module.get_submodule(self.row).register_forward_pre_hook(stop)
        module.get_submodule(parent).register_forward_pre_hook(called, with_kwargs=True)
        try:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                module(*args, **kwargs)
        except _Arrived:
            return arrived[0]
        raise Refused(f"{type(module).__name__} does not come to {self.row} when it runs alone")

    def shown(self, width: int, t: int) -> Shown:
        """What guesses are made from."""
        _, others = self.gradients(torch.ones_like(self.arriving))
        above = self.above()
        between = {name for name in self.parameters if others[name] is not None and name not in above}
        entered = self.entered
        if entered is not None and any(x.shape[-1] % t for x in self.before.values()):
            entered = None
        return Shown(width, self.integers, between, entered)

    def gradients(self, direction: Tensor) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
        """(gradients of what enters the columns, gradients of all else that reaches the row not through a column)."""
        others = {**self.parameters, **{f"input {i}": x for i, x in enumerate(self.inputs)}}
        asked = [*self.entering.values(), *others.values()]
        found = torch.autograd.grad(self.arriving, asked, direction, allow_unused=True, retain_graph=True)
        n = len(self.entering)
        return dict(zip(self.entering, found[:n], strict=True)), dict(zip(others, found[n:], strict=True))

    def above(self) -> set[str]:
        """Parameters that reach what enters a column."""
        tops = [x.sum() for x in self.before.values() if x.requires_grad]
        if not tops or not self.parameters:
            return set()
        found = torch.autograd.grad(tops, list(self.parameters.values()), allow_unused=True, retain_graph=True)
        return {name for name, gradient in zip(self.parameters, found, strict=True) if gradient is not None}


def _watch_integers(module: nn.Module, linears: Sequence[str], seen: dict[str, dict[str, int]]) -> None:
    """Let modules note which of their own positive integers are read. They are copies, and never seen elsewhere."""
    for name, part in module.named_modules():
        if name.startswith(tuple(f"{linear}." for linear in linears)) or name in linears:
            continue

        def note(self: Any, key: str, where: str = name) -> Any:
            value = object.__getattribute__(self, key)
            if type(value) is int and value > 0 and key in object.__getattribute__(self, "__dict__"):
                seen.setdefault(where, {})[key] = value
            return value

        own: Any = type(part)
        with suppress(TypeError):  # of a class that cannot be derived from
            part.__class__ = type(own.__name__, (own,), {"__getattribute__": note, "__module__": own.__module__})


def _tried(trial: _Trial, whole: _Run, way: Way, width: int, t: int) -> Way:
    """The way, with the modules whose gradients have to be summed. Raises Refused if it is not right."""
    z, name = whole.arriving, type(trial.module).__name__
    direction = random_like(z, 5)
    entering, others = whole.gradients(direction)
    summed_in: dict[str, Tensor] = {}
    summed: dict[str, Tensor] = {}
    equal = dict.fromkeys(others, True)
    size = -(-width // t)
    for rank in range(t):
        part = slice(rank * size, min((rank + 1) * size, width))
        run = trial.run(way, rank, t)
        if departs(run.arriving, z[..., part]):
            raise Refused(
                f"with one rank's features of {t}, {name} does not compute that rank's part of what {whole.row} gets"
            )
        own_in, own = run.gradients(direction[..., part].to(run.arriving))
        for key, gradient in own_in.items():
            if gradient is not None:
                summed_in[key] = summed_in.get(key, 0) + gradient
        for key, gradient in own.items():
            equal[key] &= not departs(gradient, others[key])
            if gradient is not None:
                summed[key] = summed.get(key, 0) + gradient
    for key, gradient in entering.items():
        if departs(summed_in.get(key), gradient):
            raise Refused(f"the ranks' gradients of what enters {key} do not add up to the whole one")
    summed_over: list[str] = []
    above = whole.above()
    noise = NOISE * max(largest(gradient) for gradient in entering.values() if gradient is not None)
    for key in (key for key, same in equal.items() if not same):
        if departs(summed.get(key), others[key], noise):
            raise Refused(f"the ranks' gradients of {key} in {name} do not add up to the whole one")
        if key not in whole.parameters or key in above:
            raise Refused(f"{key} of {name} reaches {whole.row} also around {', '.join(whole.columns)}")
        summed_over.append(key)
    for key in whole.parameters:
        gradient = others[key]
        if gradient is not None and not gradient.any():
            raise Refused(f"{key} of {name} has a gradient of zero in the trial, which shows nothing")
    return replace(way, summed=tuple(sorted(summed_over)))
