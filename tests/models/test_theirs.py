"""transformers is the oracle of architectures: a GPT with its weights has its logits, in float64."""

import pytest
import torch
import transformers
from testing import assert_same

from bench.families.training import in_float64
from tpformer.models import GPT, GPTConfig

COMMON = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
SCALED = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16}
# name -> (transformers' model, further fields of its configuration, ours)
FAMILIES = {
    "Llama 3.1": (
        "Llama",
        {"rope_parameters": {**SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        {"rope_base": 100.0, "rope_scaling_factor": 8.0, "rope_original_length": 16},
    ),
    "Qwen 2": ("Qwen2", {}, {"qkv_bias": True}),
    "Qwen 3": ("Qwen3", {"head_dim": 10, "tie_word_embeddings": True}, {"head_dim": 10, "qk_norm": True}),
    "Mistral": ("Mistral", {"sliding_window": 7, "head_dim": 6}, {"sliding_window": 7, "head_dim": 6}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    name, fields, options = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON, **fields)
    with in_float64():  # their angles, too
        theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():  # off 1 and 0
            p.normal_(1, 0.3) if p.ndim == 1 else p.normal_(0, 0.1)
    ours = GPT(
        GPTConfig(
            vocab_size=37, vocab_multiple=1, seq_length=50, n_layers=2, hidden_size=24, n_heads=6, n_kv_heads=2,
            ffn_hidden_size=40, norm="rmsnorm", activation="swiglu", position="rope", bias=False,
            tie_embeddings=config.tie_word_embeddings, **options,
        ),
        dtype=torch.float64,
    )  # fmt: skip
    values = {name.removeprefix("model."): p for name, p in theirs.named_parameters()}
    assert values.keys() == {name for name, _ in ours.named_parameters()}
    ours.load_state_dict(values, strict=False)
    ids = torch.randint(37, (2, 50))
    with torch.no_grad(), in_float64():
        expected = theirs(ids).logits
    assert_same(ours.eval()(ids), expected)
