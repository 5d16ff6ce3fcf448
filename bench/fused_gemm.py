"""Fused GEMMs on one GPU: inputs, channel and launch, what they must give, what is timed beside what; imports triton.

Belongs here: what differs between the three operations, and the rows of a shape. The lists of shapes are in fused.py.
"""

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from einops import rearrange
from torch import Tensor

from harness.accuracy import poisoned, require_accurate
from harness.ratios import Row, compared
from harness.timing import Call, Effort, measure
from tpformer.kernels.all_gather_matmul.kernel import all_gather_matmul, all_gather_matmul_space
from tpformer.kernels.all_gather_matmul.plan import select_gather_tile
from tpformer.kernels.configurations import select_local_tile, select_tile
from tpformer.kernels.launch import Tile, resident_programs
from tpformer.kernels.matmul.kernel import matmul
from tpformer.kernels.matmul_all_reduce.kernel import (
    matmul_all_reduce,
    matmul_all_reduce_space,
    plan,
    select_all_reduce_tile,
)
from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter, matmul_reduce_scatter_space
from tpformer.kernels.protocol import Channel, bump
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER

from .channels import local_channel
from .predict import predicted_rows
from .shapes import BARE, BUMPED, FUSED, LIBRARY, PUSHED, SUMMED, Shape

DEVICE, DTYPE = "cuda", torch.bfloat16
CARVED = (4, 8, 16, 32)  # SMs that the bare GEMM does without

RANK = 1  # the one that is served alone: its rows are not the first ones


@dataclass(frozen=True)
class FusedGemm:
    """a: x (M / t, K) to gather, else (M, K); w: W (N, K); both the served ranks' own, stacked along dim 0."""

    shape: Shape
    channel: Channel
    tile: Tile
    a: Tensor
    w: Tensor

    @property
    def virtual(self) -> bool:
        """Whether all ranks are served."""
        return self.channel.served > 1

    @property
    def parity(self) -> int:
        return int(self.channel.epoch[0]) & 1


def build(
    shape: Shape, device: str, dtype: torch.dtype, *, virtual: bool = False, tile: Tile | None = None
) -> FusedGemm:
    """virtual: all t ranks in one launch. Otherwise rank RANK with its peers' flags set, and random numbers in its
    slots for what they would have sent."""
    op, m, n, k, t = shape.op, shape.m, shape.n, shape.k, shape.t
    place, rows = torch.device(device), m if op == ALL_REDUCE else m // t
    if tile is None and op == ALL_REDUCE:
        tile = select_all_reduce_tile(place, dtype, m, n, t)
    elif tile is None and op == GATHER:
        tile = select_gather_tile(place, dtype, rows, [n], k, t)
    elif tile is None:
        tile = select_tile(place, dtype, rows, n, chunks=t)
    space = {
        GATHER: lambda: all_gather_matmul_space(rows, k, t, dtype.itemsize),
        SCATTER: lambda: matmul_reduce_scatter_space(rows, n, t, dtype, tile),
        ALL_REDUCE: lambda: matmul_all_reduce_space(m, n, t, dtype, dtype, tile),
    }[op]()
    channel = local_channel(t, *space, place, None if virtual else RANK)
    if not virtual:
        for slot in channel.slots:
            slot.view(dtype).normal_()
    a = torch.randn(channel.served * (rows if op == GATHER else m), k, device=device, dtype=dtype)
    w = torch.randn(channel.served * n, k, device=device, dtype=dtype) * k**-0.5
    return FusedGemm(shape, channel, tile, a, w)


def launch(gemm: FusedGemm, *, push: bool = True, programs: int | None = None) -> Tensor:
    """The operation at the epoch that `bump` has begun. push: of a gather, whether the kernel sends the shard."""
    options: dict = {"tile": gemm.tile, "programs": programs}
    if gemm.shape.op == GATHER:
        return all_gather_matmul(gemm.a, [gemm.w], gemm.channel, push=push, **options)[0]
    function = {SCATTER: matmul_reduce_scatter, ALL_REDUCE: matmul_all_reduce}[gemm.shape.op]
    return function([gemm.a], [gemm.w], gemm.channel, **options)


