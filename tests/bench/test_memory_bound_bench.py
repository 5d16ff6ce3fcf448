"""The benches of memory-bound kernels without a GPU: shapes and bytes, formulas, Liger's calls, the gate, rows."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from testing import assert_same
from torch import Tensor

from bench.memory_bound import benches, cases, experts, formulas, liger
from bench.memory_bound.case import COMPILED, LIGER, TORCH, Case, Rows, Work, each, flat
from bench.memory_bound.cases import CASES, EPS, Heads


class Function:
    """An autograd Function of Liger-Kernel 0.8.5 in plain torch: it takes the same arguments, overwrites the same ones
    and returns as many results. It has the formula of some tensors, and its backward by autograd.

    given: what follows the tensors in a call of forward. overwritten: where the backward leaves gradients, of its own
    arguments and then what was kept. nothing: how many results of the backward are None.
    """

    def __init__(
        self, formula: Callable[..., Any], tensors: int, given: tuple = (), overwritten: tuple = (), nothing: int = 0
    ) -> None:
        self.formula, self.tensors, self.given = formula, tensors, given
        self.overwritten, self.nothing = overwritten, nothing

    def forward(self, ctx: Any, *arguments: Any) -> Any:
        tensors, given = arguments[: self.tensors], arguments[self.tensors :]
        assert given == self.given
        ctx.save_for_backward(*tensors)
        return self.formula(*tensors)

    def backward(self, ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        assert all(ctx.needs_input_grad[: self.tensors])
        leaves = [x.clone().requires_grad_() for x in ctx.saved_tensors]
        found = torch.autograd.grad(self.formula(*leaves), leaves, [dy.clone() for dy in upstream])
        for index, place in enumerate(self.overwritten):
            (*upstream, *ctx.saved_tensors)[place].copy_(found[index])
        return found[0] if self.tensors == 1 else (*found, *[None] * self.nothing)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


class Rope:
    @staticmethod
    def turn(q, k, cos, sin, sign):
        for x in (q, k):  # (batch, heads, seq, d), in place
            half = x.shape[-1] // 2
            swapped = torch.cat([-x[..., half:], x[..., :half]], -1)
            x.copy_(x * cos[:, None] + sign * swapped * sin[:, None])
        return q, k

    @classmethod
    def forward(cls, ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        ctx.save_for_backward(cos, sin)
        ctx.rotary_dim = cos.shape[-1]
        return cls.turn(q, k, cos, sin, 1)

    @classmethod
    def backward(cls, ctx, dq, dk):
        assert ctx.rotary_dim == dq.shape[-1]
        return *cls.turn(dq, dk, *ctx.saved_tensors, -1), None, None, None, None, None


class CrossEntropy:
    @staticmethod
    def forward(ctx, _input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction):
        assert reduction == "none"
        losses, gradient = formulas.cross_entropy_both(_input.detach(), target)
        if _input.requires_grad:
            _input.detach().copy_(gradient)
        return losses, None, None, None


class LinearCrossEntropy:
    @staticmethod
    def apply(_input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction):
        assert reduction == "sum"
        return F.cross_entropy(F.linear(_input, weight), target, reduction="sum"), None, None, None


# by Liger-Kernel's module and name, without its Liger and Function
FUNCTIONS: dict[str, Any] = {
    "layer_norm.LayerNorm": Function(lambda x, *p: F.layer_norm(x, x.shape[-1:], *p, EPS), 3, (EPS,), nothing=1),
    "rms_norm.RMSNorm": Function(rms_norm, 2, (EPS,), (0,), 5),
    "fused_add_rms_norm.FusedAddRMSNorm": Function(lambda x, r, w: (rms_norm(x + r, w), x + r), 3, (EPS,), nothing=5),
    "swiglu.SiLUMul": Function(lambda a, b: F.silu(a) * b, 2, (), (1, 2), 2),
    "geglu.GELUMul": Function(lambda a, b: F.gelu(a, approximate="tanh") * b, 2, (), (1, 2), 2),
    "relu_squared.ReLUSquared": Function(lambda x: F.relu(x).square(), 1),
    "rope.Rope": Rope,
    "cross_entropy.CrossEntropy": CrossEntropy,
    "fused_linear_cross_entropy.FusedLinearCrossEntropy": LinearCrossEntropy,
}


def tiny(case: Case) -> Case:
    """The case at a size for a CPU: the same function and options."""

    sizes = {Rows: (60, 40), Heads: (60, 4, 2, 8), experts.Experts: (60, 8, 3, 16, 24)}

    def smaller(argument: Any) -> Any:
        if type(argument) in sizes:
            return type(argument)("tiny", *sizes[type(argument)])
        return 24 if isinstance(argument, int) and argument > 1 else argument

    build = case.build
    assert isinstance(build, partial) and not build.keywords
    return replace(case, build=partial(build.func, *map(smaller, build.args)))


def distinct(name: str) -> list[Case]:
    """One tiny case for each operation, direction and option of a bench."""
    return list({case.name: tiny(case) for case in CASES[name](False)}.values())


TINY = {f"{name}: {case.name}": case for name in CASES for case in distinct(name)}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny cases on a CPU; what is given to torch.compile runs as it is."""
    for module in (cases, experts):
        monkeypatch.setattr(module, "compiled", lambda function: function)
    monkeypatch.setattr(benches, "DEVICE", "cpu")
    monkeypatch.setattr(benches, "flush_buffer", lambda: torch.empty(16))
    torch.manual_seed(0)


