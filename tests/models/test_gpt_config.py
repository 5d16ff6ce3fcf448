"""GPTConfig refuses what cannot be built; its FLOPs are those of the paper's formula, and those that torch counts."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tpformer.models import GPT, GPTConfig, preset_config


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"attention_dropout": 0.1},
            "attention_dropout=0.1 is not supported.*seq_length x seq_length masks; use dropout",
        ),
        ({"norm": "batchnorm"}, "norm='batchnorm': choose one of layernorm, rmsnorm"),
        ({"activation": "relu"}, "activation='relu': choose one of gelu, gelu_tanh, swiglu, geglu"),
        ({"position": "alibi"}, "position='alibi': choose one of learned, rope"),
        ({"dropout": 1.0}, r"dropout=1.0 must be in \[0, 1\)"),
        ({"dropout": -0.1}, r"dropout=-0.1 must be in \[0, 1\)"),
        ({"n_layers": 0}, r"n_layers=0 must be in \[1, 1e5\]"),
        ({"seq_length": -5}, "seq_length=-5 must be at least 1"),
        ({"vocab_multiple": 0}, "vocab_multiple=0 must be at least 1"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"n_kv_heads": -1}, "n_kv_heads=-1 must be at least 1"),
        ({"ffn_hidden_size": -3}, "ffn_hidden_size=-3 must be at least 1"),
        ({"head_dim": 0}, "head_dim=0 must be at least 1"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"rope_scaling_factor": 0.5}, "rope_scaling_factor=0.5 must be at least 1 and finite"),
        ({"rope_scaling_factor": math.nan}, "rope_scaling_factor=nan must be at least 1"),
        ({"rope_low_frequency": 4.0}, "rope_low_frequency=4.0 must be above 0 and below rope_high_frequency=4.0"),
        ({"rope_original_length": 0}, "rope_original_length=0 must be at least 1"),
        ({"rope_scaling_factor": 8.0}, "rope_scaling_factor=8.0 with position='learned' would scale nothing"),
    ],
)
def test_bad_values_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**fields)


def test_unset_vocabulary_and_impossible_heads_are_refused():
    with pytest.raises(ValueError, match="GPTConfig.vocab_size is unset: give it"):
        GPT(GPTConfig())
    with pytest.raises(ValueError, match="hidden_size=768 is not a multiple of n_heads=7"):
        GPT(GPTConfig(vocab_size=10, n_heads=7))
    with pytest.raises(ValueError, match="RoPE needs an even head dim, not head_dim=9"):
        GPT(GPTConfig(vocab_size=10, n_heads=7, head_dim=9, position="rope"))


def test_flops_formula():
    """For the plain block, arXiv:2205.05198 has 72 L h^2 (1 + s/6h + V/12hL) for each token."""
    config = preset_config("megatron-1.7b")
    L, h, s, V = config.n_layers, config.hidden_size, config.seq_length, config.vocab_size
    assert config.flops_per_token == pytest.approx(72 * L * h**2 * (1 + s / (6 * h) + V / (12 * h * L)), rel=1e-12)
    # by hand: one layer of Llama 3's shape with h = 8, 4 heads of 2, 2 key-value heads, ffn 10, V = 100, s = 6:
    # q, o 2*64, k, v 2*8*4, gate, up, down 3*8*10, head 800; attention 12*8*6
    tiny = GPTConfig(
        vocab_size=100, seq_length=6, n_layers=1, hidden_size=8, n_heads=4, n_kv_heads=2,
        ffn_hidden_size=10, activation="swiglu", position="rope",
    )  # fmt: skip
    assert tiny.flops_per_token == 6 * (128 + 64 + 240 + 800) + 576
    # heads of 6: q, o 2*8*24, k, v 2*8*12; attention 12*24*4, because a token attends to 4
    options = replace(tiny, head_dim=6, sliding_window=4, qk_norm=True, qkv_bias=True)
    assert options.flops_per_token == 6 * (384 + 192 + 240 + 800) + 1152


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_flops_equal_what_torch_counts(kind):
    options = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "n_kv_heads": 2, "tie_embeddings": False}
    config = GPTConfig(
        vocab_size=256, seq_length=48, n_layers=2, hidden_size=32, n_heads=4, **(options if kind == "llama" else {})
    )
    model = GPT(config)
    ids = torch.randint(256, (2, 48))
    # torch's counter does not know the in-place addmm_ that adds up dx over several weights
    known = {torch.ops.aten.addmm_: lambda y, a, b, out_shape=None, **_: 2 * a[0] * a[1] * b[1]}
    # the math backend counts its two products forward and four backward at full seq x seq, as the formula does
    with FlopCounterMode(display=False, custom_mapping=known) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, targets=ids).backward()
    assert counter.get_total_flops() / ids.numel() == pytest.approx(config.flops_per_token, rel=0.02)
