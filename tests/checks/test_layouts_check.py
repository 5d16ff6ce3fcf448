"""The matrix of layouts covers what it should, and counts differences and known defects as misses. Proofs run it."""

import contextlib
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from commands import python
from pool import WorkerPool
from testing import build_small_split
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from turns import PARTS, in_parts, in_turns

from checks import layouts
from checks.layout_cases import EIGHT, FP8_CASES, FP8_EXPERTS, FP8_NEWER, SIXTEEN, case
from checks.layout_report import draw
from checks.layouts import FLOAT32, FLOAT64, RankRun, bfloat16_row, make_row
from checks.routing import Routed
from harness.runner import machine, main
from tpformer.config import RunConfig
from tpformer.parallel import SCHEDULES, TiedParameter
from tpformer.training import model as training_model

STEPS, CURVE_STEPS = 3, 20  # of the proof


def values_of(cases: list | tuple, field: str) -> set:
    return {getattr(one.layout, field) for one in cases}


def test_what_the_matrix_covers() -> None:
    cases, moe_cases = layouts.CASES, layouts.MOE_CASES
    for matrix, dense, least in ((cases, True, 24), (moe_cases, False, 20)):
        layouts.plan(matrix, dense, "unused")  # checks every configuration
        assert len({str(one) for one in matrix}) >= least and len(matrix) == len(set(matrix))
        assert values_of(matrix, "tensor_parallel") == {1, 2, 4} and values_of(matrix, "zero") == {0, 1, 2, 3}
        assert values_of(matrix, "sequence_parallel") == {False, True}
        assert {one.n_microbatches for one in matrix} == {1, 2, 4, 8}
    for name in ("pipeline_parallel", "data_parallel"):
        assert values_of(cases, name) == {1, 2, 4}
    context = layouts.CONTEXT_CASES
    layouts.plan(context, False, "unused")
    assert values_of(context, "context_parallel") == {2, 4} and values_of(context, "zero") == {0, 1, 2, 3}
    assert len({str(one) for one in context}) == len(context) >= 27
    exchange = layouts.EXCHANGE_CASES
    layouts.plan(exchange, False, "unused")
    assert values_of(exchange, "expert_parallel") == {1, 2, 4, 8} and values_of(exchange, "zero") == {0, 1, 2, 3}
    assert values_of(exchange, "copies_experts") == {False, True} and values_of(exchange, "expert_shards") == {1, 2, 4}
    assert len({str(one) for one in exchange}) == len(exchange) >= 33
    assert values_of(cases, "recompute") == {"none", "mlp", "full"} and values_of(cases, "cpu_offload") == {False, True}
    every = [one.layout for one in cases]
    for ranks in (2, 4):
        alone = [layout for layout in every if layout.pipeline_parallel == layout.world_size == ranks]
        assert {layout.pipeline_schedule for layout in alone} == {*SCHEDULES}
    assert max(layout.world_size for layout in every) == 8
    assert min(one.data_parallel_replicate * one.data_parallel_shard for one in every if one.world_size == 8) == 1
    fp8 = layouts.FP8_CASES
    layouts.plan(fp8, False, "unused")
    assert len({str(one) for one in fp8}) == len(fp8) >= 24 and all(one.in_fp8 for one in fp8)
    assert values_of(fp8, "tensor_parallel") == {1, 2, 4} and values_of(fp8, "zero") == {0, 1, 2, 3}
    assert values_of(fp8, "context_parallel") == {1, 2} and values_of(fp8, "recompute") == {"none", "mlp", "full"}
    assert values_of(fp8, "pipeline_parallel") == {1, 2, 4} and values_of(fp8, "sequence_parallel") == {False, True}
    experts = layouts.FP8_EXPERTS_CASES
    layouts.plan(experts, False, "unused")
    assert len({str(one) for one in experts}) == len(experts) >= 30 and all(one.in_fp8 for one in experts)
    assert values_of(experts, "tensor_parallel") == {1, 2, 4} and values_of(experts, "zero") == {0, 1, 2, 3}
    assert values_of(experts, "expert_parallel") == {None, 1, 2, 4}
    assert values_of(experts, "sequence_parallel") == {False, True}
    assert values_of((*fp8, *experts), "transport") == {"auto", "pipelined"}
    assert values_of(experts, "pipeline_schedule") >= {"1F1B", "ZBVZeroBubble", "DualPipeV"}
    muon = layouts.MUON_CASES
    layouts.plan(muon, False, "unused", layouts.BFLOAT16_MUON_CASES)
    assert len({str(one) for one in muon}) == len(muon) >= 40 and {one.optimizer for one in muon} == {"muon"}
    assert values_of(muon, "tensor_parallel") == {1, 2, 4} and values_of(muon, "zero") == {0, 1, 2, 3}
    assert values_of(muon, "context_parallel") == {1, 2} and values_of(muon, "expert_parallel") == {None, 2, 4, 8}
    assert values_of(muon, "cpu_offload") == {False, True} and values_of(muon, "data_parallel_replicate") == {1, 2, 4}
    assert values_of(muon, "pipeline_schedule") >= {"1F1B", "ZBVZeroBubble", "DualPipeV", "Interleaved1F1B"}
    assert {one.tied for one in cases} == {False, True} and len(layouts.BFLOAT16_CASES) == 4
    assert len({str(one) for one in moe_cases}) == len(moe_cases)
    for model in (EIGHT, SIXTEEN):
        own = [one for one in moe_cases if one.model == model]
        assert values_of(own, "tensor_parallel") == {1, 2, 4} and values_of(own, "transport") == {"auto", "pipelined"}
        assert values_of(own, "recompute") == {"none", "mlp", "full"}
        assert values_of(own, "pipeline_schedule") >= {"1F1B", "ZBVZeroBubble"}


