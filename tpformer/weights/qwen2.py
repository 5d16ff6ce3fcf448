"""Qwen 2 and 2.5: Llama with biases of the queries, keys and values."""

from .family import Family, Field, Must
from .llama import FIELDS, NO_WINDOW, TENSORS

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed={"norm": "rmsnorm", "position": "rope", "bias": False, "qkv_bias": True},
    fields=FIELDS
    | NO_WINDOW
    | {
        "vocab_size": Field("vocab_size", 151936),
        "max_position_embeddings": Field("seq_length", 32768),
        "num_key_value_heads": Field("n_kv_heads", 32),
        "intermediate_size": Field("ffn_hidden_size", 22016),
        "use_mrope": Must(False, "RoPE of several dimensions is for images"),
    },
    tensors=TENSORS,
    prefix="model.",
)
