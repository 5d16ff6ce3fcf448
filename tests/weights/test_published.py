"""config.json files as the hub has them, with all their fields: each is read, and its preset is of the same model."""

import pytest

from tpformer.config import GPTConfig
from tpformer.config.presets import preset_config
from tpformer.weights.families import family_of
from tpformer.weights.family import meaning

WRITTEN = {"initializer_range": 0.02, "transformers_version": "4.40.0", "use_cache": True}
LLAMA = {
    **WRITTEN,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "intermediate_size": 11008,
    "max_length": 4096,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 32,
    "pad_token_id": 0,
    "rope_theta": 10000.0,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA31 = {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": SCALING,
}
LLAMA32 = {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": SCALING | {"factor": 32.0},
    "tie_word_embeddings": True,
}
TINY = {"hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 2048, "num_hidden_layers": 22}
TINY |= {"num_key_value_heads": 4, "rope_theta": 10000.0, "vocab_size": 32000}
SMOL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "vocab_size": 49152,
}
MISTRAL = {
    **WRITTEN,
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
MISTRAL3 = {"attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768}
QWEN2 = {
    **WRITTEN,
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN2_SMALL = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "vocab_size": 151936,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "vocab_size": 151936,
}
QWEN3_SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28}
QWEN3_SMALL |= {"max_window_layers": 28, "tie_word_embeddings": True}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
QWEN3_MOE_LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
DISTILLED = {
    "_num_labels": 1,
    "id2label": {"0": "LABEL_0"},
    "is_decoder": True,
    "label2id": {"LABEL_0": 0},
    "n_layer": 6,
}
XL = {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True}
# name -> (config.json, its preset or what its fields say, with the length that the hub's file has)
PUBLISHED = {
    "Llama-2-7b": (LLAMA | LLAMA2, preset_config("llama2-7b")),
    "Meta-Llama-3-8B": (LLAMA, preset_config("llama3-8b")),
    "Llama-3.1-8B-Instruct": (LLAMA | LLAMA31, preset_config("llama3.1-8b")),
    "Llama-3.2-1B": (LLAMA | LLAMA31 | LLAMA32, preset_config("llama3.2-1b")),
    "Mistral-7B-v0.1": (MISTRAL, preset_config("mistral-7b")),
    "Mistral-7B-v0.3": (MISTRAL | MISTRAL3, preset_config("mistral-7b-v0.3")),
    "Qwen2-0.5B": (QWEN2 | QWEN2_SMALL, preset_config("qwen2-0.5b")),
    "Qwen2.5-7B-Instruct": (QWEN2, preset_config("qwen2-7b", seq_length=32768)),
    "Qwen3-0.6B": (QWEN2 | QWEN3 | QWEN3_SMALL, preset_config("qwen3-0.6b", seq_length=40960)),
    "Qwen3-8B": (QWEN2 | QWEN3, preset_config("qwen3-8b", seq_length=40960)),
    "Mixtral-8x7B-v0.1": (MISTRAL | MIXTRAL, preset_config("mixtral-8x7b")),
    "Qwen3-30B-A3B": (QWEN2 | QWEN3 | QWEN3_MOE, preset_config("qwen3-30b-a3b", seq_length=40960)),
    "Qwen3-235B-A22B": (
        QWEN2 | QWEN3 | QWEN3_MOE | QWEN3_MOE_LARGE,
        preset_config("qwen3-235b-a22b", seq_length=40960),
    ),
    "gpt2": (GPT2, preset_config("gpt2-124m")),
    "gpt2-xl": (GPT2 | XL, preset_config("gpt2-1.5b")),
    "distilgpt2": (GPT2 | DISTILLED, preset_config("gpt2-124m", n_layers=6)),
    "TinyLlama-1.1B": (
        LLAMA | TINY,
        preset_config(
            "llama2-7b", seq_length=2048, n_layers=22, hidden_size=2048, ffn_hidden_size=5632, n_kv_heads=4
        ),
    ),
    "SmolLM2-135M": (
        LLAMA | SMOL,
        preset_config(
            "llama3-8b", vocab_size=49152, n_layers=30, hidden_size=576, n_heads=9, n_kv_heads=3, ffn_hidden_size=1536,
            rope_base=100000.0, tie_embeddings=True,
        ),
    ),
}  # fmt: skip


def newer(values: dict) -> dict:
    """The same file as transformers 5 writes it."""
    values = dict(values)
    if "rope_theta" in values:
        scaling = values.pop("rope_scaling", None) or {"rope_type": "default"}
        values["rope_parameters"] = {"rope_theta": values.pop("rope_theta"), **scaling}
    if "torch_dtype" in values:
        values["dtype"] = values.pop("torch_dtype")
    if values["model_type"].startswith("qwen"):
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    return values


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name):
    values, expected = PUBLISHED[name]
    for written in (values, newer(values)):
        found: GPTConfig = family_of(written).read(written)
        assert meaning(found) == meaning(expected)
        assert found.n_parameters == expected.n_parameters


@pytest.mark.parametrize(
    "kind", "phi phi3 gemma gemma2 gemma3_text qwen2_moe qwen3_next deepseek_v3 gpt_neox llama4 smollm3".split()
)
def test_other_families_are_refused(kind):
    with pytest.raises(ValueError, match=f"model_type = '{kind}': known here are llama"):
        family_of(LLAMA | {"model_type": kind})
