"""The backward of an activation hands the linear before it the blocks of its gradients. What that linear makes of them
is what it makes of gradients that it quantises itself, whatever happens to them on the way."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from testing import assert_identical, on_every_rank
from torch import Tensor

from tpformer import ops
from tpformer.distributed import build_mesh
from tpformer.layers import MLP, TensorParallel, init_weights
from tpformer.ops.transports import quantized
from tpformer.ops.transports.quantized import BLOCKS, record_blocks
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


def passes(case: Callable, gated: bool) -> tuple[int, int]:
    """(passes that quantise rows as wide as the activation, matrices of such rows that are quantised)."""
    made, implementation = [], quantized.implementation
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
        mlp(case, gated)
    return made.count((ROWS, WIDTH)), [tuple(each.values.shape) for each in told].count((ROWS, WIDTH))


def test_no_pass_quantises_what_an_activation_has_quantised() -> None:
    """Only what a hook has changed, and sums. Recorders hear of each matrix once: a, a again, and the gradients."""
    assert passes(untouched, True) == (0, 4) and passes(untouched, False) == (0, 3)
    assert passes(added, True) == passes(hooked, True) == (2, 4)


def test_blocks_of_a_gradient_that_was_written_are_noticed() -> None:
    right = mlp(hooked)
    with mock.patch.object(quantized, "versions", lambda *_: [0]):
        wrong = mlp(hooked)
    assert any(not torch.equal(x, y) for x, y in zip(wrong, right, strict=True))


def test_a_gradient_keeps_its_bits_for_others() -> None:
    """Biases, and whoever reads it, find what 16 bits have."""
    GENERATOR.manual_seed(1)
    x, down = drawn(ROWS, WIDTH), drawn(HIDDEN, WIDTH)
    y = ops.row_linear(x, down, activation="silu", **LINEAR)
    (dx,) = torch.autograd.grad(y.sum(), [x])
    assert not vars(dx), "whoever copies or saves it"
    assert (dx != dx.to(torch.float8_e4m3fn).to(dx.dtype)).any()
