"""Qwen 2 and 2.5: Llama with biases of the queries, keys and values."""

from .family import Family, Field, Fields, Must, Unused
from .llama import FIELDS, TENSORS

# Qwen 3 has them, too
QWEN_FIELDS: Fields = FIELDS | {
    "vocab_size": Field("vocab_size", 151936),
    "max_position_embeddings": Field("seq_length", 32768),
    "num_key_value_heads": Field("n_kv_heads", 32),
    "intermediate_size": Field("ffn_hidden_size", 22016),
    "use_sliding_window": Must(False, "its layers would have windows of their own"),
    "layer_types": Must("full_attention", "all layers have to attend alike"),
    "sliding_window": Unused("use_sliding_window is off"),
    "max_window_layers": Unused("use_sliding_window is off"),
}

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed={"norm": "rmsnorm", "position": "rope", "bias": False, "qkv_bias": True},
    fields=QWEN_FIELDS | {"use_mrope": Must(False, "RoPE of several dimensions is for images")},
    tensors=TENSORS,
    prefix="model.",
)
