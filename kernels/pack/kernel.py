"""Packing of bfloat16 values, without loss: a program packs a group, or unpacks a part of one.

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
from .reference import check_packed, check_values

PACKERS, BLOCKS = 8, 8  # warps, and blocks that they pack at once
UNPACKERS, PART = 8, 4096  # warps, and values that they unpack
POWER = tl.constexpr(triton.next_power_of_2(packing.SLOTS))
RUN, CODES, BASES, ESCAPES, RECORD, GROUP, BLOCK, SLOTS, WINDOW, ZERO, ESCAPE, HEADROOM, NAN = map(
    tl.constexpr,
    (
        packing.RUN, packing.CODES, packing.BASES, packing.ESCAPES, packing.RECORD, packing.GROUP, packing.BLOCK,
        packing.SLOTS, packing.WINDOW, packing.ZERO, packing.ESCAPE, packing.HEADROOM, packing.NAN,
    ),
)  # fmt: skip


@triton.jit
def join_bits(content, code, base, slots):
    """The 16 bits, in int32, of values with these bytes, codes and bases. slots: where those of each value's group are;
    they are read for escapes only."""
    exponent = tl.where(code == ZERO, 0, base - code)  # of an escape it is not used
    bits = ((content & 128) << 8) | (exponent << 7) | (content & 127)
    slot = slots.to(tl.pointer_type(tl.uint16)) + content
    return tl.load(slot, mask=code == ESCAPE, other=bits.to(tl.uint16)).to(tl.int32)


@triton.jit
def read_block(buffer, first, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS x COLUMNS values, in float32, from (row, column) on of a packed matrix (rows, columns), zeros outside of it.

    The matrix has no gaps and begins at value number `first`. That number, column and columns are multiples of RUN, so
    a run of values lies in one group, has one base, and its codes are one word.
    """
    at = row + tl.arange(0, ROWS)
    place = column + RUN * tl.arange(0, COLUMNS // RUN)
    mask = (at < rows)[:, None] & (place < columns)[None, :]
    at = first + at.to(tl.int64)[:, None] * columns + place[None, :]
    record, place = tl.multiple_of(buffer + at // GROUP * RECORD, (16, 16)), (at % GROUP).to(tl.int32)
    codes = (record + CODES + place // 2).to(tl.pointer_type(tl.int32))
    word = tl.load(codes, mask=mask, other=0)[:, :, None]
    base = tl.load(record + BASES + place // BLOCK, mask=mask, other=0).to(tl.int32)[:, :, None]
    each = tl.arange(0, RUN)[None, None, :]
    content = (record + tl.multiple_of(place, (RUN, RUN)))[:, :, None] + each
    content = tl.load(content, mask=mask[:, :, None], other=0).to(tl.int32)
    bits = join_bits(content, (word >> (4 * each)) & 15, base, (record + ESCAPES)[:, :, None])
    return tl.reshape((bits << 16).to(tl.float32, bitcast=True), (ROWS, COLUMNS))


@triton.jit
def pack_blocks(bits, record, first, before):
    """Pack the blocks of a group from value number `first` on, (blocks, BLOCK) int32.

    Returns how many escapes there are up to the end of these blocks. before: up to their begin.
    """
    BLOCKS: tl.constexpr = bits.shape[0]
    exponent = (bits >> 7) & 255
    nonzero = tl.maximum(tl.sum((exponent > 0).to(tl.int32), 1), 1)
    base = tl.minimum(tl.max(exponent, 1), tl.sum(exponent, 1) // nonzero + HEADROOM)
    code = base[:, None] - exponent
    code = tl.where((code >= 0) & (code < WINDOW), code, ESCAPE)
    code = tl.where(exponent == 0, ZERO, code)
    low, high = tl.split(tl.reshape(code, (BLOCKS, BLOCK // 2, 2)))
    block = tl.arange(0, BLOCKS)
    pair = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(record + CODES + first // 2 + pair, (low | (high << 4)).to(tl.uint8))
    tl.store(record + BASES + first // BLOCK + block, base.to(tl.uint8))
    content = record + first + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(content, (((bits >> 8) & 128) | (bits & 127)).to(tl.uint8))
    escapes = tl.reshape((code == ESCAPE).to(tl.int32), (BLOCKS * BLOCK,))
    found = tl.sum(escapes, 0)
    if found > 0:  # of few blocks
        slot = tl.reshape(before + tl.cumsum(escapes, 0) - escapes, (BLOCKS, BLOCK))
        fits = (code == ESCAPE) & (slot < SLOTS)
        tl.debug_barrier()  # another thread has stored the content
        tl.store(content, tl.where(fits, slot, 0).to(tl.uint8), mask=code == ESCAPE)
        tl.store((record + ESCAPES).to(tl.pointer_type(tl.int16)) + slot, bits.to(tl.int16), mask=fits)
    return before + found


@triton.jit(do_not_specialize=["numel"])
def pack_kernel(x, buffer, counts, numel, BLOCKS: tl.constexpr):
    """Pack group number program_id(0), BLOCKS of its blocks at a time. x: the values' bits, int16."""
    group = tl.program_id(0).to(tl.int64)
    x, record, rest = x + group * GROUP, buffer + group * RECORD, numel - group * GROUP
    total = 0
    for first in tl.range(0, GROUP, BLOCKS * BLOCK):
        at = first + tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        if rest >= GROUP:  # without a mask loads are 16 bytes wide
            bits = tl.load(x + at)
        else:
            bits = tl.load(x + at, mask=at < rest, other=0)
        total = pack_blocks(bits.to(tl.int32), record, first, total)
    slots, unused = (record + ESCAPES).to(tl.pointer_type(tl.int16)), tl.arange(0, POWER)
    tl.store(slots + unused, tl.zeros((POWER,), tl.int16), mask=(unused >= total) & (unused < SLOTS))
    if total > SLOTS:
        tl.debug_barrier()  # another thread has stored an escape there
        tl.store(slots, tl.cast(NAN, tl.int16))
    tl.store(counts + group, total)


@triton.jit(do_not_specialize=["numel"])
def unpack_kernel(buffer, x, numel, PART: tl.constexpr):
    """Unpack part number program_id(0) into x, the values' bits, int16."""
    start = tl.program_id(0).to(tl.int64) * PART
    record, first = buffer + start // GROUP * RECORD, (start % GROUP).to(tl.int32)
    first = tl.multiple_of(first, PART)
    at = first + tl.arange(0, PART)
    content = tl.load(record + at).to(tl.int32)
    pair = tl.load(record + CODES + first // 2 + tl.arange(0, PART // 2)).to(tl.int32)
    code = tl.reshape(tl.join(pair & 15, pair >> 4), (PART,))
    base = tl.load(record + BASES + (at // BLOCK)).to(tl.int32)
    bits = join_bits(content, code, base, record + ESCAPES).to(tl.int16)
    place, rest = tl.arange(0, PART), numel - start
    if rest >= PART:
        tl.store(x + start + place, bits)
    else:
        tl.store(x + start + place, bits, mask=place < rest)


@replayed
def pack_bits(bits: Tensor) -> tuple[Tensor, Tensor]:
    """(buffer, counts) of pack, for the values' bits (numel,) int16."""
    groups = groups_of(bits.numel())
    buffer = bits.new_empty((groups, packing.RECORD), dtype=torch.uint8)
    counts = bits.new_empty((groups,), dtype=torch.int32)
    if groups:
        launch(pack_kernel, (groups,), bits, buffer, counts, bits.numel(), BLOCKS=BLOCKS, **launch_options(PACKERS, 1))
    return buffer, counts


@replayed
def unpack_bits(buffer: Tensor, numel: int) -> Tensor:
    """The bits (numel,) int16 of unpack's result."""
    bits = buffer.new_empty((numel,), dtype=torch.int16)
    if numel:
        programs = triton.cdiv(numel, PART)
        launch(unpack_kernel, (programs,), buffer, bits, numel, PART=PART, **launch_options(UNPACKERS, 1))
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
    check_values(x)
    buffer, counts = pack_bits(x.contiguous().view(-1).view(torch.int16))
    return Packed(buffer, tuple(x.shape)), counts


def unpack(packed: Packed) -> Tensor:
    """The tensor that was packed, contiguous, with the same bits; with NaN in it if it had overflowed.

    Math:     unpack of reference.py
    Shapes:   bfloat16 of the packed shape
    Numerics: integers only
    Traffic:  pack_cost; slots are read for escapes only
    Order:    each value by itself; no communication, deterministic
    Source:   as in reference.py
    """
    check_packed(packed)
    return unpack_bits(packed.buffer.contiguous(), packed.numel()).view(torch.bfloat16).view(packed.shape)


def unpacked(x: Tensor | Packed) -> Tensor:
    """x as a tensor."""
    return unpack(x) if isinstance(x, Packed) else x


def kept_source(x: Tensor | Packed) -> Tensor:
    """What a kernel takes for a contiguous x: its memory, or the buffer that it is packed in.

    ValueError for a packed x whose rows do not begin with a run, or whose buffer is not theirs.
    """
    if not isinstance(x, Packed):
        return x.contiguous()
    check_packed(x)
    if x.shape[-1] % packing.RUN:
        raise ValueError(f"packed rows of {x.shape[-1]} values, no multiple of {packing.RUN}: unpack them first")
    return x.buffer.contiguous()
