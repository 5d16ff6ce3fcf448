"""row_linear on 1 to 3 ranks has the outputs and gradients of activation, linear, dropout and residual in plain torch.
It runs the collectives that its docstring lists, with those bytes; its errors say what to do."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import RankFailure
from shards import Here, assert_close, join, leaves, make, mine
from torch import Tensor

from tpformer import ops
from tpformer.distributed import record_collectives
from tpformer.kernels.norm.reference import norm_forward

P, KEY, SEQ = 0.3, 99, 4


def case(tokens=12, k=12, n=7, activation=None, gated=False, bias=True, residual=True, drop=True, sp=True) -> dict:
    return locals()


def tensors(case: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {"x": (case["tokens"], case["k"]), "weight": (case["n"], case["k"]), "dy": (case["tokens"], case["n"])}
    if case["gated"]:
        shapes["gate"] = shapes["x"]
    if case["bias"]:
        shapes["bias"] = (case["n"],)
    if case["residual"]:
        shapes["residual"] = shapes["dy"]
    return make(1, dtype, **shapes)


def site(case: dict, rank: int, rows: int) -> ops.Dropout | None:
    """The dropout of this rank's rows. Samples come in the order 5, 3, 8, ...: bits follow the index, not the place."""
    if not case["drop"]:
        return None
    samples = torch.tensor([5, 3, 8, 1, 0, 2], device=Here.device)
    return ops.Dropout(ops.dropout_starts(samples, SEQ, case["n"], slice(rank * rows, (rank + 1) * rows)), KEY, P)