def sent(*experts: list[int], gap: float = 1.0) -> dict:
    """Where the tokens of one sample went in step 1 and layer 0."""
    return {(1, 0, 0): Routed(np.array(experts, dtype=np.int32), np.full(len(experts), gap))}


def test_a_token_at_another_expert_is_a_miss() -> None:
    def moe_row(double: dict, single: dict, gap: float, model: str = EIGHT) -> layouts.Row:
        run = trained()._replace(quantized=[frozenset()])
        expected = {dtype: run._replace(routed=sent([0, 1], [1, 2], gap=gap)) for dtype in (FLOAT64, FLOAT32)}
        found = {FLOAT64: [run._replace(routed=double)], FLOAT32: [run._replace(routed=single)]}
        return make_row(case(tp=2, model=model), found, expected)

    same, other = sent([0, 1], [1, 2]), sent([0, 1], [1, 3])
    assert moe_row(same, same, 1.0)["ok"]
    assert not moe_row(other, same, 1e-7)["ok"]  # not even a near one, in float64
    assert not moe_row(same, other, 1e-4)["ok"]
    assert moe_row(same, other, 1e-4, FP8_EXPERTS)["ok"] and not moe_row(other, same, 1e-7, FP8_EXPERTS)["ok"]
    near = moe_row(same, other, 1e-6)
    assert near["ok"] and near["routing"]["flips"] == [(1, 0, 0, 1, 1e-6)]
    with pytest.raises(ValueError, match="0 samples were routed in place of 1"):
        moe_row(same, {}, 1.0)


def test_another_block_is_a_miss() -> None:
    """In float64; float32 is not judged, nor are its losses."""

    def fp8_row(double: bytes, single: bytes) -> layouts.Row:
        expected = trained()._replace(quantized=[frozenset([b"a"])])
        found = {FLOAT64: double, FLOAT32: single}
        runs = {dtype: [trained(2.1 if dtype == FLOAT32 else 2.0)._replace(quantized=[frozenset([block])])]
                for dtype, block in found.items()}  # fmt: skip
        return make_row(FP8_CASES[0], runs, {FLOAT64: expected, FLOAT32: expected})

    assert fp8_row(b"a", b"a")["ok"] and fp8_row(b"a", b"b")["ok"] and not fp8_row(b"b", b"a")["ok"]
    assert fp8_row(b"a", b"b")["quantized"]["float32"] == 1.0


