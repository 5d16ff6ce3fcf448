"""The packed form of bfloat16 values: what a buffer holds and where, and its type. Torch only.

Belongs here: what the reference, the kernels and their callers must agree on.

Values are packed by groups of GROUP, in the order of memory. A group has a record of RECORD bytes:
    GROUP      a byte for each value: its sign and mantissa, or, for an escape, the number of its slot
    GROUP / 2  a code for each value, 4 bits: base - exponent if that is 0 to WINDOW - 1; ZERO for an exponent field of
               zero (zeros and denormals, whose mantissa is in the byte); ESCAPE for any other exponent. Value 2 i has
               the lower half of byte i
    GROUP / BLOCK  the base of each block of BLOCK values: its largest exponent, but at most HEADROOM above the mean
               exponent (rounded down) of its values that are no zeros; so a few outliers do not drive the others out
    2 * SLOTS  the values of the group's escapes, whole, in the order of memory; zeros behind the last one
If a group has more escapes than slots, the tensor has overflowed: those without a slot have the number 0, and slot 0
holds NaN.
So every value of a group is found without a search, and the same values give the same bytes.

An example: a group whose first block begins with 1000, 3, -0.75, 0, 2^-20, and has ones besides. Exponent fields are
136, 128, 126, 0, 107 and 127. Their mean without the zero, rounded down, is 126. So the base is not 136 but 126 + 6.
    value     code                         byte
    1000      132 - 136 < 0: ESCAPE        0, its slot
    3         132 - 128 = 4                mantissa 1.5: 64
    -0.75     132 - 126 = 6                sign 128 + mantissa 1.5: 64
    0         ZERO                         0
    2^-20     132 - 107 >= WINDOW: ESCAPE  1, its slot
    1         132 - 127 = 5                mantissa 1: 0
The slots hold 1000 and 2^-20 whole. With 2^20 in place of 1000 the base is 133; without HEADROOM it would be 147,
and all ones would be escapes. 16384 + 8192 + 64 + 96 = 24736 bytes for 16384 values are 12.08 bits each, not 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK, GROUP, SLOTS = 256, 16384, 48
WINDOW, ZERO, ESCAPE = 14, 14, 15
HEADROOM = 6
RUN = 8  # values that kernels read at once: as many as a load of 16 bytes has that are not packed
NAN = 0x7FFF  # its bits
CODES, BASES, ESCAPES = GROUP, GROUP + GROUP // 2, GROUP + GROUP // 2 + GROUP // BLOCK  # where they begin in a record
RECORD = ESCAPES + 2 * SLOTS


class Packed(NamedTuple):
    """A contiguous bfloat16 tensor in packed form."""

    buffer: Tensor
    """(groups, RECORD) uint8; the last group is filled up with zeros."""
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16."""
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        """Where the buffer is."""
        return self.buffer.device

    @property
    def is_cuda(self) -> bool:
        """Whether the buffer is on a GPU."""
        return self.buffer.is_cuda

    def new_empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """An uninitialised tensor on the same device."""
        return self.buffer.new_empty(shape, dtype=dtype)

    def numel(self) -> int:
        """How many values there are."""
        return size(self.shape)


def size(shape: Sequence[int]) -> int:
    """The number of elements of a shape."""
    count = 1
    for each in shape:
        count *= each
    return count


def groups_of(numel: int) -> int:
    """How many groups hold so many values."""
    return -(-numel // GROUP)


def packed_bytes(numel: int) -> int:
    """Bytes of the packed form of so many values: 12.08 bits for each value of a whole group."""
    return groups_of(numel) * RECORD


def pays(numel: int) -> bool:
    """Whether the packed form of so many values takes at most 7/8 of their bytes; not if a group were half empty."""
    return 8 * packed_bytes(numel) <= 7 * 2 * numel
