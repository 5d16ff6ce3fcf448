"""The bench `layer` without a GPU: blocks, the gate, rows and predictions at tiny sizes on a CPU."""

import pytest
import torch
from testing import assert_same
from torch import Tensor, nn

from bench import layer as bench
from bench.layer import Layer, check_layer, inputs_of, our_block, our_dropout, step
from bench.plain import plain_block
from bench.timing import Call, Effort
from tpformer.kernels.cost import machine_for
from tpformer.models import GPTConfig

GPT = GPTConfig(n_layers=1, hidden_size=64, n_heads=4, seq_length=32)
LLAMA = GPTConfig(
    n_layers=1,
    hidden_size=64,
    n_heads=4,
    n_kv_heads=2,
    ffn_hidden_size=96,
    norm="rmsnorm",
    activation="swiglu",
    position="rope",
    bias=False,
    seq_length=32,
)
DROPPING = GPTConfig(n_layers=1, hidden_size=64, n_heads=4, seq_length=32, dropout=0.1)
CONFIGS = {"gpt": GPT, "gpt with dropout": DROPPING, "llama": LLAMA}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "compiled", lambda block: torch.compile(block, backend="eager", dynamic=False))
    torch.manual_seed(0)


def test_blocks_are_the_models() -> None:
    gpt, dropping, llama = bench.layers(quick=False)
    assert (str(gpt), str(dropping)) == ("GPT-7B, 4 x 2048", "GPT-7B, dropout 0.1, 4 x 2048")
    c = gpt.config
    assert (c.hidden_size, c.n_heads, c.kv_heads, c.ffn_size) == (4096, 32, 32, 16384)
    assert (c.norm, c.activation, c.bias, c.position) == ("layernorm", "gelu_tanh", True, "learned")
    assert gpt.tokens == 8192
    # forward 24 h^2 per token and 4 s h of attention, backward twice that
    assert gpt.flops == 8192 * 3 * (24 * 4096**2 + 4 * 2048 * 4096)
    c = llama.config
    assert (c.hidden_size, c.n_heads, c.kv_heads, c.ffn_size) == (4096, 32, 8, 14336)
    assert (c.norm, c.activation, c.bias, c.position) == ("rmsnorm", "swiglu", False, "rope")
    assert [layer.batch for layer in bench.layers(quick=True)] == [1]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fused_qkv", [False, True])
def test_plain_blocks_are_ours(name: str, fused_qkv: bool, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and every gradient agree in float64; a fused qkv gradient is the three projections' in a row."""
    monkeypatch.setattr(bench, "DTYPE", torch.float64)
    config = CONFIGS[name]
    block = our_block(config)
    nn.init.normal_(block.input_layernorm.weight)
    x, dy, options = inputs_of(block, config, 2, 16)
    drop = our_dropout(config, options) if config.dropout else None
    plain = plain_block(block, config, torch.float64, fused_qkv=fused_qkv, drop=drop)
    ours = step(block, lambda x: block(x, **options), x, dy)
    wanted = step(plain, plain, x, dy)
    for result in [result for result in wanted if "qkv_proj" in result]:
        ours[result] = torch.cat([ours.pop(result.replace("qkv_proj", f"{part}_proj")) for part in "qkv"])
    assert_same(ours, wanted)
    if config.dropout:
        with pytest.raises(AssertionError, match="not close"):
            assert_same(plain_block(block, config, torch.float64)(x), ours["output"])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gate_passes_on_a_cpu(name: str, on_cpu: None) -> None:
    check_layer(CONFIGS[name], tokens=32)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_gate_refuses_a_wrong_block(recompute: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.step

    def wrong(block: nn.Module, function, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        results = right(block, function, x, dy)
        if getattr(block, "recompute", None) == recompute:
            results["mlp.fc1.bias"] *= 1.1
        return results

    monkeypatch.setattr(bench, "step", wrong)
    with pytest.raises(AssertionError, match=f"layernorm layer, tpformer, {recompute}: mlp.fc1.bias: error"):
        check_layer(GPT, tokens=32)


def once(calls: dict[str, Call], effort: Effort) -> dict[str, list[float]]:
    for call in calls.values():
        call.run()
    return {name: [1e-3 * (index + 1)] * effort.rounds for index, name in enumerate(calls)}


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_complete(name: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure", once)
    monkeypatch.setattr(bench, "layers", lambda quick: [Layer("tiny", CONFIGS[name], 1)])
    rows = bench.rows(False)
    pairs = [(row["provider"], row["baseline"], row["bar"]) for row in rows]
    bar = None if name == "llama" else 1.1
    assert ("tpformer", "torch.compile", bar) in pairs
    assert (("tpformer", "torch.compile, fused qkv", bar) in pairs) == (name != "llama")
    for pair in [
        ("tpformer", "PyTorch"),
        ("tpformer, recompute mlp", "tpformer"),
        ("tpformer, recompute full", "tpformer"),
        ("tpformer", "data-sheet peak"),
    ]:
        assert (*pair, None) in pairs
    assert ("tpformer, packed", "tpformer", 1 / 1.04) in pairs
    (share,) = (row for row in rows if (row["provider"], row["baseline"]) == ("tpformer", "data-sheet peak"))
    assert share["baseline_value"] == 989.0
    assert all(row["unit"] == "TFLOP/s" for row in rows)


def test_predictions_by_hand() -> None:
    h200 = machine_for("H200")
    assert h200 is not None
    gpt, dropping, llama = bench.layers(quick=False)
    # 24 h^2 and causal 2 s h FLOPs a token, three times; bytes in units of tokens * h * 2: for each branch twice a
    # norm forward (2), a backward with residual (4), a finish with residual (3), one that reads dz (1); GELU on 4 h
    gemms = 8192 * 3 * (24 * 4096**2 + 2 * 2048 * 4096) / 700e12
    unit = 8192 * 4096 * 2
    passes = bench.passes_bytes(gpt)
    assert passes == pytest.approx(unit * (2 * (2 + 2 + 4 + 3 + 1) + 4 * (2 + 3)), rel=0.1)
    assert bench.predicted_seconds(gpt, h200) == pytest.approx(gemms + passes / 4.3e12, rel=1e-6)
    assert bench.passes_bytes(dropping) > passes and bench.passes_bytes(llama) > 0
    fc1 = 2 * 8192 * 4096 * 16384 / 700e12
    assert bench.predicted_seconds(gpt, h200, "mlp") - bench.predicted_seconds(gpt, h200) == pytest.approx(fc1)
    rows = bench.predictions()
    assert len(rows) == 3 * 3 and all(0.4 < row["ratio"] < 0.75 for row in rows)
