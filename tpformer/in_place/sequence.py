"""Sequence parallelism of a model that exists: between tensor-parallel linears each rank has its part of the sequence.

Belongs here: what runs in the forward. The first layer of a chain takes this rank's tokens, the last one gathers them,
and between them norms and residual additions run on shards. streams.py finds the chains.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpformer import ops
from tpformer.layers import TensorParallel
from tpformer.torch_private import in_backward, tree_map_with_path

from .sequence_trial import Layout, call_of, call_tree, real_leaves
from .streams import Streams
from .summing import sum_gradients
from .tensors import OF_SHARDS

SEQUENCE_DIM = -2  # of linears: dim 1 of (batch, seq, hidden), and dim 0 of rows (batch * seq / t, hidden)
HIDDEN_STATES = "output_hidden_states"  # with it transformers' models return what passes between layers


def gather_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """All of a sequence (batch, seq, ...) from each rank's shard (batch, seq / t, ...); as ops.gather_rows."""
    rows = ops.gather_rows(x.movedim(1, 0).reshape(x.shape[1], -1), tp.group)
    return rows.view(-1, len(x), *x.shape[2:]).movedim(0, 1).contiguous()


def scatter_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """This rank's shard (batch, seq / t, ...) of a sequence (batch, seq, ...); as ops.scatter_rows."""
    rows = ops.scatter_rows(x.movedim(1, 0).reshape(x.shape[1], -1), tp.group)
    return rows.view(-1, len(x), *x.shape[2:]).movedim(0, 1).contiguous()


