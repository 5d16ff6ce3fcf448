"""Whether a region's linears can be cut over t ranks, found by trying it in one process, without communication.

Belongs here: the ways a linear can be cut, the copies that stand for ranks, and what has to agree between them.

The module around the region is copied in float64 and gets random parameters, so that no zero bias or norm of ones hides
anything. It runs whole, and then as each rank would run it. Whatever it computes between its linears (heads, gates,
positions, norms), it may be cut if every rank's input of the last linear is its part of the whole one, and if the
gradients that ranks compute are the whole ones, or add up to them where something adds them up.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpformer.torch_private import tree_leaves, tree_map

from .regions import linear_of, sizes_of

WIDTHS = ("size", "dim", "width", "features", "hidden")  # in names of integers that may be numbers of features
TOLERANCE = 1e-5  # of the largest element: models compute norms and positions in float32 whatever their dtype is


@dataclass(frozen=True)
class Cut:
    """How a linear's output features are cut: blocks one after another, (features, parts) each.

    A rank takes one part of every block. With fewer parts than ranks, neighbours share one.
    """

    blocks: tuple[tuple[int, int], ...]

    def rows(self, rank: int, t: int) -> tuple[slice, ...]:
        """The output features of this rank, as slices one after another."""
        first, found = 0, []
        for size, parts in self.blocks:
            width, part = -(-size // parts), rank * parts // t
            found.append(slice(first + part * width, first + min((part + 1) * width, size)))
            first += size
        return tuple(found)

    def is_even(self, t: int) -> bool:
        """Whether each rank has a slice of its own, and these one after another are the whole."""
        return len(self.blocks) == 1 and self.blocks[0][1] == t


@dataclass(frozen=True)
class Way:
    """How a region is cut. Names are relative to its root.

    attributes: for the modules that hold columns, the integers that become those of one rank.
    summed:     modules whose parameters' gradients have to be summed over ranks, because each rank uses them on its
                part.
    """

    cuts: dict[str, Cut]
    attributes: dict[str, dict[str, int]]
    summed: tuple[str, ...] = ()


class Refused(Exception):
    """The reason why a region cannot be cut in some way."""


class _Arrived(Exception):
    """The run has come to the region's last linear."""