def check(gemm: FusedGemm, *, push: bool = True, programs: int | None = None) -> None:
    """AssertionError unless one epoch gives rank RANK what it should, with no wait expired."""
    bump(gemm.channel)
    oracle, baseline = expected(gemm, torch.float64), expected(gemm, gemm.a.dtype)
    like = baseline.new_empty(gemm.channel.served * len(baseline), gemm.shape.n)
    result = poisoned(lambda: launch(gemm, push=push, programs=programs), like)
    what = f"{gemm.shape}, {'virtual ranks' if gemm.virtual else 'flags set'}, push={push}"
    require_accurate(what, result.chunk(gemm.channel.served)[RANK if gemm.virtual else 0], oracle, baseline)
    require_no_expiry(gemm, what)


def require_no_expiry(gemm: FusedGemm, what: str) -> None:
    """AssertionError if a wait has given up: then the kernel did less than it should, and was fast."""
    if gemm.a.is_cuda:
        torch.cuda.synchronize()
    if bool(gemm.channel.error.any()):
        raise AssertionError(f"{what}: a wait expired: {gemm.channel.error.tolist()}")


def expected(gemm: FusedGemm, dtype: torch.dtype) -> Tensor:
    """Rank RANK's result of the epoch that has begun, with products in dtype: float64 or the operands' own."""
    shape = gemm.shape
    if shape.op == GATHER:
        return gathered(gemm).to(dtype) @ gemm.w.chunk(gemm.channel.served)[RANK if gemm.virtual else 0].to(dtype).t()
    if shape.op == SCATTER:
        rows = shape.m // shape.t
        return total(partials(gemm, dtype, RANK * rows, rows))
    one_shot, rows, _ = plan(shape.m, shape.n, shape.t, gemm.a.dtype, None, gemm.tile)
    if one_shot or gemm.virtual:
        return total(partials(gemm, dtype, 0, shape.m))
    # two-shot: the own chunk is summed here, the others arrive as sums behind the partials
    result = unpacked(gemm, rows, area=1).to(dtype, copy=True).flatten(0, 1)[: shape.m]
    own = total(partials(gemm, dtype, RANK * rows, rows))
    result[RANK * rows : RANK * rows + len(own)] = own
    return result


def gathered(gemm: FusedGemm) -> Tensor:
    """All ranks' rows: the stack of them, or what lies in the slot with the own ones put in their place."""
    if gemm.virtual:
        return gemm.a
    rows = gemm.channel.gathered(gemm.parity, gemm.a).clone()
    rows.chunk(gemm.shape.t)[RANK].copy_(gemm.a)
    return rows


def partials(gemm: FusedGemm, dtype: torch.dtype, first: int, rows: int) -> Tensor:
    """(t, rows, N): what every rank contributes to rows of A: computed, or as it lies in the slot."""
    t, last = gemm.shape.t, first + rows
    if gemm.virtual:
        pairs = zip(gemm.a.chunk(t), gemm.w.chunk(t), strict=True)
        return torch.stack([a[first:last].to(dtype) @ w.to(dtype).t() for a, w in pairs])
    own = gemm.a[first:last].to(dtype) @ gemm.w.to(dtype).t()
    terms = unpacked(gemm, rows, area=0)[:, : len(own)].to(dtype, copy=True)
    terms[RANK] = own
    return terms


