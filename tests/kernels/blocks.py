"""The oracle of quantisation to blocks of e4m3, in exact fractions, and the matrices on which it tells mistakes apart.

Belongs here: what the tests of the reference and of the kernels share, and what tensor cores make of products of
blocks. No tests.
"""

from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from math import copysign
from random import Random
from types import ModuleType

import torch
from testing import assert_identical
from torch import Tensor

from tpformer.kernels.quantize.format import BLOCK, EXPONENTS, NOT_A_NUMBER, VALUES, Blocks

WIDTH = 3 * BLOCK  # columns: three blocks a row, so that no matrix has as many rows as a row has blocks
NAN_BYTE = 0x7F
# magnitudes of the bytes 0 to 126: seven subnormal ones, then 15 exponents with eight mantissas, the last of them NaN's
GRID = [Fraction(byte, 512) for byte in range(8)]
GRID += [Fraction(8 + byte % 8) * Fraction(2) ** (byte // 8 - 10) for byte in range(8, 127)]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
# scales at which every tie is tried, as exponents, and those of which amax is tried around 448 * 2**exponent
SCALES = {torch.float16: (-8, 0, 7), torch.bfloat16: (-113, -3, 119), torch.float32: (-112, 0, 119)}
SCALES[torch.float64] = (-120, 1, 120)
LARGEST_SCALES = {torch.float16: range(-30, 8), torch.bfloat16: range(-141, 120), torch.float32: range(-157, 120)}
LARGEST_SCALES[torch.float64] = range(-160, 122)
STEP, KEPT = 32, 13  # products that one instruction of sm_90 adds to a sum, and digits behind the first that it keeps


@cache
def byte_of(x: float, exponent: int) -> int:
    """The e4m3 nearest to |x| / 2**exponent, which is 448 at most; of two the even one."""
    magnitude = Fraction(abs(x)) / Fraction(2) ** exponent
    below = bisect_right(GRID, magnitude) - 1
    if below == len(GRID) - 1:
        return below
    to_below, to_above = magnitude - GRID[below], GRID[below + 1] - magnitude
    return below + (to_above < to_below or (to_above == to_below and below % 2 == 1))


def exponent_of(largest: float) -> int:
    """The exponent of the smallest power of two, 2**-120 at least, by which no number is beyond 448."""
    exponent = -120
    while Fraction(largest) > 448 * Fraction(2) ** exponent:
        exponent += 1
    return exponent


def quantized(block: Tensor) -> tuple[Tensor, int]:
    """(the bytes, the exponent) of one block, by the definition."""
    numbers = block.double().flatten().tolist()
    if block.isfinite().all() and (exponent := exponent_of(max(map(abs, numbers)))) <= 120:
        found = [byte_of(x, exponent) | (128 if copysign(1, x) < 0 else 0) for x in numbers]
        return torch.tensor(found, dtype=torch.uint8).view(block.shape), exponent
    return torch.full(block.shape, NAN_BYTE, dtype=torch.uint8), NOT_A_NUMBER


def oracle(x: Tensor, rows: int) -> Blocks:
    """x in blocks of `rows` rows: exponents (M / rows, K / 128), whichever the matrix is."""
    values = torch.empty(x.shape, dtype=torch.uint8)
    exponents = torch.empty(x.shape[0] // rows, x.shape[1] // BLOCK, dtype=EXPONENTS)
    for row in range(exponents.shape[0]):
        for column in range(exponents.shape[1]):
            place = slice(row * rows, (row + 1) * rows), slice(column * BLOCK, (column + 1) * BLOCK)
            values[place], exponents[row, column] = quantized(x[place])
    return Blocks(values.view(VALUES), exponents)


def numbers(blocks: Blocks, rows: int) -> Tensor:
    """What blocks with such exponents stand for, in float64."""
    table = torch.tensor([float(x) for x in GRID] + [float("nan")], dtype=torch.float64)
    byte = blocks.values.view(torch.uint8).int()
    exponents = blocks.exponents.double().repeat_interleave(rows, 0).repeat_interleave(BLOCK, 1)
    magnitude = table[byte & 127] * torch.tensor(2.0, dtype=torch.float64) ** exponents
    return torch.where(exponents == NOT_A_NUMBER, torch.nan, torch.where(byte > 127, -magnitude, magnitude))


def judged(dtype: torch.dtype, device: str) -> torch.dtype:
    """The dtype in which products of blocks are judged. On a GPU float32 is too fine: see sum_of_tensor_cores."""
    return torch.float16 if device == "cuda" and dtype == torch.float32 else dtype


def kept(x: Tensor, largest: Tensor) -> Tensor:
    """x without its digits that lie KEPT behind the first digit of `largest`."""
    step = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1] - 1 - KEPT)
    return (x / step).trunc() * step


def sum_of_tensor_cores(a: Blocks, w: Blocks) -> Tensor:
    """A W^T in float32 of rows and a weight in blocks, as Hopper's tensor cores are known to add up products of e4m3:
    STEP products and the sum so far are cut to a place KEPT behind the largest one's first digit (DeepSeek-V3,
    arXiv:2412.19437, section 3.3.2: about 14 bits)."""
    total = torch.zeros(len(a.values), len(w.values))
    for block in range(len(a.exponents)):
        result = torch.zeros(total.shape, dtype=torch.float64)
        for first in range(block * BLOCK, (block + 1) * BLOCK, STEP):
            x, y = (each.values[:, first : first + STEP].double() for each in (a, w))
            terms = torch.cat([x[:, None] * y[None], result[:, :, None]], 2)
            result = kept(terms, terms.abs().amax(2, keepdim=True)).sum(2)
            result = kept(result, result)
        scales = torch.exp2(a.exponents[block].float()), torch.exp2(w.exponents[:, block].float())
        total += result.float() * scales[0][:, None] * scales[1].repeat_interleave(BLOCK)
    return total


def beside(x: Tensor) -> Tensor:
    """Positive numbers, and their two neighbours in their dtype each."""
    bits = x.view(INTEGERS[x.element_size()])
    return torch.stack([bits - 1, bits, bits + 1], 1).view(x.dtype).flatten()


def ties(dtype: torch.dtype) -> Iterator[Tensor]:
    """Blocks with all that e4m3 has, all that lies in the middle of two, and the neighbours of both, at some scales."""
    middles = [(x + y) / 2 for x, y in zip(GRID, GRID[1:], strict=False)]
    for scale in SCALES[dtype]:
        wanted = [float(x * Fraction(2) ** scale) for x in (*GRID[1:], *middles)]
        positive = torch.tensor(wanted, dtype=torch.float64).to(dtype)
        assert torch.equal(positive.double(), torch.tensor(wanted, dtype=torch.float64))
        largest = positive.max()
        near = beside(positive).clamp(max=largest)
        for part in torch.cat([near, -near]).split(BLOCK - 1):
            yield torch.cat([-largest[None], part, part.new_zeros(BLOCK - 1 - len(part))])


def largest(dtype: torch.dtype) -> Iterator[Tensor]:
    """Blocks with a largest magnitude of 448 times each power of two, and its neighbours."""
    powers = torch.tensor([float(448 * Fraction(2) ** scale) for scale in LARGEST_SCALES[dtype]], dtype=torch.float64)
    for number in beside(powers.to(dtype)[powers.to(dtype) > 0]):
        block = torch.zeros(BLOCK, dtype=dtype)
        block[[3, 100, 127]] = torch.stack([number / 3, -number, number / 32])
        yield block


def special(dtype: torch.dtype) -> Iterator[Tensor]:
    """Blocks of zeros and of the smallest and the largest numbers, and such with a NaN or an infinity in one place."""
    info = torch.finfo(dtype)
    drawn = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    smallest = torch.ones(BLOCK, dtype=INTEGERS[dtype.itemsize]).view(dtype)
    yield from (torch.zeros(BLOCK, dtype=dtype), -torch.zeros(BLOCK, dtype=dtype), smallest, -smallest)
    yield from ((drawn.clamp(-1, 1) * size).to(dtype) for size in (info.tiny, info.max, 1.0, 448.0))
    for number, place in ((torch.nan, 0), (torch.inf, 77), (-torch.inf, BLOCK - 1), (-torch.nan, 1)):
        block = drawn.to(dtype)
        block[place] = number
        yield block


@cache
def telling(dtype: torch.dtype) -> tuple[Tensor, Blocks]:
    """Rows of all such blocks, with unlike ones side by side, and what the oracle makes of them."""
    blocks = [*ties(dtype), *largest(dtype), *special(dtype)]
    blocks += [torch.full((BLOCK,), 3.0, dtype=dtype)] * (-len(blocks) % (WIDTH // BLOCK))
    x = torch.stack(Random(0).sample(blocks, len(blocks))).view(-1, WIDTH)
    return x, oracle(x, 1)


@cache
def telling_weight(dtype: torch.dtype) -> tuple[Tensor, Blocks]:
    """A weight of 2 x 3 blocks: ties, very small and very large ones, zeros and a NaN; and the oracle's of it."""
    generator = torch.Generator().manual_seed(1)
    few = torch.randn(500, generator=generator, dtype=torch.float64)
    w = few[torch.randint(500, (2 * BLOCK, WIDTH), generator=generator)]
    w[:BLOCK, :BLOCK] = torch.stack([*ties(dtype)])[torch.arange(BLOCK) % 12].double()
    w[BLOCK:, :BLOCK] *= torch.finfo(dtype).tiny
    w[:BLOCK, BLOCK : 2 * BLOCK] *= torch.finfo(dtype).max / 16
    w[BLOCK:, BLOCK : 2 * BLOCK] = 0
    w = w.to(dtype)
    w[5, -3], w[BLOCK + 7, -2] = torch.nan, 448.0
    return w, oracle(w, BLOCK)


def assert_blocks(actual: Blocks, expected: Blocks, what: str) -> None:
    """The same bytes."""
    for name, x, y in zip(Blocks._fields, actual, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.is_contiguous(), f"{what} {name}: {x.dtype} {x.shape}"
        wrong = x.cpu().view(torch.uint8) != y.cpu().view(torch.uint8)
        assert not wrong.any(), f"{what}: {int(wrong.sum())} {name} of {wrong.numel()} differ"


def check(module: ModuleType, dtype: torch.dtype, device: str = "cpu") -> None:
    """A module's results have the oracle's bytes, and stand for the oracle's numbers, for rows and for weights."""
    x, expected = telling(dtype)
    rows = Blocks(expected.values, expected.exponents.t().contiguous())
    assert_blocks(module.quantize_rows(x.to(device)), rows, f"rows of {dtype}")
    w, blocks = telling_weight(dtype)
    assert_blocks(module.quantize_weight(w.to(device)), blocks, f"weight of {dtype}")
    transposed = Blocks(*(part.view(torch.uint8).t().contiguous().view(part.dtype) for part in blocks))
    for found, wanted in zip(module.quantize_weight_twice(w.to(device)), (blocks, transposed), strict=True):
        assert_blocks(found, wanted, f"both copies of a weight of {dtype}")
    for name, given, wanted in (
        ("dequantize", rows, numbers(expected, 1)),
        ("dequantize_weight", blocks, numbers(blocks, BLOCK)),
    ):
        back = getattr(module, name)(Blocks(*(part.to(device) for part in given)), dtype)
        assert back.is_contiguous()
        assert_identical(back.cpu(), wanted.to(dtype), f"{name} to {dtype}")
    check_shards(module, blocks, dtype, device)


def check_shards(module: ModuleType, blocks: Blocks, dtype: torch.dtype, device: str, offset: int = 0) -> None:
    """Weights of three ranks, which lie behind one another with gaps and other bytes, as a gather leaves them; the
    second one is the first upside down. offset: elements before each result."""
    n, k = blocks.values.shape
    upside = Blocks(*(each.flip(0) for each in (blocks.values.view(torch.uint8), blocks.exponents)))
    ranks = [Blocks(upside.values.view(VALUES), upside.exponents) if rank == 1 else blocks for rank in range(3)]
    sent = [torch.cat([part.view(torch.uint8).flatten() for part in each]) for each in ranks]
    received = torch.stack([torch.cat([each, each.new_zeros(5)]) for each in sent]).to(device)
    values, exponents = received[:, : n * k], received[:, n * k : len(sent[0])]
    exponents = exponents.view(torch.int8).unflatten(1, blocks.exponents.shape)
    memory = torch.full((3, offset + n * k + 1), -7.0, dtype=dtype, device=device)
    out = memory[:, offset : offset + n * k].view(3, n, k)
    result = module.dequantize_shards(Blocks(values.view(VALUES).unflatten(1, (n, k)), exponents), out)
    assert result is out and memory[:, offset + n * k :].eq(-7).all() and memory[:, :offset].eq(-7).all()
    for found, wanted in zip(out.cpu(), ranks, strict=True):
        assert_identical(found, numbers(wanted, BLOCK).to(dtype), f"shards ({n}, {k}) {dtype}")
