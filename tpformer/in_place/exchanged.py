"""Mixtures of experts whose ranks exchange tokens: each rank has whole experts, and tokens travel to them.

Belongs here: which modules are such mixtures, found by trying them in one process, and the module when it is. Rows
travel by ops/exchanged_rows.py. Experts that all ranks compute for the same tokens are in matrices.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tpformer import ops
from tpformer.distributed.groups import unbroken
from tpformer.layers import TensorParallel
from tpformer.layers.explain_notes import exchange_note
from tpformer.ops.exchanged_rows import Decision, bring_home, send_rows
from tpformer.ops.uncompiled import uncompiled
from tpformer.torch_private import in_backward, tree_leaves, tree_map

from .linears import class_of, lay_out, reduced
from .matrices import Copy, Division, check_alone, choice_of, experts_of, has_several, locals_of, seeing, smaller
from .regions import Recording
from .trial import Refused, short

RANKS = 2  # of a trial: rows that travel to two ranks, each by itself, show what would go wrong with more
AGAIN = (
    "{name} runs again in the backward, and its router chose other experts than in the forward: let the layer compute "
    "the same numbers again, or leave gradient checkpointing out"
)
REENTRANT = (
    "{name} runs again in the backward, after a forward that recorded no graph, as with use_reentrant=True, so nobody "
    "knows which experts its router chose: checkpoint with use_reentrant=False"
)
OWN_TEXTS = (
    "generate() ends when a rank's own texts do, and ranks that exchange tokens have to run as many forwards as the "
    "others: call it on all of them with synced_gpus=True"
)


class Roles(NamedTuple):
    """Which tensors of a mixture's call are which, by their places among its leaves."""

    rows: int
    experts: int
    weights: int

    @classmethod
    def of(cls, call: Any) -> Roles:
        """Those of a call. Raises Refused for another one than rows, numbers of experts and weights."""
        found = [(place, x) for place, x in enumerate(tree_leaves(call)) if isinstance(x, Tensor)]
        chosen = choice_of(call)
        floats = [(place, x) for place, x in found if x.is_floating_point()]
        weights = [place for place, x in floats if chosen is not None and x.shape == chosen.shape]
        rows = [place for place, x in floats if x.ndim == 2 and place not in weights[-1:]]
        if chosen is None or chosen.ndim != 2 or len(found) != 3 or not weights or len(rows) != 1:
            shapes = ", ".join(str(tuple(x.shape)) for _, x in found)
            raise Refused(f"it is called with tensors of {shapes}, and not with rows, their experts and their weights")
        return cls(rows[0], next(place for place, x in found if x is chosen), weights[-1])

    def tensors(self, call: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Rows (T, H), experts (T, K) and weights (T, K) of a call."""
        leaves = tree_leaves(call)
        found = [leaves[place] for place in self if place < len(leaves)]
        if len(found) != 3 or not all(isinstance(x, Tensor) for x in found):
            raise ValueError("a mixture of experts is called in another way than in the example: give another example")
        return found[0], found[1], found[2]

    def put(self, call: Any, rows: Tensor, experts: Tensor, weights: Tensor) -> Any:
        """The same call with other tensors."""
        leaves, made = tree_leaves(call), (rows, experts, weights)
        instead = {id(leaves[place]): x for place, x in zip(self, made, strict=True)}
        return tree_map(lambda x: instead.get(id(x), x), call)


@dataclass(frozen=True)
class Exchange(Division):
    """A Division into whole experts, to which tokens travel. k: the experts of a token. hidden: the size of a row."""

    roles: Roles = Roles(0, 1, 2)
    k: int = 1
    hidden: int = 1

    def attributes(self, module: nn.Module, rank: int, t: int) -> dict[str, Any]:
        """What the module counts by, on one rank."""
        return dict(self.counts(module, self.experts // t))


class _Apart(Copy):
    """A trial in which each rank's experts get their own rows alone, one for each expert of a token."""

    def called(self, module: nn.Module, call: Any, division: Division, rank: int, t: int) -> Any:
        if not isinstance(division, Exchange):
            return super().called(module, call, division, rank, t)
        rows, chosen, weights = division.roles.tensors(call)
        part = division.chunk(division.experts, rank, t)
        token, place = ((chosen >= part.start) & (chosen < part.stop)).nonzero(as_tuple=True)
        order = chosen[token, place].argsort(stable=True)
        token, place = token[order], place[order]
        own = (chosen[token, place] - part.start)[:, None], weights[token, place][:, None]
        args, kwargs = division.roles.put(call, rows[token], *own)
        y = module(*args, **kwargs)
        if not isinstance(y, Tensor) or y.ndim != 2 or len(y) != len(token):
            raise Refused(f"a {type(module).__name__} does not return a row for each row that it is given")
        return y.new_zeros(len(rows), y.shape[1]).index_add(0, token, y)


def find_exchanges(model: nn.Module, recording: Recording, ep: int) -> dict[str, Exchange]:
    """{name: how it is divided} of all mixtures of experts in a model, whose tokens ep ranks exchange.

    A mixture multiplies with parameters of its own, whose first dim counts experts, and is called with rows, the
    numbers of their experts and weights.
    Errors:  ValueError for a model without mixtures, and for one that cannot be divided so, with the reason.
    """
    found: dict[str, Exchange] = {}
    calls = {name: call for name, call in recording.calls.items() if has_several(model.get_submodule(name))}
    tried: dict[Any, Exchange] = {}
    for name, call in calls.items():
        module = model.get_submodule(name)
        if not (experts := experts_of(module, call)):
            continue
        key = type(module), repr(module), *((each, tuple(p.shape)) for each, p in module.named_parameters())
        try:
            if experts % ep:
                raise Refused(f"{ep} ranks cannot share its {experts} experts equally")
            check_alone(name, module, {}, recording)
            if key not in tried:
                tried[key] = _find_exchange(module, call, recording)
        except Refused as refused:
            raise ValueError(f"{name} cannot exchange tokens over {ep} ranks: {refused}") from refused
        found[name] = tried[key]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no module that holds its experts as parameters (experts, ...) of its own and "
            f"is called with their numbers alone, so nothing can exchange tokens over {ep} ranks: leave experts out of "
            f"the TensorParallel"
        )
    return found


