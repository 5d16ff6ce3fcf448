"""The keys and values that one attention has computed, kept for the tokens that follow.

Belongs here: one layer's memory and how it grows. A whole model's is in models/cache.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .positions import Positions


class LayerCache:
    """Keys and values of one attention's heads on this rank, each (batch, capacity, kv_heads, head_dim).

    A sample's token at position p is in slot p, so samples of a batch may have different lengths. The memory is made by
    the first call, in the keys' dtype and on their device. It is doubled when it is full. It starts as zeros, because a
    slot that is masked still takes part in a product with 0, where a NaN would stay.
    capacity: for how many tokens of a sample memory is made at first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.reach = capacity, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor, positions: Positions) -> None:
        """Write the keys and values (batch, seq, kv_heads, head_dim) of tokens at these positions.

        Errors: ValueError with gradients, with packed documents or padding masks, and for another batch than before.
        """
        if k.requires_grad or v.requires_grad:
            raise ValueError("a cache keeps no gradients: call the model under torch.no_grad(), or leave cache out")
        if positions.ids is not None:
            raise ValueError(
                "position_ids or key_padding_mask beside a cache, which has one document for each sample: pad on the "
                "right, and give each sample's number of tokens"
            )
        if self.keys is not None and self.keys.shape[0] != len(k):
            raise ValueError(f"{len(k)} samples, but the cache has {self.keys.shape[0]}: make one for each batch")
        if positions.reach - positions.seq_length > self.reach:
            raise ValueError(
                f"tokens from position {positions.reach - positions.seq_length} on, but the cache has {self.reach}: "
                f"give positions whose offset is each sample's number of tokens in the cache"
            )
        self._make_room(k, positions.reach)
        assert self.keys is not None and self.values is not None
        for held, new in ((self.keys, k), (self.values, v)):
            if isinstance(positions.offset, int):
                held[:, positions.offset : positions.reach] = new
            else:
                held.index_put_(positions.slots(k.device), new)
        self.reach = positions.reach

    def seen(self, first: int) -> tuple[Tensor, Tensor]:
        """Keys and values in the slots from `first` to the last one written, as views."""
        assert self.keys is not None and self.values is not None
        return self.keys[:, first : self.reach], self.values[:, first : self.reach]

    def select(self, samples: Sequence[int]) -> None:
        """Keep these samples, in this order; one may come several times. Copies them."""
        if self.keys is None or self.values is None:
            return
        with torch.inference_mode(False):
            index = torch.tensor(samples, device=self.keys.device)
            self.keys, self.values = (held.index_select(0, index) for held in (self.keys, self.values))

    def _make_room(self, k: Tensor, needed: int) -> None:
        if self.keys is not None and needed <= self.keys.shape[1]:
            return
        self.capacity = max(self.capacity, needed) if self.keys is None else max(needed, 2 * self.capacity)
        shape = (len(k), self.capacity, *k.shape[2:])
        olds = self.keys, self.values
        with torch.inference_mode(False):  # the memory may be written inside of inference_mode and outside
            self.keys, self.values = (k.new_zeros(shape) for _ in olds)
            for old, new in zip(olds, (self.keys, self.values), strict=True):
                if old is not None:
                    new[:, : old.shape[1]] = old


def require_cache(module: nn.Module, name: str) -> None:
    """ValueError unless a module's forward takes `cache`."""
    parameters = inspect.signature(module.forward).parameters.values()
    if not any(each.name == "cache" or each.kind is each.VAR_KEYWORD for each in parameters):
        raise ValueError(
            f"{name} is a {type(module).__name__}, whose forward takes no cache: generate without one, or let its "
            f"forward take cache= and hand it to a SelfAttention"
        )
