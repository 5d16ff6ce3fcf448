"""Forms in which bfloat16 values can be packed, and what they would cost: nothing is packed here, only counted.

Belongs here: numbers from values. The form that ships is kernels/pack/format.py's; the others differ from it
in the bits of a code, the values of a block or of a group, or how far above a block's mean exponent its base may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpformer.kernels.pack.format import BLOCK, GROUP, HEADROOM

SIGN_AND_MANTISSA, BASE, VALUE = 8, 8, 16  # bits: of every value, of a block, of an escape in its slot
NUMBERED = 1 << 8  # slots that the byte of an escape can tell apart
BLOCKS = (32, 64, 128, 256, 512)
HEADROOMS = {3: (2, 3, 4), 4: (HEADROOM,), 5: (14,)}  # by bits of a code; the best of 3 bits is not known beforehand
LARGEST_GROUP = 32768
CANDIDATES = (
    (128, 4096, 32),
    (256, 8192, 24),
    (256, 8192, 64),
    (256, 16384, 48),
    (256, 32768, 96),
    (512, 16384, 64),
)  # block, group, slots
Row = dict[str, Any]


class Form(NamedTuple):
    """bits: of a value's code. block: values with one base. headroom: how far above the mean exponent of a block the
    base is at most; None: the base is the block's largest exponent. group: values that share slots."""

    bits: int = 4
    block: int = BLOCK
    headroom: int | None = HEADROOM
    group: int = GROUP

    @property
    def window(self) -> int:
        """Exponents that have a code: all codes but those of zeros and of escapes."""
        return (1 << self.bits) - 2

    @property
    def bits_without_slots(self) -> float:
        """Bits a value, of sign and mantissa, code, and its share of the base."""
        return SIGN_AND_MANTISSA + self.bits + BASE / self.block


def compared() -> list[Form]:
    """Every number of bits with every block and headroom."""
    return [Form(bits, block, room) for bits, rooms in HEADROOMS.items() for block in BLOCKS for room in rooms]


def grouped() -> list[Form]:
    """4 bits with the blocks and groups of CANDIDATES."""
    return [Form(block=block, group=group) for block, group in dict.fromkeys(each[:2] for each in CANDIDATES)]


def exponent_fields(x: Tensor) -> Tensor:
    """(values,) int16: the exponent fields of bfloat16 values, in the order of memory of a contiguous x, with zeros
    behind them up to a whole group."""
    bits = x.reshape(-1).view(torch.int16)
    if len(bits) % LARGEST_GROUP:
        bits = torch.cat([bits, bits.new_zeros(-len(bits) % LARGEST_GROUP)])
    return (bits >> 7).bitwise_and_(255)


def escapes(fields: Tensor, form: Form) -> Tensor:
    """(groups,) int64: how many values of each group are escapes. fields: exponent_fields of a tensor."""
    blocks = fields.view(-1, form.block)
    base = blocks.amax(1)
    if form.headroom is not None:
        nonzero = (blocks != 0).sum(1).clamp_(min=1)
        mean = blocks.sum(1).div_(nonzero, rounding_mode="floor")
        base = torch.minimum(base, mean.add_(form.headroom).to(torch.int16))
    code = base[:, None] - blocks
    found = ((code < 0) | (code >= form.window)) & (blocks != 0)
    return found.view(-1, form.group).sum(1)


def entropy(fields: Tensor) -> float:
    """Bits that a value's exponent field carries, if each value is taken by itself."""
    counts = torch.bincount(fields.int(), minlength=256).double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log2()).sum())


@dataclass
class Tally:
    """What a form finds in tensors. worst: the most escapes of a group."""

    form: Form
    values: int = 0
    escapes: int = 0
    worst: int = 0

    def add(self, fields: Tensor) -> None:
        """Count one more tensor, by its exponent_fields."""
        found = escapes(fields, self.form)
        self.values += fields.numel()
        self.escapes += int(found.sum())
        self.worst = max(self.worst, int(found.max()))

    @property
    def rate(self) -> float:
        """The share of values that are escapes."""
        return self.escapes / self.values

    @property
    def slots(self) -> int:
        """Slots of a group that hold the escapes of every group seen: a power of two, or none."""
        return 1 << (self.worst - 1).bit_length() if self.worst else 0

    def row(self) -> Row:
        """rate, worst, slots; bits a value with that many slots, and with room for as many escapes as there are."""
        without = self.form.bits_without_slots
        return {
            **self.form._asdict(),
            **{"rate": self.rate, "worst": self.worst, "slots": self.slots},
            **{
                "bits_of_slots": without + VALUE * self.slots / self.form.group,
                "bits_of_rate": without + VALUE * self.rate,
            },
        }


def add_all(tallies: Iterable[Tally], tensors: Iterable[Tensor]) -> None:
    """Count tensors, bfloat16, in each of the tallies."""
    tallies = list(tallies)
    for x in tensors:
        fields = exponent_fields(x)
        for tally in tallies:
            tally.add(fields)


def tallied(tensors: Iterable[Tensor], forms: Iterable[Form]) -> list[Row]:
    """The row of each form over all of the tensors, bfloat16."""
    tallies = [Tally(form) for form in forms]
    add_all(tallies, tensors)
    return [tally.row() for tally in tallies]


def statistics(tensors: Sequence[Tensor]) -> Row:
    """values, rate and worst in the form that ships; entropy, bits a value of its exponent field; zeros, the share of
    values whose exponent field is zero. The last two are means over the tensors, which have equally many values."""
    tally, entropies, zeros = Tally(Form()), [], []
    for x in tensors:
        fields = exponent_fields(x)
        tally.add(fields)
        entropies.append(entropy(fields))
        zeros.append(float((fields == 0).double().mean()))
    means = {"entropy": sum(entropies) / len(entropies), "zeros": sum(zeros) / len(zeros)}
    return {"values": tally.values, "rate": tally.rate, "worst": tally.worst, **means}
