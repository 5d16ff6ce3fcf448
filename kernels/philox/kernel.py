"""Philox4x32-10 words by element index, as philox/reference.py has them: device code only, inlined by other kernels."""

import triton
import triton.language as tl


@triton.jit
def random_words(key_low, key_high, index):
    """The 32-bit word of every int64 element index, as int64: word index % 4 of Philox block index // 4."""
    key = (key_high.to(tl.int64) << 32) | (key_low.to(tl.int64) & 0xFFFFFFFF)
    block = index >> 2
    low, high = (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32)
    zero = low * 0
    w0, w1, w2, w3 = tl.philox(key, low, high, zero, zero)
    lane = index & 3
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)).to(tl.int64)
