"""GPTConfig refuses what cannot be built; its FLOPs are those of the paper's formula, and those that torch counts.
Presets have the published parameter counts."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tpformer.models import GPT, PRESETS, GPTConfig, preset_config

SMALLEST = {
    "seq_length": -5, "n_kv_heads": -1, "ffn_hidden_size": -3, "head_dim": 0,
    "sliding_window": 0, "rope_original_length": 0,
}  # fmt: skip
REFUSED = {
    **{f"{name}={value} must be at least 1": {name: value} for name, value in SMALLEST.items()},
    "norm='batchnorm': choose one of layernorm, rmsnorm": {"norm": "batchnorm"},
    "activation='relu': choose one of gelu, gelu_tanh, swiglu, geglu": {"activation": "relu"},
    "position='alibi': choose one of learned, rope": {"position": "alibi"},
    r"dropout=1.0 must be in \[0, 1\)": {"dropout": 1.0},
    r"dropout=-0.1 must be in \[0, 1\)": {"dropout": -0.1},
    r"vocab_size=0 must be in \[1, 2147483648\]": {"vocab_size": 0},
    r"vocab_multiple=0 must be in \[1, 2147483648\]": {"vocab_multiple": 0},
    r"n_layers=0 must be in \[1, 1e4\]": {"n_layers": 0},
    "rope_scaling_factor=0.5 must be at least 1 and finite": {"rope_scaling_factor": 0.5},
    "rope_scaling_factor=nan must be at least 1": {"rope_scaling_factor": math.nan},
    "rope_low_frequency=4.0 must be above 0 and below rope_high_frequency=4.0": {"rope_low_frequency": 4.0},
    "rope_scaling_factor=8.0 with position='learned' would scale nothing": {"rope_scaling_factor": 8.0},
}


def test_bad_values_are_refused():
    for message, fields in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            GPTConfig(**fields)


def test_flops_formula():
    """For the plain block, arXiv:2205.05198 has 72 L h^2 (1 + s/6h + V/12hL) for each token."""
    config = preset_config("megatron-1.7b")
    L, h, s, V = config.n_layers, config.hidden_size, config.seq_length, config.vocab_size
    assert config.flops_per_token == pytest.approx(72 * L * h**2 * (1 + s / (6 * h) + V / (12 * h * L)), rel=1e-12)
    # by hand: one layer of Llama 3's shape with h = 8, 4 heads of 2, 2 key-value heads, ffn 10, V = 100, s = 6:
    # q, o 2*64, k, v 2*8*4, gate, up, down 3*8*10, head 800; attention 12*8*6
    sizes = {"vocab_size": 100, "seq_length": 6, "n_layers": 1, "hidden_size": 8, "n_heads": 4, "ffn_hidden_size": 10}
    tiny = GPTConfig(**sizes, n_kv_heads=2, activation="swiglu", position="rope")
    assert tiny.flops_per_token == 6 * (128 + 64 + 240 + 800) + 576
    # heads of 6: q, o 2*8*24, k, v 2*8*12; attention 12*24*4, because a token attends to 4
    options = replace(tiny, head_dim=6, sliding_window=4, qk_norm=True, qkv_bias=True)
    assert options.flops_per_token == 6 * (384 + 192 + 240 + 800) + 1152


def test_flops_equal_what_torch_counts():
    options = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "n_kv_heads": 2, "tie_embeddings": False}
    config = GPTConfig(vocab_size=256, seq_length=48, n_layers=2, hidden_size=32, n_heads=4, **options)
    model = GPT(config)
    ids = torch.randint(256, (2, 48))
    # torch's counter does not know the in-place addmm_ that adds up dx over several weights
    known = {torch.ops.aten.addmm_: lambda y, a, b, out_shape=None, **_: 2 * a[0] * a[1] * b[1]}
    # the math backend counts its two products forward and four backward at full seq x seq, as the formula does
    with FlopCounterMode(display=False, custom_mapping=known) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, targets=ids).backward()
    assert counter.get_total_flops() / ids.numel() == pytest.approx(config.flops_per_token, rel=0.02)


# parameters of the published checkpoints: the number of elements that Hugging Face reads in their safetensors files.
# A tied table counts once, also where the files have it twice (Qwen 3)
EXACT = {
    "gpt2-124m": 124_439_808, "gpt2-355m": 354_823_168, "gpt2-774m": 774_030_080, "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248, "llama3.1-70b": 70_553_706_496, "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824, "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304, "qwen2-7b": 7_615_616_512, "qwen2-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264, "mistral-7b": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704, "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
}  # fmt: skip
# arXiv:2104.04473, table 1, in billions as printed
PRINTED = ["1.7", "3.6", "7.5", "18.4", "39.1", "76.1", "145.6", "310.1", "529.6", "1008.0"]


def test_presets_have_the_published_counts():
    assert {name: preset_config(name).n_parameters for name in EXACT} == EXACT
    rows = [name for name in PRESETS if name.startswith("megatron-")]
    assert [f"{preset_config(name).n_parameters / 1e9:.1f}" for name in rows] == PRINTED
    assert set(PRESETS) == set(EXACT) | set(rows) | {"gpt3-175b"}


def test_gpt3_differs_from_megatrons_175b_by_its_vocabulary():
    """arXiv:2005.14165, appendix D: 174,600 million parameters. arXiv:2205.05198, table 3: 175 billion."""
    config, padded = preset_config("gpt3-175b"), preset_config("gpt3-175b", vocab_size=51200)
    assert f"{config.n_parameters / 1e6:.0f}"[:4] == "1746" and f"{padded.n_parameters / 1e9:.0f}" == "175"
    assert padded.n_parameters - config.n_parameters == (51200 - 50257) * config.hidden_size


BUILT = ["gpt2-1.5b", "llama3-70b", "llama3.2-1b", "qwen2-0.5b", "qwen3-0.6b", "mistral-7b-v0.3"]
OTHERS = [
    {"activation": "geglu", "position": "rope", "tie_embeddings": False, "n_kv_heads": 4},
    {"head_dim": 24, "sliding_window": 5, "qkv_bias": False},
    {"norm": "rmsnorm", "bias": False, "ffn_hidden_size": 100, "n_kv_heads": 1},
]


def test_count_is_the_built_models_without_padding():
    for config in [preset_config(name) for name in BUILT] + [GPTConfig(vocab_size=1000, **each) for each in OTHERS]:
        built = sum(p.numel() for p in GPT(config, device="meta").parameters())
        padding = -config.vocab_size % config.vocab_multiple * config.hidden_size
        assert built - padding * (1 if config.tie_embeddings else 2) == config.n_parameters, config


def test_overrides_of_a_preset():
    assert preset_config("gpt2-124m", n_layers=3).n_layers == 3
    assert PRESETS["gpt2-124m"]["n_layers"] == 12  # the table is not changed
