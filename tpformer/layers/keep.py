"""What waits for the backward, and in which form: recomputation, packing and offload, said of layers from outside.

Belongs here: `keep`, and what runs the layers of a model. A block holds a Keep (keep_block.py), which runs its forward;
a model of many blocks holds a KeepLayers, which runs them. Each one's default keeps what operations save, as it is.
Neither changes a bit of a result or of a gradient, but for how sums of packed norms are rounded on a GPU
(docs/memory.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tpformer import ops
from tpformer.config import RECOMPUTE, check_choice, kept_layers, regions
from tpformer.torch_private import forward_hooks, forward_pre_hooks

from .block import TransformerBlock
from .children import keeps, others_hook, unwrapped
from .dropout import DropoutKey
from .keep_block import Keep, packing
from .positions import Positions

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class KeepLayers:
    """How a model runs its layers one after another.

    regions: {name of a layer: the first layer's index of the region that it is in}. A region of layers is recomputed
    as one, and keeps only its first input. Its blocks recompute nothing themselves.
    offload: makes what moves activations to pinned host memory in one forward (ops.Offload). offloaded: the names of
    the layers whose activations it moves.
    """

    regions: Mapping[str, int] = field(default_factory=dict)
    offload: Callable[[], Any] | None = None
    offloaded: frozenset[str] = frozenset()

    def run(self, layers: nn.ModuleDict, x: Tensor, positions: Positions, dropout_key: DropoutKey | None) -> Tensor:
        """The rows behind the last layer for the rows x before the first."""
        grads = torch.is_grad_enabled()
        offload = self.offload() if self.offload is not None and grads else None
        for named, is_region in self._units(layers):
            some = [layer for _, layer in named]
            moves = named[0][0] in self.offloaded
            with nullcontext() if offload is None else offload.layer(*some, moves=moves):
                if is_region and grads:
                    x = _run_region(some, x, positions, dropout_key)
                else:
                    for layer in some:
                        x = layer(x, positions=positions, dropout_key=dropout_key)
        return x

    def _units(self, layers: nn.ModuleDict) -> Iterator[tuple[list[tuple[str, nn.Module]], bool]]:
        """The named layers in order, as (layers, whether they are a region). One outside of regions comes alone."""
        for region, found in groupby(layers.items(), key=lambda item: self.regions.get(item[0])):
            named = list(found)
            yield from [(named, True)] if region is not None else [([each], False) for each in named]


def keep(
    model: Model,
    *,
    keep: str = "",
    recompute: str = "none",
    recompute_layers: str = "",
    recompute_interval: int = 1,
    pack_activations: bool = False,
    pack_layers: str = "",
    offload_activations: bool = False,
) -> Model:
    """Say what a model's TransformerBlocks keep for the backward; the model itself is returned.

    model: a GPT or a part of one, a block, or any module that contains blocks, also within torch.compile's or FSDP2's
    wrappers. What was said before is forgotten.
    keep: the way of every layer, first layers first, such as "15*offload,9*mlp+pack,8*pack"; one way alone is that of
    all. The other options say the same in other words, and are left out beside it. Layers of a GPT have their numbers
    in the whole model, others are counted in the order of modules().
    recompute: what the backward of a layer computes again: "none", "mlp" or "full" (Keep). recompute_layers: which
    layers do so, in the notation of config.selected_layers; "" is all.
    recompute_interval: for "full", how many consecutive recomputed layers of a GPT form a region. A region keeps only
    its input.
    pack_activations, pack_layers: whether activations wait for the backward in packed form, and of which layers, in the
    same notation. Only in bfloat16.
    offload_activations: whether a GPT's activations wait for the backward in pinned host memory (ops.Offload).
    Errors: ValueError, before anything is changed, for a model without a block, for layers that do not exist, are no
    blocks or are chosen for nothing, and for regions or offload where no model runs the layers.
    """
    runner = unwrapped(model)
    runs_layers = isinstance(getattr(runner, "keep", None), KeepLayers)
    named, total = _layers_of(runner) if runs_layers else _blocks_in(model)
    check_choice("recompute", recompute, RECOMPUTE)
    ways = kept_layers(
        total, keep=keep, recompute=recompute, recompute_layers=recompute_layers, recompute_interval=recompute_interval,
        pack_activations=pack_activations, pack_layers=pack_layers, offload_activations=offload_activations,
    )  # fmt: skip
    found = regions(named, ways, recompute_interval)
    moved = frozenset(str(i) for i in named if ways[i].offload)
    if not runs_layers and (moved or recompute_interval > 1):
        raise ValueError(
            f"recompute_interval={recompute_interval}, offloaded layers: {len(moved)} of a {type(model).__name__}: "
            f"only a GPT runs its layers itself; use ops.recompute around several layers, and ops.Offload around each"
        )
    said = {i: Keep("none" if str(i) in found else ways[i].recompute, ways[i].pack) for i in named}
    _say(named, said)
    if runs_layers:
        runner.keep = KeepLayers(found, ops.Offload if moved else None, moved)
    return model


def _say(named: dict[int, Any], said: dict[int, Keep]) -> None:
    """Give each block its Keep. ValueError, before any has one, for a layer that is none and should do something."""
    others = {i: layer for i, layer in named.items() if not isinstance(layer, TransformerBlock)}
    for index, layer in others.items():
        if said[index] != Keep():
            raise ValueError(
                f"layer {index} is a {type(layer).__name__}, which is no TransformerBlock: leave it out of "
                f"recompute_layers and pack_layers, or use ops.recompute in it"
            )
    for index in named.keys() - others.keys():
        named[index].keep = said[index]


def _layers_of(runner: Any) -> tuple[dict[int, Any], int]:
    """(the layers of a GPT's part by their numbers, without what wraps them; the number of layers of the whole GPT,
    with those that were added to it)."""
    layers = {int(name): unwrapped(layer) for name, layer in runner.layers.items()}
    return layers, max([runner.config.n_layers, *(number + 1 for number in layers)])


def _blocks_in(model: nn.Module) -> tuple[dict[int, Any], int]:
    """(the blocks in a module that is no GPT, by their numbers; their number). ValueError if there is none, and if they
    are a GPT's."""
    for path, each in model.named_modules():
        if isinstance(getattr(each, "keep", None), KeepLayers):
            raise ValueError(f"{type(model).__name__} has a {type(each).__name__} in it, at {path!r}: give that one")
    blocks = [each for each in model.modules() if isinstance(each, TransformerBlock)]
    if not blocks:
        raise ValueError(f"{type(model).__name__} contains no TransformerBlock: give a model that does")
    return dict(enumerate(blocks)), len(blocks)


def _run_region(layers: list[nn.Module], x: Tensor, positions: Positions, dropout_key: DropoutKey | None) -> Tensor:
    """Run layers one after another as one recomputed region, which keeps only x. Their blocks recompute nothing.

    x is packed if the first of them packs. If the last layer is a block whose result no hook sees, the second run
    leaves out the last GEMM and its reduction.
    """

    def region(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, positions=positions, dropout_key=dropout_key)
        return x

    blocks = [layer for layer in layers if keeps(layer, TransformerBlock, "forward")]
    hooked = any(others_hook(hooks) for layer in layers for hooks in (forward_pre_hooks(layer), forward_hooks(layer)))
    draws = hooked or len(blocks) < len(layers) or any(block.draws(dropout_key) for block in blocks)
    skip_end = layers[-1] in blocks and not others_hook(forward_hooks(layers[-1]))
    first = unwrapped(layers[0])
    packs = isinstance(first, TransformerBlock) and first.keep.packs(x)
    with packing(x, layers) if packs else nullcontext():
        return ops.recompute(region, x, keep_random_state=draws, skip_end=skip_end)
