"""Which modules of a layer may run on sequence shards, found by running the layer on each rank's part in one process.

Belongs here: the trial of one layer. It runs on a copy, and tensor-parallel linears are not computed again: they
give this rank's part of what they gave for the whole sequence. Nothing is communicated, and no code is read.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpformer.parallel.judge import Values, departs, random_like, with_random_values
from tpformer.torch_private import in_backward, stops_recomputation, tree_map_with_path

from .recomputation import Recomputation

RANKS = 2  # the ranks of a trial: what holds for two parts of a sequence holds for more
TOKENWISE = ("Linear", "FalconLinear", "Conv1D", "Embedding")  # modules with matrices that treat every token alike

# How a tensor of a rank is a part of the one for the whole sequence, (batch, seq, ...) or rows (batch * seq, N):
EQUAL, SHARD = "whole", "shard"  # all of it; this rank's tokens
ROWS_SHARD, ROWS = "rows of a shard", "rows of all shards"  # (batch * seq / t, N); all ranks' such rows, rank by rank
# What a module needs, if not its rank's tokens alone:
FIRST, GATHERED = "first gathered", "gathered"  # its first input whole, the others its tokens; all inputs whole
ALONE = "alone"  # all inputs whole, and its rank takes its tokens of the results
NEXT = {None: FIRST, FIRST: GATHERED, GATHERED: ALONE}  # what is tried after what


class Linears(NamedTuple):
    """The names of modules that are cut over ranks. others: those that need whole inputs, and give whole results."""

    columns: Collection[str]
    rows: Collection[str]
    others: Collection[str]

    def inside(self, name: str) -> Linears:
        """Those in a module, by their names in it."""
        return Linears(*([each[len(name) + 1 :] for each in some if each.startswith(f"{name}.")] for some in self))


@dataclass
class Layout:
    """How one layer runs on sequence shards. Names are relative to the layer, "" is the layer itself."""

    stream: str = ""  # the argument that is sharded along dim 1, as a path: ['0'] or ['hidden_states']
    result: str = ""  # the part of the output that is then sharded
    linears: set[str] = field(default_factory=set)  # tensor-parallel linears that gather or scatter the sequence
    gathered: dict[str, set[str]] = field(default_factory=dict)  # module: its arguments that it needs whole
    scattered: dict[str, set[str]] = field(default_factory=dict)  # module: its results of which a rank takes its part
    summed: set[str] = field(default_factory=set)  # modules whose own parameters see this rank's tokens alone
    unseen: set[str] = field(default_factory=set)  # modules with parameters that did not run
    recomputes: bool = False  # whether its backward runs a part of its forward again


class Misfit(Exception):
    """A module of the layer cannot run as it was tried. name: that module's; the layer's own is empty."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


def is_real(x: Any) -> bool:
    """Whether x is a tensor of floating-point numbers."""
    return isinstance(x, Tensor) and x.is_floating_point()


