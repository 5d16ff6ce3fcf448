"""The GPU benches without a GPU: shapes, predictions, how time is taken, what a rank with preset flags computes.

Marked `gpu`: each bench as a whole, --quick.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from pool import WorkerPool

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository is not installed as a whole

from bench import fused, matmul, predict, shapes, timing  # noqa: E402
from bench.__main__ import BENCHES  # noqa: E402
from bench.accuracy import require_accurate  # noqa: E402
from bench.compile import compiler  # noqa: E402
from bench.matmul import Gemm  # noqa: E402
from bench.ratios import Row, compared, draw_ratios, mean_row, means, ratios  # noqa: E402
from bench.runner import Bench, main  # noqa: E402
from bench.shapes import Shape, operation_shapes  # noqa: E402
from bench.timing import Call, cold  # noqa: E402
from tpformer.kernels.cost import machine_for  # noqa: E402
from tpformer.ops.transports.interface import ALL, GATHER, OPERATIONS, SCATTER  # noqa: E402

MEMORY_BOUND = {"norm": 24, "activation": 16, "rope": 8, "dropout": 9, "cross_entropy": 5}  # rows that are predicted
NAMES = ["matmul", *OPERATIONS, *MEMORY_BOUND, "layer", "nvlink"]


def sizes(op: str, t: int = 8) -> dict[tuple[str, str], tuple[int, int]]:
    return {(s.model, s.layer): (s.n, s.k) for s in operation_shapes(op, t)}


def test_shapes_are_the_models() -> None:
    parameters = {name: config.n_parameters / 1e9 for name, config in shapes.MODELS.items()}
    assert parameters == pytest.approx({"8B": 8.03, "70B": 70.55, "405B": 405.85, "GPT-3": 174.6}, rel=1e-3)
    column, row = sizes(GATHER), sizes(SCATTER)
    # q, k, v: (32 + 2 * 8) heads of 128 over 8 ranks; gate and up: 2 * 14336 / 8
    assert column["8B", "qkv"] == (768, 4096) and column["8B", "gate+up"] == (3584, 4096)
    assert row["8B", "o"] == (4096, 512) and row["8B", "down"] == (4096, 1792)
    assert column["70B", "qkv"] == (1280, 8192) and column["70B", "gate+up"] == (7168, 8192)
    assert row["70B", "o"] == (8192, 1024) and row["70B", "down"] == (8192, 3584)
    assert column["405B", "qkv"] == (2304, 16384) and column["405B", "gate+up"] == (13312, 16384)
    assert row["405B", "o"] == (16384, 2048) and row["405B", "down"] == (16384, 6656)
    # 96 heads of 128, no gate, 4 * 12288
    assert column["GPT-3", "qkv"] == (4608, 12288) and column["GPT-3", "up"] == (6144, 12288)
    assert row["GPT-3", "o"] == (12288, 1536) and row["GPT-3", "down"] == (12288, 6144)
    assert sizes(SCATTER, 2)["70B", "down"] == (8192, 14336)


def test_lists_have_every_number_of_rows() -> None:
    assert {s.m for s in operation_shapes(SCATTER)} == {1024, 2048, 4096, 8192, 16384}
    assert {s.m for s in operation_shapes(ALL)} == {8, 32, 128, 1024, 2048, 4096, 8192, 16384}
    assert len(operation_shapes(GATHER)) == 4 * 2 * 5 and len(operation_shapes(ALL)) == 4 * 2 * 8
    cases = [gemm.case for gemm in matmul.gemms(quick=False)]
    assert [cases.count(case) for case in ("forward", "dgrad", "wgrad", "decode")] == [80, 32, 32, 48]
    with pytest.raises(ValueError, match="3 ranks cannot share the 8 heads of 8B"):
        operation_shapes(GATHER, 3)
    quick = [gemm for gemm in matmul.gemms(quick=True) if gemm.case == "forward"]
    assert [str(gemm.shape) for gemm in quick][::3] == ["8B qkv 1024x768x4096", "8B down 1024x4096x1792"]


def test_predictions_by_hand() -> None:
    h200 = machine_for("H200")
    assert h200 is not None and (h200.flops, h200.link, h200.memory) == (700e12, 380e9, 4.3e12)
    down = Shape("70B", "down", SCATTER, 8192, 8192, 3584, 8)
    # GEMM 2 * 8192 * 8192 * 3584 / 700e12 = 687.2 us; link 7/8 * 8192 * 8192 * 2 / 380e9 = 309.1 us, hidden;
    # tail: 9/8 * 8192 * 8192 * 2 / 4.3e12 = 35.1 us
    assert predict.predict(down, h200).fused * 1e6 == pytest.approx(687.2 + 35.1, abs=0.1)
    assert predict.predict(down, h200).sequential * 1e6 == pytest.approx(687.2 + 309.1, abs=0.1)
    # the same shard gathered, not hidden: 309.1 + one chunk's GEMM, 2 * 8192 * 1280 * 8192 / 700e12 / 8 = 30.7
    qkv = Shape("70B", "qkv", GATHER, 8192, 1280, 8192, 8)
    assert predict.predict(qkv, h200).fused * 1e6 == pytest.approx(309.1 + 30.7, abs=0.1)
    # two-shot: half of 2 * 309.1 hides, the other half, its copies (2 * 7/8 of 134.2 MB: 54.6) and two hops do not
    shared = predict.predict(down._replace(op=ALL), h200)
    assert shared.fused * 1e6 == pytest.approx(687.2 + 35.1 + 309.1 + 54.6 + 21.6, abs=0.1)
    assert shared.sequential * 1e6 == pytest.approx(687.2 + 2 * 309.1 + 21.8, abs=0.1)
    # one-shot: 8 rows, the weight's 58.7 MB (and 0.2 MB) at 4.3e12; 7 * 131072 bytes on the link, 9 * in memory
    decode = predict.predict(down._replace(op=ALL, m=8), h200)
    assert decode.fused * 1e6 == pytest.approx(13.70 + 2.41 + 0.27 + 10.8, abs=0.02)
    assert decode.sequential * 1e6 == pytest.approx(13.70 + 0.60 + 21.8, abs=0.02)
    # measured: our GEMM takes 750 us, cuBLAS 700
    measured = predict.predict(down, h200, 750e-6, 700e-6)
    assert measured.fused * 1e6 == pytest.approx(785.1, abs=0.1)
    assert measured.sequential * 1e6 == pytest.approx(1009.1, abs=0.1)


def test_prediction_rows_say_so() -> None:
    (row,) = predict.predicted_rows(operation_shapes(SCATTER)[-1:])
    assert row["case"].startswith("prediction: matmul_reduce_scatter, 8 ")
    assert (row["provider"], row["baseline"], row["bar"]) == ("predicted fused", "predicted sequential", None)
    assert (
        row["ratio"]
        == row["ratio_min"]
        == row["ratio_max"]
        == pytest.approx(row["baseline_value"] / row["value"], abs=1e-3)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [[], ["--quick"]])
def test_without_a_gpu_predictions_are_shown_and_nothing_is_written(
    name: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main([name, *options], BENCHES, tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"{name} needs ") and lines[1].endswith(": nothing is measured, nothing is written")
    assert "CUDA device" in lines[1]
    assert lines[3] == "PREDICTION, not a measurement"
    headings = [line for line in lines if line.startswith("prediction: ")]
    rows = [line for line in lines[5:] if line.startswith("  ")]
    listed = {"matmul": 128, "nvlink": 144, ALL: 64, "layer": 9, **MEMORY_BOUND}
    assert all("H200" in line for line in headings) and all(" predicted" in line for line in rows)
    assert len(rows) == listed.get(name, 40) and max(map(len, [*headings, *rows])) <= 120
    assert "kernels/cost.py" in lines[-1]
    assert list(tmp_path.iterdir()) == []


def row_of(shape: Shape, provider: str, baseline: str, ratio: float) -> Row:
    return compared("x", shape, {provider: [1e-6] * 3, baseline: [ratio * 1e-6] * 3}, [(provider, baseline)])[0]


def test_the_mean_is_geometric_and_carries_the_bar() -> None:
    rows = [row_of(operation_shapes(SCATTER)[0], "ours", "other", ratio) for ratio in (0.5, 1.0, 4.0)]
    row = mean_row(rows, case="mean", shape="3 shapes", provider="ours", bar=1.3)
    assert row["ratio"] == pytest.approx(2 ** (1 / 3), abs=1e-3)
    assert (row["ratio_min"], row["ratio_max"], row["bar"], row["ok"]) == (0.5, 4.0, 1.3, False)
    assert (row["value"], row["baseline_value"]) == (1.0, 1.3)


def test_the_bars_stand_in_the_last_row() -> None:
    listed = operation_shapes(GATHER)
    taxes = [row_of(shape, name, "matmul", r) for shape in listed[:2] for name, r in (("fused", 0.98), ("push", 0.909))]
    pushed, required = means(taxes, required={(fused.FUSED, fused.BARE): fused.REQUIRED})
    assert (pushed["provider"], pushed["bar"], pushed["ratio"]) == ("push", None, 0.909)
    assert (required["provider"], required["bar"], required["ok"]) == ("fused", 0.97, True)
    rows = [row_of(shape, "tpformer (large)", "torch.matmul", 0.9) for shape in listed]
    assert [(row["bar"], row["ok"]) for row in matmul.means(rows, rows)] == [(None, True), (None, True), (0.95, False)]


class Recorder:
    """Stands for torch.cuda: what is enqueued, in order; an event's time is its position."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        self.slept = 0
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("synchronize"))

    def sleep(self, cycles: int) -> None:
        self.slept = cycles
        self.log.append("sleep")

    def event(self, enable_timing: bool) -> "Recorder.Event":
        return Recorder.Event(self.log)

    class Event:
        def __init__(self, log: list[str]) -> None:
            self.log, self.at = log, 0

        def record(self) -> None:
            self.at = len(self.log)
            self.log.append("event")

        def elapsed_time(self, end: "Recorder.Event") -> int:
            return end.at - self.at

        def zero_(self) -> None:
            self.log.append("flush")


