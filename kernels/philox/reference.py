"""Philox4x32-10 random numbers addressed by global element index: the specification (torch only).

Every random value of the project (initial weights, dropout) is a function of a key and of the element's index in the
unsharded tensor, so a shard draws exactly its part of what one process would draw. A call describes its elements as
rows: `start` (rows,) int64 has the index of each row's first element, and all rows have one `width`.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; constants from that paper.
"""

import hashlib
import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_key(*parts: int | str) -> int:
    """A 64-bit key from a tuple such as (seed, parameter name): the first 8 bytes of its SHA-256."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def philox4x32(key: int, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words, as int64, for each int64 counter. The upper half of Philox's 128-bit counter is zero."""
    # int64 products wrap modulo 2**64, which leaves both 32-bit halves right once masked; c1 and c3, which nothing
    # multiplies, are masked at the end
    c0, c1 = counter & _MASK, counter >> 32
    c2 = c3 = torch.zeros_like(counter)
    k0, k1 = key & _MASK, key >> 32
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (second >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = (first >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = second, first
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def _blocks(start: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """Counters (rows, blocks) whose four words cover each row, and the words to pick when rows start inside a block."""
    shift = start & 3
    aligned = not bool(shift.any())
    count = -(-width // 4) + (0 if aligned else 1)
    counter = (start >> 2)[:, None] + torch.arange(count, device=start.device)
    return counter, None if aligned else shift[:, None] + torch.arange(width, device=start.device)


def _pick(words: Tensor, columns: Tensor | None, width: int) -> Tensor:
    return words[:, :width] if columns is None else words.gather(1, columns)


def random_words(key: int, start: Tensor, width: int) -> Tensor:
    """(rows, width) int64 in [0, 2**32): element index i takes word i % 4 of Philox block i // 4."""
    counter, columns = _blocks(start, width)
    return _pick(torch.stack(philox4x32(key, counter), -1).flatten(1), columns, width)


def random_normal(key: int, start: Tensor, width: int) -> Tensor:
    """(rows, width) float64 standard normals by Box-Muller: words (0, 1) and (2, 3) of a block make two pairs.

    Computed in float64 so that the rounding of a vectorised tail cannot reach a float32 weight.
    """
    counter, columns = _blocks(start, width)
    normals = []
    words = philox4x32(key, counter)
    for radius_word, angle_word in (words[:2], words[2:]):
        radius = ((radius_word.double() + 0.5) * 2.0**-32).log_().mul_(-2).sqrt_()
        angle = angle_word.double() * (2 * math.pi * 2.0**-32)
        normals += [radius * angle.cos(), radius * angle.sin()]
    return _pick(torch.stack(normals, -1).flatten(1), columns, width)