def call_tree(args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call as one dict: positional ones by their numbers."""
    return {**{str(index): value for index, value in enumerate(args)}, **kwargs}


def call_of(tree: dict[str, Any]) -> tuple[tuple, dict]:
    """Undo call_tree."""
    args = tuple(value for key, value in tree.items() if key.isdigit())
    return args, {key: value for key, value in tree.items() if not key.isdigit()}


def real_leaves(tree: Any) -> dict[str, Tensor]:
    """The floating-point tensors of a tree by their paths."""
    found: dict[str, Tensor] = {}
    tree_map_with_path(lambda path, leaf: found.update({path: leaf} if is_real(leaf) else {}), tree)
    return found


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether a tensor is as in one process. What is no number there, as in rows that are masked, has to be none."""
    if a.shape != b.shape or not torch.equal(a != a, b != b):
        return False
    return not departs(a.masked_fill(a != a, 0), b.masked_fill(b != b, 0))


class _Take(torch.autograd.Function):
    """The recorded whole tensor in place of this rank's part of it; the gradient is this rank's part."""

    @staticmethod
    def forward(ctx, x, whole, take):
        ctx.take = take
        return whole.detach().clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.take(dy), None, None


class _Trial:
    """A copy of a layer with one recorded call, and what its modules gave and got for the whole sequence."""

    def __init__(self, layer: nn.Module, tree: dict, stream: str, cut: Linears) -> None:
        self.layer, values = with_random_values(layer), Values(1)
        self.columns, self.rows, self.others, self.stream = *cut, stream
        self.asked = {path for path, leaf in real_leaves(tree).items() if leaf.requires_grad or path == stream}
        self.tree = tree_map_with_path(
            lambda _, leaf: values.real(leaf) if isinstance(leaf, Tensor) else deepcopy(leaf), tree
        )
        self.batch, self.seq = real_leaves(tree)[stream].shape[:2]
        self.names = {module: name for name, module in self.layer.named_modules()}
        self.fixed = set(self._with_unknown_use())
        self.states = dict.fromkeys(self.fixed, ALONE)
        self.calls: Counter[str] = Counter()
        self.loss = torch.zeros((), dtype=torch.float64)
        self.rank: int | None = None
        self.got: dict[tuple[str, int], dict[str, Tensor]] = {}
        self.gave: dict[tuple[str, int], Any] = {}
        for module, name in self.names.items():
            if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                module.forward = partial(self._call, name, module, module.forward)

    def part(self, whole: Tensor, kind: str) -> Tensor:
        """This rank's part of a tensor in a layout."""
        if kind == EQUAL:
            return whole
        if kind == SHARD:
            return whole.tensor_split(RANKS, 1)[self.rank or 0]
        parts = whole.view(self.batch, self.seq, -1).tensor_split(RANKS, 1)
        rows = [part.reshape(-1, whole.shape[-1]) for part in parts]
        return rows[self.rank or 0] if kind == ROWS_SHARD else torch.cat(rows)

    def kind(self, x: Tensor, whole: Tensor) -> str | None:
        """The layout in which x is a part of the whole; None if it is none."""
        kinds = [EQUAL]
        if whole.ndim > 2 and whole.shape[1] == self.seq:
            kinds.append(SHARD)
        elif whole.ndim == 2 and len(whole) == self.batch * self.seq:
            kinds += [ROWS_SHARD, ROWS]
        return next((kind for kind in kinds if _close(x, self.part(whole, kind))), None)

    def _weight(self, key: tuple, whole: Tensor) -> Tensor:
        """A random weight of a tensor in the trial's loss, the same in every run."""
        return random_like(whole, zlib.crc32(repr(key).encode()))

    def _count(self, key: tuple, x: Tensor, whole: Tensor, kind: str) -> None:
        """Add a tensor to the loss of this run."""
        if x.requires_grad and torch.is_grad_enabled():
            self.loss = self.loss + (x.double() * self.part(self._weight(key, whole), kind)).sum()

    def _cut(self, value: Any) -> Any:
        """A result as new leaves of the graph, so that gradients of parameters before it are counted at its inputs."""
        return tree_map_with_path(
            lambda _, leaf: leaf.detach().requires_grad_().clone() if is_real(leaf) else leaf, value
        )

    def _call(self, name: str, module: nn.Module, original: Callable, *args: Any, **kwargs: Any) -> Any:
        key = (name, self.calls[name])
        self.calls[name] += 1
        if in_backward() and (name, 1) in self.gave:
            raise Misfit(name, "it is called several times, and a checkpoint recomputes one of these calls")
        tree = call_tree(args, kwargs)
        cut = name in self.columns or name in self.rows or self.states.get(name) == ALONE
        if self.rank is None:
            self.got[key] = {path: x.detach() for path, x in real_leaves(tree).items()}
            if cut:
                for path, x in real_leaves(tree).items():
                    self._count((*key, path), x, x, EQUAL)
                with torch.no_grad():
                    self.gave[key] = original(*args, **kwargs)
                return self._cut(self.gave[key])
            value = original(*args, **kwargs)
            self.gave[key] = tree_map_with_path(lambda _, leaf: leaf.detach() if is_real(leaf) else leaf, value)
            return value
        if key not in self.gave:
            raise Misfit(name, "it is called more often on a part of the sequence")
        if cut:
            return self._cut(self._linear(name, key, tree) if name not in self.states else self._alone(name, key, tree))
        if self.states.get(name) in (FIRST, GATHERED):
            args, kwargs = call_of(tree_map_with_path(partial(self._gather, name, key), tree))
        try:
            value = original(*args, **kwargs)
        except Misfit:
            raise
        except Exception as error:  # whatever a model's code raises for a shard
            if stops_recomputation(error):
                raise
            raise Misfit(name, f"it raised {type(error).__name__} for a part of the sequence: {error}") from error
        whole = real_leaves(self.gave[key])
        kinds = {path: self._kind_or_misfit(name, x, whole.get(path)) for path, x in real_leaves(value).items()}
        if name in self.others and {*kinds.values()} != {EQUAL}:
            raise Misfit(name.rpartition(".")[0], f"{name} is cut in a way that needs the whole sequence")
        self.kinds[key] = kinds
        return value

    def _kind_or_misfit(self, name: str, x: Tensor, whole: Tensor | None) -> str:
        kind = None if whole is None else self.kind(x, whole)
        if kind is None:
            raise Misfit(name, f"its tensor {tuple(x.shape)} is neither that of the whole sequence nor a part of it")
        return kind

    def _linear(self, name: str, key: tuple[str, int], tree: dict) -> Tensor:
        """What a tensor-parallel linear gives: a column linear gathers tokens, a row linear scatters them."""
        ((path, x),) = real_leaves(tree).items()
        parent = name.rpartition(".")[0]
        kind = self._kind_or_misfit(parent, x, self.got[key].get(path))
        self._count((*key, path), x, self.got[key][path], kind)
        whole: Tensor = self.gave[key]
        if name in self.rows:
            if kind not in (EQUAL, ROWS):
                raise Misfit(parent, "a row-parallel linear gets a part of the sequence")
            self.layout.linears.add(name)
            return self.part(whole, kind).tensor_split(RANKS, -2)[self.rank or 0]
        if kind in (SHARD, ROWS_SHARD):
            self.layout.linears.add(name)
        return self.part(whole, ROWS if kind in (ROWS, ROWS_SHARD) else EQUAL)

    def _gather(self, name: str, key: tuple[str, int], path: str, leaf: Any) -> Any:
        if not is_real(leaf):
            return leaf
        kind = self._kind_or_misfit(name, leaf, self.got[key].get(path))
        if kind == EQUAL or (self.states[name] == FIRST and self.layout.gathered.get(name)):
            return leaf
        if kind != SHARD:
            raise Misfit(name, f"its input is {kind} of a flattened sequence")
        self.layout.gathered.setdefault(name, set()).add(path)
        return _Take.apply(leaf, self.got[key][path], partial(self.part, kind=SHARD))

    def _alone(self, name: str, key: tuple[str, int], tree: dict) -> Any:
        """What a module gives that runs on the whole sequence, and then takes this rank's part of its results."""
        for path, x in real_leaves(tree).items():
            self._gather(name, key, path, x)
            kind = self._kind_or_misfit(name, x, self.got[key][path])
            self._count((*key, path), x, self.got[key][path], kind)
        if name not in self.layout.gathered:
            return self.gave[key]  # what is around it has all tokens already

        def scatter(path: str, leaf: Any) -> Any:
            if not is_real(leaf) or leaf.shape != real_leaves(self.tree)[self.stream].shape:
                return leaf
            self.layout.scattered.setdefault(name, set()).add(path)
            return self.part(leaf, SHARD)

        return tree_map_with_path(scatter, self.gave[key])

    def run(self, rank: int | None) -> dict[str, Tensor | None]:
        """Run the layer on a rank's tokens (None: on all). Returns the gradients of parameters and inputs by name."""
        self.rank, self.layout = rank, Layout(stream=self.stream)
        self.calls.clear()
        self.kinds: dict[tuple[str, int], dict[str, str]] = {}
        self.loss = torch.zeros((), dtype=torch.float64)
        self.layer.zero_grad()

        def give(path: str, leaf: Any) -> Any:
            if path == self.stream and rank is not None:
                leaf = self.part(leaf, SHARD)
            return leaf.clone().requires_grad_(path in self.asked) if is_real(leaf) else leaf

        tree = tree_map_with_path(give, self.tree)
        args, kwargs = call_of(tree)
        value = self.layer(*args, **kwargs)
        for path, x in real_leaves(value).items():
            kind = EQUAL if rank is None else self.kinds["", 0][path]
            self._count(("", path), x, real_leaves(self.gave["", 0])[path], kind)
        if self.loss.requires_grad:
            self.calls.clear()  # a checkpoint calls again what it recomputes, and finds what was found before
            found, self.layout = self.layout, Layout(stream=self.stream)
            with Recomputation() as backward:
                self.loss.backward()
            self.layout = found
            found.recomputes = backward.seen
        grads = {f"parameter {name}": p.grad for name, p in self.layer.named_parameters()}
        grads |= {f"input {path}": x.grad for path, x in real_leaves(tree).items() if path in self.asked}
        return {name: None if grad is None else grad.clone() for name, grad in grads.items()}

    def unseen(self) -> Iterator[str]:
        """The modules with parameters of their own that no run has called. One that runs alone is seen as a whole."""
        called = {name for name, _ in self.got}
        alone = tuple(f"{name}." for name, state in self.states.items() if state == ALONE)
        for module, name in self.names.items():
            if name not in called and not name.startswith(alone or "\n") and [*module.parameters(recurse=False)]:
                yield name

    # An example: y = self.mix(x) is x less its mean over the tokens (1, 2, 3, 6), so (-2, -1, 0, 3). Rank 0 has (1, 2),
    # and mix gives (-0.5, 0.5), no part of that: Misfit("mix"), which becomes FIRST. Its input is gathered, so it gives
    # all four. In x + self.down(self.up(y)) a column linear takes all, the row linear gives rank 0 its two: it fits.
    # In x + y two tokens meet four, and the layer raises. mix left the whole there, so it becomes ALONE: its rank takes
    # (-2, -1) of what it gives, and the layer's result is (1, 2) + (-2, -1) = (-1, 1).
    def escalate(self, misfit: Misfit) -> None:
        """Give the module that does not fit, or the one that left it a whole sequence, more than its shard."""
        name = misfit.name
        inside = f"{name}." if name else ""
        left_whole = [
            other
            for (other, _), kinds in self.kinds.items()
            if self.states.get(other) in (FIRST, GATHERED) and other.startswith(inside) and EQUAL in kinds.values()
        ]
        if left_whole and self.states.get(name) not in (FIRST, GATHERED):
            return self._set(left_whole[-1], ALONE)
        lists = (nn.ModuleList, nn.ModuleDict)
        while name and (self.states.get(name) == ALONE or isinstance(self.layer.get_submodule(name), lists)):
            name = name.rpartition(".")[0]
        if not name:
            raise misfit
        self._set(name, NEXT[self.states.get(name)])

    def _set(self, name: str, state: str) -> None:
        inside = {other for other in self.states if f"{other}.".startswith(f"{name}.")} - self.fixed
        self.states = {other: old for other, old in self.states.items() if other not in inside} | {name: state}

    def _with_unknown_use(self) -> Iterator[str]:
        """Modules in which a token may depend on others in ways that one run does not show; they run alone.

        They are around matrices of unknown use, such as those of experts, or have statistics of a batch.
        """
        for module, name in self.names.items():
            own = [p for p in module.parameters(recurse=False) if p.ndim > 1]
            if own and type(module).__name__ not in TOKENWISE and name:
                yield name.rpartition(".")[0] or name
            elif hasattr(module, "running_mean"):
                yield name


def try_layer(layer: nn.Module, args: tuple, kwargs: dict, cut: Linears) -> Layout:
    """How a layer runs on sequence shards, from one call of it with the whole sequence.

    Errors:  Misfit with the reason, if it does not.
    """
    tree = call_tree(args, kwargs)
    stream = next((path for path, x in real_leaves(tree).items() if x.ndim == 3), None)
    if stream is None or real_leaves(tree)[stream].shape[1] < RANKS:
        raise Misfit("", f"no argument is a tensor (batch, seq, hidden) with seq of at least {RANKS}")
    trial = _Trial(layer, tree, stream, cut)
    while True:
        expected = trial.run(None)
        try:
            runs = [(trial.run(rank), trial.layout, trial.kinds) for rank in range(RANKS)]
            layout, kinds = runs[0][1:]
            sharded = [path for path, kind in kinds["", 0].items() if kind == SHARD]
            if len(sharded) != 1:
                raise Misfit("", f"{len(sharded)} of its results are sharded along the sequence, where one should be")
        except Misfit as misfit:
            trial.escalate(misfit)
            continue
        break
    layout.result = sharded[0]
    layout.summed = set(_summed(trial, expected, [found for found, _, _ in runs]))
    layout.unseen = set(trial.unseen())
    return layout


def _summed(trial: _Trial, expected: dict, found: list[dict]) -> Iterator[str]:
    """The modules whose parameters' gradients are sums over ranks. Misfit for one that is neither that nor whole."""
    for name, whole in expected.items():
        parts = [each[name] for each in found]
        kind, _, path = name.partition(" ")
        module = path.rpartition(".")[0]
        if whole is None and all(part is None for part in parts):
            continue
        zeros = torch.zeros_like(whole if whole is not None else parts[0])
        whole, parts = (zeros if whole is None else whole), [zeros if part is None else part for part in parts]
        if path == trial.stream and kind == "input":
            if _close(torch.cat(parts, 1), whole):
                continue
        elif all(_close(part, whole) for part in parts):
            continue
        elif kind == "parameter" and _close(sum(parts), whole):
            yield module
            continue
        raise Misfit(module, f"the gradient of {name} is neither whole on every rank nor the sum over ranks")
