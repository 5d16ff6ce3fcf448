"""column_linear and row_linear have the outputs and gradients of plain torch, and run exactly the collectives of their
docstrings, with their bytes. On one rank they have F.linear's bits. Their errors say what to do."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from linears import EPS, Column, Row, columns, rows
from opened import opened
from shards import check, leaves, make, mine, on_transport
from testing import assert_identical, on_every_rank
from turns import in_turns

from tpformer import ops
from tpformer.distributed import record_collectives
from tpformer.kernels.norm.reference import norm_forward

BOTH = [ops.column_linear, ops.row_linear]


@pytest.mark.parametrize("t", [1, 3, *in_turns([2], first=0)])
@pytest.mark.parametrize("linear", [columns, rows])
def test_equals_plain_torch(ranks, linear, t):
    @settings(max_examples=4)
    @given(st.lists(linear(t), min_size=6, max_size=6))
    def run(cases):
        for transport in ("sequential", "pipelined"):
            check(partial(ranks(t).run, on_transport, transport), cases, torch.float64)

    run()


@pytest.mark.parametrize("transport", ["sequential", "pipelined"])
def test_low_precision_by_the_error_of_plain_torch(ranks, transport):
    cases = [Column(3, 4, 33, (4,)), Column(3, 4, 33, (4, 2), ("rmsnorm", False))]
    cases += [Column(3, 4, 33, (4, 2), ("layernorm", True), carry=True)]
    cases += [Row(3, 4, 20, activation=each) for each in ((None, False), ("gelu_tanh", False), ("silu", True))]
    run = partial(ranks(3).run, on_transport, transport)
    for sequence_parallel in (True, False):
        several = [replace(case, sequence_parallel=sequence_parallel) for case in cases]
        check(run, several, torch.float32)
        check(run, several[:1], torch.bfloat16)


@on_every_rank(1)
def test_one_rank_has_the_bits_of_linear() -> None:
    """A group of one is none. Some BLAS take 1 row for a product with a vector; 33 x 65 leaves tails, 64 x 64 none."""
    dtypes, shapes = (torch.float32, torch.float64, torch.bfloat16), ((1, 7, 5), (33, 65, 17), (64, 64, 64))
    for dtype, (m, k, n), biased, group in itertools.product(dtypes, shapes, (False, True), (None, dist.group.WORLD)):
        given = make(0, dtype, input=(m, k), weight=(n, k), **({"bias": (n,)} if biased else {}))
        inputs, dy = list(leaves(given).values()), make(1, dtype, y=(m, n))["y"]
        expected = F.linear(*inputs)
        for operation in BOTH:
            y = operation(*inputs, transport=opened(group, inputs[0]))
            gradients = [torch.autograd.grad(each, inputs, dy, retain_graph=True) for each in (y, expected)]
            assert_identical([y, gradients[0]], [expected, gradients[1]], f"{operation} {dtype}, {m} x {n} x {k}")


@on_every_rank(2)
def test_a_frozen_input_moves_no_gradient() -> None:
    """The backward gathers x for the weight's gradient only, and reduces the gradient of x only."""
    nbytes = 4 * 3 * 4
    for name, call in (("x", "all_gather"), ("weight", "reduce_scatter")):
        inputs = make(dist.get_rank(), torch.float32, x=(2, 3), weight=(5, 3))
        x, weight = (value.requires_grad_(key != name) for key, value in inputs.items())
        with record_collectives() as forward:
            y = ops.column_linear(x, weight, transport=opened(dist.group.WORLD, x))
        with record_collectives() as backward:
            y.sum().backward()
        assert (x.grad is None) == (name == "x") and (weight.grad is None) == (name == "weight")
        assert (forward, backward) == ([("all_gather", nbytes)], [(call, nbytes)])


