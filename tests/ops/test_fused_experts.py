"""Experts in FP8 on the fused transport compute the recipe of test_quantized_op.py, from the blocks that sequential
gathers and quantises, in Triton's interpreter. Each mistake with what was gathered is caught."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from opened import opened
from pool import WorkerPool
from shards import Here, check, on_ranks
from test_fused_blocks import own_exponents, sent_by, stale_exponents
from test_quantized_experts import CHOSEN, EXPERTS, HIDDEN, WIDTH, Experts, of_other_experts, of_the_first_expert
from test_quantized_op import FUSED, SEQUENTIAL
from testing import assert_identical, fails_on_a_rank, on_every_rank
from torch import Tensor
from turns import in_turns

pytest.importorskip("triton")

from checks.quantized_blocks import digests
from tpformer import ops
from tpformer.kernels.all_gather_quantized_matmul.reference import packed_shard
from tpformer.kernels.quantize.format import Blocks
from tpformer.kernels.quantize.reference import dequantize
from tpformer.ops.dispatch import Dispatch, dispatch
from tpformer.ops.transports import fused_blocks
from tpformer.ops.transports.experts import gather_experts
from tpformer.ops.transports.interface import GATHER, SCATTER
from tpformer.ops.transports.quantized import Quantized, record_blocks


def cases(t: int) -> list[Experts]:
    """An expert has no row and another one a single row; a rank has one row, and there is a shared expert."""
    return [Experts(t), Experts(t, 1), Experts(t, 5, shared=True, drop=True)]


def on(transport: str, function: Callable, *args: Any) -> Any:
    """Call the function with this transport, whose reductions may be sequential's."""
    with mock.patch.object(Here, "transport", transport):
        return function(*args)


@pytest.mark.parametrize("t, copies", [(2, False), *in_turns([(2, True), (1, False), (4, False), (4, True)], first=3)])
def test_fused_experts_compute_the_recipe(interpreted: WorkerPool, t: int, copies: bool) -> None:
    several = [*cases(t), *[Experts(t, 4, sequence_parallel=False, shared=True)] * (t == 4)]
    check(partial(interpreted(t).run, sent_by, copies, on, FUSED), several, torch.float32)


def blocks_of(t: int) -> tuple[list[frozenset[bytes]], list]:
    """What this rank quantises in each case, forward and backward, and what carried them."""
    found = []
    with ops.record_transports() as carried:
        for case in cases(t):
            with record_blocks() as made:
                on_ranks([case], torch.float32)
            found.append(digests(made))
    return found, list(carried)


def test_fused_quantises_what_sequential_does(interpreted: WorkerPool) -> None:
    """And a kernel gathers for experts in the forward and in the backward, each time."""
    of_fused, of_sequential = (interpreted(2).run(on, each, blocks_of, 2) for each in (FUSED, SEQUENTIAL))
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
        found += [y, dequantize(blocks, torch.float32), blocks.exponents.float()]
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
