"""The benches of a GPU, without one: sizes of the models, gates, rows and predictions at tiny sizes on a CPU.

Without a GPU a bench shows its prediction, if it has one, and writes nothing. Each as a whole, --quick, is an item of
`python -m bench gpu`, and rehearsed there. Those of memory-bound kernels are in test_memory_bound_bench.py, that of
several GPUs in test_nvlink_bench.py.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from testing import assert_kernel_close, assert_same
from torch import Tensor, nn

from bench import gates, gathered_experts, grouped_matmul, layer, profile, quantized_matmul
from bench.__main__ import BENCHES
from bench.grouped_matmul import DGRAD, DOWN, FORWARD, UP, WGRAD, Grouped
from bench.plain import plain_block
from harness.runner import main
from tpformer.kernels.grouped_matmul import reference
from tpformer.kernels.quantize import kernel as quantize
from tpformer.kernels.quantize.reference import quantize_rows, quantize_weight
from tpformer.models import GPTConfig

NAMES = [bench.name for bench in BENCHES if bench.device == "cuda"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_predictions_without_a_gpu(name, tmp_path, capsys):
    assert main([name], BENCHES, tmp_path) == 0
    said = capsys.readouterr().out
    assert f"{name} needs " in said and "nothing is measured, nothing is written" in said
    assert ("PREDICTION, not a measurement" in said) == (
        name not in ("ceilings", "constants", "gates", "matmul_trials")
    )
    assert not list(tmp_path.iterdir())


def test_a_product_that_torch_refuses_is_left_out_and_named(monkeypatch, capsys):
    """cuBLASLt has no algorithm for some shapes. Our kernels are measured there all the same."""

    def refused(*arguments: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nException raised from")

    monkeypatch.setattr(quantize, "quantize_rows", quantize_rows)
    monkeypatch.setattr(quantize, "quantize_weight", quantize_weight)
    small = {"DEVICE": "cpu", "ROWS": 8, "served_by_library": lambda *_: True, "library_product": lambda *_: None}
    with mock.patch.multiple(quantized_matmul, **small):
        _, calls = quantized_matmul.calls_of(128, 256)
        assert list(calls) == ["torch.matmul", "tpformer", "torch.scaled_mm"]
        quantized_matmul.library_product = refused
        _, calls = quantized_matmul.calls_of(128, 256)
    assert list(calls) == ["torch.matmul", "tpformer"]
    said = "(8, 128, 256): torch.scaled_mm is left out, as it says: CUBLAS_STATUS_NOT_SUPPORTED\n"
    assert capsys.readouterr().err.endswith(said)


GPT = GPTConfig(n_layers=1, hidden_size=64, n_heads=4, seq_length=32)
ROPE: dict = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False}
LLAMA = replace(GPT, n_kv_heads=2, ffn_hidden_size=96, **ROPE)
CONFIGS = {"gpt": GPT, "gpt with dropout": replace(GPT, dropout=0.1), "llama": LLAMA}
EXPERTS = GPTConfig(hidden_size=16, n_heads=2, n_experts=8, experts_per_token=2, expert_ffn_size=24, **ROPE)


SMALL = {"DEVICE": "cpu", "DTYPE": torch.float32, "MODELS": {"tiny": EXPERTS}}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(layer, "DEVICE", "cpu")
    monkeypatch.setattr(layer, "compiled", lambda block: torch.compile(block, backend="eager", dynamic=False))
    torch.manual_seed(0)
    with mock.patch.multiple(grouped_matmul, **SMALL):
        yield


@pytest.mark.parametrize("name", CONFIGS)
def test_plain_layers_are_ours(name, on_cpu, monkeypatch):
    """The gate passes, and in float64 the output and every gradient agree."""
    config = CONFIGS[name]
    layer.check_layer(config, tokens=32)
    monkeypatch.setattr(layer, "DTYPE", torch.float64)
    block = layer.our_block(config)
    nn.init.normal_(block.input_layernorm.weight)
    x, dy, options = layer.inputs_of(block, config, 2, 16)
    drop = layer.our_dropout(config, options) if config.dropout else None
    plain = plain_block(block, config, torch.float64, drop=drop)
    ours = layer.step(block, lambda x: block(x, **options), x, dy)
    assert_same(ours, layer.step(plain, plain, x, dy))
    if config.dropout:
        with pytest.raises(AssertionError, match="not close"):
            assert_same(plain_block(block, config, torch.float64)(x), ours["output"])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_gate_of_layers_refuses_a_wrong_one(recompute, on_cpu, monkeypatch):
    right = layer.step

    def wrong(block: nn.Module, function: Callable, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        results = right(block, function, x, dy)
        if getattr(getattr(block, "keep", None), "recompute", None) == recompute:
            results["mlp.fc1.bias"] *= 1.1
        return results

    monkeypatch.setattr(layer, "step", wrong)
    with pytest.raises(AssertionError, match=f"layernorm layer, tpformer, {recompute}: mlp.fc1.bias: error"):
        layer.check_layer(GPT, tokens=32)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_layers_are_complete(name, on_cpu, untimed, monkeypatch):
    monkeypatch.setattr(layer, "measure", untimed)
    monkeypatch.setattr(layer, "layers", lambda quick: [layer.Layer("tiny", CONFIGS[name], 1)])
    rows = layer.rows(False)
    bars = {(row["provider"], row["baseline"]): row["bar"] for row in rows}
    gpt = {("tpformer", "torch.compile"): 1.1, ("tpformer", "torch.compile, fused qkv"): 1.1}
    required = {("tpformer, packed", "tpformer"): 1 / 1.04, **({} if name == "llama" else gpt)}
    assert {pair: bar for pair, bar in bars.items() if bar is not None} == required
    assert len(bars) == (8 if name == "llama" else 9)
    assert {row["baseline_value"] for row in rows if row["baseline"] == "data-sheet peak"} == {989.0}


def test_flops_and_bytes_of_a_layer_by_hand():
    gpt, *others = layer.layers(quick=False)
    assert gpt.tokens == 8192 and gpt.flops == 8192 * 3 * (24 * 4096**2 + 4 * 2048 * 4096)
    # in units of tokens * h * 2 bytes: for each branch twice a norm forward (2), a backward with residual (4), a finish
    # with residual (3), one that reads dz (1); GELU on 4 h
    units = 2 * (2 + 2 + 4 + 3 + 1) + 4 * (2 + 3)
    assert layer.passes_bytes(gpt) == pytest.approx(units * 8192 * 4096 * 2, rel=0.1)
    assert len(others) == 2 and all(0.4 < row["ratio"] < 0.75 for row in layer.predictions())


def test_grouped_products_and_predictions_are_those_of_the_models():
    sizes = {(p.model, p.layer, p.t): (p.groups, p.n, p.k) for p in grouped_matmul.products(quick=False)}
    assert sizes["Mixtral", UP, 1] == (8, 28672, 4096) and sizes["30B", UP, 8] == (16, 1536, 2048)
    assert sizes["235B", DOWN, 8] == (16, 4096, 1536) and len(sizes) == 3 * 2 * 2
    found = {(row["case"].split(",")[0], row["shape"]): row["value"] for row in grouped_matmul.predictions()}
    # 16 groups of 8192 rows in all, and half of a large tile's 128 rows for each: 8192 / 9216 of what GEMMs sustain
    assert found["prediction: forward", "30B gate+up 16 x 1536 x 2048 8192"] == pytest.approx(700 * 8192 / 9216, abs=1)


@pytest.mark.parametrize("t", [1, 4])
@pytest.mark.parametrize("layer", [UP, DOWN])
@pytest.mark.parametrize("case", [FORWARD, DGRAD, WGRAD])
def test_torch_computes_grouped_products(case, layer, t, on_cpu):
    """Both of torch's ways give what the reference does. The gate passes, and a wrong result does not pass it."""
    o = grouped_matmul.draw(Grouped(case, "tiny", layer, 13, t))
    oracle, expected = (
        reference.grouped_weight_gradient(left, right, o.offsets, o.left_index, o.right_index)
        if case == WGRAD
        else reference.grouped_matmul(left, right, o.offsets, o.left_index, transposed=case == DGRAD)
        for left, right in ((o.left.double(), o.right.double()), (o.left, o.right))
    )
    assert (o.right_index if case == WGRAD else o.left_index) is not None or layer == (UP if case == DGRAD else DOWN)
    for provider in (grouped_matmul.library, grouped_matmul.loop):
        actual = provider(case, o)
        assert_kernel_close(actual, oracle, expected, provider.__name__)
        grouped_matmul.check_groups("", case, o, actual, expected)
    with pytest.raises(AssertionError, match=r"group \d: error"):
        grouped_matmul.check_groups("of ours", case, o, expected + 1, expected)