def unpacked(gemm: FusedGemm, rows: int, area: int) -> Tensor:
    """(t, rows, N) of a slot in which every source's tiles lie one after another; area 1: behind area 0."""
    t, n, tile = gemm.shape.t, gemm.shape.n, gemm.tile
    tiles_m, tiles_n = -(-rows // tile.m), -(-n // tile.n)
    size = t * tiles_m * tiles_n * tile.m * tile.n
    packed = gemm.channel.slots[gemm.parity].view(gemm.a.dtype)[area * size : (area + 1) * size]
    matrix = rearrange(packed, "(t i j r c) -> t (i r) (j c)", t=t, i=tiles_m, j=tiles_n, r=tile.m)
    return matrix[:, :rows, :n]


def total(terms: Tensor) -> Tensor:
    """The sum over ranks in at least float32, rounded once."""
    return terms.sum(0, dtype=torch.promote_types(terms.dtype, torch.float32)).to(terms.dtype)


def check_shape(shape: Shape, virtual: bool) -> None:
    """Check both ways to gather, each with both parities, as they are timed."""
    torch.cuda.empty_cache()  # slots of one shape are several GB, and the next one's have another size
    gemm = build(shape, DEVICE, DTYPE, virtual=virtual)
    for push in (False, True) if shape.op == GATHER and not virtual else (True,):
        for _ in range(2):
            check(gemm, push=push)


def tax_rows(shape: Shape, effort: Effort) -> list[Row]:
    """The fused kernel of one rank whose peers have all arrived, against the bare GEMM; then the prediction from it."""
    torch.cuda.empty_cache()
    gemm = build(shape, DEVICE, DTYPE)
    begin = partial(bump, gemm.channel)
    x = gathered(gemm) if shape.op == GATHER else gemm.a
    calls = {
        BARE: Call(lambda: matmul(x, [gemm.w])),
        LIBRARY: Call(lambda: torch.matmul(x, gemm.w.t())),
        FUSED: Call(lambda: launch(gemm, push=False), begin),
        BUMPED: Call(lambda: (begin(), launch(gemm, push=False))),
    }
    if shape.op == GATHER:
        calls[PUSHED] = Call(lambda: launch(gemm, push=True), begin)
    if shape.op == SCATTER:
        terms = unpacked(gemm, shape.m // shape.t, area=0).contiguous()  # a scatter's, for a sum by torch
        calls[SUMMED] = Call(lambda: (matmul(x, [gemm.w]), terms.sum(0, dtype=torch.float32).to(x.dtype)))
    seconds = measure(calls, effort)
    require_no_expiry(gemm, str(shape))
    pairs = [(FUSED, BARE), (BUMPED, BARE), (PUSHED, BARE), (FUSED, SUMMED), (BARE, LIBRARY)]
    rows = compared(f"flag tax, rank of {shape.t}", shape, seconds, pairs)
    return [*rows, *predicted_rows([shape], median(seconds[BARE]), median(seconds[LIBRARY]))]


def virtual_rows(shape: Shape, effort: Effort) -> list[Row]:
    """All ranks in one launch against their bare GEMMs, one after the other."""
    torch.cuda.empty_cache()
    gemm = build(shape, DEVICE, DTYPE, virtual=True)
    weights = gemm.w.chunk(shape.t)
    inputs = [gemm.a] * shape.t if shape.op == GATHER else gemm.a.chunk(shape.t)
    many = f"{shape.t} x {BARE}"
    calls = {
        FUSED: Call(lambda: launch(gemm), partial(bump, gemm.channel)),
        many: Call(lambda: [matmul(x, [w]) for x, w in zip(inputs, weights, strict=True)]),
    }
    seconds = measure(calls, effort)
    require_no_expiry(gemm, str(shape))
    return compared(f"{shape.t} virtual ranks", shape, seconds, [(FUSED, many)])


def carved_rows(shape: Shape, effort: Effort) -> list[Row]:
    """The bare GEMM with the programs of fewer SMs, as if the others moved data."""
    device = torch.device(DEVICE)
    x = torch.randn(shape.m, shape.k, device=device, dtype=DTYPE)
    w = torch.randn(shape.n, shape.k, device=device, dtype=DTYPE) * shape.k**-0.5
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    each = resident_programs(device, select_local_tile(device, x.dtype, shape.m, shape.n)) // sms

    def call(fewer: int) -> Call:
        return Call(lambda: matmul(x, [w], programs=each * (sms - fewer)))

    calls = {"all SMs": call(0)} | {f"{fewer} SMs fewer": call(fewer) for fewer in CARVED}
    return compared("fewer SMs", shape, measure(calls, effort), [(name, "all SMs") for name in list(calls)[1:]])