def trained(loss: float = 2.0, norm: float = 1.0, parameter: float = 0.5) -> RankRun:
    return RankRun([2.0, loss], [1.0, norm], {"a": np.zeros(2), "b": np.array([0.5, parameter])}, 0.1)


def row(double: RankRun, single: RankRun) -> layouts.Row:
    """The matrix's row for two ranks: the first trains as one process does, the second gives `double` and `single`."""
    runs = {FLOAT64: [trained(), double], FLOAT32: [trained(), single]}
    return make_row(case(tp=2), runs, {FLOAT64: trained(), FLOAT32: trained()})


@pytest.mark.parametrize(
    "dtype, key, value",
    [(FLOAT64, "loss", 2.0), (FLOAT64, "norm", 1.0), (FLOAT64, "parameter", 0.5), (FLOAT32, "loss", 2.0),
     (FLOAT32, "norm", 1.0)],
)  # fmt: skip
def test_a_difference_on_any_rank_is_a_miss(dtype: str, key: str, value: float) -> None:
    def judged(found: float) -> layouts.Row:
        other = trained(**{key: found})
        return row(other, trained()) if dtype == FLOAT64 else row(trained(), other)

    near = {FLOAT64: 1e-9, FLOAT32: 1e-5}[dtype]  # the relative difference that is allowed
    assert judged(value * (1 + 0.9 * near))["ok"]
    bad = judged(value * (1 + 1.1 * near))
    assert not bad["ok"] and (key != "parameter" or bad["float64"]["worst"] == "b")
    assert not judged(math.nan)["ok"]


def test_parameters_that_are_small_or_that_no_rank_has() -> None:
    """Small ones count in units of the learning rate."""
    moved, lacking = trained(), trained()
    moved.parameters["a"] = np.array([0.0, layouts.LR * 5e-10])
    assert row(moved, trained())["float64"]["parameters"] == pytest.approx(5e-10)
    del lacking.parameters["b"]
    with pytest.raises(ValueError, match="no rank has b"):
        make_row(case(), {FLOAT64: [lacking], FLOAT32: [trained()]}, {FLOAT64: trained(), FLOAT32: trained()})


def test_bfloat16_is_allowed_twice_the_error_of_one_process() -> None:
    eps = torch.finfo(torch.bfloat16).eps
    oracle, single = RankRun([2.0] * 4, [1.0] * 4, {}, 0), RankRun([2.0, 2.0, 2.0, 2.1], [1.0] * 4, {}, 0)
    found = bfloat16_row(case(tp=2), [single, single], single, oracle)
    assert found["ok"] and found["loss"] == 0
    limit = 2 * (0.1 + eps * 2)
    assert found["loss_allowed"] == pytest.approx([limit, 2 * (0.05 + eps * 2)])
    for value, ok in ((limit * 0.99, True), (limit * 1.01, False), (math.nan, False)):
        one_step = single._replace(losses=[2.0, 2.0, 2.0, 2.0 + value])
        assert bfloat16_row(case(tp=2), [single, one_step], single, oracle)["ok"] is ok
    every_step = single._replace(losses=[2.0 + limit * 0.99] * 4)  # the largest error would do, the RMS does not
    assert not bfloat16_row(case(tp=2), [every_step], single, oracle)["ok"]


set_divide_factor = FSDPModule.set_gradient_divide_factor


def without_reduction(part: torch.nn.Module) -> None:
    """Take partial gradients for whole ones."""
    for parameter in part.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(isinstance(place, Partial) for place in grad.placements):
            places = [Replicate() if isinstance(place, Partial) else place for place in grad.placements]
            parameter.grad = DTensor.from_local(grad.to_local(), grad.device_mesh, places, run_check=False)


