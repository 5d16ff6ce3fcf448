"""config.json files as the hub has them, with all their fields: each is read, and its preset is of the same model."""

import pytest

from tpformer.config import GPTConfig
from tpformer.config.presets import preset_config
from tpformer.weights.families import family_of
from tpformer.weights.family import meaning

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("vocab_size", "max_position_embeddings", "rope_theta")


def sizes(*values: float) -> dict:
    """The fields of a model's size, under the names that they have in config.json."""
    return dict(zip(SIZES, values, strict=True))


# what else the files of a family have
WRITTEN = {"initializer_range": 0.02, "transformers_version": "4.40.0", "use_cache": True, "torch_dtype": "bfloat16"}
ROPE = WRITTEN | {"hidden_act": "silu", "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "attention_dropout": 0.0}
LLAMA = ROPE | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 128000, "eos_token_id": 128001,
    "attention_bias": False, "pretraining_tp": 1, "rope_scaling": None,
}  # fmt: skip
LLAMA2 = LLAMA | {"_name_or_path": "meta-llama/Llama-2-7b-hf", "max_length": 4096, "pad_token_id": 0}
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 8192}
LLAMA31 = LLAMA | {"eos_token_id": [128001, 128008, 128009], "mlp_bias": False, "rope_scaling": SCALING}
LLAMA32 = LLAMA31 | {"head_dim": 64, "rope_scaling": SCALING | {"factor": 32.0}, "tie_word_embeddings": True}
SMOL = LLAMA | {"is_llama_config": True, "rope_interleaved": False, "tie_word_embeddings": True}
SMOL |= {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}
MISTRAL = ROPE | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2,
    "sliding_window": 4096,
}  # fmt: skip
MISTRAL03 = MISTRAL | {"sliding_window": None}
MIXTRAL = MISTRAL03 | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8,
    "output_router_logits": False, "router_aux_loss_coef": 0.02,
}  # fmt: skip
QWEN2 = ROPE | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "bos_token_id": 151643, "eos_token_id": 151645,
    "max_window_layers": 28, "rms_norm_eps": 1e-06, "sliding_window": 131072, "use_sliding_window": False,
}  # fmt: skip
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
    "max_window_layers": 36, "rope_scaling": None, "sliding_window": None,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
    "num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
GPT2 = {
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"), 0.1),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 50256), **dict.fromkeys(("n_ctx", "n_positions"), 1024),
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "n_embd": 768, "n_head": 12, "n_layer": 12,
    "summary_activation": None, "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
DISTILLED = {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "is_decoder": True, "label2id": {"LABEL_0": 0}}
SMOL_LM = {
    "vocab_size": 49152, "n_layers": 30, "hidden_size": 576, "n_heads": 9, "n_kv_heads": 3, "ffn_hidden_size": 1536,
    "rope_base": 100000.0, "tie_embeddings": True,
}  # fmt: skip
LONG, TIED = {"seq_length": 40960}, {"tie_word_embeddings": True}
# name -> (config.json, its preset, what differs from that: the length that the hub's file has)
PUBLISHED: dict[str, tuple[dict, str, dict]] = {
    "Llama-2-7b": (LLAMA2 | sizes(4096, 11008, 32, 32, 32, 32000, 4096, 1e4), "llama2-7b", {}),
    "Meta-Llama-3-8B": (LLAMA | sizes(4096, 14336, 32, 32, 8, 128256, 8192, 5e5), "llama3-8b", {}),
    "Llama-3.1-8B": (LLAMA31 | sizes(4096, 14336, 32, 32, 8, 128256, 131072, 5e5), "llama3.1-8b", {}),
    "Llama-3.2-1B": (LLAMA32 | sizes(2048, 8192, 16, 32, 8, 128256, 131072, 5e5), "llama3.2-1b", {}),
    "SmolLM2-135M": (SMOL | sizes(576, 1536, 30, 9, 3, 49152, 8192, 100000), "llama3-8b", SMOL_LM),
    "Mistral-7B-v0.1": (MISTRAL | sizes(4096, 14336, 32, 32, 8, 32000, 32768, 1e4), "mistral-7b", {}),
    "Mistral-7B-v0.3": (MISTRAL03 | sizes(4096, 14336, 32, 32, 8, 32768, 32768, 1e6), "mistral-7b-v0.3", {}),
    "Mixtral-8x7B-v0.1": (MIXTRAL | sizes(4096, 14336, 32, 32, 8, 32000, 32768, 1e6), "mixtral-8x7b", {}),
    "Qwen2-0.5B": (
        QWEN2 | sizes(896, 4864, 24, 14, 2, 151936, 131072, 1e6) | TIED | {"use_mrope": False}, "qwen2-0.5b", {}
    ),
    "Qwen2.5-7B": (QWEN2 | sizes(3584, 18944, 28, 28, 4, 152064, 32768, 1e6), "qwen2-7b", {"seq_length": 32768}),
    "Qwen3-0.6B": (QWEN3 | sizes(1024, 3072, 28, 16, 8, 151936, 40960, 1000000) | TIED, "qwen3-0.6b", LONG),
    "Qwen3-8B": (QWEN3 | sizes(4096, 12288, 36, 32, 8, 151936, 40960, 1000000), "qwen3-8b", LONG),
    "Qwen3-30B-A3B": (QWEN3_MOE | sizes(2048, 6144, 48, 32, 4, 151936, 40960, 1000000), "qwen3-30b-a3b", LONG),
    "Qwen3-235B-A22B": (
        QWEN3_MOE | sizes(4096, 12288, 94, 64, 4, 151936, 40960, 1000000) | {"moe_intermediate_size": 1536},
        "qwen3-235b-a22b", LONG,
    ),
    "gpt2": (GPT2, "gpt2-124m", {}),
    "gpt2-xl": (GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True}, "gpt2-1.5b", {}),
    "distilgpt2": (GPT2 | DISTILLED | {"n_layer": 6}, "gpt2-124m", {"n_layers": 6}),
}  # fmt: skip


def newer(values: dict) -> dict:
    """The same file as transformers 5 writes it."""
    values = {"dtype" if name == "torch_dtype" else name: value for name, value in values.items()}
    if "rope_theta" in values:
        scaling = values.pop("rope_scaling", None) or {"rope_type": "default"}
        values["rope_parameters"] = {"rope_theta": values.pop("rope_theta"), **scaling}
    if values["model_type"].startswith("qwen"):
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    return values


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name):
    """And written with the scaling where transformers 4 reads it, which does not know rope_parameters."""
    values, preset, changes = PUBLISHED[name]
    for written in (values, newer(values)):
        found: GPTConfig = family_of(written).read(written)
        assert meaning(found) == meaning(preset_config(preset, **changes))
        assert family_of(values).write(found).get("rope_scaling") == values.get("rope_scaling")