def check_groups(tp: TensorParallel) -> None:
    """ValueError unless the ranks of experts are whole groups of tensor-parallel ranks."""
    assert tp.experts is not None
    ranks = dist.get_process_group_ranks(tp.experts.get_group())
    beside = [dist.get_rank()] if tp.group is None else dist.get_process_group_ranks(tp.group)
    if missing := sorted(set(beside) - set(ranks)):
        raise ValueError(
            f"experts on {len(ranks)} ranks that exchange tokens, without rank {missing[0]} of {len(beside)} "
            f"tensor-parallel ranks, whose tokens are the same: give as many neighbours as hold all of these"
        )


def _find_exchange(module: nn.Module, call: tuple[tuple, dict], recording: Recording) -> Exchange:
    """How the experts of a mixture are divided. Raises Refused with the reason."""
    name, experts, roles = type(module).__name__, experts_of(module, call), Roles.of(call)
    hidden, k = (x.shape[1] for x in roles.tensors(call)[:2])
    try:
        small, given = smaller(module, call, RANKS)
        whole = _Apart(small, given)
        results = whole.run(Division({}), 0, 1)
        dims = dict.fromkeys([name for name, _ in small.named_parameters(recurse=False)], 0)
        division = Exchange(dims, experts=experts_of(small, given), roles=roles, k=k)
        right = whole.adds_up(division, results, RANKS)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{name} cannot be tried alone ({short(error)})") from error
    if not right:
        raise Refused(f"the experts of this {name} do not give what all of them do if each gets its own rows alone")
    named = [name for name, p in module.named_parameters() if p.is_floating_point()]
    unused = tuple(n for n, gradient in zip(named, results[-len(named) :], strict=True) if gradient is None)
    return Exchange(dims, experts=experts, roles=roles, k=k, hidden=hidden, unused=unused)


def exchange_tokens(model: nn.Module, found: Mapping[str, Exchange], tp: TensorParallel) -> None:
    """Let the mixtures of a model exchange tokens, in place. Their parameters become DTensors, Shard(0), on tp.experts.

    Communication, per rank: that of ops.exchanged_rows.send_rows and bring_home; with t tensor-parallel ranks, each of
             which sends its part of the same tokens, forward an all-gather of the result, and backward of the gradients
             of rows and of weights.
    """
    for name, exchange in found.items():
        module = model.get_submodule(name)
        own: Any = type(module)
        lay_out(module, tp.of_experts, dict(exchange.dims))
        for key, value in exchange.attributes(module, tp.of_experts.rank, tp.of_experts.size).items():
            setattr(module, key, value)
        module.__class__ = class_of(_Exchanging, own)
        module.exchange, module.exchanges_over, module.decisions = exchange, tp, _Decisions(name)


def generate_together(model: nn.Module) -> None:
    """Let generate() of transformers' models refuse to end on each rank by itself."""
    for part in model.modules():
        if hasattr(type(part), "generate"):
            part.generate = partial(_generate, part.generate)


