"""Packing of bfloat16 values, without loss: a program packs or unpacks one group.

Belongs here: the two passes, and device code by which other kernels read values that are packed. format.py has the
format. Bits are handled as integers, so that the interpreter, which has no bfloat16, is exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch_options
from ..replay import launch, replayed
from . import format as packing
from .format import Packed, groups_of

WARPS = 8
CODES, BASES, ESCAPES, RECORD, GROUP, BLOCK, SLOTS, WINDOW, ZERO, ESCAPE, HEADROOM, NO_SLOT, NAN = map(
    tl.constexpr,
    (
        packing.CODES, packing.BASES, packing.ESCAPES, packing.RECORD, packing.GROUP, packing.BLOCK, packing.SLOTS,
        packing.WINDOW, packing.ZERO, packing.ESCAPE, packing.HEADROOM, packing.NO_SLOT, packing.NAN,
    ),
)  # fmt: skip


@triton.jit
def join_bits(content, code, base, slots, mask):
    """The 16 bits, in int32, of values with these bytes, codes and bases. slots: where the group's are, for each value;
    they are read for escapes only."""
    exponent = tl.where(code == ZERO, 0, base - code)
    bits = ((content & 128) << 8) | (exponent << 7) | (content & 127)
    escapes = code == ESCAPE
    inside = escapes & (content < SLOTS)
    if mask is not None:
        inside &= mask
    whole = tl.load(slots.to(tl.pointer_type(tl.int16)) + content, mask=inside, other=NAN).to(tl.int32)
    return tl.where(escapes, whole & 65535, bits)


@triton.jit
def load_values(source, at, mask):
    """Values number `at` of contiguous ones, in float32; zeros where the mask is false. A source of bytes is packed.

    at: int64 if there can be more than 2**31 of them.
    """
    if source.dtype.element_ty == tl.uint8:
        record = source + tl.cast(at // GROUP, tl.int64) * RECORD
        place = (at % GROUP).to(tl.int32)
        content = tl.load(record + place, mask=mask, other=0).to(tl.int32)
        pair = tl.load(record + CODES + place // 2, mask=mask, other=0).to(tl.int32)
        base = tl.load(record + BASES + place // BLOCK, mask=mask, other=0).to(tl.int32)
        code = (pair >> (place % 2 * 4)) & 15
        value = (join_bits(content, code, base, record + ESCAPES, mask) << 16).to(tl.float32, bitcast=True)
        if mask is not None:
            value = tl.where(mask, value, 0.0)
    else:
        value = tl.load(source + at, mask=mask, other=None if mask is None else 0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["numel"])
def pack_kernel(x, buffer, counts, numel):
    """Pack group number program_id(0). x: the values' bits, int16."""
    group = tl.program_id(0).to(tl.int64)
    at, record = tl.arange(0, GROUP), buffer + group * RECORD
    bits = tl.load(x + group * GROUP + at, mask=at < numel - group * GROUP, other=0).to(tl.int32)
    blocks = tl.reshape(bits, (GROUP // BLOCK, BLOCK))
    exponent = (blocks >> 7) & 255
    nonzero = tl.maximum(tl.sum((exponent > 0).to(tl.int32), 1), 1)
    base = tl.minimum(tl.max(exponent, 1), tl.sum(exponent, 1) // nonzero + HEADROOM)
    code = base[:, None] - exponent
    code = tl.where((code >= 0) & (code < WINDOW), code, ESCAPE)
    code = tl.reshape(tl.where(exponent == 0, ZERO, code), (GROUP,))
    escapes = (code == ESCAPE).to(tl.int32)
    slot = tl.cumsum(escapes, 0) - escapes
    fits = (escapes > 0) & (slot < SLOTS)
    content = tl.where(escapes > 0, tl.where(fits, slot, NO_SLOT), ((bits >> 8) & 128) | (bits & 127))
    tl.store(record + at, content.to(tl.uint8))
    low, high = tl.split(tl.reshape(code, (GROUP // 2, 2)))
    tl.store(record + CODES + tl.arange(0, GROUP // 2), (low | (high << 4)).to(tl.uint8))
    tl.store(record + BASES + tl.arange(0, GROUP // BLOCK), base.to(tl.uint8))
    slots = (record + ESCAPES).to(tl.pointer_type(tl.int16))
    tl.store(slots + slot, bits.to(tl.int16), mask=fits)
    count = tl.sum(escapes, 0)
    tl.store(slots + tl.arange(0, SLOTS), tl.zeros((SLOTS,), tl.int16), mask=tl.arange(0, SLOTS) >= count)
    tl.store(counts + group, count)


@triton.jit(do_not_specialize=["numel"])
def unpack_kernel(buffer, x, numel):
    """Unpack group number program_id(0) into x, the values' bits, int16."""
    group = tl.program_id(0).to(tl.int64)
    at, record = tl.arange(0, GROUP), buffer + group * RECORD
    content = tl.load(record + at).to(tl.int32)
    pair = tl.load(record + CODES + tl.arange(0, GROUP // 2)).to(tl.int32)
    code = tl.reshape(tl.join(pair & 15, pair >> 4), (GROUP,))
    base = tl.load(record + BASES + at // BLOCK).to(tl.int32)
    bits = join_bits(content, code, base, record + ESCAPES, None)
    tl.store(x + group * GROUP + at, bits.to(tl.int16), mask=at < numel - group * GROUP)


@replayed
def pack_bits(bits: Tensor) -> tuple[Tensor, Tensor]:
    """(buffer, counts) of pack, for the values' bits (numel,) int16."""
    groups = groups_of(bits.numel())
    buffer = bits.new_empty((groups, packing.RECORD), dtype=torch.uint8)
    counts = bits.new_empty((groups,), dtype=torch.int32)
    if groups:
        launch(pack_kernel, (groups,), bits, buffer, counts, bits.numel(), **launch_options(WARPS, 1))
    return buffer, counts


@replayed
def unpack_bits(buffer: Tensor, numel: int) -> Tensor:
    """The bits (numel,) int16 of unpack's result."""
    bits = buffer.new_empty((numel,), dtype=torch.int16)
    if numel:
        launch(unpack_kernel, (len(buffer),), buffer, bits, numel, **launch_options(WARPS, 1))
    return bits


def pack(x: Tensor) -> tuple[Packed, Tensor]:
    """(the packed form of x, how many values of each group are escapes).

    Math:     pack of reference.py, the same bytes
    Shapes:   x bfloat16, any shape; a copy is made first if it is not contiguous. Counts (groups,) int32
    Numerics: integers only; every bit pattern comes back
    Traffic:  pack_cost, and 4 bytes for each group; 16-byte accesses of values and of bytes
    Order:    one program for each group; a sum over the group in a fixed order numbers the escapes, so the same values
              give the same bytes. No atomics, no communication
    Source:   as in reference.py
    """
    buffer, counts = pack_bits(x.contiguous().view(-1).view(torch.int16))
    return Packed(buffer, tuple(x.shape)), counts


def unpack(packed: Packed) -> Tensor:
    """The tensor that was packed, contiguous, with the same bits; NaN where an escape found no slot.

    Math:     unpack of reference.py
    Shapes:   bfloat16 of the packed shape
    Numerics: integers only
    Traffic:  pack_cost; slots are read for escapes only
    Order:    one program for each group; no communication, deterministic
    Source:   as in reference.py
    """
    return unpack_bits(packed.buffer, packed.numel()).view(torch.bfloat16).view(packed.shape)
