"""Fused linears and experts in FP8 compute the recipe of test_quantized_op.py, from the blocks that sequential gathers
and quantises, in Triton's interpreter; linears reduce to its bits. Each mistake with what was gathered is caught."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from opened import opened
from pool import WorkerPool
from shards import Here, check, on_transport
from test_fused_op import sent_by
from test_quantized_experts import CHOSEN, EXPERTS, HIDDEN, WIDTH, Experts, of_other_experts, of_the_first_expert
from test_quantized_op import FUSED, SEQUENTIAL, Fp8Column, Fp8Row, blocks_of
from testing import assert_identical, fails_on_a_rank, on_every_rank
from torch import Tensor
from turns import in_turns

pytest.importorskip("triton")

from tpformer import ops
from tpformer.kernels.all_gather_quantized_matmul.reference import packed_shard
from tpformer.kernels.finish import Finish
from tpformer.kernels.quantize import reference
from tpformer.kernels.quantize.format import Blocks
from tpformer.kernels.quantize.reference import quantize_rows
from tpformer.ops.dispatch import Dispatch, dispatch
from tpformer.ops.transports import fused_blocks
from tpformer.ops.transports.experts import gather_experts
from tpformer.ops.transports.interface import GATHER, SCATTER
from tpformer.ops.transports.quantized import Quantized


def cases(t: int) -> list[Fp8Column | Fp8Row]:
    """A rank has one block of features, or two; 3 or 1 rows. What is quantised is given: no activation, no norm."""
    return [Fp8Column(t, 3, 256, (128, 256)), Fp8Row(t, 3, 128, 256, drop=False)]


def unsharded(t: int) -> list[Fp8Column | Fp8Row]:
    """Without sequence parallelism reductions are all-reduces, and nothing is gathered."""
    return [
        Fp8Column(t, 2, 256, (128, 256), sequence_parallel=False),
        Fp8Row(t, 1, 128, 256, drop=False, sequence_parallel=False),
    ]


def more(t: int) -> list[Fp8Column | Fp8Row]:
    """More weights than a launch takes, no biases, and one row."""
    return [Fp8Column(t, 1, 128, (128,) * 4, bias=False), Fp8Row(t, 1, 128, 128, bias=False)]


@pytest.mark.parametrize("t, copies", [(2, False), *in_turns([(2, True), (3, False), (4, False), (4, True)])])
def test_fused_linears_compute_the_recipe(interpreted: WorkerPool, t: int, copies: bool) -> None:
    several = cases(t) + (unsharded(t)[1:] if (t, copies) == (2, False) else unsharded(t) + more(t))
    check(partial(interpreted(t).run, sent_by, copies, on_transport, FUSED), several, torch.float32)


ROWS = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
ROWS *= 2.0 ** torch.arange(-30, 30, 5).view(6, 2).repeat_interleave(128, 1)  # each block has a scale of its own


def shard_of(step: int, rank: int) -> Tensor:
    """New rows in each step, with other scales."""
    return ROWS.roll(step, 0).chunk(2)[rank] * 2.0 ** (7 * step)


unpacked_shards = fused_blocks.unpacked_shards


def own_exponents(shards: Tensor, columns: int) -> Blocks:
    """A receiver that takes its own rows' exponents for everyone's."""
    values, exponents = unpacked_shards(shards, columns)
    return Blocks(values, exponents.chunk(2, 1)[dist.get_rank()].repeat(1, 2))


kept: list[Tensor] = []


def stale_exponents(shards: Tensor, columns: int) -> Blocks:
    """A receiver whose exponents are those of the slot's epoch before."""
    values, exponents = unpacked_shards(shards, columns)
    kept.append(exponents)
    return Blocks(values, kept[max(0, len(kept) - 3)])


GATHERS: dict[str, Callable] = {
    "right": unpacked_shards, "own exponents": own_exponents, "stale exponents": stale_exponents
}  # fmt: skip


