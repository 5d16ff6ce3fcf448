"""Qwen 3 with experts, in all layers but maybe the first ones."""

from .family import Family, Field, Must, Tensors
from .mixtral import TRAINING
from .qwen3 import QWEN3

EXPERTS = tuple(
    Tensors(f"model.layers.{{}}.mlp.experts.{{expert}}.{name}_proj.weight", (ours,), part=part)
    for name, ours, part in (
        ("gate", "layers.{}.mlp.experts.gate_up_proj", (0, 2)),
        ("up", "layers.{}.mlp.experts.gate_up_proj", (1, 2)),
        ("down", "layers.{}.mlp.experts.down_proj", (0, 1)),
    )
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fixed=QWEN3.fixed,
    fields=QWEN3.fields
    | TRAINING
    | {
        "num_hidden_layers": Field("n_layers", 24),
        "hidden_size": Field("hidden_size", 2048),
        "num_key_value_heads": Field("n_kv_heads", 4),
        "head_dim": Field("head_dim", None),
        "intermediate_size": Field("ffn_hidden_size", 6144),
        "num_experts": Field("n_experts", 128, also="num_local_experts"),
        "num_experts_per_tok": Field("experts_per_token", 8),
        "moe_intermediate_size": Field("expert_ffn_size", 768),
        "norm_topk_prob": Field("router_normalised", False),
        "mlp_only_layers": Field("first_dense_layers", None, prefix=True),
        "decoder_sparse_step": Must(1, "only the first layers can be without experts here (mlp_only_layers)"),
    },
    tensors=(
        *QWEN3.tensors,
        Tensors("model.layers.{}.mlp.gate.weight", ("layers.{}.mlp.gate.weight",)),
        *EXPERTS,
    ),
    prefix="model.",
)
