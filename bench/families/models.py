"""Families of transformers, each as a tiny random model with inputs.

Belongs here: which families, their smallest configurations, their inputs. transformers is imported when a model is
made.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SEQ, BATCH, VOCAB = 8, 2, 50  # 50 rows of an embedding are no whole number for each of 4 ranks
TEXT, MASKED, PAIRS, IMAGES = "text", "masked text", "pairs of texts", "images"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 40}
LLAMA = {**SIZES, **TOKENS, "num_key_value_heads": 4, "intermediate_size": 48}
GROUPED = {**LLAMA, "num_key_value_heads": 2}  # 4 ranks are more than these
BERT = {**SIZES, **TOKENS, "intermediate_size": 48}
VISION = {**SIZES, "intermediate_size": 48, "patch_size": 2}
WIDE = (6, 10)  # pixels: 15 patches, and with the class 16 tokens; a square has 9 patches, so that 4 do not divide 10
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
NEXT = {
    **GROUPED, **EXPERTS, "head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
LATENT = {
    **LLAMA, **EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
DISTILLED = {**TOKENS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
RELATIVE = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    **TOKENS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
}  # fmt: skip


class Family(NamedTuple):
    """A model class of transformers, and what its configuration has besides defaults. There is no dropout."""

    name: str
    model: str
    options: Mapping[str, Any]
    inputs: str = TEXT
    draws: bool = False  # whether it draws random numbers in training mode

    def save(self, directory: Path) -> None:
        """Write the model with random weights in the default dtype; a bias or the weight of a norm is random, too."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.model_class(self.config())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.2 * torch.randn(parameter.shape))
        model.save_pretrained(directory)

    def load(self, directory: Path, **options: Any) -> nn.Module:
        """The model of a directory, in training mode unless it draws then, and the default dtype. Experts run one after
        another, because torch multiplies no groups of float64 matrices."""
        dtype = torch.get_default_dtype()
        made = self.model_class.from_pretrained(directory, dtype=dtype, experts_implementation="eager", **options)
        return made.eval() if self.draws else made.train()

    @property
    def model_class(self) -> Any:
        return getattr(importlib.import_module("transformers"), self.model)

    def config(self) -> Any:
        made = self.model_class.config_class
        dropout = {key: 0.0 for key, value in vars(made()).items() if "drop" in key and isinstance(value, float)}
        return made(**{**dropout, **self.options})

    def batch(self) -> dict[str, Tensor]:
        """What the model is called with."""
        generator = torch.Generator().manual_seed(1)
        if self.inputs == IMAGES:
            size = self.options["image_size"]
            height, width = size if isinstance(size, tuple) else (size, size)
            pixels = torch.randn(BATCH, 3, height, width, generator=generator, dtype=torch.float64)
            return {"pixel_values": pixels.to(torch.get_default_dtype())}
        ids, labels = torch.randint(3, VOCAB, (2, BATCH, SEQ), generator=generator)
        if self.inputs == TEXT:
            return {"input_ids": ids, "labels": ids}
        mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
        mask[1, -2:] = 0
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


GROUPS: dict[str, tuple[Family, ...]] = {
    "dense": (
        Family("Llama", "LlamaForCausalLM", LLAMA),
        Family("Qwen2", "Qwen2ForCausalLM", LLAMA),
        Family("Gemma", "GemmaForCausalLM", {**LLAMA, "head_dim": 8}),
        Family("Gemma2", "Gemma2ForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 4}),
        Family("OLMo2", "Olmo2ForCausalLM", LLAMA),
        Family("Granite", "GraniteForCausalLM", {**LLAMA, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
        Family("StableLM", "StableLmForCausalLM", {**LLAMA, "use_qkv_bias": True}),
        Family("Starcoder2", "Starcoder2ForCausalLM", LLAMA),
        Family("Cohere", "CohereForCausalLM", LLAMA),
        Family("SmolLM3", "SmolLM3ForCausalLM", LLAMA),
        Family("GLM4", "Glm4ForCausalLM", {**LLAMA, "head_dim": 8}),
        Family("Gemma3", "Gemma3ForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 4}),
        Family("OLMo3", "Olmo3ForCausalLM", {**LLAMA, "sliding_window": 4}),
        Family("EXAONE4", "Exaone4ForCausalLM", {**LLAMA, "sliding_window": 4}),
        Family("Cohere2", "Cohere2ForCausalLM", {**LLAMA, "sliding_window": 4}),
        Family("Nemotron", "NemotronForCausalLM", LLAMA),
        Family("OPT", "OPTForCausalLM", {**SIZES, **TOKENS, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    ),
    "fewer key-value heads": (
        Family("Qwen3", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
        Family("Ministral", "MinistralForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
        Family("Mistral", "MistralForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    ),
    "parallel blocks": (
        Family("GPT-NeoX", "GPTNeoXForCausalLM", BERT),
        Family("GPT-J", "GPTJForCausalLM", {**SIZES, **TOKENS, "rotary_dim": 4}),
        Family("Phi", "PhiForCausalLM", LLAMA),
        Family("Falcon", "FalconForCausalLM", {**SIZES, **TOKENS, "ffn_hidden_size": 48}),
    ),
    "fused projections": (
        Family("GPT-2", "GPT2LMHeadModel", {**SIZES, **TOKENS}),
        Family("BLOOM", "BloomForCausalLM", {**SIZES, **TOKENS}),
        Family("Phi3", "Phi3ForCausalLM", LLAMA),
        Family("GPT-BigCode", "GPTBigCodeForCausalLM", {**SIZES, **TOKENS}),
    ),
    "mixtures of experts": (
        Family("Mixtral", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 4, "intermediate_size": 16}),
        Family("Qwen3-MoE", "Qwen3MoeForCausalLM", {**GROUPED, **EXPERTS, "head_dim": 8, "num_experts": 4}),
        Family(
            "Qwen2-MoE",
            "Qwen2MoeForCausalLM",
            {**GROUPED, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
        ),
        Family("Qwen3-Next", "Qwen3NextForCausalLM", NEXT),
        Family("PhiMoE", "PhimoeForCausalLM", {**GROUPED, "num_local_experts": 4, "intermediate_size": 16}, draws=True),
        Family("GraniteMoE", "GraniteMoeForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
        Family(
            "GPT-OSS",
            "GptOssForCausalLM",
            {
                **GROUPED,
                "head_dim": 8,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "intermediate_size": 16,
                "sliding_window": 4,
            },
        ),
        Family("DeepSeek-V3", "DeepseekV3ForCausalLM", LATENT),
    ),
    "encoders": (
        Family("BERT", "BertForMaskedLM", BERT, MASKED),
        Family("RoBERTa", "RobertaForMaskedLM", BERT, MASKED),
        Family("DistilBERT", "DistilBertForMaskedLM", DISTILLED, MASKED),
        Family("ELECTRA", "ElectraForMaskedLM", {**BERT, "embedding_size": 16}, MASKED),
        Family("ModernBERT", "ModernBertForMaskedLM", {**BERT, "local_attention": 4}, MASKED),
    ),
    "encoders with decoders": (
        Family("T5", "T5ForConditionalGeneration", RELATIVE, PAIRS),
        Family("BART", "BartForConditionalGeneration", BART, PAIRS),
    ),
    "vision": (
        Family("ViT", "ViTForImageClassification", {**VISION, "image_size": WIDE}, IMAGES),
        Family(
            "CLIP vision", "CLIPVisionModelWithProjection", {**VISION, "image_size": 6, "projection_dim": 20}, IMAGES
        ),
    ),
}
FAMILIES = tuple(family for group in GROUPS.values() for family in group)