def test_gates_that_fail_are_named_and_stop_no_other(tmp_path, capsys):
    def fails(quick: bool) -> None:
        raise AssertionError(f"3 is not 4, quick {quick}")

    whole = gates.gates([replace(layer.BENCH, name="wrong", check=fails), replace(layer.BENCH, check=lambda _: None)])
    assert main(["gates"], [replace(whole, device="cpu")], tmp_path) == 1
    said = capsys.readouterr().out
    assert "gates: wrong: AssertionError: 3 is not 4, quick True" in said and "passes" in said
    rows = json.loads((tmp_path / "cpu" / "gates.json").read_text())["rows"]
    assert [(row["gate"], bool(row["said"])) for row in rows] == [("wrong", True), ("layer", False)]


def test_a_profile_counts_what_overlaps_once():
    assert profile.united([(0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (2.6, 2.9), (5.0, 6.0)]) == 4.0
    a = torch.randn(64, 64)
    found = profile.profiled(lambda: [a @ a, a @ a], torch.device("cpu"))
    assert 0 < found["busy_ms"] <= found["wall_ms"] and found["kernels"] >= 2
    assert any(name == "aten::mm" for name, _ in found["longest"]) and "aten::mm" in profile.profile_line(found)


def gate_of_a_gather(case: str, layer: str) -> str:
    """What the gate of the fused kernel says of a result that is right, and then of a wrong one."""
    torch.manual_seed(0)
    with mock.patch.multiple(grouped_matmul, **SMALL):
        found = gathered_experts.build(Grouped(case, "tiny", layer, 40, 8))
        gathered_experts.check_gathered(found)
        found.channel.gathered(1, found.shard).add_(1)  # what the peers have sent
        with pytest.raises(AssertionError) as caught:
            gathered_experts.check_gathered(found)
    return str(caught.value)


@pytest.mark.parametrize("case, layer", [(FORWARD, UP), (DGRAD, DOWN)])
def test_the_gate_of_a_fused_gather(case, layer, interpreted):
    (said,) = interpreted(1).run(gate_of_a_gather, case, layer)
    assert "push=False, group" in said and "error" in said
