"""What autograd keeps of a layer, counted and named: the counting, the promised sizes, the tool's files and gate."""

import gc
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist
from live import Live

from bench import memory
from bench.layer_memory import RESIDUALS, UNPACKED, Counted, Layer, Step, count, expected_items
from harness.runner import main
from tpformer.distributed import build_mesh
from tpformer.models import GPTConfig
from tpformer.planner.storages import OTHER, new_objects

GPT = replace(memory.GPT, hidden_size=64, n_heads=4, seq_length=32)
LLAMA = replace(
    memory.LLAMA, qk_norm=True, hidden_size=64, n_heads=4, n_kv_heads=2, seq_length=32, ffn_hidden_size=96, head_dim=24
)
MOE = replace(
    LLAMA, n_layers=2, first_dense_layers=1, n_experts=8, experts_per_token=4, expert_ffn_size=24, shared_expert_size=16
)
MODES = ("none", "mlp", "full")


def counted(layers: Sequence[Layer], collectives: bool = True) -> list[Counted]:
    """bench.layer_memory.count in this process, which is a rank."""
    mesh = None
    if dist.is_initialized() and dist.get_world_size() > 1:
        mesh = build_mesh("cpu", tensor_parallel=layers[0].tp, context_parallel=layers[0].cp)
    steps = [Step(layer, mesh) for layer in layers]
    return [Counted(step.layer, step.saved_items(), {} if step.layer.torch else step.collectives()) for step in steps]


