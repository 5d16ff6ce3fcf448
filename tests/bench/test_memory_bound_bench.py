"""The benches of memory-bound kernels without a GPU: shapes and bytes, formulas, Liger's calls, the gate, rows."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from liger_functions import functions
from testing import assert_identical, assert_kernel_close, assert_same
from torch import Tensor

from bench.memory_bound import benches, cases, experts, formulas, liger
from bench.memory_bound.case import COMPILED, LIGER, Case, Rows, each, flat
from bench.memory_bound.cases import CASES, EPS, Heads
from bench.timing import Call, Effort
from tpformer.kernels.finish import Norm


def tiny(case: Case) -> Case:
    """The case at a size for a CPU: the same function and options."""

    def smaller(argument: Any) -> Any:
        if isinstance(argument, Rows):
            return Rows("tiny", 60, 40)
        if isinstance(argument, Heads):
            return Heads("tiny", 60, 4, 2, 8)
        if isinstance(argument, experts.Experts):
            return experts.Experts("tiny", 60, 8, 3, 16, 24)
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
    ops = functions()
    monkeypatch.setattr(liger, "function", lambda module, name: ops[module, name])


def test_shapes_are_the_models() -> None:
    shapes = {name: sorted({case.shape for case in listed(False)}) for name, listed in CASES.items()}
    assert shapes["norm"] == shapes["dropout"] == ["405B 4096x16384", "70B 8192x8192", "8B 8192x4096"]
    assert shapes["activation"] == [
        "70B/8 16384x3584",
        "8B 8192x14336",
        "8B/8 32768x1792",
        "GPT-3 2048x49152",
        "GPT-3/8 8192x6144",
    ]
    assert shapes["rope"] == ["70B 8192x(64+8)x128", "8B 8192x(32+8)x128"]
    assert shapes["cross_entropy"] == ["8B 4096x128256", "8B/8 4096x16032", "8B/8 4096x16032x4096"]
    assert shapes["route"] == ["Mixtral 8x7B 32768x8, 2 of them", "Qwen3-30B-A3B 32768x128, 8 of them"]
    assert shapes["weighted_activation"] == ["Mixtral 8x7B 16384x14336", "Qwen3-30B-A3B 65536x768"]
    assert shapes["combine"] == ["Mixtral 8x7B 8192x4096, 2 rows each", "Qwen3-30B-A3B 8192x2048, 8 rows each"]
    for name, listed in CASES.items():
        # a router's scores are few, and it need not be as fast as a copy of them
        assert all(case.nbytes is None or case.nbytes >= 2 * 64e6 or name == "route" for case in listed(False))
        assert {case.name for case in listed(True)} <= {case.name for case in listed(False)}
        assert len(listed(True)) < len(listed(False))


def test_bytes_by_hand() -> None:
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
    logits = 4096 * 16032 * 2
    forward, both, linear = CASES["cross_entropy"](True)
    assert (forward.nbytes, both.nbytes) == pytest.approx((logits, 3 * logits), rel=0.01)
    assert (linear.nbytes, linear.flops) == (None, 6 * 4096 * 16032 * 4096)


@pytest.mark.parametrize("name", [name for name in TINY if name.startswith("activation")])
def test_every_operand_of_an_activation_counts_once(name: str, on_cpu: None) -> None:
    case = next(case for case in CASES["activation"](False) if name == f"activation: {case.name}")
    work = TINY[name].build("cpu", torch.bfloat16)
    tensors = len(flat(work.inputs)) + len(flat(work.plain(*work.inputs)))
    m, n = (int(size) for size in case.shape.split()[1].split("x"))
    assert case.nbytes == tensors * m * n * 2


@pytest.mark.parametrize("name", TINY)
def test_the_gate_passes_on_a_cpu(name: str, on_cpu: None, with_liger: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The references by the accuracy rule, and as the same operation Liger's stand-ins and one graph of each formula,
    run op by op."""

    def compiled(function: Callable) -> Callable:
        torch.compiler.reset()
        return torch.compile(function, fullgraph=True, dynamic=False, backend="eager")

    for module in (cases, experts):
        monkeypatch.setattr(module, "compiled", compiled)
    benches.check_case(TINY[name])


@pytest.mark.parametrize("name", TINY)
def test_formulas_are_the_references(name: str, on_cpu: None) -> None:
    """In float64: what the accuracy rule takes for true is what the references compute."""
    work = TINY[name].build("cpu", torch.float64)
    ours = [x.clone() for x in flat(work.ours(*each(Tensor.clone, work.inputs)))]
    assert_same(ours, list(flat(work.plain(*work.inputs))))


