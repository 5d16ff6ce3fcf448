"""The benches of memory-bound kernels without a GPU: shapes and bytes, formulas, the gate, rows."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from testing import assert_same
from torch import Tensor

from bench.memory_bound import benches, cases, experts
from bench.memory_bound.case import COMPILED, TORCH, Case, Rows, Work, each, flat
from bench.memory_bound.cases import CASES, Heads


def tiny(case: Case) -> Case:
    """The case at a size for a CPU: the same function and options."""

    sizes = {Rows: (60, 40), Heads: (60, 4, 2, 8), experts.ExpertSizes: (60, 8, 3, 16, 24)}

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
    (row,) = benches.case_rows(head, {"tpformer": [3e-3], COMPILED: [4e-3]})
    assert (row["value"], row["unit"], row["bar"], row["ok"]) == (537.9, "TFLOP/s", None, True)
    row = benches.predictions(CASES["norm"])[0]
    # x in, y out, mean and rstd: 2 * 8192 * 4096 * 2 + 8 * 8192 bytes at 4.3e12
    assert row["value"] == pytest.approx(31.2, abs=0.1) and row["unit"] == "us"


@pytest.mark.parametrize("name", TINY)
def test_every_provider_gives_the_formula_each_time(name, on_cpu, monkeypatch):
    """The gate passes. In float64 each gives the formula as often as it is called: what it overwrites is restored.
    torch.compile's is one graph, run op by op.

    The rivals of what draws random numbers draw others.
    """

    def compiled(function: Callable) -> Callable:
        torch.compiler.reset()
        return torch.compile(function, fullgraph=True, dynamic=False, backend="eager")

    case = replace(TINY[name], nbytes=None)
    benches.check_case(case)
    for module in (cases, experts):
        monkeypatch.setattr(module, "compiled", compiled)
    work = case.build("cpu", torch.float64)
    wanted = flat(work.plain(*each(Tensor.clone, work.inputs)))
    calls = benches.calls_of(case, work)
    for provider in [provider for provider in calls if provider == benches.OURS or not work.random]:
        for _ in range(2):
            calls[provider].prepare()  # type: ignore[misc]
            found = flat(calls[provider].run())
            assert_same(found, wanted, provider)
