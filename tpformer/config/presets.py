"""Named architectures, as plain dicts of GPTConfig fields: GPT-2, GPT-3, Megatron's ten sizes, Llama, Qwen, Mistral.

seq_length is the longest context that a model was published for. A training run may want a shorter one.
"""

from tpformer.words import shown

from .architecture import GPTConfig

_GPT2 = {"vocab_size": 50257, "seq_length": 1024}
_MEGATRON = {"vocab_size": 51200, "seq_length": 2048}
_LLAMA = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rope",
    "bias": False,
    "tie_embeddings": False,
}
_LLAMA2 = {**_LLAMA, "vocab_size": 32000, "seq_length": 4096}
_LLAMA3 = {**_LLAMA, "vocab_size": 128256, "seq_length": 8192, "rope_base": 500000.0, "n_kv_heads": 8}
_LLAMA31 = {**_LLAMA3, "seq_length": 131072, "rope_scaling_factor": 8.0}
_LLAMA32 = {**_LLAMA31, "rope_scaling_factor": 32.0, "tie_embeddings": True}
_QWEN = {**_LLAMA, "rope_base": 1000000.0, "norm_eps": 1e-6}
_QWEN2 = {**_QWEN, "seq_length": 131072, "qkv_bias": True}
_QWEN3 = {**_QWEN, "vocab_size": 151936, "seq_length": 32768, "n_kv_heads": 8, "head_dim": 128, "qk_norm": True}
_QWEN3_MOE = {**_QWEN3, "n_kv_heads": 4, "n_experts": 128, "experts_per_token": 8}
_TIED = {"tie_embeddings": True}
_MISTRAL = {**_LLAMA, "seq_length": 32768, "n_kv_heads": 8, "ffn_hidden_size": 14336}


def _size(n_layers: int, hidden_size: int, n_heads: int, **others: int) -> dict:
    return {"n_layers": n_layers, "hidden_size": hidden_size, "n_heads": n_heads, **others}


PRESETS: dict[str, dict] = {
    "gpt2-124m": {**_GPT2, **_size(12, 768, 12)},
    "gpt2-355m": {**_GPT2, **_size(24, 1024, 16)},
    "gpt2-774m": {**_GPT2, **_size(36, 1280, 20)},
    "gpt2-1.5b": {**_GPT2, **_size(48, 1600, 25)},
    # arXiv:2005.14165, table 2.1, but for its sparse attention
    "gpt3-175b": {"vocab_size": 50257, "seq_length": 2048, **_size(96, 12288, 96)},
    # arXiv:2104.04473, table 1
    "megatron-1.7b": {**_MEGATRON, **_size(24, 2304, 24)},
    "megatron-3.6b": {**_MEGATRON, **_size(30, 3072, 32)},
    "megatron-7.5b": {**_MEGATRON, **_size(36, 4096, 32)},
    "megatron-18.4b": {**_MEGATRON, **_size(40, 6144, 48)},
    "megatron-39.1b": {**_MEGATRON, **_size(48, 8192, 64)},
    "megatron-76.1b": {**_MEGATRON, **_size(60, 10240, 80)},
    "megatron-145.6b": {**_MEGATRON, **_size(80, 12288, 96)},
    "megatron-310.1b": {**_MEGATRON, **_size(96, 16384, 128)},
    "megatron-529.6b": {**_MEGATRON, **_size(105, 20480, 128)},
    "megatron-1008b": {**_MEGATRON, **_size(128, 25600, 160)},
    "llama2-7b": {**_LLAMA2, **_size(32, 4096, 32, ffn_hidden_size=11008)},
    "llama2-13b": {**_LLAMA2, **_size(40, 5120, 40, ffn_hidden_size=13824)},
    "llama2-70b": {**_LLAMA2, **_size(80, 8192, 64, ffn_hidden_size=28672, n_kv_heads=8)},
    "llama3-8b": {**_LLAMA3, **_size(32, 4096, 32, ffn_hidden_size=14336)},
    "llama3-70b": {**_LLAMA3, **_size(80, 8192, 64, ffn_hidden_size=28672)},
    "llama3-405b": {**_LLAMA3, **_size(126, 16384, 128, ffn_hidden_size=53248)},
    "llama3.1-8b": {**_LLAMA31, **_size(32, 4096, 32, ffn_hidden_size=14336)},
    "llama3.1-70b": {**_LLAMA31, **_size(80, 8192, 64, ffn_hidden_size=28672)},
    "llama3.1-405b": {**_LLAMA31, **_size(126, 16384, 128, ffn_hidden_size=53248)},
    "llama3.2-1b": {**_LLAMA32, **_size(16, 2048, 32, ffn_hidden_size=8192)},
    "llama3.2-3b": {**_LLAMA32, **_size(28, 3072, 24, ffn_hidden_size=8192)},
    "qwen2-0.5b": {**_QWEN2, **_size(24, 896, 14, n_kv_heads=2, ffn_hidden_size=4864, vocab_size=151936, **_TIED)},
    "qwen2-1.5b": {**_QWEN2, **_size(28, 1536, 12, n_kv_heads=2, ffn_hidden_size=8960, vocab_size=151936, **_TIED)},
    "qwen2-7b": {**_QWEN2, **_size(28, 3584, 28, n_kv_heads=4, ffn_hidden_size=18944, vocab_size=152064)},
    "qwen2-72b": {**_QWEN2, **_size(80, 8192, 64, n_kv_heads=8, ffn_hidden_size=29568, vocab_size=152064)},
    "qwen3-0.6b": {**_QWEN3, **_size(28, 1024, 16, ffn_hidden_size=3072, **_TIED)},
    "qwen3-1.7b": {**_QWEN3, **_size(28, 2048, 16, ffn_hidden_size=6144, **_TIED)},
    "qwen3-4b": {**_QWEN3, **_size(36, 2560, 32, ffn_hidden_size=9728, **_TIED)},
    "qwen3-8b": {**_QWEN3, **_size(36, 4096, 32, ffn_hidden_size=12288)},
    "qwen3-14b": {**_QWEN3, **_size(40, 5120, 40, ffn_hidden_size=17408)},
    "qwen3-32b": {**_QWEN3, **_size(64, 5120, 64, ffn_hidden_size=25600)},
    "qwen3-30b-a3b": {**_QWEN3_MOE, **_size(48, 2048, 32, ffn_hidden_size=6144, expert_ffn_size=768)},
    "qwen3-235b-a22b": {**_QWEN3_MOE, **_size(94, 4096, 64, ffn_hidden_size=12288, expert_ffn_size=1536)},
    # version 0.1
    "mistral-7b": {**_MISTRAL, **_size(32, 4096, 32, vocab_size=32000, sliding_window=4096)},
    "mistral-7b-v0.3": {**_MISTRAL, **_size(32, 4096, 32, vocab_size=32768), "rope_base": 1000000.0},
    "mixtral-8x7b": {
        **_MISTRAL,
        **_size(32, 4096, 32, vocab_size=32000, n_experts=8, experts_per_token=2),
        "rope_base": 1000000.0,
    },
}


def preset(name: str) -> dict:
    """The fields of a named architecture; ValueError lists the names for an unknown one."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"unknown preset {shown(name)}; choose one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])


def preset_config(name: str, **overrides) -> GPTConfig:
    """The GPTConfig of a named architecture with some fields replaced; ValueError for an unknown name."""
    return GPTConfig(**{**preset(name), **overrides})
