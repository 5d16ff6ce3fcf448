"""Tiny random models of transformers, which is the oracle: one for each thing that a family can differ in.

Belongs here: making and saving them. No assertions.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.families.training import in_float64

GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, **GQA,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
QWEN3_MOE = LLAMA | {
    **{"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True},
    **{"max_window_layers": 3, "decoder_sparse_step": 1},
}
GPT2 = {"vocab_size": 101, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
# name -> (model_type, fields of its configuration)
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", LLAMA),
    "llama-tied-mha": ("llama", LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama-biases-heads": ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama-3.1": ("llama", LLAMA | {"rope_parameters": SCALED}),
    "llama-geglu": ("llama", LLAMA | {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1}),
    "qwen2": ("qwen2", LLAMA),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 20}),
    "qwen3-tied": ("qwen3", LLAMA | {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("mistral", LLAMA | {"sliding_window": 6, "head_dim": 6}),
    "mistral-no-window": ("mistral", LLAMA | {"sliding_window": None}),
    "mixtral": ("mixtral", LLAMA | {"num_local_experts": 4}),
    "mixtral-window": ("mixtral", LLAMA | {"sliding_window": 6, "num_local_experts": 5, "num_experts_per_tok": 3}),
    "qwen3-moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3-moe-dense-first": ("qwen3_moe", QWEN3_MOE | {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied-gelu": ("gpt2", GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 72}),
}


def configuration(name: str):
    kind, fields = MODELS[name]
    return AutoConfig.for_model(kind, **fields)


def make(name: str, folder, dtype: torch.dtype = torch.float32, **saving):
    """Save a random model to `folder`, and return it. Biases and norms are random, too."""
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(configuration(name)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, **saving)
    return model


def ids() -> torch.Tensor:
    return torch.randint(101, (2, 24), generator=torch.Generator().manual_seed(3))


def exact(model):
    """A model of theirs, its angles too, in float64, with attention and experts in plain torch."""
    with in_float64():
        made = type(model)(model.config).eval()
    made.load_state_dict(model.state_dict())
    made.config._attn_implementation = made.config._experts_implementation = "eager"
    return made
