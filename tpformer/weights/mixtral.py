"""Mixtral: Mistral with experts in every layer, whose weights for a token are divided by their sum."""

from .family import Family, Field, Must, Tensors, Unused
from .llama import FIELDS, TENSORS

EXPERTS = tuple(
    Tensors(f"model.layers.{{}}.block_sparse_moe.experts.{{expert}}.{theirs}.weight", (ours,), part=part)
    for theirs, ours, part in (
        ("w1", "layers.{}.mlp.experts.gate_up_proj", (0, 2)),
        ("w2", "layers.{}.mlp.experts.down_proj", (0, 1)),
        ("w3", "layers.{}.mlp.experts.gate_up_proj", (1, 2)),
    )
)
GATE = Tensors("model.layers.{}.block_sparse_moe.gate.weight", ("layers.{}.mlp.gate.weight",))
TRAINING = {
    "router_aux_loss_coef": Unused("it is a setting of training (train.balance_loss)"),
    "output_router_logits": Unused("it is about what a forward returns"),
}
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fixed={"norm": "rmsnorm", "position": "rope", "bias": False},
    fields=FIELDS
    | TRAINING
    | {
        "max_position_embeddings": Field("seq_length", 131072),
        "num_key_value_heads": Field("n_kv_heads", 8),
        "intermediate_size": Field("expert_ffn_size", 14336),
        "rms_norm_eps": Field("norm_eps", 1e-5),
        "sliding_window": Field("sliding_window", None),
        "num_local_experts": Field("n_experts", 8),
        "num_experts_per_tok": Field("experts_per_token", 2),
        "router_jitter_noise": Must(0.0, "a router here adds no noise"),
    },
    tensors=(*TENSORS, GATE, *EXPERTS),
    prefix="model.",
    rope_base=1e6,
)