def test_unused_output_of_several():
    """The weight of one of q, k, v that is not used gets no gradient, as that of a linear of its own."""
    x, a, b = (torch.randn(shape, requires_grad=True) for shape in ((3, 4), (2, 4), (5, 4)))
    used, _ = ops.column_linear(x, [a, b])
    used.sum().backward()
    assert b.grad is None and torch.equal(x.grad, a.sum(0).expand(3, 4)) and a.grad.any()


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_normed_rows_take_the_place_of_the_norm(kind):
    """With norm(x) given, the bits are the same. The GEMM does read the given rows, as zeros in their place show."""
    values = leaves(make(0, torch.float64, x=(6, 5), weight=(4, 5), norm_weight=(5,), dy=(6, 4)))
    norm = ops.Norm(kind, values["norm_weight"], None, EPS)
    y, (mean, rstd) = norm_forward(values["x"].detach(), norm._replace(weight=norm.weight.detach()))
    inputs = [values[name] for name in ("x", "weight", "norm_weight")]
    results = []
    for normed in (None, ops.Normed(y, mean, rstd)):
        out = ops.column_linear(values["x"], values["weight"], norm=norm, normed=normed)
        results.append([out, torch.autograd.grad(out, inputs, values["dy"].detach())])
    assert_identical(*results)
    assert not ops.column_linear(values["x"], values["weight"], norm=norm, normed=ops.Normed(0 * y, mean, rstd)).any()


@on_every_rank(1, 2)
def test_norm_of_the_result() -> None:
    """With next_norm the norm of the stored result is returned, too, without a gradient; all else stays as it was."""
    case = Row(dist.get_world_size(), 12 // dist.get_world_size(), n=5)
    each = itertools.product(("layernorm", "rmsnorm"), ("sequential", "pipelined"), (True, False))
    for kind, transport, sequence_parallel in each:
        values = make(0, torch.float32, x=(12, 4), weight=(5, 4), bias=(5,), norm=(5,), dy=(12, 5))
        dy = mine(values.pop("dy"), 0 if sequence_parallel else "equal")
        x, weight, bias, norm_weight = leaves(values).values()
        norm = ops.Norm(kind, norm_weight, None, EPS)
        how: dict = {"transport": opened(dist.group.WORLD, x, sequence_parallel, transport)}
        how |= {"residual": dy, "dropout": case.site(dist.get_rank() if sequence_parallel else 0, len(dy))}
        plainly = ops.row_linear(x, weight, bias, **how)
        y, normed = ops.row_linear(x, weight, bias, next_norm=norm, **how)
        expected, (mean, rstd) = norm_forward(y.detach(), norm)
        assert_identical([y, *normed[:3]], [plainly, expected, None if kind == "rmsnorm" else mean, rstd])
        assert y.requires_grad and not any(part.requires_grad for part in normed[:3] if part is not None)
        assert_identical(*(torch.autograd.grad(z, [x, weight, bias], dy) for z in (y, plainly)))
        assert normed.of[0] is y  # which column_linear takes without checking the norm again, and others not
        with pytest.raises(ValueError, match="normed was made by row_linear of other rows"):
            ops.column_linear(y[:1], weight.new_ones(2, 5), norm=norm, normed=normed)


@pytest.mark.parametrize("operation, options, words", [
    (ops.column_linear, {"normed": ops.Normed(None, None, None)}, "normed without norm: give the norm"),
    (ops.column_linear, {"weight": [torch.ones(4, 3)] * 2, "bias": [None]}, "2 weights but 1 biases: pass one bias"),
    (ops.row_linear, {"activation": "swiglu"}, "activation='swiglu': choose one of gelu, gelu_tanh, silu, relu2"),
    (ops.row_linear, {"gate": torch.ones(2, 3)}, r"a gate needs an activation: give one, for act\(gate\) \* x"),
])  # fmt: skip
def test_wrong_arguments_are_refused(operation, options, words):
    with pytest.raises(ValueError, match=words):
        operation(torch.ones(2, 3), **{"weight": torch.ones(4, 3), **options})


@on_every_rank(2)
def test_indivisible_tokens_are_refused() -> None:
    x = torch.ones(5, 2)
    for transport in ("sequential", "pipelined"):
        with pytest.raises(ValueError, match="2 ranks.*5 rows.*pad"):
            ops.row_linear(x, torch.ones(3, 2), transport=opened(dist.group.WORLD, x, transport=transport))