@pytest.mark.parametrize("t, cp", [(1, 1), (2, 1), (1, 2)])
def test_layers_keep_what_they_should(ranks, t, cp):
    models = {"GPT": GPT, "Llama": LLAMA, "MoE": MOE}.items()
    layers = [Layer(name, config, t, mode, cp=cp) for name, config in models for mode in MODES]
    layers += [Layer("GPT", GPT, t, torch=True)] * (cp == 1)
    first, *others = ranks(t * cp).run(counted, layers) if t * cp > 1 else [counted(layers)]
    assert all(other == first for other in others)
    for each in first:
        assert memory.collective_problems(each) == []
        assert each.layer.torch or memory.item_problems(each.layer, each.items) == []
    *_, torchs = first
    if cp > 1:
        assert torchs.layer.unit == 32 * 64 / cp
        return
    unit, torch_items = torchs.layer.unit, torchs.items
    assert unit == 32 * 64 / t
    # 34 without parallelism; gathered norm outputs are whole on every rank; its norms' statistics have 2 bytes here
    assert sum(torch_items.values()) / unit == 34 + 4 * (t - 1) + 8 / 64 + 4 / (64 // 4)
    assert torch_items["norm output before MLP"] == 2 * t * unit and OTHER not in torch_items


def test_nothing_lives_that_autograd_does_not_show():
    """Operations could keep tensors as attributes, which no hook sees: the memory itself is looked at."""
    with new_objects():
        for config, mode in [(config, mode) for config in (GPT, MOE) for mode in MODES] + [(LLAMA, "none")]:
            step = Step(Layer("layer", config, 1, mode), None)
            expected = step.saved_items()
            del expected[RESIDUALS[0]]  # the input was there before
            with Live([step.x, *step.block.parameters()]) as live:
                y = step.forward()
            table = 0
            if config.position == "rope":
                tables, ids = step.positions.rope(config.head_size, config.rope_base, y.device, y.dtype)
                table = sum(x.untyped_storage().nbytes() for x in (*tables, ids))
            del step.positions
            gc.collect()
            shared = 8 * (config.n_experts or 0)  # how many tokens each expert has had
            shared += 8 * config.seq_length if config.dropout else 0  # where rows' random numbers begin: once for all
            alive = sum(nbytes for storage, nbytes in live.alive.values() if not storage.expired())
            assert alive - y.untyped_storage().nbytes() - table - shared == sum(expected.values()), mode


def test_published_formulas():
    rows = memory.formula_rows(Layer("GPT layer", replace(GPT, ffn_hidden_size=2 * GPT.hidden_size), 1))
    assert [row["items"]["total"] / row["unit"] for row in rows] == [26, 22]
    assert memory.formula_rows(Layer("Llama layer", LLAMA, 1)) == []
    assert memory.formula_rows(Layer("grouped", replace(GPT, n_kv_heads=2), 1)) == []


@pytest.mark.parametrize("call, words", [
    (lambda: Layer("layer", GPT, 3).check(), "n_heads=4 cannot be split"),
    (lambda: Layer("layer", GPT, 1, cp=3).check(), "seq_length=32 tokens cannot be shared by ranks=3"),
    (lambda: Layer("layer", replace(GPT, n_kv_heads=1), 2).check(), "layer: kv_heads=1 cannot be split evenly over 2"),
    (lambda: Layer("layer", replace(GPT, ffn_hidden_size=97), 2).check(), "ffn_size=97 cannot be split"),
    (lambda: Layer("layer", replace(GPT, hidden_size=2**20, n_heads=2**10), 1).check(), "weights are 24576 GiB"),
    (lambda: memory.chosen_layers("gpt2-125m", None), "unknown preset 'gpt2-125m'"),
    (lambda: memory.chosen_layers("gpt2-124m", 5), "n_heads=12 cannot be split over tensor_parallel=5"),
    (lambda: memory.chosen_layers(None, 0), "--tp 0 must be at least 1"),
])  # fmt: skip
def test_layers_that_cannot_be_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_samples_are_as_few_as_ranks_can_share():
    assert Layer("layer", GPT, 4).batch == 1
    assert Layer("layer", replace(GPT, seq_length=6), 4).batch == 2 and Layer("layer", GPT, 5).batch == 5


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The tool on small layers, one rank, in this process."""
    monkeypatch.setattr(memory, "MODELS", {"GPT layer": GPT, "Llama layer": LLAMA, "MoE layer": MOE})
    monkeypatch.setattr(memory, "RANKS", (1,))
    monkeypatch.setattr(memory, "SHARED", ())
    monkeypatch.setattr(memory, "count", counted)
    return monkeypatch


def test_the_result_file(tiny, tmp_path, capsys):
    assert main(["memory"], [memory.BENCH], tmp_path) == 0
    assert "every size and count is as it should be" in capsys.readouterr().out
    result = json.loads((tmp_path / "cpu" / "memory.json").read_text())
    assert list(result)[8:] == ["note", "models", "rows", "gemms", "collectives"]
    assert GPTConfig(**result["models"]["Llama layer"]) == LLAMA
    assert {row["unit"] for row in result["rows"]} == {32 * 64}
    totals = {(row["model"], row["recompute"]): sum(row["items"].values()) / row["unit"] for row in result["rows"]}
    assert totals["GPT layer", "none"] == 20.5 and totals["GPT layer", "full"] == 2
    assert totals["GPT layer, Megatron (formula)", "attention"] == 34
    svg = (tmp_path / "cpu" / "memory.svg").read_text()
    assert svg.count(">20.50<") == 1 and "GPT layer, PyTorch TP+SP" in svg


def test_layers_keep_packed_what_they_should(tiny, tmp_path, capsys):
    """Every name has its packed bytes, statistics have their own, and parts of the packed bytes add up."""
    wide: dict = {"hidden_size": 128, "seq_length": 256}
    llama = replace(LLAMA, **wide, head_dim=32, ffn_hidden_size=512)
    moe = replace(MOE, **wide, head_dim=32, expert_ffn_size=64, shared_expert_size=64)
    tiny.setattr(memory, "MODELS", {"GPT": replace(GPT, **wide), "Llama": llama, "MoE": moe})
    assert main(["memory", "--pack"], [memory.BENCH], tmp_path) == 0
    printed = capsys.readouterr().out
    assert "every size and count is as it should be" in printed and OTHER not in printed.split()
    layer = Layer("MoE", moe, 1, pack=True)
    items = expected_items(layer)
    packed = sum(size for name, size in items.items() if name not in UNPACKED) / layer.unit
    assert sum(memory.packed_parts(layer, items).values()) == pytest.approx(packed)
    assert list(tmp_path.iterdir()) == []


def test_what_options_ask_is_printed_and_not_written(tiny, tmp_path, capsys):
    tiny.setattr(memory, "preset_config", lambda name, **fields: replace(GPT, **fields))
    assert main(["memory", "--preset", "gpt2-124m"], [memory.BENCH], tmp_path) == 0
    printed = capsys.readouterr().out
    assert "gpt2-124m layer: hidden 64, 1 x 32 tokens" in printed and "20.5 (0.04)" in printed
    assert main(["memory", "--tp", "0"], [memory.BENCH], tmp_path) == 2
    assert list(tmp_path.iterdir()) == []


def test_other_sizes_and_counts_are_problems():
    layer = Layer("GPT layer", GPT, 2)
    items = expected_items(layer) | {OTHER: 512}
    del items["q"]
    where = "GPT layer, t = 2, recompute none"
    assert memory.item_problems(layer, items) == [
        f"{where}: {OTHER} takes 512 bytes, not 0",
        f"{where}: q takes 0 bytes, not 2048",
        f"{where}: 18.5 sbh/t without statistics, not 20",
    ]
    row = {"model": "GPT layer", "recompute": "none", "forward": 30, "backward": 90, "recomputed": 30}
    assert [problem.split(": ")[1].split()[0] for problem in memory.gemm_problems(layer, row)] == ["forward", "30"]
    calls = {"forward": [("all_gather", 2 * 32 * 64)] * 2 + [("reduce_scatter", 8000)] * 3}
    _, *others = memory.collective_problems(Counted(layer, {}, calls))
    assert others == [f"{where}, forward: reduce_scatter of 8000 bytes, above 4096"] * 3


@pytest.mark.proof
def test_counts_of_processes():
    (found,) = count([Layer("GPT layer", GPT, 2, "mlp")], collectives=True)
    assert sum(found.items.values()) / found.layer.unit == 12 + 8 / 64 + 4 / 16
    assert found.collectives["forward"]
