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


def widen(x: Array) -> Array:
    """Integers with twice as many bits."""
    return x.astype(f"{x.dtype.kind}{2 * x.dtype.itemsize}")


def multiply_high(x: Array, y: Array) -> Array:
    """The upper half of the bits of products of integers; of 64 bits, unsigned ones."""
    if x.dtype.itemsize < 8:
        return (widen(x) * y >> 8 * x.dtype.itemsize).astype(x.dtype)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    low_x, high_x, low_y, high_y = x & mask, x >> half, y & mask, y >> half
    first = high_x * low_y + (low_x * low_y >> half)
    second = low_x * high_y + (first & mask)
    return high_x * high_y + (first >> half) + (second >> half)


def divide(a: Array, b: Array) -> Array:
    """Integer division that truncates; all ones where b is 0, as on a GPU."""
    return np.where(b == 0, ~np.zeros((), b.dtype), (a - np.fmod(a, b)) // b)


def extract(x: Array, first: int, count: int) -> Array:
    """bfe: `count` bits from bit `first` on, with sign where x is signed."""
    bits = x.dtype.itemsize * 8
    count = min(count, bits - first)
    return (x << x.dtype.type(bits - first - count)) >> x.dtype.type(bits - count)


def count_ones(x: Array) -> Array:
    """popc: how many bits of each value are set."""
    return sum(((x >> x.dtype.type(n)) & x.dtype.type(1) for n in range(8 * x.dtype.itemsize)), np.zeros_like(x))


def permute(low: Array, high: Array, selector: Array) -> Array:
    """prmt: four of the eight bytes of two words. Half a byte of the selector names one, or asks for its sign alone."""
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    result: Array = np.zeros((), np.uint32)
    for n in range(4):
        choice = selector >> np.uint32(4 * n)
        byte = (both >> ((choice & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint8)
        byte = np.where(choice & np.uint32(8), np.where(byte & np.uint8(128), np.uint8(255), np.uint8(0)), byte)
        result = result | (byte.astype(np.uint32) << np.uint32(8 * n))
    return result


def shuffle(x: Array, lane: Array, mode: str) -> Array:
    """shfl.sync from a lane of the own warp: idx that lane, bfly the one whose bits differ from the own lane's in those
    of `lane`, up the one so many lanes below, or the own one where there is none."""
    given = (lane.reshape(-1, LANES) if np.ndim(lane) else np.full(LANES, lane)).astype(np.int64) & (LANES - 1)
    source = {"idx": given, "bfly": LANE ^ given, "up": np.where(LANE < given, LANE, LANE - given)}[mode]
    warps = x.reshape(-1, LANES)
    return warps[np.arange(len(warps))[:, None], source].reshape(-1)


def reduce_lanes(x: Array, members: Array, operation: str) -> Array:
    """redux.sync: add, min or max of the lanes of a warp whose bits are set in `members`, for all of its lanes."""
    ufunc, initial = {
        "add": (np.add, 0),
        "min": (np.minimum, np.iinfo(x.dtype).max),
        "max": (np.maximum, np.iinfo(x.dtype).min),
    }[operation]
    inside = (np.broadcast_to(members, x.shape).reshape(-1, LANES).astype(np.int64) >> LANE) & 1 == 1
    return np.repeat(ufunc.reduce(x.reshape(-1, LANES), 1, x.dtype, where=inside, initial=initial), LANES)


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