def train_with(defects: bool, config: RunConfig) -> RankRun:
    """Train, with a defect of tied parameters, of tensor parallelism and of data parallelism."""
    with contextlib.ExitStack() as stack:
        for owner, name, wrong in (
            (TiedParameter, "reduce", lambda self: None),
            (training_model, "reduce_partial_gradients", without_reduction),
            # gradients are averaged over data-parallel ranks, as in DDP
            (FSDPModule, "set_gradient_divide_factor", lambda self, _: set_divide_factor(self, 2.0)),
        ) * defects:
            stack.enter_context(mock.patch.object(owner, name, wrong))
        return layouts.setup({"run": config})["run"]()


def pooled(
    pool: WorkerPool, defects: bool, size: int, _: int, __: object, runs: Mapping[str, RunConfig]
) -> contextlib.AbstractContextManager:
    """Stands for harness.ranks.Ranks: it runs on the tests' pool, and its ranks may have the defects."""

    def call(name: str) -> list[RankRun]:
        return pool(size).run(train_with, defects and runs[name].parallel.world_size > 1, runs[name])

    return contextlib.nullcontext(SimpleNamespace(call=call))


@pytest.mark.parametrize("defects", in_turns([False, True]))
def test_the_command_notices_a_defect(
    defects: bool, ranks: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Each of the three layouts has one of the defects. The command trains two layers for two steps; float32, whose
    bound is wider, is compared where there is no defect."""
    whole, few = layouts.LayoutCase.config, (case(tp=2), case(pp=2), case(2, shard=2, zero=1))

    def config(self: layouts.LayoutCase, *arguments: object) -> RunConfig:
        found = whole(self, *arguments)  # type: ignore[arg-type]
        return replace(found, model=replace(found.model, n_layers=2))

    monkeypatch.setattr(layouts.LayoutCase, "config", config)
    small = {
        "STEPS": 2,
        "QUICK_CASES": few,
        "QUICK_MOE_CASES": (),
        "QUICK_CONTEXT_CASES": (),
        "COMPARED": (FLOAT64,) if defects else layouts.COMPARED,
        "Ranks": partial(pooled, ranks, defects),
    }
    for name, value in small.items():
        monkeypatch.setattr(layouts, name, value)
    assert main(["layouts", "--quick"], [layouts.BENCH], tmp_path) == defects
    assert not list(tmp_path.iterdir())
    lines = capsys.readouterr().out.splitlines()
    names = {"TP2", "PP2 1F1B", "DP2 ZeRO-1"}
    missed = {name for name in names for line in lines if line.startswith(name) and " NO" in line}
    assert missed == (names if defects else set())


def test_the_drawing_has_every_loss_and_every_difference(tmp_path: Path) -> None:
    differences = {FLOAT64: {"TP4": [0.0, 1e-15, 0.0], "PP4": [0.0, 0.0, -1e-13]}}
    differences[FLOAT32] = {"TP4": [0.0] * 3, "PP4": [0.0] * 3}
    curves = {"losses": [5.0, 4.0, 3.0], "differences": differences}
    head = {"bench": "layouts", "machine": machine(), "versions": {"torch": "2"}, "date": "2026-01-01", "commit": None}
    (tmp_path / "layouts.json").write_text(json.dumps({**head, "curves": curves}))
    (tmp_path / "layouts-quick.json").write_text(json.dumps(head))
    assert draw(tmp_path / "layouts-quick.json") is None, "a part of the layouts has no curves"
    root = ElementTree.parse(draw(tmp_path / "layouts.json")).getroot()
    name = "{http://www.w3.org/2000/svg}"
    drawn = [each.attrib["points"].split() for each in root.iter(name + "polyline")]
    assert [len(points) for points in drawn] == [3, 3, 3]
    zero, small, *heights = [float(dot.attrib["cy"]) for dot in root.iter(name + "circle")]
    assert len(heights) == 2 * 2 * 3 - 2
    assert heights[0] == zero > small > heights[3], "upwards: 0, 1e-15, 1e-13"
    assert len(set(heights[4:])) == 1, "no difference in float32"


# a part of some matrices, in float64 and in fewer steps than the bench takes; bench/results/ has the whole
PROGRAM = f"""
import sys
from pathlib import Path
from harness.runner import main
from checks import layouts
folder, part, options, *names = sys.argv[1:]
for name in names:
    setattr(layouts, name, getattr(layouts, name)[int(part)::{PARTS}])
alone, *curves = layouts.CURVES.items()
layouts.CURVES = dict([alone, curves[int(part) % len(curves)]])
layouts.STEPS, layouts.CURVE_STEPS, layouts.FP8_STEPS, layouts.COMPARED = {STEPS}, {CURVE_STEPS}, 2, ("float64",)
sys.exit(main(["layouts", *options.split()], [layouts.BENCH], Path(folder)))
"""
MATRICES = ("CASES", "MOE_CASES", "CONTEXT_CASES", "EXCHANGE_CASES", "BFLOAT16_CASES", "BFLOAT16_MOE_CASES")


def test_few_layouts_in_fp8(ranks: WorkerPool, tmp_path: Path) -> None:
    """In the suite: with experts that ranks share or exchange tokens for, with key-value heads that ranks share, and
    with weights that ZeRO gathers in blocks."""
    text, _ = build_small_split(tmp_path, quiet=True)
    expected: dict[str, RankRun] = {}
    for one in (
        case(4, tp=2, transport="pipelined", model=FP8_EXPERTS),
        case(4, tp=2, ep=2, model=FP8_EXPERTS),
        case(4, tp=4, model=FP8_NEWER),
        case(4, shard=2, zero=3, zero_gather="fp8", model=FP8_NEWER),
    ):

        def trained_in(each: layouts.LayoutCase) -> list[RankRun]:
            config = each.config(FLOAT64, str(text), 2, layouts.LR)
            config = replace(config, model=replace(config.model, n_layers=2))
            return ranks(each.layout.world_size).run(train_with, False, config)

        if one.model not in expected:
            (expected[one.model],) = trained_in(one.alone)
        row = make_row(one, {FLOAT64: trained_in(one)}, {FLOAT64: expected[one.model]})
        assert row["ok"] and row["quantized"]["blocks"] > 5000, row


@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", in_parts())
def test_every_block_of_layouts_in_fp8(tmp_path: Path, part: int) -> None:
    printed = python("-c", PROGRAM, tmp_path, part, "--fp8", "FP8_CASES", "FP8_EXPERTS_CASES")
    cases = [*layouts.FP8_CASES[part::PARTS], *layouts.FP8_EXPERTS_CASES[part::PARTS]]
    assert f"all {len(cases)} layouts are the run of one process" in printed
    hashes = [
        re.findall(rf"^{re.escape(str(one))} +([0-9a-f]{{16}})  ([0-9a-f]{{16}}) ", printed, re.M) for one in cases
    ]
    numbers = [1 + (one in layouts.FP8_EXPERTS_CASES) for one in cases]  # of tables: experts also have one of routing
    assert [len(found) for found in hashes] == numbers and all(a == b for found in hashes for a, b in found), printed


@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", in_parts())
def test_layouts_by_muon(tmp_path: Path, part: int) -> None:
    """They train as one process does, and send the bytes of the formula."""
    printed = python("-c", PROGRAM, tmp_path, part, "--muon", "MUON_CASES")
    assert f"all {len(layouts.MUON_CASES[part::PARTS])} layouts are the run of one process" in printed


@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", in_parts())
def test_the_matrix(tmp_path: Path, part: int) -> None:
    python("-c", PROGRAM, tmp_path, part, "", *MATRICES)
    result = json.loads((tmp_path / "cpu" / "layouts.json").read_text())
    cases = [getattr(layouts, name)[part::PARTS] for name in MATRICES]
    rows, low = sum(cases[:4], ()), sum(cases[4:], ())
    assert [row["layout"] for row in result["rows"]] == [*map(str, rows)] and all(row["ok"] for row in result["rows"])
    assert [row["layout"] for row in result["bfloat16"]] == [*map(str, low)]
    losses = result["curves"]["losses"]
    curves = [curve for by_layout in result["curves"]["differences"].values() for curve in by_layout.values()]
    assert {len(curve) for curve in curves} == {len(losses)}
    assert len(losses) == CURVE_STEPS and losses[-1] < 0.8 * losses[0]