def test_backward_formulas_are_autograds() -> None:
    torch.manual_seed(0)
    x, dy, residual = torch.randn(3, 7, 12, dtype=torch.float64)
    weight, bias = torch.randn(2, 12, dtype=torch.float64)
    for kind, shift in (("layernorm", bias), ("rmsnorm", None)):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, shift) if tensor is not None]
        y = (
            F.rms_norm(*leaves[:1], (12,), *leaves[1:], EPS)
            if shift is None
            else F.layer_norm(leaves[0], (12,), *leaves[1:], EPS)
        )
        expected = list(torch.autograd.grad(y, leaves, dy))
        expected[0] += residual
        norm = Norm(kind, weight, shift, EPS)
        _, *mean, rstd = formulas.norm_forward(x, norm)
        found = formulas.norm_backward(dy, x, (mean[0] if mean else None, rstd), norm, residual)
        assert_same(list(found), expected)
    for name in ("gelu", "gelu_tanh", "silu", "relu2"):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(formulas.act(leaf, name).sum(), leaf)
        assert_same(formulas.act_derivative(x, name), slope)
    targets = torch.randint(12, (7,))
    leaf = x.clone().requires_grad_()
    losses = F.cross_entropy(leaf, targets, reduction="none")
    assert_same(list(formulas.cross_entropy_both(x, targets)), [losses, *torch.autograd.grad(losses.sum(), leaf)])


@pytest.mark.parametrize("name", [f"{name}: {listed(True)[0].name}" for name, listed in CASES.items()])
def test_the_gate_refuses_what_is_wrong(name: str, on_cpu: None) -> None:
    case = TINY[name]

    def broken(which: str, spoil: Callable[[Tensor], Any]) -> Case:
        def build(device: str, dtype: torch.dtype) -> Any:
            work = case.build(device, dtype)
            right = work.ours if which == "ours" else work.rivals[COMPILED]

            def wrong(*inputs: Tensor) -> list[Tensor]:
                results = [x.clone() for x in flat(right(*inputs))]
                spoil(results[0])
                return results

            return work._replace(**({"ours": wrong} if which == "ours" else {"rivals": {COMPILED: wrong}}))

        return replace(case, build=build)

    if name.startswith("route"):
        with pytest.raises(AssertionError, match="result 0: other integers"):
            benches.check_case(broken("ours", lambda x: x.view(-1)[-1:].add_(1)))
        with pytest.raises(AssertionError, match=r"result 0 of torch.compile: .* another operation"):
            benches.check_case(broken("rival", lambda x: x.add_(1)))
        return
    with pytest.raises(AssertionError, match="result 0: error"):
        benches.check_case(broken("ours", lambda x: x.view(-1)[-1:].fill_(float("nan"))))
    with pytest.raises(AssertionError, match="result 0: error"):
        benches.check_case(broken("ours", lambda x: x.mul_(1.05)))
    with pytest.raises(AssertionError, match=r"result 0 of torch.compile: .* another operation"):
        benches.check_case(broken("rival", lambda x: x.mul_(1.3)))


def test_a_missing_result_is_refused(on_cpu: None) -> None:
    case = TINY["norm: layernorm forward"]

    def build(device: str, dtype: torch.dtype) -> Any:
        work = case.build(device, dtype)
        return work._replace(ours=lambda *inputs: flat(work.ours(*inputs))[:1])

    with pytest.raises(AssertionError, match="1 results, not 3"):
        benches.check_case(replace(case, build=build))


def test_overwritten_operands_are_restored_before_each_call(on_cpu: None) -> None:
    for name in ("activation: gated silu backward", "rope: half forward", "norm: rmsnorm backward"):
        case = replace(TINY[name], nbytes=None)
        work = case.build("cpu", torch.float32)
        before = each(Tensor.clone, work.inputs)
        prepare = benches.calls_of(case, work)[benches.OURS].prepare
        assert prepare is not None
        for x in flat(work.inputs):
            x.zero_()
        prepare()
        assert_identical(flat(work.inputs), flat(before))