@on_every_rank(2, pool="interpreted")
def test_gathered_blocks_are_what_their_ranks_quantised() -> None:
    """For three epochs, the third in the first one's slot; and later gathers do not touch them."""
    for name, function in GATHERS.items():
        with mock.patch.object(fused_blocks, "unpacked_shards", function):
            transport, right, gathered = opened(dist.group.WORLD, shard_of(0, 0), transport=FUSED), True, []
            for step in range(3):
                gathered.append(transport.start_gather(shard_of(step, dist.get_rank()))())
            for step, each in enumerate(gathered):
                wanted = reference.quantize_rows(torch.cat([shard_of(step, rank) for rank in range(2)]))
                right &= torch.equal(*(reference.dequantize(x, torch.float32) for x in (each, wanted)))
            assert right == (name == "right"), name


def test_fused_quantises_what_sequential_does(interpreted: WorkerPool) -> None:
    run, given = interpreted(2).run, (blocks_of, cases(2), torch.float32)
    assert run(on_transport, FUSED, *given) == run(on_transport, SEQUENTIAL, *given)


WEIGHTS = {True: (128, 256), False: (256, 128)}  # (N, K) of y = x W^T, or of y = x W, for as many columns


def reduced(name: str, rank: int, scatter: bool, transposed: bool, weights: int) -> Tensor:
    """A reduction of products of so many weights, of whole numbers."""
    generator = torch.Generator().manual_seed(10 * rank + weights)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    shape = WEIGHTS[transposed]
    inputs = [quantize_rows(drawn(6, shape[transposed])) for _ in range(weights)]
    residual = drawn(3 if scatter else 6, shape[not transposed])
    transport = opened(dist.group.WORLD, residual, scatter, name)
    finish = Finish(drawn(shape[not transposed]), None, residual)
    return transport.matmul_reduce(
        inputs, [drawn(*shape) for _ in range(weights)], transposed=transposed, finish=finish
    )[0]


@on_every_rank(2, pool="interpreted")
def test_reductions_of_whole_numbers_are_sequentials_to_the_bit() -> None:
    """Of one weight, and of more than a launch takes."""
    for case in product((True, False), (True, False), (1, 4)):
        found, wanted = (reduced(name, dist.get_rank(), *case) for name in (FUSED, SEQUENTIAL))
        assert_identical(found, wanted, str(case))


@on_every_rank(2, pool="interpreted")
def test_fused_linears_fuse_all_and_say_so() -> None:
    x = shard_of(0, dist.get_rank())
    weight, transport = torch.ones(128, 256), opened(dist.group.WORLD, x, transport=FUSED)
    with ops.record_transports() as ran:
        y = ops.column_linear(x.requires_grad_(), weight.requires_grad_(), transport=transport)
        ops.row_linear(y, torch.ones(256, 128), transport=transport).sum().backward()
    gather, scatter = ("all_gather_matmul", "fused"), ("matmul_reduce_scatter", "fused")
    assert list(ran) == [gather, scatter, gather, scatter]
    whole = opened(dist.group.WORLD, x, False, FUSED)
    assert whole.agreed == transport.agreed == ("fused", "quantized")


@on_every_rank(2, pool="interpreted")
def test_reductions_of_two_precisions_are_told_so() -> None:
    """Before a rank adds what the other has put into tiles of another size."""
    x = torch.ones(4, 128)
    transport = opened(dist.group.WORLD, x, False, FUSED if dist.get_rank() else "fused")
    rows = x if dist.get_rank() == 0 else quantize_rows(x)
    with pytest.raises(RuntimeError, match="quantized_matmul_all_reduce"):
        transport.matmul_reduce([rows], [torch.ones(128, 128)], transposed=True)


def expert_cases(t: int) -> list[Experts]:
    """An expert has no row and another one a single row; a rank has one row, and there is a shared expert."""
    return [Experts(t), Experts(t, 1), Experts(t, 5, shared=True, drop=True)]


