"""The backward of a norm hands the row linear before it the blocks of its gradient, if nobody else sees this gradient.
Both linears compute the recipe of test_quantized_op.py on any number of ranks, with every gradient."""

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from linears import norm_of
from opened import opened
from pool import WorkerPool
from shards import Here, check, inputs_of, leaves, on_ranks, on_transport
from test_quantized_op import PIPELINED, SEQUENTIAL, Fp8Column, Fp8Row
from testing import assert_identical, differ_on_a_rank, on_every_rank
from torch import Tensor

from tpformer import ops
from tpformer.kernels.norm import reference as norms
from tpformer.kernels.quantize.format import Blocks
from tpformer.kernels.quantize.reference import quantize_rows
from tpformer.ops.transports import quantized
from tpformer.ops.transports.quantized import Quantized, record_blocks

WIDTH = 256


@dataclass(frozen=True)
class Between:
    """A row linear with a residual, and a norm with two column linears behind it, which carry its rows on."""

    t: int
    tokens: int = 3
    norm: tuple[str, bool] = ("rmsnorm", False)
    sequence_parallel: bool = True
    private: bool = True

    @property
    def row(self) -> Fp8Row:
        options: dict = {"bias": False, "drop": False, "sequence_parallel": self.sequence_parallel}
        return Fp8Row(self.t, self.tokens, WIDTH // self.t, WIDTH, **options)

    @property
    def column(self) -> Fp8Column:
        options: dict = {"bias": False, "carry": True, "sequence_parallel": self.sequence_parallel}
        return Fp8Column(self.t, self.tokens, WIDTH, (128, 256), self.norm, **options)

    def inputs(self):
        return self.column.inputs() | self.row.inputs()

    def outputs(self):
        return self.column.outputs()

    def plain(self, x, weight, residual, **given):
        return self.column.plain(self.row.plain(x, weight, residual=residual)["y"], **given)

    def ours(self, group, x, weight, residual, norm_weight, weight0, weight1, norm_bias=None):
        how: dict = {"transport": opened(group, x, self.sequence_parallel, Here.transport)}
        y = ops.row_linear(x, weight, residual=residual, **how)
        norm = norm_of(self.norm[0], norm_weight, norm_bias)
        ys = ops.column_linear(y, [weight0, weight1], norm=norm, carry=True, private=self.private, **how)
        return dict(zip(self.outputs(), ys, strict=True))

    def calls(self, itemsize):
        return tuple(map(list.__add__, self.row.calls(itemsize), self.column.calls(itemsize)))


def cases(t: int) -> list[Between]:
    """Rows of a rank: 3, 1, 4."""
    return [
        Between(t),
        Between(t, 1, ("layernorm", True)),
        Between(t, 4, ("layernorm", False), sequence_parallel=False),
        Between(t, private=False),
    ]


@pytest.mark.parametrize("t, transport", [(1, SEQUENTIAL), (2, SEQUENTIAL), (2, PIPELINED)])
def test_any_number_of_ranks_computes_the_recipe(ranks: WorkerPool, t: int, transport: str) -> None:
    check(partial(ranks(t).run, on_transport, transport), cases(t), torch.float64)


def results(case: Between) -> tuple[dict[str, Tensor], list[Blocks]]:
    """This rank's outputs and gradients, and what it quantised."""
    with mock.patch.object(Here, "transport", SEQUENTIAL), record_blocks() as made:
        return on_ranks([case], torch.float64)[0][0], made


@on_every_rank(2)
def test_gradients_and_blocks_are_those_of_a_pass() -> None:
    for case in cases(2):
        found, made = results(case)
        with mock.patch.object(quantized, "_beside", lambda _: None):
            expected, others = results(case)
        assert_identical(found, expected)
        for blocks, other in zip(made, others, strict=True):
            assert_identical(*([each.view(torch.int8) for each in some] for some in (blocks, other)))


@on_every_rank(1)
def test_the_residuals_gradient_has_no_blocks() -> None:
    """It is the same tensor, and others see it."""
    case = Between(1)
    given = leaves(inputs_of(case, torch.float64))
    with mock.patch.object(Here, "transport", SEQUENTIAL):
        outputs = case.ours(dist.group.WORLD, **given)
    with mock.patch.object(Quantized, "norm_gradients", autospec=True, side_effect=Quantized.norm_gradients) as called:
        (gradient,) = torch.autograd.grad(sum(y.sum() for y in outputs.values()), [given["residual"]])
    assert called.call_args.args[-1] and not vars(gradient)


norm_backward = norms.norm_backward


def without_the_residual(dy: Tensor, *given: Any, blocks: bool = False) -> Any:
    """Blocks of the gradient before the residual's is added."""
    found = norm_backward(dy, *given)
    return (*found, quantize_rows(norm_backward(dy, *given[:3])[0])) if blocks else found


def of_another_row(*given: Any, blocks: bool = False) -> Any:
    *found, made = norm_backward(*given, blocks=True)
    return (*found, Blocks(made.values, made.exponents.flip(1))) if blocks else tuple(found)


@on_every_rank(2)
def test_wrong_blocks_are_noticed_where_they_are_taken() -> None:
    for private, mistake in product((True, False), (norm_backward, without_the_residual, of_another_row)):
        case = Between(2, private=private)
        right, _ = results(case)
        with mock.patch.object(norms, "norm_backward", mistake):
            found, _ = results(case)
        assert differ_on_a_rank(found, right) == (private and mistake is not norm_backward), (private, mistake)
