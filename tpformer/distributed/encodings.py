"""Values in fewer bits, on their way between ranks.

Belongs here: how values become bytes and values again. Who sends them, and what becomes of the rounding, is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256  # values that share a scale in int8


class Encoding(NamedTuple):
    """encode: (parts, n) values, n a multiple of `block`, -> what is sent of them, (parts, ...) each. decode: that ->
    (parts, n) float32. value_bytes: of a value on its way."""

    block: int
    value_bytes: float
    encode: Callable[[Tensor], tuple[Tensor, ...]]
    decode: Callable[[Sequence[Tensor]], Tensor]


def _to_int8(values: Tensor) -> tuple[Tensor, ...]:
    blocks = values.view(len(values), -1, BLOCK)
    scales = blocks.abs().amax(-1) / 127
    # a block of zeros has the scale 0, and a value that is not finite makes its block so when it is decoded
    steps = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).nan_to_num(0.0)
    return steps.round().clamp(-127, 127).to(torch.int8), scales


def _from_int8(codes: Sequence[Tensor]) -> Tensor:
    steps, scales = codes
    return (steps.float() * scales[..., None]).flatten(1)


ENCODINGS = {
    # float32 without the last 16 bits, rounded to nearest
    "bfloat16": Encoding(1, 2.0, lambda values: (values.to(torch.bfloat16),), lambda codes: codes[0].float()),
    # multiples of a 127th of the block's largest magnitude, and that in 4 bytes
    "int8": Encoding(BLOCK, 1 + 4 / BLOCK, _to_int8, _from_int8),
}
