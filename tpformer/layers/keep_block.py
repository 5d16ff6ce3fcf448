"""What one block keeps for the backward, and in which form.

Belongs here: Keep, which runs a block's forward. keep.py says it of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tpformer import ops
from tpformer.config import RECOMPUTE, check_choice, check_packing
from tpformer.ops.packing import may_pack, packed_activations
from tpformer.ops.uncompiled import uncompiled
from tpformer.torch_private import base_of
from tpformer.words import dtype_name

from .positions import Positions

Sites = list[ops.Dropout | None]


def said_by_keep(name: str) -> property:
    """What stands where a module had this option: AttributeError, with what to write, if somebody sets it."""

    def refuse(self: nn.Module, value: Any) -> None:
        raise AttributeError(f"{name} of a {type(self).__name__} is said by tpformer.layers.keep(module, {name}=...)")

    return property(fset=refuse)


class Block(Protocol):
    """What a Keep asks of a block; TransformerBlock says what each means."""

    @property
    def composed(self) -> bool: ...
    def rows(self, x: Tensor, positions: Positions, sites: Sites) -> Tensor: ...
    def add_attention(
        self, x: Tensor, positions: Positions, site: ops.Dropout | None
    ) -> tuple[Tensor, ops.Normed | None]: ...
    def private(self, site: ops.Dropout | None) -> bool: ...
    def add_mlp(
        self, x: Tensor, normed: ops.Normed | None, positions: Positions, site: ops.Dropout | None, private: bool
    ) -> Tensor: ...


@dataclass(frozen=True)
class Keep:
    """What a block keeps for its backward, in bytes / (tokens * hidden / t), in 16 bits with MHA, GELU and
    ffn = 4 * hidden, not counting the statistics of each row (16 / hidden + 4 / head_dim):
        recompute="none"  20; the backward runs no GEMM of the forward again
        recompute="mlp"   12; it runs the fc1 GEMM and its all-gather again
        recompute="full"   2; it runs the forward again, except its last GEMM and reduction
    With x (batch, seq / t, hidden_size) the first two keep 2 more, for the attention's result in both orders. With
    qk_norm the first two keep 4 more, for the queries and keys before their norms (in general
    2 (n_heads + n_kv_heads) head_dim / hidden), and one more statistic of each head.
    `python -m bench memory` counts these.
    pack: what is kept of bfloat16 takes 0.755 as much, in every mode (ops/packing.py). The values are the same.
    torch.compile leaves such a block alone. On a GPU see ops.packing_report.
    """

    recompute: str = "none"
    pack: bool = False

    def __post_init__(self) -> None:
        check_choice("recompute", self.recompute, RECOMPUTE)

    def run(self, block: Block, x: Tensor, positions: Positions, sites: Sites) -> Tensor:
        """The block's rows for rows x, both (tokens, hidden_size), or its shard."""
        if self.packs(x):
            return self._run_packed(block, x, positions, sites)
        return self._run(block, x, positions, sites)

    def _run(self, block: Block, x: Tensor, positions: Positions, sites: Sites) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return block.rows(x, positions, sites)
        draws = block.composed
        if self.recompute == "full":
            return ops.recompute(block.rows, x, positions, sites, keep_random_state=draws, skip_end=True)
        x, _ = block.add_attention(x, positions, sites[0])
        given = x, None, positions, sites[1], block.private(sites[0])
        return ops.recompute(block.add_mlp, *given, keep_random_state=draws, skip_end=True)

    @uncompiled
    def _run_packed(self, block: Block, x: Tensor, *arguments: Any) -> Tensor:
        with packing(x, [block]):
            return self._run(block, x, *arguments)

    def packs(self, x: Tensor) -> bool:
        """Whether a forward of x packs what it saves (packing.may_pack).

        Errors: ValueError for an x of another dtype than bfloat16.
        """
        if not self.pack or x.is_meta or not may_pack():
            return False
        check_packing(dtype_name(x.dtype))
        return True


def packing(x: Tensor, layers: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """ops.packed_activations for layers that take x. An x that is a leaf is held by whoever wants its gradient, as what
    a pipeline stage has received is by the pipeline."""
    base = base_of(x)
    return packed_activations(*layers, held=[x] if base.is_leaf and base.requires_grad else [])