def test_every_repetition_is_cold_and_enqueued_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    log = recorder.log
    call = Call(lambda: log.append("run"), lambda: log.append("prepare"))
    assert cold(call, 2, recorder.event(True))() == 2e-3  # type: ignore[arg-type]
    assert log[:7] == [*["flush", "prepare", "run"] * 2, "sleep"]
    assert log[7:] == ["flush", "prepare", "event", "run", "event"] * 2 + ["synchronize"]
    monkeypatch.setattr(timing, "flush_buffer", lambda: recorder.event(True))
    seconds = timing.measure({"a": call, "b": Call(lambda: None)}, timing.Effort(3, 2))
    assert seconds == {"a": [2e-3] * 3, "b": [1e-3] * 3}
    cold(Call(lambda: time.sleep(0.002)), 10, recorder.event(True))()  # type: ignore[arg-type]
    assert recorder.slept >= 10 * 2 * 0.002 * timing.CYCLES


def test_a_wrong_or_missing_result_is_refused() -> None:
    x, w = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(4, 16, dtype=torch.bfloat16)
    oracle, right = x.double() @ w.double().t(), x @ w.t()
    require_accurate("it", right, oracle, right)
    with pytest.raises(AssertionError, match="it: error"):
        require_accurate("it", right * 1.05, oracle, right)
    hole = right.clone()
    hole[3, 2] = float("nan")
    with pytest.raises(AssertionError, match="it: error"):
        require_accurate("it", hole, oracle, right)
    with pytest.raises(AssertionError, match="float32, not"):
        require_accurate("it", right.float(), oracle, right)