def find_way(root: nn.Module, columns: Sequence[str], row: str, call: tuple[tuple, dict], t: int) -> Way:
    """How the region can be cut over t ranks.

    call: (args, kwargs) of root in a run. Raises Refused with the reason if no way is right.
    """
    linear = linear_of(root.get_submodule(row))
    assert linear is not None
    width = sizes_of(linear)[0]
    if width <= (t - 1) * -(-width // t):
        raise Refused(f"its {width} input features are too few for {t} ranks")
    try:
        whole = _Run(root, columns, row, call)
    except Exception as error:
        raise Refused(f"{type(root).__name__} cannot be tried alone ({_short(error)})") from error
    reason = ""
    outputs = {name: len(whole.weights[name]) for name in columns}
    for cuts in _cuts(outputs, width, t):
        for attributes in _attributes(root, cuts, width, t):
            try:
                return _tried(whole, Way(cuts, attributes), width, t)
            except Refused as refused:
                reason = reason or str(refused)
    raise Refused(reason or f"{t} ranks cannot share the {max(outputs.values())} features of {max(outputs)}")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _cuts(outputs: Mapping[str, int], width: int, t: int) -> Iterator[dict[str, Cut]]:
    """Ways to cut a region's columns, by their numbers of output features; width: the row's input features."""
    fewer = [n for n in range(t - 1, 0, -1) if t % n == 0]  # key-value heads that several ranks share
    even = {name: Cut(((size, t),)) for name, size in outputs.items()}
    if all(size > (t - 1) * -(-size // t) for size in outputs.values()):
        yield even
    most = max(outputs.values())
    if min(outputs.values()) < most and most % t == 0:
        for n in fewer:
            if all(size == most or size % n == 0 for size in outputs.values()):
                yield {name: Cut(((size, t if size == most else n),)) for name, size in outputs.items()}
    if width % t:
        return
    if any(size > width and size % width == 0 for size in outputs.values()):
        yield {
            name: Cut(((width, t),) * (size // width)) if size % width == 0 else even[name]
            for name, size in outputs.items()
        }
    for name, size in outputs.items():  # queries, keys and values in one
        rest = (size - width) // 2
        if size > width and (size - width) % 2 == 0 and rest != width:
            for n in (t, *fewer):
                if rest % n == 0:
                    yield even | {name: Cut(((width, t), (rest, n), (rest, n)))}


def _attributes(root: nn.Module, cuts: Mapping[str, Cut], width: int, t: int) -> Iterator[dict[str, dict[str, int]]]:
    """Values that integers of the modules that hold columns may take on one rank."""
    blocks = [[size for size, _ in cut.blocks] for cut in cuts.values()]
    widths = {width, *map(sum, blocks)}.union(*blocks)
    fewest = min(parts for cut in cuts.values() for _, parts in cut.blocks)
    found: dict[str, dict[str, dict[str, int]]] = {"heads": {}, "widths": {}}
    for holder in dict.fromkeys(name.rpartition(".")[0] for name in cuts):
        for name, value in vars(root.get_submodule(holder)).items():
            if type(value) is not int or value < 1:
                continue
            if "groups" in name:
                kind, own = "heads", value * fewest // t
            elif "head" in name and "dim" not in name and "size" not in name:
                kind, own = "heads", value // t if value % t == 0 else 1 if t % value == 0 else value
            elif any(word in name for word in WIDTHS):
                kind, own = "widths", value // t if value in widths and value % t == 0 else value
            else:
                continue
            if own != value:
                found[kind].setdefault(holder, {})[name] = own
    tried: list[dict] = []
    for kinds in (("heads",), ("heads", "widths"), ("widths",), ()):
        choice: dict[str, dict[str, int]] = {}
        for holder, changes in (pair for kind in kinds for pair in found[kind].items()):
            choice[holder] = choice.get(holder, {}) | changes
        if isinstance(root, nn.TransformerEncoderLayer):  # its fast path would not call its linears
            choice.setdefault("", {})["activation_relu_or_gelu"] = 0
        if choice not in tried:
            tried.append(choice)
            yield choice


class _Run:
    """One run of a copy of root up to the row: its input there, and where gradients can be asked for.

    whole, way, rank: None, or the run of all ranks whose values this rank's run shares.
    """

    def __init__(
        self, root: nn.Module, columns: Sequence[str], row: str, call: tuple[tuple, dict],
        whole: "_Run | None" = None, way: Way | None = None, at: tuple[int, int] = (0, 1),
    ) -> None:  # fmt: skip
        self.root, self.columns, self.row, self.call = root, columns, row, call
        linear = root.get_submodule(columns[0])
        device = next(linear.parameters()).device
        self.device = torch.device("cpu") if device.type == "meta" else device
        self.generator = torch.Generator().manual_seed(0)
        self.weights: dict[str, Tensor] = {} if whole is None else whole.weights
        self.values: dict[str, Tensor] = {} if whole is None else whole.values
        module = self._copy(way, at)
        if way is not None:
            for holder, changes in way.attributes.items():
                for name, value in changes.items():
                    setattr(module.get_submodule(holder), name, value)
        self.parameters = {
            name: p for name, p in module.named_parameters() if name.rpartition(".")[0] not in (*columns, row)
        }
        args, kwargs = self._arguments(None if whole is None else whole.arguments)
        self.inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        self.before: dict[str, Tensor] = {}  # what enters the columns
        self.entering: dict[str, Tensor] = {}  # the same, cut from the graph above
        self.arriving = self._run(module, args, kwargs)

    def _random(self, name: str, shape: Sequence[int]) -> Tensor:
        """Around one for norms and scales, around zero for biases, else such that a linear keeps the scale."""
        if len(shape) < 2 and not name.endswith("bias"):
            return (torch.rand(*shape, generator=self.generator, dtype=torch.float64) + 0.5).to(self.device)
        return self._normal(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)

    def _normal(self, shape: Sequence[int]) -> Tensor:
        """Of both signs, so that activations are not in their linear part alone."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.device)

    def _real(self, x: Tensor) -> Tensor:
        """A tensor's values, in float64 if it holds floats. On meta it gets random ones, or true."""
        if x.is_meta:
            return self._random("", x.shape) if x.is_floating_point() else torch.ones_like(x, device=self.device)
        x = x.detach().to(self.device)
        return x.to(torch.float64) if x.is_floating_point() else x

    def _copy(self, way: Way | None, at: tuple[int, int]) -> nn.Module:
        """root in float64, with plain linears in the place of the columns, and the row only as a shape."""
        memo: dict[int, Any] = {id(m.config): m.config for m in self.root.modules() if hasattr(m, "config")}
        for name in (*self.columns, self.row):
            adapted = self.root.get_submodule(name)
            linear = linear_of(adapted)
            assert linear is not None
            k, n = sizes_of(linear)
            if name == self.row:
                memo[id(adapted)] = nn.Linear(k, n, linear.bias is not None, device="meta", dtype=torch.float64)
                continue
            if name not in self.weights:
                self.weights[name] = self._random(name, (n, k))
                if linear.bias is not None:
                    self.values[f"{name}.bias"] = self._normal((n,))
            rows = [slice(None)] if way is None else way.cuts[name].rows(*at)
            weight = torch.cat([self.weights[name][part] for part in rows])
            plain = nn.Linear(k, len(weight), linear.bias is not None, device="meta", dtype=torch.float64)
            plain.weight = nn.Parameter(weight)
            if linear.bias is not None:
                plain.bias = nn.Parameter(torch.cat([self.values[f"{name}.bias"][part] for part in rows]))
            memo[id(adapted)] = plain
        module = copy.deepcopy(self.root, memo).eval()
        done = {id(part) for name in (*self.columns, self.row) for part in module.get_submodule(name).parameters()}
        for holder_name, holder in module.named_modules():
            for name, value in [*holder.named_parameters(recurse=False), *holder.named_buffers(recurse=False)]:
                if id(value) not in done:
                    key = f"{holder_name}.{name}"
                    parameter = isinstance(value, nn.Parameter)
                    if key not in self.values:
                        random = value.is_floating_point() and (parameter or value.is_meta)
                        self.values[key] = self._random(name, value.shape) if random else self._real(value)
                    held = self.values[key].clone()
                    setattr(holder, name, nn.Parameter(held) if parameter and held.is_floating_point() else held)
        return module

    def _arguments(self, given: Any) -> Any:
        """The call's arguments in float64: random where they need gradients."""
        values = given

        def changed(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return self._normal(x.shape) if x.requires_grad else self._real(x)

        self.arguments = tree_map(changed, self.call) if values is None else values
        grads = [isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(self.call)]
        flags = iter(grads)

        def fresh(x: Any) -> Any:
            flag = next(flags)
            return x.clone().requires_grad_(flag) if isinstance(x, Tensor) else x

        return tree_map(fresh, self.arguments)

    def _run(self, module: nn.Module, args: tuple, kwargs: dict) -> Tensor:
        arrived: list[Tensor] = []

        def entering(name: str) -> Any:
            def hook(_: nn.Module, args: tuple) -> tuple:
                if name in self.before:
                    raise Refused(f"{name} runs twice before {self.row}")
                self.before[name] = args[0]
                self.entering[name] = args[0].detach().requires_grad_()
                return (self.entering[name].clone(), *args[1:])

            return hook

        def stop(_: nn.Module, args: tuple) -> None:
            arrived.append(args[0])
            raise _Arrived

        for name in self.columns:
            module.get_submodule(name).register_forward_pre_hook(entering(name))
        module.get_submodule(self.row).register_forward_pre_hook(stop)
        try:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                module(*args, **kwargs)
        except _Arrived:
            return arrived[0]
        raise Refused(f"{type(module).__name__} does not come to {self.row} when it runs alone")

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


def _differ(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        some = expected if found is None else found
        return some is not None and bool(some.abs().max() > 0)
    if found.shape != expected.shape:
        return True
    return not bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _tried(whole: _Run, way: Way, width: int, t: int) -> Way:
    """The way, with the modules whose gradients have to be summed. Raises Refused if it is not right."""
    z, name = whole.arriving, type(whole.root).__name__
    direction = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(z)
    entering, others = whole.gradients(direction)
    summed_in: dict[str, Tensor] = {}
    summed: dict[str, Tensor] = {}
    equal = dict.fromkeys(others, True)
    size = -(-width // t)
    for rank in range(t):
        part = slice(rank * size, min((rank + 1) * size, width))
        try:
            run = _Run(whole.root, whole.columns, whole.row, whole.call, whole, way, (rank, t))
        except Exception as error:
            if isinstance(error, Refused):
                raise
            raise Refused(f"with one rank's features of {t}, {name} raises {_short(error)}") from error
        if _differ(run.arriving, z[..., part]):
            raise Refused(
                f"with one rank's features of {t}, {name} does not compute that rank's part of what {whole.row} gets"
            )
        own_in, own = run.gradients(direction[..., part].to(run.arriving))
        for key, gradient in own_in.items():
            if gradient is not None:
                summed_in[key] = summed_in.get(key, 0) + gradient
        for key, gradient in own.items():
            equal[key] &= not _differ(gradient, others[key])
            if gradient is not None:
                summed[key] = summed.get(key, 0) + gradient
    for key, gradient in entering.items():
        if _differ(summed_in.get(key), gradient):
            raise Refused(f"the ranks' gradients of what enters {key} do not add up to the whole one")
    modules: set[str] = set()
    above = whole.above()
    for key in (key for key, same in equal.items() if not same):
        if _differ(summed.get(key), others[key]):
            raise Refused(f"the ranks' gradients of {key} in {name} do not add up to the whole one")
        if key not in whole.parameters or key in above:
            raise Refused(f"{key} of {name} reaches {whole.row} also around {', '.join(whole.columns)}")
        modules.add(key.rpartition(".")[0])
    for key in whole.parameters:
        gradient = others[key]
        if gradient is not None and not gradient.any():
            raise Refused(f"{key} of {name} has a gradient of zero in the trial, which shows nothing")
        if key.rpartition(".")[0] in modules and equal[key] and gradient is not None:
            raise Refused(f"one parameter of {key.rpartition('.')[0]} is used on a rank's features, {key} is not")
    return Way(way.cuts, way.attributes, tuple(sorted(modules)))
