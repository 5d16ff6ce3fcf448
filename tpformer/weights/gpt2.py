"""GPT-2: learned positions, layer norms, and weights of linears as (in_features, out_features)."""

from .family import DROPOUT, Family, Field, Must, Tensors, Unused

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}
HEAD = Unused("it is for a classifier's head")


def _linear(theirs: str, *ours: str) -> tuple[Tensors, ...]:
    weight = Tensors(f"transformer.h.{{}}.{theirs}.weight", tuple(f"layers.{{}}.{one}.weight" for one in ours), True)
    return weight, Tensors(f"transformer.h.{{}}.{theirs}.bias", tuple(f"layers.{{}}.{one}.bias" for one in ours))


def _norm(theirs: str, ours: str) -> tuple[Tensors, ...]:
    return tuple(Tensors(f"transformer.{theirs}.{kind}", (f"{ours}.{kind}",)) for kind in ("weight", "bias"))


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fixed={"norm": "layernorm", "position": "learned", "bias": True},
    fields={
        "vocab_size": Field("vocab_size", 50257),
        "n_positions": Field("seq_length", 1024),
        "n_layer": Field("n_layers", 12),
        "n_embd": Field("hidden_size", 768),
        "n_head": Field("n_heads", 12),
        "n_inner": Field("ffn_hidden_size", None),
        "layer_norm_epsilon": Field("norm_eps", 1e-5),
        "activation_function": Field("activation", "gelu_new", ACTIVATIONS),
        "tie_word_embeddings": Field("tie_embeddings", True),
        "initializer_range": Field("init_std", 0.02),
        "attn_pdrop": DROPOUT,
        "embd_pdrop": DROPOUT,
        "resid_pdrop": DROPOUT,
        "scale_attn_weights": Must(True, "attention is always divided by the root of head_dim here"),
        "scale_attn_by_inverse_layer_idx": Must(False, "all layers scale their attention alike here"),
        "reorder_and_upcast_attn": Unused("it changes rounding, not results"),
        "n_ctx": Unused("an old name of n_positions"),
        "output_past": Unused("it is a setting of generation"),
        "summary_activation": HEAD,
        "summary_first_dropout": HEAD,
        "summary_proj_to_labels": HEAD,
        "summary_type": HEAD,
        "summary_use_proj": HEAD,
    },
    tensors=(
        Tensors("transformer.wte.weight", ("embed_tokens.weight",)),
        Tensors("transformer.wpe.weight", ("embed_positions.weight",)),
        *_norm("h.{}.ln_1", "layers.{}.input_layernorm"),
        *_linear("attn.c_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        *_linear("attn.c_proj", "self_attn.o_proj"),
        *_norm("h.{}.ln_2", "layers.{}.post_attention_layernorm"),
        *_linear("mlp.c_fc", "mlp.fc1"),
        *_linear("mlp.c_proj", "mlp.fc2"),
        *_norm("ln_f", "norm"),
        Tensors("lm_head.weight", ("lm_head.weight",)),
    ),
    prefix="transformer.",
    buffers=("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"),
)