def once(calls: dict[str, Call], effort: Effort) -> dict[str, list[float]]:
    for call in calls.values():
        if call.prepare is not None:
            call.prepare()
        call.run()
    return {name: [1e-3 * (index + 1)] * effort.rounds for index, name in enumerate(calls)}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_complete(name: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "measure", once)
    listed = [replace(case, nbytes=case.nbytes and 4800) for case in distinct(name)]
    rows = benches.rows(lambda quick: listed, False)
    for case in listed:
        bars = {row["baseline"]: row["bar"] for row in rows if row["case"] == case.name}
        expected = {COMPILED: 1.0, "copy": case.share} if case.nbytes else {COMPILED: None}
        assert bars == expected
    means = [row for row in rows if row["case"] == "geometric mean"]
    assert [row["baseline"] for row in means] == [COMPILED, "copy"]
    (row,) = (row for row in rows[:2] if row["baseline"] == COMPILED)
    assert row["unit"] == "GB/s" and row["ratio"] == 2.0


def test_values_by_hand() -> None:
    case = Case("it", "8B 8192x4096", 2 * 8192 * 4096 * 2, cases.norm_cases(True)[0].build)
    (row,) = benches.case_rows(case, {"tpformer": [40e-6], "copy": [32e-6]})
    assert (row["value"], row["baseline_value"], row["unit"]) == (3355.4, 4194.3, "GB/s")
    assert (row["ratio"], row["bar"], row["ok"]) == (0.8, 0.9, False)
    head = replace(case, nbytes=None, flops=6 * 4096 * 16032 * 4096)
    (row,) = benches.case_rows(head, {"tpformer": [3e-3], LIGER: [4e-3]})
    assert (row["value"], row["unit"], row["bar"], row["ok"]) == (537.9, "TFLOP/s", 1.0, True)


def test_predictions_by_hand() -> None:
    row = benches.predictions(CASES["norm"])[0]
    # x in, y out, mean and rstd: 2 * 8192 * 4096 * 2 + 8 * 8192 bytes at 4.3e12
    assert row["value"] == pytest.approx(31.2, abs=0.1) and row["unit"] == "us"


LIGERS = [
    *(f"norm: {kind} {name}" for kind in ("layernorm", "rmsnorm") for name in ("forward", "backward")),
    "norm: rmsnorm backward + residual",
    "norm: rmsnorm after finish",
    *(
        f"activation: {name} {way}"
        for name in ("gated silu", "gated gelu_tanh", "relu2")
        for way in ("forward", "backward")
    ),
    *(f"rope: half {way}" for way in ("forward", "backward")),
    *(name for name in TINY if name.startswith("cross_entropy")),
]


@pytest.mark.parametrize("name", TINY)
def test_liger_is_asked_for_the_same(name: str, on_cpu: None, with_liger: None) -> None:
    """Twice, as in timing: a backward's context outlives a call, and what is overwritten is restored."""
    work = TINY[name].build("cpu", torch.float32)
    assert (work.rivals.get(LIGER) is not None) == (name in LIGERS)
    for rival in [rival for provider, rival in work.rivals.items() if LIGER in provider and rival is not None]:
        calls = benches.calls_of(replace(TINY[name], nbytes=None), work._replace(rivals={LIGER: rival}))
        wide = each(lambda x: x.double() if x.is_floating_point() else x, work.inputs)
        oracles, baselines = (flat(work.plain(*each(Tensor.clone, inputs))) for inputs in (wide, work.inputs))
        for _ in range(2):
            if calls[LIGER].prepare is not None:
                calls[LIGER].prepare()  # type: ignore[misc]
            found = flat(calls[LIGER].run())
            assert 0 < len(found) <= len(oracles)
            for actual, oracle, baseline in zip(found, oracles, baselines, strict=False):
                assert_kernel_close(actual, oracle, baseline, name)


def test_liger_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    if not liger.installed():
        assert liger.provider(liger.function, "rope", "LigerRopeFunction") is None
        assert "not installed" in benches.LIGER_NOTE
    package, ops, one = ModuleType("liger_kernel"), ModuleType("liger_kernel.ops"), ModuleType("liger_kernel.ops.rope")
    one.LigerRopeFunction = "it"  # type: ignore[attr-defined]
    present = {"liger_kernel": package, "liger_kernel.ops": ops, "liger_kernel.ops.rope": one}
    for name, module in present.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(liger.util, "find_spec", lambda name: present.get(name))
    assert liger.function("rope", "LigerRopeFunction") == "it"
    assert liger.provider(liger.function, "fused_add_rms_norm", "LigerFusedAddRMSNormFunction") is None