def on(transport: str, function: Callable, *args: Any) -> Any:
    """Call the function with this transport, whose reductions may be sequential's."""
    with mock.patch.object(Here, "transport", transport):
        return function(*args)


@pytest.mark.parametrize("t, copies", [(2, False), *in_turns([(2, True), (1, False), (4, False), (4, True)], first=3)])
def test_fused_experts_compute_the_recipe(interpreted: WorkerPool, t: int, copies: bool) -> None:
    several = [*expert_cases(t), *[Experts(t, 4, sequence_parallel=False, shared=True)] * (t == 4)]
    check(partial(interpreted(t).run, sent_by, copies, on, FUSED), several, torch.float32)


def carried_blocks(t: int) -> tuple[list[frozenset[bytes]], list]:
    """What this rank quantises in each case, and what carried it."""
    with ops.record_transports() as carried:
        return blocks_of(expert_cases(t), torch.float32), carried


def test_fused_experts_quantise_what_sequential_does(interpreted: WorkerPool) -> None:
    """A kernel gathers for them in the forward and in the backward, each time."""
    of_fused, of_sequential = (interpreted(2).run(on, each, carried_blocks, 2) for each in (FUSED, SEQUENTIAL))
    for (blocks, carried), (wanted, _) in zip(of_fused, of_sequential, strict=True):
        assert blocks == wanted
        assert carried == [(GATHER, "fused"), (SCATTER, "sequential")] * 2 * len(blocks)


def gathered(transport: str) -> list[Tensor]:
    """Of three steps the products of gathered rows with this rank's experts, and the rows' blocks. All are whole
    numbers times scales: each row of each step and each expert has one of its own."""
    rank, own, found = dist.get_rank(), EXPERTS // 2, []
    generator = torch.Generator().manual_seed(0)
    routing = ops.Routing(Experts(2, 3).experts(), torch.ones(6, CHOSEN))
    sent = Dispatch(dispatch(routing, rank * own, own, EXPERTS, 2))
    for step in range(3):
        transposed = step == 1
        shape = (EXPERTS, HIDDEN, WIDTH) if transposed else (EXPERTS, WIDTH, HIDDEN)
        weights, x = (torch.randint(-2, 3, size, generator=generator).float() for size in (shape, (6, HIDDEN)))
        weights *= 2.0 ** torch.arange(EXPERTS)[:, None, None]
        x *= 2.0 ** torch.arange(6)[:, None] * 4.0**step
        given = opened(dist.group.WORLD, x, True, transport), x.chunk(2)[rank], sent, weights.chunk(2)[rank]
        y, blocks = gather_experts(*given, transposed=transposed)
        found += [y, reference.dequantize(blocks, torch.float32), blocks.exponents.float()]
    return found


def of_another_row(blocks: Blocks) -> Tensor:
    """A rank that sends another row's exponents."""
    return packed_shard(blocks._replace(exponents=blocks.exponents.roll(1, 1).contiguous()))


MISTAKES: dict[str, tuple[Any, str, Callable]] = {
    "right": (fused_blocks, "packed_shard", packed_shard),
    "another row's exponents": (fused_blocks, "packed_shard", of_another_row),
    "the own rank's exponents for all": (fused_blocks, "unpacked_shards", own_exponents),
    "exponents of the epoch before": (fused_blocks, "unpacked_shards", stale_exponents),
    "the first expert's matrix": (Quantized, "expert_right", of_the_first_expert),
    "another expert's scales": (Quantized, "expert_right", of_other_experts),
}


@on_every_rank(2, pool="interpreted")
def test_gathers_of_whole_numbers_are_sequentials_to_the_bit() -> None:
    """And each mistake is noticed by a rank."""
    wanted = gathered(SEQUENTIAL)
    for name, mistake in MISTAKES.items():
        with mock.patch.object(*mistake):
            found = gathered(FUSED)
        assert fails_on_a_rank(partial(assert_identical, found, wanted)) == (name != "right"), name
