"""Qwen 3: Llama with norms of each head's queries and keys, and a head_dim of its own."""

from .family import Family, Field, Must, Tensors
from .llama import TENSORS
from .qwen2 import QWEN_FIELDS

NORMS = tuple(f"layers.{{}}.self_attn.{name}_norm.weight" for name in "qk")
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={"norm": "rmsnorm", "position": "rope", "bias": False, "qk_norm": True},
    fields=QWEN_FIELDS
    | {
        "head_dim": Field("head_dim", 128),
        "attention_bias": Must(False, "only all linears, or q, k and v alone, can have biases here"),
    },
    tensors=(*TENSORS, *(Tensors(f"model.{name}", (name,)) for name in NORMS)),
    prefix="model.",
)
