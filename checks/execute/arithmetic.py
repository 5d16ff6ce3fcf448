"""What instructions compute that numpy has no function for, on arrays with one element for each lane.

Belongs here: pure functions of arrays. Memory is in memory.py.
"""

import numpy as np
from numpy.typing import NDArray

LANES = 32
LANE = np.arange(LANES)
Array = NDArray


def widen_bf16(x: Array) -> Array:
    """The float32 values of bfloat16 bits."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16(x: Array) -> Array:
    """The bfloat16 bits of float32 values, rounded to the nearest even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def f16(x: Array) -> Array:
    """The float16 bits of float32 values."""
    return x.astype(np.float16).view(np.uint16)


def pair(high: Array, low: Array) -> Array:
    """32 bits of two times 16."""
    return (high.astype(np.uint32) << np.uint32(16)) | low


def half(x: Array, number: int) -> Array:
    """The float16 values in the lower (0) or upper (1) half of 32 bits."""
    return (x >> np.uint32(16 * number)).astype(np.uint16).view(np.float16)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding, but for the rounding of a float64 sum."""
    return a * b + c if a.dtype.kind != "f" else (a.astype(np.float64) * b + c).astype(a.dtype)


def multiply_high(x: Array, y: Array) -> Array:
    """The upper 64 bits of products of unsigned 64-bit integers."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    low_x, high_x, low_y, high_y = x & mask, x >> half, y & mask, y >> half
    first = high_x * low_y + (low_x * low_y >> half)
    second = low_x * high_y + (first & mask)
    return high_x * high_y + (first >> half) + (second >> half)


def divide(a: Array, b: Array) -> Array:
    """Integer division that truncates; all ones where b is 0, as on a GPU."""
    some = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // some
    quotient = np.where((quotient < 0) & (quotient * some != a), quotient + quotient.dtype.type(1), quotient)
    return np.where(b == 0, ~np.zeros((), b.dtype), quotient)


def extract(x: Array, first: int, count: int) -> Array:
    """bfe: `count` bits from bit `first` on, with sign where x is signed."""
    bits = x.dtype.itemsize * 8
    count = min(count, bits - first)
    return (x << x.dtype.type(bits - first - count)) >> x.dtype.type(bits - count)


def funnel_left(low: Array, high: Array, count: int) -> Array:
    """shf.l: the upper 32 bits of high:low, shifted left."""
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    return ((both << np.uint64(count & 31)) >> np.uint64(32)).astype(np.uint32)


def permute(a: Array, b: Array, selection: int) -> Array:
    """prmt: the bytes of b:a that a constant selects."""
    out = np.zeros_like(a)
    for byte in range(4):
        chosen = (selection >> (4 * byte)) & 7
        source = a if chosen < 4 else b
        out |= ((source >> np.uint32(8 * (chosen & 3))) & np.uint32(255)) << np.uint32(8 * byte)
    return out


def shuffle(x: Array, mode: str, b: Array, c: int) -> Array:
    """shfl.sync among the lanes of each warp. A lane whose source lies outside of its segment keeps its value."""
    rows = x.reshape(-1, LANES)
    offset = np.broadcast_to(b, x.shape).reshape(-1, LANES).astype(np.int64)
    segment, clamp = (c >> 8) & 31, c & 31
    highest = (LANE & segment) | (clamp & ~segment)
    source = {
        "bfly": LANE ^ offset,
        "idx": (LANE & segment) | (offset & ~segment & 31),
        "up": LANE - offset,
        "down": LANE + offset,
    }[mode]
    inside = source >= highest if mode == "up" else source <= highest
    return np.take_along_axis(rows, np.where(inside, source, LANE), 1).reshape(-1)


def multiply_fragments(d: tuple, a: tuple, b: tuple, c: tuple, kind: str) -> None:
    """mma.m16n8k16: d = a b + c for each warp, from the fragments that its lanes hold (PTX manual, 9.7.14)."""
    warps = len(a[0]) // LANES

    def values(x: Array) -> Array:
        halves = np.ascontiguousarray(x).view(np.uint16)
        wide = widen_bf16(halves) if kind == "bf16" else halves.view(np.float16).astype(np.float32)
        return wide.reshape(warps, 8, 8)

    left, right = np.empty((warps, 16, 16), np.float32), np.empty((warps, 8, 16), np.float32)
    left[:, :8, :8], left[:, 8:, :8], left[:, :8, 8:], left[:, 8:, 8:] = (values(x) for x in a)
    right[:, :, :8], right[:, :, 8:] = (values(x) for x in b)
    product = (left @ right.transpose(0, 2, 1)).reshape(warps, 2, LANES, 2)
    sums = [c[i] + product[:, i // 2, :, i % 2].reshape(-1) for i in range(4)]
    for target, value in zip(d, sums, strict=True):
        target[...] = value


def fma_bf16x2(x: Array, y: Array, z: Array) -> Array:
    """fma of two bfloat16 values in each 32 bits."""
    high = [(np.ascontiguousarray(v) & np.uint32(0xFFFF0000)).view(np.float32) for v in (x, y, z)]
    low = [(np.ascontiguousarray(v) << np.uint32(16)).view(np.float32) for v in (x, y, z)]
    return pair(bf16(fma(*high)), bf16(fma(*low)))
