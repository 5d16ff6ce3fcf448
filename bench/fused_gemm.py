"""One fused GEMM on one GPU: its inputs, channel and launch, and what it must give; imports triton.

Belongs here: what differs between the three operations. What is timed is in fused.py.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from tpformer.kernels.all_gather_matmul.kernel import all_gather_matmul, all_gather_matmul_space
from tpformer.kernels.configurations import select_tile
from tpformer.kernels.launch import Tile
from tpformer.kernels.matmul_all_reduce.kernel import matmul_all_reduce, matmul_all_reduce_space, plan
from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter, matmul_reduce_scatter_space
from tpformer.kernels.protocol import Channel, bump
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER

from .accuracy import poisoned, require_accurate
from .channels import local_channel
from .shapes import Shape

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
    def served(self) -> int:
        return self.channel.served

    @property
    def virtual(self) -> bool:
        return self.served > 1


def build(
    shape: Shape, device: str, dtype: torch.dtype, *, virtual: bool = False, tile: Tile | None = None
) -> FusedGemm:
    """virtual: all t ranks in one launch. Otherwise rank RANK with its peers' flags set, and random numbers in its
    slots for what they would have sent."""
    op, m, n, k, t = shape.op, shape.m, shape.n, shape.k, shape.t
    place, rows = torch.device(device), m if op == ALL_REDUCE else m // t
    tile = tile or select_tile(place, dtype, rows, n, chunks=m // rows)
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
    """The operation at the epoch that `begin` has begun. push: of a gather, whether the kernel sends the shard."""
    options: dict = {"tile": gemm.tile, "programs": programs}
    if gemm.shape.op == GATHER:
        return all_gather_matmul(gemm.a, [gemm.w], gemm.channel, push=push, **options)[0]
    function = {SCATTER: matmul_reduce_scatter, ALL_REDUCE: matmul_all_reduce}[gemm.shape.op]
    return function([gemm.a], [gemm.w], gemm.channel, **options)


def begin(gemm: FusedGemm) -> None:
    bump(gemm.channel)


def check(gemm: FusedGemm, *, push: bool = True, programs: int | None = None) -> None:
    """AssertionError unless one epoch gives rank RANK what it should, with no wait expired."""
    begin(gemm)
    oracle, baseline = expected(gemm, torch.float64), expected(gemm, gemm.a.dtype)
    like = baseline.new_empty(gemm.served * len(baseline), gemm.shape.n)
    result = poisoned(lambda: launch(gemm, push=push, programs=programs), like)
    what = f"{gemm.shape}, {'virtual ranks' if gemm.virtual else 'flags set'}, push={push}"
    require_accurate(what, result.chunk(gemm.served)[RANK if gemm.virtual else 0], oracle, baseline)
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
        return gathered(gemm).to(dtype) @ own_weight(gemm).to(dtype).t()
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


def own_weight(gemm: FusedGemm) -> Tensor:
    return gemm.w.chunk(gemm.served)[RANK] if gemm.virtual else gemm.w


def gathered(gemm: FusedGemm) -> Tensor:
    """All ranks' rows: the stack of them, or what lies in the slot with the own ones put in their place."""
    if gemm.virtual:
        return gemm.a
    rows = gemm.channel.gathered(parity(gemm), gemm.a).clone()
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
    packed = gemm.channel.slots[parity(gemm)].view(gemm.a.dtype)[area * size : (area + 1) * size]
    matrix = rearrange(packed, "(t i j r c) -> t (i r) (j c)", t=t, i=tiles_m, j=tiles_n, r=tile.m)
    return matrix[:, :rows, :n]


def parity(gemm: FusedGemm) -> int:
    return int(gemm.channel.epoch[0]) & 1


def total(terms: Tensor) -> Tensor:
    """The sum over ranks in at least float32, rounded once."""
    return terms.sum(0, dtype=torch.promote_types(terms.dtype, torch.float32)).to(terms.dtype)


def received(gemm: FusedGemm) -> Tensor:
    """(t, M / t, N): a scatter's partial sums as a tensor of their own, for a reduction by torch."""
    return unpacked(gemm, gemm.shape.m // gemm.shape.t, area=0).contiguous()
