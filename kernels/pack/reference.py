"""Packing of bfloat16 values, without loss: the specification (torch only), and the cost. format.py has the format."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tpformer.torch_private import is_fake

from ..cost import Cost
from ..operands import require
from .format import (
    BASES,
    BLOCK,
    CODES,
    ESCAPE,
    ESCAPES,
    GROUP,
    HEADROOM,
    NAN,
    RECORD,
    SLOTS,
    WINDOW,
    ZERO,
    Packed,
    groups_of,
    packed_bytes,
)

AT_ONCE = 8  # groups, so that intermediate values stay in a CPU's cache


def check_values(x: Tensor) -> None:
    """ValueError unless x is bfloat16."""
    require("pack", x, ("x", x, x.shape, (torch.bfloat16,)))


def check_packed(packed: Packed) -> None:
    """ValueError unless the buffer is as format.py has it."""
    require("unpack", packed, ("buffer", packed.buffer, (groups_of(packed.numel()), RECORD), (torch.uint8,)))


def bases(exponents: Tensor) -> Tensor:
    """The base of each block, from its values' exponent fields (..., BLOCK), int16: (...,) int16."""
    nonzero = (exponents != 0).sum(-1).clamp_(min=1)
    mean = exponents.sum(-1).div_(nonzero, rounding_mode="floor")
    return torch.minimum(exponents.amax(-1), mean.add_(HEADROOM).to(torch.int16))


def pack(x: Tensor) -> tuple[Packed, Tensor]:
    """(the packed form of x, how many values of each group are escapes).

    Math:     format.py. unpack gives the bits of x back if no group has more than SLOTS escapes
    Shapes:   x bfloat16, any shape and strides; packed_bytes(numel) bytes; counts (groups,) int32
    Numerics: integers only: every bit pattern comes back, also of NaNs, infinities and denormals
    Traffic:  see pack_cost
    Source:   exponents of neural networks' values carry 2 to 3 of 8 bits (ZipServ, arXiv:2603.17435; ZipCCL,
              arXiv:2604.27844, pack weights and messages); the base below an outlier and the slots are this project's
    """
    check_values(x)
    flat = x.reshape(-1).view(torch.int16)
    groups = groups_of(len(flat))
    buffer = torch.empty(groups, RECORD, dtype=torch.uint8, device=x.device)
    counts = torch.zeros(groups, dtype=torch.int32, device=x.device)
    if is_fake(buffer):  # of a dry run, which has no values
        return Packed(buffer, tuple(x.shape)), counts
    for first in range(0, groups, AT_ONCE):
        bits = flat[first * GROUP : (first + AT_ONCE) * GROUP]
        if len(bits) % GROUP:
            bits = torch.cat([bits, bits.new_zeros(-len(bits) % GROUP)])
        part = slice(first, first + AT_ONCE)
        _pack_groups(bits.view(-1, GROUP), buffer[part], counts[part])
    return Packed(buffer, tuple(x.shape)), counts


def _pack_groups(bits: Tensor, buffer: Tensor, counts: Tensor) -> None:
    exponents = (bits >> 7).bitwise_and_(255)
    blocks = exponents.view(len(bits), -1, BLOCK)
    base = bases(blocks)
    code = (base[..., None] - blocks).view(bits.shape)
    code.masked_fill_((code < 0) | (code >= WINDOW), ESCAPE).masked_fill_(exponents == 0, ZERO)
    content = (bits >> 8).bitwise_and_(128).bitwise_or_(bits & 127)
    slots = bits.new_zeros(len(bits), SLOTS)
    escapes = code == ESCAPE
    if escapes.any():
        torch.sum(escapes, 1, dtype=torch.int32, out=counts)
        group, place = escapes.nonzero(as_tuple=True)
        slot = torch.arange(len(group), device=bits.device) - (counts.cumsum(0) - counts)[group]
        fits = slot < SLOTS
        slots[group[fits], slot[fits]] = bits[group[fits], place[fits]]
        slots[:, 0].masked_fill_(counts > SLOTS, NAN)
        content[group, place] = torch.where(fits, slot, 0).to(torch.int16)
    low, high = code.view(len(bits), -1, 2).unbind(-1)
    buffer[:, :CODES] = content
    buffer[:, CODES:BASES] = low | (high << 4)
    buffer[:, BASES:ESCAPES] = base
    buffer[:, ESCAPES:] = slots.view(torch.uint8)


def unpack(packed: Packed) -> Tensor:
    """The tensor that was packed, contiguous, with the same bits; with NaN in it if it had overflowed.

    Shapes:   bfloat16 of the packed shape
    Traffic:  see pack_cost
    """
    check_packed(packed)
    buffer, numel = packed.buffer, packed.numel()
    out = torch.empty(numel, dtype=torch.int16, device=buffer.device)
    if is_fake(out):
        return out.view(torch.bfloat16).view(packed.shape)
    for first in range(0, len(buffer), AT_ONCE):
        part = out[first * GROUP : (first + AT_ONCE) * GROUP]
        part.copy_(_unpack_groups(buffer[first : first + AT_ONCE]).view(-1)[: len(part)])
    return out.view(torch.bfloat16).view(packed.shape)


def _unpack_groups(buffer: Tensor) -> Tensor:
    content = buffer[:, :CODES].to(torch.int16)
    codes = buffer[:, CODES:BASES]
    code = torch.stack([codes & 15, codes >> 4], -1).view(content.shape)
    exponent = (buffer[:, BASES:ESCAPES, None] - code.view(len(buffer), -1, BLOCK)).view(content.shape).to(torch.int16)
    exponent.masked_fill_(code == ZERO, 0)
    bits = (content & 128).bitwise_left_shift_(8).bitwise_or_(content & 127)
    bits.bitwise_or_(exponent.bitwise_left_shift_(7))
    escapes = code == ESCAPE
    if escapes.any():
        group, place = escapes.nonzero(as_tuple=True)
        slots = buffer[:, ESCAPES:].contiguous().view(torch.int16)
        bits[group, place] = slots[group, content[group, place].long()]
    return bits


def ranges(numel: int) -> list[slice]:
    """Where the parts of parts_of lie among so many values."""
    return [slice(first, min(first + AT_ONCE * GROUP, numel)) for first in range(0, numel, AT_ONCE * GROUP)]


def parts_of(x: Tensor | Packed) -> Iterator[Tensor]:
    """The values of a contiguous x in flat parts, of which each is unpacked when it is asked for."""
    for place in ranges(x.numel()):
        if isinstance(x, Packed):
            yield unpack(Packed(x.buffer[place.start // GROUP :][:AT_ONCE], (place.stop - place.start,)))
        else:
            yield x.view(-1)[place]


def unpacked(x: Tensor | Packed) -> Tensor:
    """x as a tensor."""
    return unpack(x) if isinstance(x, Packed) else x


def pack_cost(numel: int) -> Cost:
    """Of pack, and of unpack: 2 bytes for each value on one side, its packed form on the other. No floating point."""
    return Cost(0, 2 * numel + packed_bytes(numel))
