"""Qwen 3: Llama with norms of each head's queries and keys, and a head_dim of its own."""

from .family import Family, Field, Must, Tensors
from .llama import FIELDS, NO_WINDOW, TENSORS

NORMS = tuple(f"layers.{{}}.self_attn.{name}_norm.weight" for name in "qk")
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={"norm": "rmsnorm", "position": "rope", "bias": False, "qk_norm": True},
    fields=FIELDS
    | NO_WINDOW
    | {
        "vocab_size": Field("vocab_size", 151936),
        "max_position_embeddings": Field("seq_length", 32768),
        "num_key_value_heads": Field("n_kv_heads", 32),
        "head_dim": Field("head_dim", 128),
        "intermediate_size": Field("ffn_hidden_size", 22016),
        "attention_bias": Must(False, "only all linears, or q, k and v alone, can have biases here"),
    },
    tensors=(*TENSORS, *(Tensors(f"model.{name}", (name,)) for name in NORMS)),
    prefix="model.",
)
