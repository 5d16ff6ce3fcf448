"""Llama 2, 3 and 3.1, and everything else of that shape. Its tables are also the ground of Qwen's and Mistral's."""

from .family import DROPOUT, Family, Field, Fields, Tensors, Unused

ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
FIELDS: Fields = {
    "vocab_size": Field("vocab_size", 32000),
    "max_position_embeddings": Field("seq_length", 2048),
    "num_hidden_layers": Field("n_layers", 32),
    "hidden_size": Field("hidden_size", 4096),
    "num_attention_heads": Field("n_heads", 32),
    "num_key_value_heads": Field("n_kv_heads", None),
    "head_dim": Field("head_dim", None),
    "intermediate_size": Field("ffn_hidden_size", 11008),
    "rms_norm_eps": Field("norm_eps", 1e-6),
    "hidden_act": Field("activation", "silu", ACTIVATIONS),
    "tie_word_embeddings": Field("tie_embeddings", False),
    "initializer_range": Field("init_std", 0.02),
    "attention_dropout": DROPOUT,
}
NAMES = (
    "embed_tokens.weight",
    "layers.{}.input_layernorm.weight",
    *(f"layers.{{}}.self_attn.{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")),
    "layers.{}.post_attention_layernorm.weight",
    *(f"layers.{{}}.mlp.{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")),
    "norm.weight",
)
TENSORS = (*(Tensors(f"model.{name}", (name,)) for name in NAMES), Tensors("lm_head.weight", ("lm_head.weight",)))

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fixed={"norm": "rmsnorm", "position": "rope"},
    fields=FIELDS
    | {
        "attention_bias": Field("bias", False),
        "mlp_bias": Field("bias", False),
        "pretraining_tp": Unused("it changes how products are summed, not what they are"),
        "is_llama_config": Unused("SmolLM's mark"),
        "max_sequence_length": Unused("an old name of max_position_embeddings"),
    },
    tensors=TENSORS,
    prefix="model.",
    divides_hidden=True,
    buffers=("model.layers.{}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
)
