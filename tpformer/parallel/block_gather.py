"""The all-gather of FSDP2 that sends weights of linears in FP8 as blocks of e4m3.

Belongs here: what travels, and what is made of it. zero.py decides for which units. kernels/quantize/format.py has the
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpformer.config.zero_gather import gather_words, in_whole_blocks
from tpformer.distributed.collectives import all_gather_single
from tpformer.kernels.quantize.format import EXPONENTS, VALUES, Blocks, weight_exponents
from tpformer.ops.implementation import implementation
from tpformer.torch_private import foreach_copy_

ALIGNMENT = 16  # bytes, to which a rank's are padded


class SentShard(NamedTuple):
    """A rank's shard of a parameter, as FSDP2 sends it. quantised: whether GEMMs read nothing of it but its blocks."""

    name: str
    shape: tuple[int, ...]
    quantised: bool

    @property
    def in_blocks(self) -> bool:
        """Whether it travels in blocks."""
        return self.quantised and in_whole_blocks(self.shape)


class BlockGather:
    """torch's AllGather for one group of FSDP2's parameters: weights of linears travel in blocks, the rest as it is.

    The gathered weights are what the blocks stand for, in the computation's dtype. A linear that quantises them has the
    same numbers as if it had quantised them itself, because blocks of numbers that blocks stand for stand for the same
    numbers. Their bytes are the same but for a block whose largest magnitude was rounded down to 224 scales: its
    values then are twice as large, and its exponent is one less.

    shards: this group's, in FSDP2's order. Those of whole blocks travel in them. Nothing is kept from gather to gather.
    Communication: one all-gather, of 1 + 1 / 128**2 bytes for each number in blocks.
    """

    def __init__(self, shards: Sequence[SentShard]) -> None:
        self.shards = list(shards)
        self._numels = [math.prod(shard.shape) for shard in shards]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The memory into which FSDP2 wants the gathered parameters."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather this rank's shards, which lie flat one behind the other, and may be a part of the output.

        Shapes: input_tensor (n,) of a floating dtype; output_tensor (ranks * n,), the ranks' one behind the other
        On a GPU all of it runs in the current stream, as FSDP2 asks where async_op is False. Where it is True, nothing
        is left to be waited for, either.
        """
        inputs = input_tensor.split(self._numels)
        made = [
            implementation("quantize", x).quantize_weight(x.view(-1, shard.shape[-1]))
            for x, shard in zip(inputs, self.shards, strict=True)
            if shard.in_blocks
        ]
        whole = [x for x, shard in zip(inputs, self.shards, strict=True) if not shard.in_blocks]
        # values are whole words of any width, so what follows them begins at multiples of those, too
        sent = [*(blocks.values for blocks in made), *whole, *(blocks.exponents for blocks in made)]
        sizes = [x.nbytes for x in sent]
        own = input_tensor.new_empty(sum(sizes) + -sum(sizes) % ALIGNMENT, dtype=torch.uint8)
        torch.cat([x.view(torch.uint8).flatten() for x in sent], out=own[: sum(sizes)])
        received = own.new_empty(group.size(), len(own))
        all_gather_single(received.view(-1), own, group=group)
        outputs = output_tensor.view(group.size(), -1).split(self._numels, 1)
        self._take(received[:, : sum(sizes)].split(sizes, 1), outputs)

    def _take(self, received: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Write what each rank has sent, (ranks, bytes) for each of its tensors, to the places of its shards.

        Math: value * 2**exponent, by dequantize_shards of kernels/quantize; no rounding, also in bfloat16.
        """
        weights = [pair for pair in zip(outputs, self.shards, strict=True) if pair[1].in_blocks]
        whole = [out for out, shard in zip(outputs, self.shards, strict=True) if not shard.in_blocks]
        if whole:
            foreach_copy_(whole, [x.view(whole[0].dtype) for x in received[len(weights) : -len(weights)]])
        values, exponents = received[: len(weights)], received[-len(weights) :]
        for (out, shard), value, exponent in zip(weights, values, exponents, strict=True):
            n, k = out.shape[1] // shard.shape[-1], shard.shape[-1]
            blocks = Blocks(
                value.view(VALUES).unflatten(1, (n, k)), exponent.view(EXPONENTS).unflatten(1, weight_exponents(n, k))
            )
            implementation("quantize", out).dequantize_shards(blocks, out.unflatten(1, (n, k)))

    def __str__(self) -> str:
        """How weights of linears in FP8 travel, in words."""
        return gather_words((shard.name, shard.shape) for shard in self.shards if shard.quantised)