TINY = [
    Shape("tiny", "gather", GATHER, 3 * 5, 7, 3, 3),
    Shape("tiny", "gather", GATHER, 2 * 20, 35, 36, 2),
    Shape("tiny", "scatter", SCATTER, 3 * 20, 37, 9, 3),
    Shape("tiny", "one-shot", ALL, 7, 40, 5, 3),
    Shape("tiny", "two-shot", ALL, 1030, 70, 4, 4),  # above 256 KiB; the last chunk is shorter
]
WIDE = (128, 64, 16, 1, 8, False)  # fewer tiles: the interpreter's time


def preset_ranks() -> None:
    from bench import fused_gemm
    from tpformer.kernels.launch import Tile

    for shape in TINY:
        for push in (False, True) if shape.op == GATHER else (True,):
            tile = Tile(*WIDE) if shape.m > 1000 else None
            gemm = fused_gemm.build(shape, "cpu", torch.float32, tile=tile)
            # one poll: that nothing expires shows that no wait waited
            object.__setattr__(gemm, "channel", gemm.channel._replace(limit=1))
            for _ in range(2):  # both parities
                fused_gemm.check(gemm, push=push)


def virtual_ranks() -> None:
    from bench import fused_gemm

    for shape in TINY[:4]:
        gemm = fused_gemm.build(shape, "cpu", torch.float32, virtual=True)
        for _ in range(2):
            fused_gemm.check(gemm)


