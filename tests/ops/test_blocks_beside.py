"""The backward of an activation hands the linear before it the blocks of its gradients, that of dropout and a bias its
own linear's, and that of a norm those of its gradient to the row linear before it, if nobody else sees this gradient.
What these make of them is what they make of gradients that they quantise themselves, whatever happens to them on the
way; linears around a norm compute the recipe of test_quantized_op.py on any number of ranks."""

from collections.abc import Callable
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
from tpformer.distributed import build_mesh
from tpformer.kernels.norm import reference as norms
from tpformer.kernels.quantize.format import Blocks
from tpformer.kernels.quantize.reference import quantize_rows
from tpformer.layers import MLP, TensorParallel, init_weights
from tpformer.ops.transports import quantized
from tpformer.ops.transports.products import Products
from tpformer.ops.transports.quantized import BLOCKS, Quantized, record_blocks
from tpformer.ops.transports.sequential import local
from tpformer.parallel import local_part

LINEAR: dict[str, Any] = {"transport": local(BLOCKS)}
GENERATOR = torch.Generator().manual_seed(0)
ROWS, HIDDEN, WIDTH = 3, 128, 256


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR).requires_grad_()


def untouched(gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return gate, x


def added(gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Each has a second use, and so a sum of two gradients."""
    added.loss = (gate * x).sum()  # type: ignore[attr-defined]
    return gate, x


def hooked(gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A hook writes one gradient in place, and one replaces the other."""
    gate.register_hook(lambda dy: dy.mul_(3).sub_(dy.mean()))
    x.register_hook(lambda dy: dy.flip(0))
    return gate, x


def viewed(gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients pass views."""
    return gate.view(ROWS, 2, -1).flatten(1), x[:, :]


CASES: dict[str, Callable] = {each.__name__: each for each in (untouched, added, hooked, viewed)}


def mlp(case: Callable, gated: bool = True, private: bool = True) -> list[Tensor]:
    """The gradients of an MLP with biases."""
    GENERATOR.manual_seed(1)
    x, *weights = drawn(ROWS, HIDDEN), drawn(WIDTH, HIDDEN), drawn(WIDTH, HIDDEN)
    down, biases = drawn(HIDDEN, WIDTH), [drawn(WIDTH), drawn(WIDTH)]
    outputs = ops.column_linear(x, weights, biases, **LINEAR)
    gate, up = case(*outputs)
    y = ops.row_linear(up, down, activation="silu", gate=gate if gated else None, private=private, **LINEAR)
    loss = y.square().sum()
    if case is added:
        loss = loss + added.loss  # type: ignore[attr-defined]
    return list(torch.autograd.grad(loss, [x, *weights, down, *biases], allow_unused=not gated))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_of_blocks_made_anew(case: Callable) -> None:
    found = mlp(case)
    with mock.patch.object(quantized, "_beside", lambda _: None):
        assert_identical(found, mlp(case))


def uncounted(*outputs: Tensor) -> tuple[Tensor, ...]:
    """Hooks write gradients, and autograd does not count it: nor would it count an all-reduce of them."""

    def write(dy: Tensor) -> None:
        dy.data.mul_(3).sub_(dy.mean())

    for output in outputs:
        output.register_hook(write)
    return outputs


def hooked_layer(which: str) -> list[Tensor]:
    """The gradients of an MLP, of which one layer has such hooks on what it makes."""
    GENERATOR.manual_seed(1)
    tp = TensorParallel(build_mesh("cpu", tensor_parallel=2)["tp"], sequence_parallel=True, precision="fp8")
    part = MLP(HIDDEN, ffn_hidden_size=WIDTH, activation="swiglu", tp=tp, dtype=torch.float64)
    init_weights(part, seed=0)
    part.get_submodule(which).register_forward_hook(lambda module, inputs, y: uncounted(y)[0])
    gradients = torch.autograd.grad(part(drawn(ROWS, HIDDEN)).square().sum(), [*part.parameters()])
    return [local_part(each) for each in gradients]


@on_every_rank(2)
def test_gradients_that_others_see_have_no_blocks() -> None:
    cases = [partial(mlp, uncounted, private=False)]
    cases += [partial(hooked_layer, each) for each in ("gate_proj", "up_proj", "down_proj", "")]
    for case in cases:
        found = case()
        with mock.patch.object(quantized, "_beside", lambda _: None):
            assert_identical(found, case())


def passes(run: Callable, *arguments: Any, width: int = WIDTH) -> tuple[int, int]:
    """(passes that quantise rows as wide as the activation, matrices of such rows that are quantised)."""
    made: list[tuple] = []
    implementation = quantized.implementation
    quantize_rows = implementation("quantize", torch.empty(0)).quantize_rows

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(implementation("quantize", torch.empty(0)), name)

        def quantize_rows(self, x: Tensor) -> Any:
            made.append(tuple(x.shape))
            return quantize_rows(x)

    def counted(op: str, x: Tensor) -> Any:
        return Counted() if op == "quantize" else implementation(op, x)

    with mock.patch.object(quantized, "implementation", counted), record_blocks() as told:
        run(*arguments)
    return made.count((ROWS, width)), [tuple(each.values.shape) for each in told].count((ROWS, width))


def test_no_pass_quantises_what_an_activation_has_quantised() -> None:
    """Only what a hook has changed, and sums. Recorders hear of each matrix once: a, a again, and the gradients."""
    assert passes(mlp, untouched, True) == (0, 4) and passes(mlp, untouched, False) == (0, 3)
    assert passes(mlp, added, True) == passes(mlp, hooked, True) == (2, 4)


def test_blocks_of_a_gradient_that_was_written_are_noticed() -> None:
    right = mlp(hooked)
    with mock.patch.object(quantized, "versions", lambda *_: [0]):
        wrong = mlp(hooked)
    assert any(not torch.equal(x, y) for x, y in zip(wrong, right, strict=True))


def row(dropout: bool, bias: bool, frozen: bool = False, after: bool = False) -> list[Tensor]:
    """The gradients of a row linear with a residual. frozen: its input needs none. after: an activation and another row
    linear are behind it, so that its output's gradient has blocks beside it."""
    GENERATOR.manual_seed(1)
    x, weight, last = drawn(ROWS, HIDDEN), drawn(WIDTH, HIDDEN), drawn(HIDDEN, WIDTH)
    added, shift = drawn(ROWS, WIDTH), drawn(WIDTH)
    site = ops.Dropout(ops.dropout_starts(torch.arange(1), ROWS, WIDTH, slice(0, ROWS)), 5, 0.4) if dropout else None
    given = {"bias": shift if bias else None, "residual": added, "dropout": site}
    y = ops.row_linear(x.detach() if frozen else x, weight, **given, **LINEAR)
    if after:
        y = ops.row_linear(y, last, activation="silu", private=True, **LINEAR)
    loss = (y * torch.linspace(-1, 3, y.numel(), dtype=y.dtype).view(y.shape)).sum()
    gradients = torch.autograd.grad(loss, [x, weight, added, shift, last], allow_unused=True)
    return [each for each in gradients if each is not None]


ROWS_OF = [*product((False, True), repeat=4)]


@pytest.mark.parametrize("case", ROWS_OF)
def test_what_dropout_writes_in_blocks_changes_no_gradient(case: tuple) -> None:
    """Nor blocks: recorders hear of the same ones. The bias's and the residual's gradients are those of 16 bits."""
    with record_blocks() as told:
        found = row(*case)
    with mock.patch.object(Quantized, "finish_gradient", Products.finish_gradient), record_blocks() as others:
        assert_identical(found, row(*case))
    for blocks, other in zip(told, others, strict=True):
        assert_identical([each.view(torch.int8) for each in blocks], [each.view(torch.int8) for each in other])


@pytest.mark.parametrize("case", ROWS_OF)
def test_no_pass_quantises_what_dropout_or_a_bias_has_read(case: tuple) -> None:
    """Nor what has blocks beside it, unless dropout changes it."""
    dropout, bias, _, after = case
    behind = 2 * after  # act(y) and act(y) again
    expected = int(not (dropout or bias or after)), 1 + behind
    assert passes(row, *case, width=WIDTH) == expected


def test_a_gradient_keeps_its_bits_for_others() -> None:
    """Biases, and whoever reads it, find what 16 bits have."""
    GENERATOR.manual_seed(1)
    x, down = drawn(ROWS, WIDTH), drawn(HIDDEN, WIDTH)
    y = ops.row_linear(x, down, activation="silu", **LINEAR)
    (dx,) = torch.autograd.grad(y.sum(), [x])
    assert not vars(dx), "whoever copies or saves it"
    assert (dx != dx.to(torch.float8_e4m3fn).to(dx.dtype)).any()


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
