"""Tiny models of transformers with random values, which tests of models in place share."""

from typing import Any

import torch
import transformers
from torch import nn

VOCAB, HIDDEN, HEADS = 50, 32, 4  # 4 ranks share the vocabulary unequally
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": HEADS, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": None}
SIZES |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
GPT2 = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "n_positions": 64}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": None}
# name -> (the configuration's class, the model's class, what differs from SIZES)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"num_key_value_heads": 2}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"num_key_value_heads": 2}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
    "bert": ("BertConfig", "BertForMaskedLM", {}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": HEADS}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {}),
    "tied": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_key_value_heads": 2, "num_local_experts": 11, "experts_implementation": "eager"},
    ),  # its other ones lack float64
    "t5": ("T5Config", "T5ForConditionalGeneration", {"d_model": HIDDEN, "d_kv": 8, "d_ff": 48, "num_layers": 2}),
    "vit": ("ViTConfig", "ViTForImageClassification", {"image_size": 16, "patch_size": 8}),
    "bart": ("BartConfig", "BartForConditionalGeneration", {"d_model": HIDDEN}),
}
BART = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in
        {"layers": 2, "attention_heads": HEADS, "ffn_dim": 48}.items()}  # fmt: skip
OWN = {"t5": {"num_heads": HEADS, "decoder_start_token_id": 0}, "bart": BART}


def built(name: str, **options: Any) -> nn.Module:
    """A model with the values that transformers draws. options: of its configuration."""
    config, model, own = MODELS[name]
    sizes = GPT2 if own.items() >= GPT2.items() else SIZES
    return getattr(transformers, model)(getattr(transformers, config)(**sizes | own | OWN.get(name, {}) | options))


def tiny(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A model with the same values on every rank. options: of its configuration."""
    torch.manual_seed(0)
    made = built(name, **options)
    for parameter in made.parameters():  # larger than transformers draws them, and no two elements equal
        nn.init.normal_(parameter, std=0.1) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    return made.to(dtype).eval()
