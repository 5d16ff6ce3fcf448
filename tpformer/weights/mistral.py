"""Mistral: Llama with a sliding window in all layers."""

from .family import Family, Field
from .llama import FIELDS, TENSORS

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fixed={"norm": "rmsnorm", "position": "rope", "bias": False},
    fields=FIELDS
    | {
        "max_position_embeddings": Field("seq_length", 131072),
        "num_key_value_heads": Field("n_kv_heads", 8),
        "intermediate_size": Field("ffn_hidden_size", 14336),
        "sliding_window": Field("sliding_window", 4096),
    },
    tensors=TENSORS,
    prefix="model.",
)
