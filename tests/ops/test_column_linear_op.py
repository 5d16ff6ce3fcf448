"""column_linear on 1 to 3 ranks has the outputs and gradients of norm and linear in plain torch. It runs exactly the
collectives of its docstring, with their bytes; its errors say what to do."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import assert_close, join, leaves, make, mine
from torch import Tensor

from tpformer import ops
from tpformer.distributed import record_collectives
from tpformer.kernels.norm.reference import norm_forward

EPS = 1e-5


def case(
    tokens=12, k=10, widths=(12,), kind=None, norm_bias=False, bias=True, sequence_parallel=True, seed=0, carry=False
) -> dict:
    return locals()


def tensors(case: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {"x": (case["tokens"], case["k"])}
    if case["kind"]:
        shapes["norm_weight"] = (case["k"],)
        if case["norm_bias"]:
            shapes["norm_bias"] = (case["k"],)
    for i, width in enumerate(case["widths"]):
        shapes |= {f"weight{i}": (width, case["k"]), f"dy{i}": (case["tokens"], width)}
        # only the first weight has a bias, so that a None among biases occurs
        if case["bias"] and i == 0:
            shapes[f"bias{i}"] = (width,)
    return make(case["seed"], dtype, **shapes, dcarried=shapes["x"])


def plain(case: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    values = tensors(case, dtype)
    dys, dcarried = [values.pop(f"dy{i}") for i in range(len(case["widths"]))], values.pop("dcarried")
    inputs = leaves(values)
    normed, size = inputs["x"], (case["k"],)
    if case["kind"] == "layernorm":
        normed = F.layer_norm(normed, size, inputs["norm_weight"], inputs.get("norm_bias"), EPS)
    elif case["kind"] == "rmsnorm":
        normed = F.rms_norm(normed, size, inputs["norm_weight"], EPS)
    ys = [F.linear(normed, inputs[f"weight{i}"], inputs.get(f"bias{i}")) for i in range(len(dys))]
    carried = [(inputs["x"].clone(), dcarried)] if case["carry"] else []
    torch.autograd.backward(*zip(*zip(ys, dys, strict=True), *carried, strict=True))
    return {f"y{i}": y.detach() for i, y in enumerate(ys)} | {f"d{n}": x.grad for n, x in inputs.items()}


def on_rank(case: dict, dtype: torch.dtype) -> tuple[dict[str, Tensor], list, list]:
    values, n = tensors(case, dtype), len(case["widths"])
    dys, dcarried = [mine(values.pop(f"dy{i}"), 1) for i in range(n)], values.pop("dcarried")
    shard = {"x": 0} if case["sequence_parallel"] else {}
    shard |= {name: 0 for name in values if name.startswith(("weight", "bias"))}
    inputs = leaves({name: mine(x, shard[name]) if name in shard else x for name, x in values.items()})
    norm = None
    if case["kind"]:
        norm = ops.Norm(case["kind"], inputs["norm_weight"], inputs.get("norm_bias"), EPS)
    weights, biases = [inputs[f"weight{i}"] for i in range(n)], [inputs.get(f"bias{i}") for i in range(n)]
    single = n == 1
    how = {"norm": norm, "carry": case["carry"], "sequence_parallel": case["sequence_parallel"]}
    given = (weights[0], biases[0]) if single else (weights, biases)
    with record_collectives() as forward:
        ys = ops.column_linear(inputs["x"], *given, group=dist.group.WORLD, **how)
    ys = (ys,) if single and not case["carry"] else ys
    if case["carry"]:
        *ys, carried = ys
        assert carried.data_ptr() == inputs["x"].data_ptr()
        ys, dys = [*ys, carried], [*dys, mine(dcarried, 0) if case["sequence_parallel"] else dcarried]
    with record_collectives() as backward:
        torch.autograd.backward(ys, dys)
    results = {f"y{i}": y.detach() for i, y in enumerate(ys[:n])} | {f"d{name}": x.grad for name, x in inputs.items()}
    return results, list(forward), list(backward)


def check(ranks, t: int, case: dict, dtype: torch.dtype) -> None:
    results = ranks(t).run(on_rank, case, dtype)
    parallel = case["sequence_parallel"]
    how = {"y": 1, "x": 0 if parallel else "equal", "norm": "sum" if parallel else "equal", "weight": 0, "bias": 0}
    parts = {name: re.fullmatch("d?(y|x|norm|weight|bias).*", name)[1] for name in results[0][0]}
    actual = {name: join([result[0][name] for result in results], how[part]) for name, part in parts.items()}
    assert_close(actual, plain(case, torch.float64), plain(case, dtype))
    nbytes = case["tokens"] * case["k"] * dtype.itemsize
    for _, forward, backward in results:
        if t == 1:
            assert forward == backward == []
        elif parallel:
            assert forward == [("all_gather", nbytes)]
            assert sorted(backward) == [("all_gather", nbytes), ("reduce_scatter", nbytes)]
        else:
            assert (forward, backward) == ([], [("all_reduce", nbytes)])


def cases(t: int) -> st.SearchStrategy[dict]:
    """Sizes per rank from 1, also odd and prime. Several weights of unlike widths share the gather."""
    return st.builds(
        lambda tokens, k, widths, norm, bias, parallel, carry: case(
            tokens, k, widths, *norm, bias, parallel, carry=carry
        ),
        st.integers(1, 4).map(lambda n: n * t),
        st.integers(3, 9),
        st.lists(st.integers(1, 5).map(lambda n: n * t), min_size=1, max_size=3),
        st.sampled_from([(None, False), ("layernorm", True), ("layernorm", False), ("rmsnorm", False)]),
        *[st.booleans()] * 3,
    )


@pytest.mark.parametrize("t", [1, 2, 3])
def test_equals_plain_torch(ranks, t):
    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(cases(t))
    def run(case):
        check(ranks, t, case, torch.float64)

    run()


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_low_precision_by_the_error_of_plain_torch(ranks, sequence_parallel):
    for dtype in (torch.float32, torch.bfloat16):
        check(ranks, 2, case(12, 33, (12,), sequence_parallel=sequence_parallel), dtype)
    check(ranks, 2, case(12, 33, (12, 6), "rmsnorm", sequence_parallel=sequence_parallel), torch.float32)
    with_bias = case(12, 33, (12, 6), "layernorm", True, sequence_parallel=sequence_parallel, carry=True)
    check(ranks, 2, with_bias, torch.float32)


def frozen(name: str) -> tuple[list, list]:
    values = make(dist.get_rank(), torch.float32, x=(2, 3), weight=(5, 3))
    x, weight = (value.requires_grad_(key != name) for key, value in values.items())
    with record_collectives() as forward:
        y = ops.column_linear(x, weight, group=dist.group.WORLD)
    with record_collectives() as backward:
        y.sum().backward()
    assert (x.grad is None) == (name == "x") and (weight.grad is None) == (name == "weight")
    return list(forward), list(backward)


@pytest.mark.parametrize("name, call", [("x", "all_gather"), ("weight", "reduce_scatter")])
def test_a_frozen_input_moves_no_gradient(ranks, name, call):
    """The backward gathers x for the weight's gradient only, and reduces the gradient of x only."""
    nbytes = 4 * 3 * 4
    assert ranks(2).run(frozen, name) == [([("all_gather", nbytes)], [(call, nbytes)])] * 2


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
        results.append([out.detach(), *torch.autograd.grad(out, inputs, values["dy"].detach())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not ops.column_linear(values["x"], values["weight"], norm=norm, normed=ops.Normed(0 * y, mean, rstd)).any()


def test_wrong_arguments_are_refused():
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    with pytest.raises(ValueError, match="'telepathy'.*choose one of auto, sequential"):
        ops.column_linear(x, weight, transport="telepathy")
    with pytest.raises(ValueError, match="normed without norm: give the norm"):
        ops.column_linear(x, weight, normed=ops.Normed(x, None, x[:, :1]))
    with pytest.raises(ValueError, match="2 weights but 1 biases: pass one bias"):
        ops.column_linear(x, [weight, weight], [None])