def _generate(generate: Any, *args: Any, **kwargs: Any) -> Any:
    """generate of a model whose ranks exchange tokens."""
    if not kwargs.get("synced_gpus"):
        raise ValueError(OWN_TEXTS)
    return generate(*args, **kwargs)


class _Decisions:
    """Where the tokens of a mixture's forwards went, as long as their graphs live, for what a backward runs again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made: weakref.WeakSet[Decision] = weakref.WeakSet()

    def of(self, experts: Tensor) -> Decision:
        """That of this run. RuntimeError for one in a backward that no forward has made."""
        decision = Decision(experts)
        if in_backward():
            if not decision.is_among(self.made):
                raise RuntimeError((AGAIN if len(self.made) else REENTRANT).format(name=self.name))
        elif torch.is_grad_enabled():
            self.made.add(decision)
        return decision

    def __deepcopy__(self, memo: dict) -> _Decisions:
        return _Decisions(self.name)

    def __reduce__(self) -> tuple[Any, tuple]:
        return _Decisions, (self.name,)


class _Exchanging(nn.Module):
    """A mixture of which each rank has whole experts, and sends its own tokens to those of all ranks.

    With tensor-parallel ranks, which have the same tokens, each sends its part of them and gathers the results. The
    gradients of experts are t / ep of their sums over the tokens of these ranks: the mean over the ep / t ranks that
    have tokens of their own, as FSDP2 makes of other gradients.
    """

    exchange: Exchange
    exchanges_over: TensorParallel
    decisions: _Decisions

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tp, exchange = self.exchanges_over, self.exchange
        group, parameters = tp.of_experts.group, locals_of(self)
        rows, experts, weights = exchange.roles.tensors((args, kwargs))
        number = len(rows)
        if tp.group is not None:
            rows, experts, weights = _own_part(tp, rows, experts, weights)
        used = {name: x for name, x in parameters.items() if x.requires_grad and name not in exchange.unused}
        decision = self.decisions.of(experts)
        with unbroken(group, self.decisions.name):
            visit = send_rows(
                rows, ops.Routing(experts, weights), list(used.values()), decision, n_experts=exchange.experts,
                group=group, share=tp.size / tp.of_experts.size,
            )  # fmt: skip
            own = zip(used, visit.own, strict=True)
            y = self._visited(visit.rows, visit.experts, visit.weights, (args, kwargs), {**parameters, **dict(own)})
            y = bring_home(y, visit)
        if tp.group is None:
            return y
        y = ops.gather_rows(F.pad(y, (0, 0, 0, _share(number, tp.size) - len(y))), tp.group)
        return y if len(y) == number else y[:number].clone()  # no view, to which FSDP2's hooks would not hold

    def _visited(self, rows: Tensor, experts: Tensor, weights: Tensor, call: Any, own: Mapping[str, Tensor]) -> Tensor:
        """What this rank's experts make of the rows (R, H) that are theirs. Without any they run on a row of zeros,
        so that all ranks record graphs alike."""
        nothing = len(rows) == 0
        if nothing:
            rows, weights, experts = F.pad(rows, (0, 0, 0, 1)), F.pad(weights, (0, 1)), F.pad(experts, (0, 1))
        args, kwargs = self.exchange.roles.put(call, rows, experts[:, None], weights[:, None])
        with seeing(self, own):
            y = super().forward(*args, **kwargs)
        return y[:0] if nothing else y

    def sent_note(self, tokens: int, dtype: torch.dtype | None) -> str:
        """What explain() says of `tokens` tokens of a forward."""
        size = (dtype or next(self.parameters()).dtype).itemsize
        own = tokens // self.exchanges_over.size * self.exchange.hidden * size
        return exchange_note(own, self.exchange.k, self.exchange.experts, self.exchanges_over.of_experts.size, 2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(self, protocol)


def _share(number: int, t: int) -> int:
    """How many of so many rows a rank has; the last ranks may have fewer."""
    return max(1, -(-number // t))


def _own_part(tp: TensorParallel, rows: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of rows (T, H), experts (T, K) and weights (T, K) that all tensor-parallel ranks have."""
    share = _share(len(rows), tp.size)
    part = slice(tp.rank * share, min((tp.rank + 1) * share, len(rows)))
    most = share * tp.size - len(rows)
    rows, weights = (ops.scatter_rows(F.pad(x, (0, 0, 0, most)), tp.group) for x in (rows, weights))
    own = max(0, part.stop - part.start)
    return rows[:own], experts[part], weights[:own]
