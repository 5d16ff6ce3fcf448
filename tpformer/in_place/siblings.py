"""Column linears that read the same tensor share one gather, one multi-weight GEMM and one reduction of its gradient.

Belongs here: which linears of a parent do so, found out while it runs, and what the first of them computes for the
others. Results and gradients are those of linears that compute alone.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpformer.layers.linear import project, to_rows
from tpformer.ops.autocast import autocast_dtype
from tpformer.ops.packing import has_other_hooks
from tpformer.ops.uncompiled import uncompiled
from tpformer.torch_private import (
    backward_hooks,
    forward_pre_hooks,
    is_own_parameter,
)

from .linears import Column


class Given(NamedTuple):
    """A tensor that a linear was called with, and all else that decides what the linear makes of it."""

    x: Tensor
    state: tuple

    @classmethod
    def of(cls, x: Tensor, layer: Column | None = None) -> Given:
        """What a linear is given now. With the layer, its parameters are part of it."""
        held = () if layer is None else [(id(p), p._version) for p in layer.parameters(recurse=False)]
        return cls(x, (x._version, torch.is_grad_enabled(), autocast_dtype(x), *held))

    def equals(self, other: Given) -> bool:
        """Whether it is the same tensor, unchanged, in the same modes, for unchanged parameters."""
        return self.x is other.x and self.state == other.state


class Siblings:
    """Column linears of one parent. The first one that gets a tensor computes for those that got it, too, last time.

    A linear that is then given another tensor computes alone. Outputs are kept no longer than the parent's forward.
    A tensor's version tells that it is unchanged. Inference tensors have none, and nothing is shared for them. Writes
    that leave the version as it is, through x.data or numpy, are seen by the values, in the forward that teaches.
    Activation checkpointing runs a forward again, and both runs have to save the same tensors. So the first forward
    under it ends all learning; a forward before it, such as one without gradients, has taught what is shared.
    """

    def __init__(self, parent: nn.Module, members: list[Column]) -> None:
        self.followers: dict[nn.Module, list[Column]] = {member: [] for member in members}
        self.learning = self.curious = True
        self._forget()
        parent.register_forward_pre_hook(self.enter)
        parent.register_forward_hook(self.leave, always_call=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"followers": self.followers, "learning": self.learning, "curious": self.curious}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.followers, self.learning, self.curious = (state[name] for name in ("followers", "learning", "curious"))
        self._forget()

    def enter(self, *_: Any) -> None:
        """The parent's forward begins."""
        self._forget()
        self.inside = True
        self.looking, self.curious = self.curious, False

    @uncompiled
    def leave(self, *_: Any) -> None:
        """The parent's forward has ended, or has been left by an exception."""
        if self.learning:
            for layer in self.made:
                self._unlearn(layer)
        self._forget()

    def rows_of(self, layer: Column, x: Tensor) -> Tensor:
        """The layer's output rows for x: made by an earlier sibling, or now, maybe with those of later ones."""
        if not self.inside or x.is_inference():
            return project(to_rows(x, layer.sequence_dim), [layer], None)[0][0]
        expected, rows = self.made.pop(layer, (None, None))
        if expected is not None and expected.equals(Given.of(x, layer)):
            assert rows is not None
            return rows
        self.learning &= not has_other_hooks()
        if self.learning:
            self._learn(layer, Given.of(x))
        followers = [each for each in self.followers[layer] if _computable(each, layer)]
        (rows, *others), _ = project(to_rows(x, layer.sequence_dim), [layer, *followers], None)
        self.made |= {each: (Given.of(x, each), y) for each, y in zip(followers, others, strict=True)}
        return rows

    def _forget(self) -> None:
        self.inside = self.looking = False
        self.leader: tuple[nn.Module, Given, Tensor | None] | None = None  # with a copy of its values, if looking
        self.made: dict[nn.Module, tuple[Given, Tensor]] = {}

    def _learn(self, layer: Column, given: Given) -> None:
        """Take note of a layer that computes by itself. A new follower has to find the values that its leader found."""
        self._unlearn(layer)
        if self.leader is None or not self.leader[1].equals(given):
            self.leader = layer, given, given.x.detach().clone() if self.looking else None
        elif self.leader[2] is None:
            self.curious = True  # the next forward looks
        elif layer is not self.leader[0] and torch.equal(self.leader[2], given.x.detach()):
            self.followers[self.leader[0]].append(layer)

    def _unlearn(self, layer: nn.Module) -> None:
        for followers in self.followers.values():
            followers[:] = (each for each in followers if each is not layer)


def _computable(layer: Column, leader: Column) -> bool:
    """Whether a layer may be computed with the leader: nothing happens between its call and its forward."""
    if layer.tp is not leader.tp or layer.sequence_dim != leader.sequence_dim:
        return False
    hooked = forward_pre_hooks(layer) or backward_hooks(layer) or "forward" in layer.__dict__
    return not hooked and is_own_parameter(layer, "weight") and (layer.bias is None or is_own_parameter(layer, "bias"))


def share_inputs(model: nn.Module) -> None:
    """Let the column linears in place that are children of one module share what they do with a tensor that all get.

    A child that wraps its linear as `base_layer`, an adapter, counts as that linear. Calling it again adds linears that
    have been sharded since.
    Communication, per rank and parent: that of one column linear instead of several.
    """
    for parent in list(model.modules()):
        children = (getattr(child, "base_layer", child) for child in parent.children())
        alike: dict[tuple, list[Column]] = defaultdict(list)
        for child in children:
            if isinstance(child, Column) and child.siblings is None:
                alike[child.tp, child.sequence_dim].append(child)
        for members in alike.values():
            if len(members) > 1:
                siblings = Siblings(parent, members)
                for member in members:
                    member.siblings = siblings
