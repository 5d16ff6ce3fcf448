"""Philox4x32-10 gives the published words, and any slice of rows and columns gives the words of the whole. The device
functions give the words of the reference."""

import itertools
import math
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_checks import FAR, KEYS, OF_KERNEL, everywhere
from testing import assert_same

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from tpformer.kernels.finish import Dropout, Finish  # noqa: E402
from tpformer.kernels.philox.kernel import random_tile  # noqa: E402
from tpformer.kernels.philox.reference import philox4x32, philox_key, random_normal, random_words  # noqa: E402


def philox_by_big_integers(counter: int, key: int) -> list[int]:
    """Philox4x32-10 as the paper describes it, in Python integers: a 128-bit counter and a 64-bit key."""
    c = [counter >> (32 * i) & 0xFFFFFFFF for i in range(4)]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        first, second = divmod(0xD2511F53 * c[0], 1 << 32), divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [second[0] ^ c[1] ^ k[0], second[1], first[0] ^ c[3] ^ k[1], first[1]]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


# counter, key, words, each from its last 32 bits on: Random123's kat_vectors; the third has the digits of pi
PUBLISHED = [
    (0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (2**128 - 1, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (0x03707344_13198A2E_85A308D3_243F6A88, 0x299F31D0_A4093822, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


@pytest.mark.parametrize("counter, key, words", PUBLISHED)
def test_published_vectors(counter, key, words):
    assert philox_by_big_integers(counter, key) == words
    # Our counter has 64 bits. The other vectors only check the big integers, which the test below compares with.
    if counter < 2**63:
        assert [int(w) for w in philox4x32(key, torch.tensor([counter]))] == words


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**63 - 12), min_size=1, max_size=4), st.integers(1, 11), st.integers(0, 2**64 - 1))
def test_a_word_depends_on_its_index_only(starts, width, key):
    """Element i is word i % 4 of block i // 4, wherever its row starts and however wide the call is."""
    words = random_words(key, torch.tensor(starts), width).tolist()
    assert words == [
        [philox_by_big_integers((start + i) // 4, key)[(start + i) % 4] for i in range(width)] for start in starts
    ]


# Rows of odd width, and some shards of columns, start inside a block of four words.
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 6), st.integers(2, 40), st.data())
def test_normals_of_slices_are_those_of_the_whole(first, rows, width, data):
    top = data.draw(st.integers(0, rows - 1))
    left = data.draw(st.integers(0, width - 1))
    right = data.draw(st.integers(left + 1, width))
    starts = first + torch.arange(rows) * width
    normals = random_normal(7, starts, width)
    part = random_normal(7, starts[top:] + left, right - left)
    # Bits are equal in float32. In float64 torch's vectorised logarithm may differ from its scalar one.
    assert torch.equal(part.float(), normals[top:, left:right].float())
    assert_same(part, normals[top:, left:right])


def test_words_are_uniform_and_normals_are_normal():
    """The moments of a fixed sample of 2**18 are within five standard errors."""
    n = 2**18
    uniform = random_words(philox_key(1, "a"), torch.zeros(1, dtype=torch.int64), n)[0].double() / 2**32
    assert abs(float(uniform.mean()) - 0.5) < 5 / math.sqrt(12 * n)
    x = random_normal(philox_key(1, "a"), torch.zeros(1, dtype=torch.int64), n)[0]
    assert x.dtype == torch.float64 and bool(x.isfinite().all())
    # variances of x, x^2, x^3, x^4 under the normal distribution: 1, 2, 15, 96
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((x**power).mean()) - mean) < 5 * math.sqrt(variance / n), power
    for lag in (1, 2, 3, 4):  # neighbours are uncorrelated, in a pair, in a block and across blocks
        assert abs(float((x[:-lag] * x[lag:]).mean())) < 5 / math.sqrt(n), lag
        assert abs(float((x[:-lag] ** 2 * x[lag:] ** 2).mean()) - 1) < 5 * math.sqrt(8 / n), lag


def test_keys():
    assert philox_key(1, "a") == philox_key(1, "a") and 0 <= philox_key(1, "a") < 2**64
    # parts are kept apart: (1, 12), (11, 2) and (112,) give different keys
    assert len({philox_key(*parts) for parts in ((1, "a"), (2, "a"), (1, "b"), (1, 12), (11, 2), (112,))}) == 6
    assert int(random_words(3, torch.tensor([0]), 1)) != int(random_words(4, torch.tensor([0]), 1))


@triton.jit(do_not_specialize=["key", "column"])
def words_kernel(start, key: tl.int64, out, column, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    words = random_tile(key, tl.load(start + rows), column, ALIGNED, ROWS, COLUMNS)
    tl.store(out + rows[:, None] * COLUMNS + columns[None, :], words)


@everywhere("philox", OF_KERNEL)
def test_has_the_words_of_the_reference(module: ModuleType, device: str) -> None:
    """In whole tiles, aligned to blocks of four words or not."""
    firsts = (0, 4, 2**32 - 4, FAR, 2**62)
    widths = (4, 16, 1024) if device == "cuda" else (16,)
    for key, first, column, aligned, columns in itertools.product(KEYS, firsts, (0, 8), (True, False), widths):
        start = first + torch.tensor([0, 20, 2**34, 4]) + (0 if aligned else torch.tensor([0, 1, 2, 3]))
        out = torch.full((4, columns), -1, device=device)
        word = Finish(dropout=Dropout(start, key, 0.5)).key
        words_kernel[(1,)](start.to(device), word, out, column, ALIGNED=aligned, ROWS=4, COLUMNS=columns)
        assert torch.equal(out.cpu(), random_words(key, start + column, columns)), (key, first, column, aligned)