def late_flags() -> str:
    from bench import channels, fused_gemm

    gemm = fused_gemm.build(TINY[0], "cpu", torch.float32)
    gemm.channel.epoch.fill_(channels.AHEAD)
    object.__setattr__(gemm, "channel", gemm.channel._replace(limit=3))
    with pytest.raises(AssertionError) as caught:
        fused_gemm.check(gemm)
    return str(caught.value)


def test_a_rank_with_preset_flags_gives_its_result_without_waiting(interpreted: WorkerPool) -> None:
    interpreted(1).run(preset_ranks, timeout=120)
    (message,) = interpreted(1).run(late_flags)
    assert "a wait expired: [[1, 2," in message  # rank 1 waited for rank 2 first


class Properties(NamedTuple):
    """What a bench asks of a GPU."""

    multi_processor_count: int = 36
    shared_memory_per_multiprocessor: int = 1 << 17


def whole_benches(op: str) -> list[tuple[str, str, str]]:
    """Gate and rows of a bench in the interpreter, in float32 and tiny, with calls that run once and take no time."""

    from bench import fused_gemm

    def once(calls: dict[str, Call], effort: timing.Effort) -> dict[str, list[float]]:
        for call in calls.values():
            if call.prepare is not None:
                call.prepare()
            call.run()
        return {name: [1e-3] * effort.rounds for name in calls}

    with pytest.MonkeyPatch.context() as patch:
        for module in (fused_gemm, matmul):
            patch.setattr(module, "DEVICE", "cpu")
            patch.setattr(module, "DTYPE", torch.float32)
            patch.setattr(module, "measure", once)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
        tiny = [Shape("tiny", "layer", op, m, 24, 16, 2) for m in (16, 80)]
        for name in ("taxed_shapes", "virtual_shapes", "carved_shapes"):
            patch.setattr(fused, name, lambda op, quick: tiny)
        cases = ("forward", "dgrad", "wgrad", "decode", "bias and gelu")
        gemms = [Gemm(case, shape) for case in cases for shape in tiny]
        patch.setattr(matmul, "gemms", lambda quick: gemms)
        patch.setattr(matmul, "candidates", lambda gemm: ("interpreted", ["interpreted", "exact"]))
        bench = {bench.name: bench for bench in (matmul.BENCH, *fused.BENCHES)}[op]
        assert bench.check is not None
        bench.check()
        rows = bench.run(argparse.Namespace(quick=False)).content["rows"]
        return [(row["case"], row["provider"], row["baseline"]) for row in rows]


