"""Experts in FP8 compute the recipe of docs/fp8.md on any number of ranks, whether these gather or exchange tokens,
from the same blocks; rows travel to them as 129 bytes for 128 values. The recipe is that of test_quantized_op.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import shards
import torch
import torch.distributed as dist
import torch.nn.functional as F
from opened import opened
from pool import WorkerPool
from shards import Here, check, inputs_of, mine_of, on_device, on_ranks, on_transport, plain
from test_exchanged_experts import FAKE_HIDDEN, FAKE_RANKS, FAKE_ROWS, FAKE_SLOTS, bytes_sent
from test_quantized_op import PIPELINED, SEQUENTIAL, blocks_of, own_exponents, recipe, sent_as_blocks, unpacked_rows
from testing import assert_kernel_close, differ_on_a_rank, on_every_rank
from torch import Tensor
from turns import in_turns

from tpformer import ops
from tpformer.kernels.quantize.format import Blocks
from tpformer.ops.transports import quantized
from tpformer.ops.transports.quantized import BLOCKS, Quantized
from tpformer.ops.transports.sequential import local

HIDDEN, WIDTH, CHOSEN = 256, 128, 2
EXPERTS, EMPTY, ONE_ROW = 4, 2, 1  # of EMPTY no token is, and of ONE_ROW the last one alone
OPTIONS: dict[str, Any] = {"n_experts": EXPERTS, "activation": "silu"}


@dataclass(frozen=True)
class Experts:
    """`experts` of a given routing, or with `exchange` exchanged_experts, whose ranks have rows of their own."""

    t: int
    tokens: int = 3
    sequence_parallel: bool = True
    shared: bool = False
    exchange: bool = False
    drop: bool = False

    def inputs(self):
        rows = self.t * self.tokens
        x, routed = (0, 0 if self.exchange else "equal") if self.sequence_parallel else ("equal", "equal")
        shapes = {"x": ((rows, HIDDEN), x), "residual": ((rows, HIDDEN), x), "weights": ((rows, CHOSEN), routed)}
        shapes |= {"gate_up": ((EXPERTS, 2 * WIDTH, HIDDEN), 0), "down": ((EXPERTS, HIDDEN, WIDTH), 0)}
        if self.shared:
            wide = self.t * WIDTH
            shapes |= dict.fromkeys(("shared_gate", "shared_up"), ((wide, HIDDEN), 0))
            shapes |= {"shared_down": ((HIDDEN, wide), 1)}
        return shapes

    def outputs(self):
        return {"y": self.inputs()["x"]}

    def experts(self) -> Tensor:
        """(T, K): of each token."""
        rows = self.t * self.tokens
        chosen = torch.tensor([0, 3]).repeat(rows, 1)
        chosen[-1, 0] = ONE_ROW
        return chosen.to(Here.device, torch.int32)

    def plain(self, x, residual, weights, gate_up, down, shared_gate=None, shared_up=None, shared_down=None):
        y, experts = torch.zeros_like(residual), self.experts()
        for e in range(EXPERTS):
            token, place = (experts == e).nonzero(as_tuple=True)
            gate, up = recipe(x[token], gate_up[e]).chunk(2, 1)
            a = weights[token, place, None] * F.silu(gate) * up
            y = y.index_add(0, token, recipe(a, down[e]))
        if self.shared:
            y = y + recipe(F.silu(recipe(x, shared_gate)) * recipe(x, shared_up), shared_down)
        return {"y": residual + ops.dropout(y, self.site(0, len(y)))}

    def site(self, rank: int, rows: int) -> ops.Dropout | None:
        """The dropout of a rank's rows."""
        own = slice(rank * rows, (rank + 1) * rows)
        return ops.Dropout(ops.dropout_starts(torch.arange(1), 1024, HIDDEN, own), 7, 0.4) if self.drop else None

    def ours(self, group, x, residual, weights, **matrices):
        experts, given = self.experts(), ops.ExpertWeights(**matrices)
        site = self.site(dist.get_rank() if self.sequence_parallel else 0, len(x))
        options = {**OPTIONS, "residual": residual, "dropout": site}
        if self.exchange:
            own = experts.chunk(self.t)[dist.get_rank()]
            y, _ = ops.exchanged_experts(
                x, given, routing=ops.Routing(own, weights), group=group, transport=local(BLOCKS), **options
            )
            return {"y": y}
        transport = opened(group, x, self.sequence_parallel, Here.transport)
        routing = ops.Routing(experts, weights)
        y, _ = ops.experts(x, given, routing=routing, transport=transport, **options)
        return {"y": y}

    def calls(self, itemsize):
        rows = self.t * self.tokens
        nbytes, routed = rows * HIDDEN * itemsize, ("all_reduce", rows * CHOSEN * max(itemsize, 4))
        gather, scatter, reduce = (name and (name, nbytes) for name in ("all_gather", "reduce_scatter", "all_reduce"))
        if self.sequence_parallel:
            return sent_as_blocks(([gather, scatter], [gather, gather, scatter, routed]), itemsize)
        return [reduce], [reduce, routed]


