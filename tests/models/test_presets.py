"""Presets have the published parameter counts. n_parameters is the built model's count without padding."""

import pytest

from tpformer.models import GPT, PRESETS, GPTConfig, preset_config

# parameters of the published checkpoints: the number of elements that Hugging Face reads in their safetensors files.
# A tied table counts once, also where the files have it twice (Qwen 3)
EXACT = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
# arXiv:2104.04473, table 1, in billions as printed
PRINTED = ["1.7", "3.6", "7.5", "18.4", "39.1", "76.1", "145.6", "310.1", "529.6", "1008.0"]


@pytest.mark.parametrize("name", EXACT)
def test_published_counts(name):
    assert preset_config(name).n_parameters == EXACT[name]


def test_megatron_rows_to_the_printed_digit():
    rows = [name for name in PRESETS if name.startswith("megatron-")]
    assert [f"{preset_config(name).n_parameters / 1e9:.1f}" for name in rows] == PRINTED
    assert set(PRESETS) == set(EXACT) | set(rows) | {"gpt3-175b"}


def test_gpt3_differs_from_megatrons_175b_by_its_vocabulary():
    """arXiv:2005.14165, appendix D: 174,600 million parameters. arXiv:2205.05198, table 3: 175 billion."""
    config = preset_config("gpt3-175b")
    assert f"{config.n_parameters / 1e6:.0f}"[:4] == "1746"
    padded = preset_config("gpt3-175b", vocab_size=51200)
    assert padded.n_parameters - config.n_parameters == (51200 - 50257) * config.hidden_size
    assert f"{padded.n_parameters / 1e9:.0f}" == "175"


FAMILIES = ["llama3.2-1b", "qwen2-0.5b", "qwen3-0.6b", "mistral-7b-v0.3"]
OTHERS = {
    "geglu-bias-rope": {"activation": "geglu", "position": "rope", "tie_embeddings": False, "n_kv_heads": 4},
    "head-dim-window": {"head_dim": 24, "sliding_window": 5, "qkv_bias": False},
    "rmsnorm-learned": {"norm": "rmsnorm", "bias": False, "ffn_hidden_size": 100, "n_kv_heads": 1},
}


@pytest.mark.parametrize(
    "name", ["gpt2-124m", "gpt2-1.5b", "megatron-1.7b", "llama2-7b", "llama3-70b", *FAMILIES, *OTHERS]
)
def test_count_is_the_built_models(name):
    config = GPTConfig(vocab_size=1000, **OTHERS[name]) if name in OTHERS else preset_config(name)
    model = GPT(config, device="meta")
    built = sum(p.numel() for p in model.parameters())
    padding = -config.vocab_size % config.vocab_multiple * config.hidden_size
    assert built - padding * (1 if config.tie_embeddings else 2) == config.n_parameters


def test_unknown_preset_and_overrides():
    with pytest.raises(ValueError, match="unknown preset 'gpt5'; choose one of gpt2-124m, gpt2-355m"):
        preset_config("gpt5")
    assert preset_config("gpt2-124m", n_layers=3).n_layers == 3
    assert PRESETS["gpt2-124m"]["n_layers"] == 12  # the table is not changed