@pytest.mark.proof
def test_the_fused_benches_in_the_interpreter(interpreted: WorkerPool) -> None:
    for op in OPERATIONS:
        (rows,) = interpreted(1).run(whole_benches, op, timeout=120)
        tax = [row[1:] for row in rows if row[0] == "flag tax, rank of 2"]
        pairs = [("fused", "matmul"), ("fused, with bump", "matmul"), ("matmul", "torch.matmul")]
        pairs += {GATHER: [("fused, SM push", "matmul")], SCATTER: [("fused", "matmul, torch.sum")], ALL: []}[op]
        assert sorted(tax) == sorted(pairs * 2)
        assert rows.count(("2 virtual ranks", "fused", "2 x matmul")) == 2
        assert [rows.count(("fewer SMs", f"{c} SMs fewer", "all SMs")) for c in (4, 8, 16, 32)] == [2] * 4
        assert sum(row[0].startswith(f"prediction: {op}, 2 ") for row in rows) == 2
        assert rows[-1] == ("geometric mean", "fused", "matmul")
        assert sum(row[0] == "geometric mean" for row in rows) == len(pairs) + 1


def test_the_matmul_bench_in_the_interpreter(interpreted: WorkerPool) -> None:
    (rows,) = interpreted(1).run(whole_benches, "matmul", timeout=120)
    for case in ("forward", "dgrad", "wgrad", "decode"):
        assert rows.count((case, "tpformer (interpreted)", "torch.matmul")) == 2
        assert rows.count((case, "exact", "torch.matmul")) == 2
    assert rows.count(("bias and gelu", "tpformer", "torch.matmul")) == 2
    assert rows[-2:] == [("geometric mean", name, "torch.matmul") for name in ("best tile", "tpformer")]


def test_virtual_ranks_give_their_results(interpreted: WorkerPool) -> None:
    interpreted(1).run(virtual_ranks, timeout=120)


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
def test_calls_of_the_launchers_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import fused_gemm
    from tpformer.kernels.configurations import TILES
    from tpformer.kernels.protocol import bump

    monkeypatch.setattr(matmul, "DEVICE", "meta")
    options: dict = {"device": "meta", "dtype": torch.bfloat16, "tile": TILES["large"]}
    with compiler.compile_only(90) as compiled:
        for shape in (operation_shapes(op)[-1] for op in OPERATIONS):
            fused_gemm.launch(fused_gemm.build(shape, **options), programs=132, push=False)
            gemm = fused_gemm.build(shape._replace(m=1024), virtual=True, **options)
            bump(gemm.channel)
            fused_gemm.launch(gemm, programs=8)
        for case in ("forward", "dgrad", "wgrad", "bias and gelu"):
            gemm = Gemm(case, operation_shapes(SCATTER)[0])
            operands = gemm.operands()
            result = gemm.ours(*operands, tile=TILES["medium"], programs=132)
            assert result.shape == gemm.library(*operands).shape
    kernels = [kernel.kernel for kernel in compiled]
    assert {f"{op}_kernel" for op in OPERATIONS} <= set(kernels) and kernels.count("matmul_kernel") == 4


def test_only_the_first_rank_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = predict.predicted_rows(operation_shapes(SCATTER)[:1])
    bench = Bench(name="toy", description="", run=ratios(lambda quick: rows), draw=draw_ratios, note="a note")
    monkeypatch.setenv("RANK", "1")
    assert main(["toy"], [bench], tmp_path) == 0
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "0")
    assert main(["toy"], [bench], tmp_path) == 0
    assert "a note" in capsys.readouterr().out and (tmp_path / "cpu" / "toy.json").exists()


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_quick_on_gpu(name: str, tmp_path: Path) -> None:
    assert main([name, "--quick"], BENCHES, tmp_path) == 0
    assert list(tmp_path.iterdir()) == []