class Chain:
    """Layers that pass their shards on to one another, and the way in which the current forward runs them.

    A forward runs whole, as without sequence parallelism, if the ranks cannot share its sequence equally, or if it
    returns hidden states.
    """

    def __init__(self, layers: Mapping[str, Layout], tp: TensorParallel) -> None:
        self.names, self.tp = tuple(layers), tp
        self.recomputes = any(layout.recomputes for layout in layers.values())
        self.whole, self.asked, self.unusual, self.warned = False, [False], False, False
        self.linears: list[nn.Module] = []
        self.summing: list[nn.Module] = []

    def enter(self, index: int, path: str, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """A layer's pre-hook: take this rank's tokens, in the first layer of the chain."""
        self.check_recompute()
        tree = call_tree(args, kwargs)
        x = real_leaves(tree).get(path)
        if x is None:
            raise ValueError(
                f"{self.names[index]} got its argument {path} in the example, and now is called without it: call it "
                f"alike, or leave sequence_parallel out"
            )
        if index == 0:
            self.choose(module, x.shape[1])
        if self.whole or index:
            return None
        return call_of(tree_map_with_path(at({path}, partial(scatter_sequence, tp=self.tp)), tree))

    def leave(self, index: int, path: str, _: nn.Module, __: Any, output: Any) -> Any:
        """A layer's hook: gather all tokens, after the last layer of the chain."""
        if index + 1 < len(self.names):
            return None
        if self.whole:
            return self.switch(False)
        return tree_map_with_path(at({path}, partial(gather_sequence, tp=self.tp)), output)

    def gather(self, paths: set[str], _: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """The pre-hook of a module that needs arguments whole."""
        self.check_recompute()
        if self.whole:
            return None
        return call_of(tree_map_with_path(at(paths, partial(gather_sequence, tp=self.tp)), call_tree(args, kwargs)))

    def scatter(self, paths: set[str], _: nn.Module, __: Any, output: Any) -> Any:
        """The hook of a module that runs on the whole sequence."""
        return None if self.whole else tree_map_with_path(at(paths, partial(scatter_sequence, tp=self.tp)), output)

    def refuse(self, name: str, *_: Any) -> None:
        """The pre-hook of a module that the example did not run."""
        if not self.whole:
            raise RuntimeError(
                f"{name} runs, but did not in the example from which its layer's way to run on sequence shards was "
                f"found: give parallelize an example that runs it, or leave sequence_parallel out"
            )

    def choose(self, layer: nn.Module, length: int) -> None:
        """Decide whether this forward runs whole."""
        uneven = length % self.tp.size != 0
        whole = uneven or self.asked[-1]
        # in training also without a graph: a checkpoint with use_reentrant=True makes it later
        self.unusual |= whole and (layer.training or torch.is_grad_enabled())
        if whole and torch.is_grad_enabled():
            why = f"{length} tokens a sequence cannot be shared equally by {self.tp.size} tensor-parallel ranks"
            if self.recomputes or (getattr(layer, "gradient_checkpointing", False) and layer.training):
                remedy = "pad them to a multiple"
                if not uneven:
                    why, remedy = "hidden states are asked for", "leave them out"
                raise ValueError(f"{why}, and gradient checkpointing needs sequence shards throughout: {remedy}")
            if uneven and not self.warned:
                self.warned = True
                warnings.warn(f"{why}: such batches run without sequence shards; pad them to a multiple", stacklevel=2)
        self.switch(whole)

    def switch(self, whole: bool) -> None:
        """Let linears and norms run whole, or on shards, as they do outside of forwards: a recomputation needs that."""
        if whole == self.whole:
            return
        self.whole = whole
        for linear in self.linears:
            linear.tp = self.tp.with_all_rows if whole else self.tp
            linear.sequence_dim = None if whole else SEQUENCE_DIM
        for module in self.summing:
            module.summed_over = TensorParallel() if whole else self.tp

    def check_recompute(self) -> None:
        """RuntimeError where a layer is recomputed, and its forward may have run in another way than this one will."""
        if self.unusual and in_backward():
            raise RuntimeError(
                f"{self.names[0]} is recomputed after a forward with hidden states as outputs, or with a sequence that "
                f"{self.tp.size} ranks cannot share equally: pad sequences to a multiple, and leave these outputs out"
            )


def at(paths: set[str], function: Callable[[Tensor], Tensor]) -> Callable[[str, Any], Any]:
    """A function for tree_map_with_path that changes the tensors at these paths."""
    return lambda path, leaf: function(leaf) if path in paths and isinstance(leaf, Tensor) else leaf


def shard_sequence(model: nn.Module, streams: Streams, tp: TensorParallel) -> None:
    """Let the chains of a model run on sequence shards, once its linears are tensor-parallel.

    The linears of streams.linears() were made with this tp, sequence_parallel=True, and sequence_dim=SEQUENCE_DIM.
    Communication, per rank, B = batch * seq * hidden * itemsize: a chain's forward ends with an all-gather of B, and so
             does its backward. A module that needs its input whole adds an all-gather of B to the forward, one that
             runs on the whole sequence one to the backward, too. Linears communicate as their classes say, and each
             parameter of a norm is all-reduced in the backward.
    """
    if tp.size == 1:
        return
    modules = dict(model.named_modules())
    owners: dict[str, list[Chain]] = {}
    for layers in streams.chains:
        chain = Chain(layers, tp)
        for index, (name, layout) in enumerate(layers.items()):
            _shard_layer(chain, index, name, layout, modules)
        first = chain.names[0]
        for owner in (name for name in modules if first.startswith(f"{name}." if name else "") and name != first):
            owners.setdefault(owner, []).append(chain)
    for name, chains in owners.items():
        owner = modules[name]
        owner.register_forward_pre_hook(partial(_begin, chains), with_kwargs=True)
        owner.register_forward_hook(partial(_end, chains), always_call=True)


def _shard_layer(chain: Chain, index: int, name: str, layout: Layout, modules: dict[str, nn.Module]) -> None:
    def inside(part: str) -> nn.Module:
        return modules[f"{name}.{part}" if part else name]

    layer = modules[name]
    layer.register_forward_pre_hook(partial(chain.enter, index, layout.stream), with_kwargs=True)
    layer.register_forward_hook(partial(chain.leave, index, layout.result))
    for part, paths in layout.gathered.items():
        inside(part).register_forward_pre_hook(partial(chain.gather, paths), with_kwargs=True)
    for part, paths in layout.scattered.items():
        inside(part).register_forward_hook(partial(chain.scatter, paths))
    for part in layout.unseen:
        inside(part).register_forward_pre_hook(partial(chain.refuse, f"{name}.{part}"))
    for part in layout.summed:
        sum_gradients(inside(part), chain.tp)
        chain.summing.append(inside(part))
        for parameter in inside(part).parameters(recurse=False):
            setattr(parameter, OF_SHARDS, True)
    chain.linears += [inside(part) for part in layout.linears]
    for part in (*layout.summed, *layout.linears):
        inside(part).sequence_chain = chain


def _begin(chains: list[Chain], module: nn.Module, args: tuple, kwargs: dict) -> None:
    """The pre-hook of a module around chains: see what its call is asked to return."""
    given = kwargs
    if len(args) > 1:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments | kwargs
    asked = given.get(HIDDEN_STATES)
    if asked is None:
        asked = getattr(getattr(module, "config", None), HIDDEN_STATES, False)
    for chain in chains:
        chain.asked.append(asked not in (None, False) or chain.asked[-1])


def _end(chains: list[Chain], *_: Any) -> None:
    """The hook of a module around chains, which runs after an error, too."""
    for chain in chains:
        chain.switch(False)
        if len(chain.asked) > 1:
            chain.asked.pop()