def cases(t: int) -> list[Experts]:
    """Rows of all ranks from 1 to 130."""
    some = [Experts(t), Experts(t, 130 // t, shared=True, drop=True), Experts(t, 1)]
    return [*some, Experts(t, 4, sequence_parallel=False, shared=True, drop=True)]


@pytest.mark.parametrize("t, transport", [
    (2, SEQUENTIAL), (4, PIPELINED), *in_turns([(1, SEQUENTIAL), (2, PIPELINED)], first=4)
])  # fmt: skip
def test_any_number_of_ranks_computes_the_recipe(ranks: WorkerPool, t: int, transport: str) -> None:
    check(partial(ranks(t).run, on_transport, transport), cases(t), torch.float64)


def test_bfloat16_has_the_error_of_the_recipe(ranks: WorkerPool) -> None:
    check(partial(ranks(2).run, on_transport, SEQUENTIAL), [Experts(2, 8)], torch.bfloat16)


def results_of(case: Experts, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """This rank's outputs and gradients."""
    return on_ranks([case], dtype)[0][0]


def expected(case: Experts, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """This rank's part of what plain torch makes of all tokens."""
    found, places = plain(case, dtype), case.inputs() | case.outputs()
    return mine_of(found, {name: places[name.removeprefix("d")] for name in found})


@on_every_rank(1, 2, 4)
def test_ranks_that_exchange_tokens_compute_the_recipe() -> None:
    for tokens in (1, 3, 33):
        case = Experts(dist.get_world_size(), tokens, exchange=True, drop=tokens == 3)
        assert not differ_on_a_rank(results_of(case), expected(case)), case


@pytest.mark.gpu
@on_every_rank(2, pool="one_gpu")
def test_on_a_gpu() -> None:
    """The kernels compute what has come by gloo; one rank's experts have a single row."""
    dtype = torch.bfloat16
    for case in (Experts(2, 8, exchange=True), Experts(2, 8, shared=True)):
        with mock.patch.object(Here, "transport", SEQUENTIAL):
            found = on_device("cuda:0", results_of, case, dtype)
        oracle, baseline = expected(case), expected(case, dtype)
        for name, x in found.items():
            assert_kernel_close(x, oracle[name], baseline[name], f"{name} of {case}")


def test_ranks_quantise_the_blocks_of_one_process(ranks: WorkerPool) -> None:
    def joined(t: int, transport: str, *some: Experts) -> list[frozenset[bytes]]:
        by_rank = ranks(t).run(on_transport, transport, blocks_of, some, torch.float64)
        return [frozenset().union(*each) for each in zip(*by_rank, strict=True)]

    one = joined(1, SEQUENTIAL, Experts(1, 12), Experts(1, 12))
    assert one[0] == one[1] and len(one[0]) > 100
    for t, transport in ((2, SEQUENTIAL), (2, PIPELINED), (4, SEQUENTIAL)):
        assert joined(t, transport, Experts(t, 12 // t), Experts(t, 12 // t, exchange=True)) == one


def of_other_rows(self: Quantized, x: Blocks, *more: Any) -> Tensor:
    return expert_product(self, Blocks(x.values, x.exponents.roll(1, 1).contiguous()), *more)


def of_the_first_expert(self: Quantized, weights: Tensor, transposed: bool) -> Any:
    return expert_right(self, weights[:1].expand_as(weights), transposed)


def of_other_experts(self: Quantized, weights: Tensor, transposed: bool) -> Any:
    """The scales of another expert's blocks."""
    (blocks, weight), turned = expert_right(self, weights, transposed)
    shift = blocks.exponents.shape[transposed] // len(weights)
    exponents = blocks.exponents.roll(shift, int(transposed))
    return (quantized.Right(Blocks(blocks.values, exponents), weight), turned)


def of_ones(self: Quantized, factor: Blocks, dtype: torch.dtype) -> Tensor:
    return factor.values.to(dtype)


expert_product, expert_right = Quantized.expert_product, Quantized.expert_right
MISTAKES: dict[str, tuple[Any, str, Callable]] = {
    "right": (quantized, "unpacked_rows", unpacked_rows),
    "the own rank's exponents for all": (quantized, "unpacked_rows", own_exponents),
    "another row's exponents": (Quantized, "expert_product", of_other_rows),
    "the first expert's matrix": (Quantized, "expert_right", of_the_first_expert),
    "another expert's scales": (Quantized, "expert_right", of_other_experts),
    "weight gradients without scales": (Quantized, "matrix", of_ones),
}


@on_every_rank(2)
def test_what_is_quantised_otherwise_is_noticed() -> None:
    """Rows and experts of widely different sizes, so that scales matter."""
    case = Experts(2, 4, shared=True)
    made = inputs_of(case, torch.float64)
    made["x"] *= 2.0 ** torch.arange(8)[:, None]
    made["gate_up"] *= 2.0 ** torch.arange(EXPERTS)[:, None, None]
    made["down"] *= 2.0 ** torch.arange(EXPERTS)[:, None, None]
    with mock.patch.object(shards, "inputs_of", lambda *_: made), mock.patch.object(Here, "transport", SEQUENTIAL):
        wanted = expected(case)
        for name, mistake in MISTAKES.items():
            with mock.patch.object(*mistake):
                found = results_of(case)
            assert differ_on_a_rank(found, wanted) == (name != "right"), name


def test_rows_travel_as_blocks_to_their_experts_and_home_in_16_bits() -> None:
    """129 / 256 of the bytes out, all of them back."""
    home, slots = 2 * FAKE_ROWS * FAKE_HIDDEN, 4 * FAKE_SLOTS
    out = home // 256 * 129
    assert bytes_sent(transport=local(BLOCKS)) == [16 * FAKE_RANKS, 2 * slots, out, home, out, out, home, slots]
