"""Which weights of a run in FP8 ZeRO gathers in blocks of e4m3, and the runs that cannot: `parallel.zero_gather`.

Belongs here: how ZeRO cuts a weight, and whether a rank's shard of it is whole blocks. No torch.

A weight's block of BLOCK x BLOCK numbers has a scale that follows from itself. So where a shard is whole blocks, the
rank that has it computes the very numbers that the linear would compute of the gathered weight. Other shards travel in
the computation's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tpformer.words import shown

from .architecture import MLP_ACTIVATIONS, GPTConfig
from .fp8 import BLOCK, FP8
from .layout import Layout


def shard_dim(shape: Sequence[int], shards: int, cut: bool) -> int:
    """The dim along which ZeRO cuts a parameter. cut: whether other ranks have others of its rows, or of its experts.

    Then the second dim if all ranks get as much of it: each keeps one piece of the whole parameter, not strided rows.
    """
    return int(cut and len(shape) > 1 and shape[1] % shards == 0)


def gather_words(weights: Iterable[tuple[str, Sequence[int]]]) -> str:
    """How weights of linears in FP8 are gathered, in words, of their names and the shapes of their shards."""
    named: dict[bool, list[str]] = {True: [], False: []}
    for name, shard in weights:
        named[in_whole_blocks(shard)].append(f"{name} {' x '.join(map(str, shard))}")
    whole, cut = (", ".join(dict.fromkeys(named[how])) for how in (True, False))
    rest = f"; as they are, being no whole blocks of {BLOCK} x {BLOCK}: {cut}" if cut else ""
    return f"ZeRO gathers shards in blocks of e4m3: {whole or 'none'}{rest}"


def in_whole_blocks(shard: Sequence[int]) -> bool:
    """Whether a shard of a linear's weight, or of experts' matrices, is whole blocks."""
    return shard[-1] % BLOCK == shard[-2] % BLOCK == 0


class Gathered(NamedTuple):
    """A weight of a layer's linears, as ZeRO gathers it. shape: on one tensor- or expert-parallel rank. cut: as of
    shard_dim. exchanged: of experts that exchange tokens, which ZeRO divides among other ranks."""

    name: str
    shape: tuple[int, ...]
    cut: bool
    shards: int
    exchanged: bool = False

    @property
    def shard(self) -> tuple[int, ...]:
        """The shape of a rank's shard, with what pads it."""
        dim = shard_dim(self.shape, self.shards, self.cut)
        return tuple(-(-size // self.shards) if each == dim else size for each, size in enumerate(self.shape))

    @property
    def elements(self) -> int:
        """Numbers of the gathered weight."""
        return math.prod(self.shape)


def gathered_weights(model: GPTConfig, layout: Layout, *, experts: bool) -> list[Gathered]:
    """The weights of a layer's linears that ranks share. experts: whether it has some in place of an MLP."""
    t, h, of_rest = layout.tensor_parallel, model.hidden_size, (layout.tensor_parallel > 1, layout.shards)
    divided = model.kv_heads % t == 0  # else each rank has all keys' and values' weights
    keys = (model.kv_size // t if divided else model.kv_size, h), t > 1 and divided, layout.shards
    found = [Gathered("q_proj", (model.query_size // t, h), *of_rest)]
    found += [Gathered("k_proj", *keys), Gathered("v_proj", *keys)]
    found += [Gathered("o_proj", (h, model.query_size // t), False, layout.shards)]
    width = (model.shared_expert_size if experts else model.ffn_size) // t
    gated = MLP_ACTIVATIONS[model.activation][1]
    *columns, row = ("gate_proj", "up_proj", "down_proj") if gated else ("fc1", "fc2")
    if width:
        found += [Gathered(name, (width, h), *of_rest) for name in columns]
        found += [Gathered(row, (h, width), False, layout.shards)]
    if experts:
        ep, f = layout.expert_parallel, model.expert_size
        exchanged = ep is not None and ep * t > 1
        ranks = ep if exchanged and ep is not None else t
        place = exchanged or t > 1, layout.expert_shards if exchanged else layout.shards, exchanged
        each = (model.n_experts or 0) // ranks
        found += [Gathered("experts.gate_up_proj", (each, 2 * f, h), *place)]
        found += [Gathered("experts.down_proj", (each, h, f), *place)]
    return [each for each in found if each.shards > 1]


def gathers_blocks(layout: Layout, precision: str) -> bool:
    """Whether a run gathers what it can in blocks."""
    return layout.zero_gather == FP8 == precision


def check_zero_gather(model: GPTConfig, layout: Layout, precision: str) -> None:
    """ValueError for parallel.zero_gather = "fp8" in a run that gathers nothing in blocks."""
    if layout.zero_gather != FP8:
        return
    asked = f"parallel.zero_gather={shown(FP8)}"
    if precision != FP8:
        raise ValueError(
            f"{asked} with train.precision={shown(precision)}: linears would multiply weights that were rounded to "
            f'e4m3 on their way; set train.precision = "fp8", or leave zero_gather out'
        )
    kinds = {model.has_experts(layer) for layer in range(model.n_layers)}
    shared = [each for experts in kinds for each in gathered_weights(model, layout, experts=experts)]
    if not shared:
        raise ValueError(
            f"{asked}, and no ranks share a linear's weight (zero_stage={layout.zero}, data_parallel_shard * "
            f"context_parallel = {layout.data_parallel_shard * layout.context_parallel}), so none is gathered: raise "
            f"data_parallel_shard, or leave zero_gather out"
        )
    if not any(in_whole_blocks(each.shard) for each in shared):
        raise ValueError(
            f"{asked} with {layout.shards} ranks that share each weight: "
            f"{gather_words((each.name, each.shard) for each in shared)}; share them among fewer ranks, or leave "
            f"zero_gather out"
        )