@pytest.fixture
def with_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger-Kernel is stood in for."""
    shortened = re.compile("Liger(.*)Function")
    monkeypatch.setattr(liger, "function", lambda module, name: FUNCTIONS[shortened.sub(rf"{module}.\1", name)])


@pytest.mark.parametrize("name", CASES)
def test_cases_are_too_large_for_a_cache(name):
    every, quick = (CASES[name](short) for short in (False, True))
    # a router's scores are few, and it need not be as fast as a copy of them
    assert all(case.nbytes is None or case.nbytes >= 2 * 64e6 or name == "route" for case in every)
    assert {case.name for case in quick} <= {case.name for case in every} and len(quick) < len(every)


def test_bytes_by_hand():
    """Operands of M x N that are read or written, 2 bytes each: vectors and statistics are under 1 %."""

    def operands(name: str) -> dict[str, float]:
        return {case.name: case.nbytes / (2 * 8192 * 4096) for case in CASES[name](True) if case.nbytes is not None}

    for kind in ("layernorm", "rmsnorm"):
        moved = [operands("norm")[f"{kind} {name}"] for name in ("forward", "backward", "backward + residual")]
        assert moved == pytest.approx([2, 3, 4], rel=0.01)
        assert operands("norm")[f"{kind} after finish"] == pytest.approx(4, rel=0.01)
    assert list(operands("dropout").values()) == pytest.approx([2, 3, 2], rel=0.01)
    assert list(operands("rope").values()) == pytest.approx([2 * 40 / 32] * 4, rel=0.03)
    # gate, up, result; da, gate, up, two gradients, result: each 16384 x 14336
    moved = [case.nbytes / (16384 * 14336 * 2) for case in CASES["weighted_activation"](True)]
    assert moved == pytest.approx([3, 6], rel=0.01)
    assert CASES["combine"](True)[0].nbytes == pytest.approx((2 + 1) * 8192 * 4096 * 2, rel=0.01)
    assert [case.nbytes for case in CASES["route"](False)] == [n * 32768 for n in (80, 80, 1088, 1088)]
    # two moments and masters, read and written, in float32; gradients and copies
    assert [case.nbytes / (98304 * 2048) for case in CASES["update"](False)] == pytest.approx([28, 20], rel=0.01)
    logits = 4096 * 16032 * 2
    forward, both, linear = CASES["cross_entropy"](True)
    assert (forward.nbytes, both.nbytes) == pytest.approx((logits, 3 * logits), rel=0.01)
    assert (linear.nbytes, linear.flops) == (None, 6 * 4096 * 16032 * 4096)


@pytest.mark.parametrize("name", [name for name in TINY if name.startswith("activation")])
def test_every_operand_of_an_activation_counts_once(name, on_cpu):
    case = next(case for case in CASES["activation"](False) if name == f"activation: {case.name}")
    work = TINY[name].build("cpu", torch.bfloat16)
    tensors = len(flat(work.inputs)) + len(flat(work.plain(*work.inputs)))
    m, n = (int(size) for size in case.shape.split()[1].split("x"))
    assert case.nbytes == tensors * m * n * 2


def changed(case: Case, provider: str, spoil: Callable[[list[Tensor]], Any]) -> Case:
    """The case with a provider whose results are spoilt in place."""

    def build(device: str, dtype: torch.dtype) -> Work:
        work = case.build(device, dtype)
        right = work.ours if provider == benches.OURS else work.rivals[provider]

        def wrong(*inputs: Any) -> list[Tensor]:
            results = [x.clone() for x in flat(right(*inputs))]
            spoil(results)
            return results

        return work._replace(**({"ours": wrong} if provider == benches.OURS else {"rivals": {provider: wrong}}))

    return replace(case, build=build)


@pytest.mark.parametrize("name", [f"{name}: {listed(True)[0].name}" for name, listed in CASES.items()])
def test_the_gate_refuses_what_is_wrong(name, on_cpu):
    spoilt: dict[Callable[[list[Tensor]], Any], str] = {
        lambda results: results[0].view(-1)[-1:].fill_(float("nan")): "result 0: error",
        lambda results: results[0].mul_(1.05): "result 0: error",
        lambda results: results.append(results[0]): r"\d results, not \d",
    }
    if name.startswith("route"):
        spoilt = {lambda results: results[0].view(-1)[-1:].add_(1): "result 0: other integers"}
    for spoil, said in spoilt.items():
        with pytest.raises(AssertionError, match=said):
            benches.check_case(changed(TINY[name], benches.OURS, spoil))
    rival = TORCH if name.startswith("update") else COMPILED
    wrong = changed(TINY[name], rival, lambda results: results[0].mul_(2).add_(1))
    with pytest.raises(AssertionError, match=f"result 0 of {rival}: .* another operation"):
        benches.check_case(wrong)
    if rival == COMPILED:
        benches.check_case(wrong, quick=True)  # it is not timed, so nothing is compiled


@pytest.mark.parametrize("name", CASES)
def test_rows_are_complete(name, on_cpu, untimed, monkeypatch):
    monkeypatch.setattr(benches, "measure", untimed)
    rival = TORCH if name == "update" else COMPILED
    listed = [replace(case, nbytes=case.nbytes and 4800) for case in distinct(name)]
    rows = benches.rows(lambda quick: listed, False)
    for case in listed:
        bars = {row["baseline"]: row["bar"] for row in rows if row["case"] == case.name}
        expected = {rival: 1.0, "copy": case.share} if case.nbytes else {rival: None}
        assert bars == expected
    means = [row for row in rows if row["case"] == "geometric mean"]
    assert [row["baseline"] for row in means] == [rival, "copy"]
    (row,) = (row for row in rows[:2] if row["baseline"] == rival)
    assert row["unit"] == "GB/s" and row["ratio"] == 2.0
    quick = {row["baseline"] for row in benches.rows(lambda quick: listed, True)}
    assert quick == ({rival, "copy"} if rival == TORCH else {"copy"})


def test_values_and_predictions_by_hand():
    case = Case("it", "8B 8192x4096", 2 * 8192 * 4096 * 2, cases.norm_cases(True)[0].build)
    (row,) = benches.case_rows(case, {"tpformer": [40e-6], "copy": [32e-6]})
    assert (row["value"], row["baseline_value"], row["unit"]) == (3355.4, 4194.3, "GB/s")
    assert (row["ratio"], row["bar"], row["ok"]) == (0.8, 0.9, False)
    head = replace(case, nbytes=None, flops=6 * 4096 * 16032 * 4096)
    (row,) = benches.case_rows(head, {"tpformer": [3e-3], LIGER: [4e-3]})
    assert (row["value"], row["unit"], row["bar"], row["ok"]) == (537.9, "TFLOP/s", 1.0, True)
    row = benches.predictions(CASES["norm"])[0]
    # x in, y out, mean and rstd: 2 * 8192 * 4096 * 2 + 8 * 8192 bytes at 4.3e12
    assert row["value"] == pytest.approx(31.2, abs=0.1) and row["unit"] == "us"


def test_operations_that_liger_has(with_liger):
    built = {name: case.build("cpu", torch.float32) for name, case in TINY.items()}
    found = Counter(name.partition(":")[0] for name, work in built.items() if work.rivals.get(LIGER) is not None)
    assert found == {"norm": 6, "activation": 6, "rope": 2, "cross_entropy": 3}


@pytest.mark.parametrize("name", TINY)
def test_every_provider_gives_the_formula_each_time(name, on_cpu, with_liger, monkeypatch):
    """The gate passes. In float64 each gives the formula as often as it is called: what it overwrites is restored, and
    a backward's context outlives a call. torch.compile's is one graph, run op by op.

    The rivals of what draws random numbers draw others.
    """

    def compiled(function: Callable) -> Callable:
        torch.compiler.reset()
        return torch.compile(function, fullgraph=True, dynamic=False, backend="eager")

    for module in (cases, experts):
        monkeypatch.setattr(module, "compiled", compiled)
    case = replace(TINY[name], nbytes=None)
    benches.check_case(case)
    work = case.build("cpu", torch.float64)
    wanted = flat(work.plain(*each(Tensor.clone, work.inputs)))
    calls = benches.calls_of(case, work)
    for provider in [provider for provider in calls if provider == benches.OURS or not work.random]:
        for _ in range(2):
            calls[provider].prepare()  # type: ignore[misc]
            found = flat(calls[provider].run())
            assert len(found) == len(wanted) or (LIGER in provider and found)
            assert_same(found, wanted[: len(found)], provider)


def test_liger_is_looked_up(monkeypatch):
    if not liger.installed():
        assert liger.provider(liger.function, "rope", "LigerRopeFunction") is None
        assert "not installed" in benches.LIGER_NOTE
    present = {name: ModuleType(name) for name in ("liger_kernel", "liger_kernel.ops", "liger_kernel.ops.rope")}
    present["liger_kernel.ops.rope"].LigerRopeFunction = "it"  # type: ignore[attr-defined]
    for name, module in present.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(liger.util, "find_spec", lambda name: present.get(name))
    assert liger.function("rope", "LigerRopeFunction") == "it"
    assert liger.provider(liger.function, "fused_add_rms_norm", "LigerFusedAddRMSNormFunction") is None