def plain(case: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    values = tensors(case, dtype)
    dy = values.pop("dy")
    inputs = leaves(values)
    functions = {None: lambda x: x, "silu": F.silu, "gelu": F.gelu}
    activation = functions.get(case["activation"], lambda x: F.gelu(x, approximate="tanh"))
    a = activation(inputs["gate"]) * inputs["x"] if case["gated"] else activation(inputs["x"])
    y = F.linear(a, inputs["weight"], inputs.get("bias"))
    if case["drop"]:
        y = ops.dropout(y, site(case, 0, len(y)))
    if case["residual"]:
        y = y + inputs["residual"]
    y.backward(dy)
    return {"y": y.detach()} | {f"d{name}": x.grad for name, x in inputs.items()}


def on_rank(case: dict, dtype: torch.dtype) -> tuple[dict[str, Tensor], list, list]:
    values = tensors(case, dtype)
    shard = {"x": 1, "gate": 1, "weight": 1} | ({"residual": 0, "dy": 0} if case["sp"] else {})
    values = {name: mine(x, shard[name]) if name in shard else x for name, x in values.items()}
    dy = values.pop("dy")
    inputs = leaves(values)
    how = {"activation": case["activation"], "sequence_parallel": case["sp"], "group": dist.group.WORLD}
    how |= {"gate": inputs.get("gate"), "residual": inputs.get("residual")}
    how["dropout"] = site(case, dist.get_rank() if case["sp"] else 0, len(dy))
    with record_collectives() as forward:
        y = ops.row_linear(inputs["x"], inputs["weight"], inputs.get("bias"), **how)
    with record_collectives() as backward:
        y.backward(dy)
    return {"y": y.detach()} | {f"d{name}": x.grad for name, x in inputs.items()}, list(forward), list(backward)


def check(ranks, t: int, case: dict, dtype: torch.dtype) -> None:
    results = ranks(t).run(on_rank, case, dtype)
    rows: int | str = 0 if case["sp"] else "equal"
    how = {"y": rows, "dresidual": rows, "dx": 1, "dgate": 1, "dweight": 1, "dbias": "sum" if case["sp"] else "equal"}
    actual = {name: join([result[0][name] for result in results], how[name]) for name in results[0][0]}
    assert_close(actual, plain(case, torch.float64), plain(case, dtype))
    nbytes = case["tokens"] * case["n"] * dtype.itemsize
    for _, forward, backward in results:
        if t == 1:
            assert forward == backward == []
        elif case["sp"]:
            assert (forward, backward) == ([("reduce_scatter", nbytes)], [("all_gather", nbytes)])
        else:
            assert (forward, backward) == ([("all_reduce", nbytes)], [])


def cases(t: int) -> st.SearchStrategy[dict]:
    """Sizes per rank from 1; any combination of activation, gate, bias, residual, dropout, sequence parallelism."""
    return st.builds(
        lambda tokens, k, n, activation, switches: case(tokens, k, n, *activation, *switches),
        st.integers(1, 4).map(lambda n: n * t),
        st.integers(1, 4).map(lambda n: n * t),
        st.integers(1, 9),
        st.sampled_from([(None, False), ("gelu", False), ("gelu_tanh", True), ("silu", True), ("silu", False)]),
        st.tuples(*[st.booleans()] * 4),
    )


@pytest.mark.parametrize("t", [1, 2, 3])
def test_equals_plain_torch(ranks, t):
    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(cases(t))
    def run(case):
        check(ranks, t, case, torch.float64)

    run()


@pytest.mark.parametrize("sp", [True, False])
def test_float32_by_the_error_of_plain_torch(ranks, sp):
    for activation in ((None, False), ("gelu_tanh", False), ("silu", True)):
        check(ranks, 3, case(12, 60, 7, *activation, sp=sp), torch.float32)


def normed_too() -> None:
    for case in itertools.product(("layernorm", "rmsnorm"), ("sequential", "pipelined"), (True, False)):
        check_normed_too(*case)


def check_normed_too(kind: str, transport: str, sp: bool) -> None:
    """With next_norm the norm of the stored result is returned, too, without a gradient; all else stays as it was."""
    values = make(0, torch.float32, x=(12, 4), weight=(5, 4), bias=(5,), norm=(5,), dy=(12, 5))
    dy = mine(values["dy"], 0) if sp else values["dy"]
    inputs = leaves({name: values[name] for name in ("x", "weight", "bias", "norm")})
    norm = ops.Norm(kind, inputs["norm"], None, 1e-5)
    how: dict = {"residual": dy, "group": dist.group.WORLD, "sequence_parallel": sp, "transport": transport}
    how["dropout"] = site({"drop": True, "n": 5}, dist.get_rank() if sp else 0, len(dy))
    plainly = ops.row_linear(inputs["x"], inputs["weight"], inputs["bias"], **how)
    y, normed = ops.row_linear(inputs["x"], inputs["weight"], inputs["bias"], next_norm=norm, **how)
    rows, (mean, rstd) = norm_forward(y.detach(), norm)
    assert torch.equal(y, plainly) and torch.equal(normed.y, rows) and torch.equal(normed.rstd, rstd)
    assert (normed.mean is None) if kind == "rmsnorm" else torch.equal(normed.mean, mean)
    assert y.requires_grad and not any(part.requires_grad for part in normed if part is not None)
    wanted = [inputs[name] for name in ("x", "weight", "bias")]
    for one, other in zip(*(torch.autograd.grad(z, wanted, dy) for z in (plainly, y)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("t", [1, 2])
def test_norm_of_the_result(ranks, t):
    ranks(t).run(normed_too)


def test_inputs_are_left_alone():
    """The epilogue adds in place, but only to its own result."""
    values = make(0, torch.float64, x=(3, 4), weight=(5, 4), bias=(5,), residual=(3, 5))
    before = {name: x.clone() for name, x in values.items()}
    ops.row_linear(values["x"], values["weight"], values["bias"], residual=values["residual"])
    assert all(torch.equal(before[name], x) for name, x in values.items())


def test_wrong_arguments_are_refused():
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    with pytest.raises(ValueError, match="'telepathy'.*choose one of auto, sequential"):
        ops.row_linear(x, weight, transport="telepathy")
    with pytest.raises(ValueError, match="activation='swiglu': choose one of gelu, gelu_tanh, silu, relu2"):
        ops.row_linear(x, weight, activation="swiglu")
    with pytest.raises(ValueError, match=r"a gate needs an activation: give one, for act\(gate\) \* x"):
        ops.row_linear(x, weight, gate=x)
    with pytest.raises(ValueError, match="next_norm with ends_region: nothing follows"):
        ops.row_linear(x, weight, next_norm=ops.Norm("rmsnorm", torch.ones(4), None, 1e-5), ends_region=True)


def indivisible():
    ops.row_linear(torch.randn(5, 2), torch.randn(3, 2), group=dist.group.WORLD)


def test_indivisible_tokens_are_refused(ranks):
    with pytest.raises(RankFailure, match=r"ValueError: .*2 ranks.*5 rows.*pad"):
        ranks(2).run(indivisible)
