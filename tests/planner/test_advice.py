"""Published rules give what their authors used; the noise scale is the one that a run logs."""

import json

import pytest

from tpformer.models import GPTConfig, preset_config
from tpformer.planner.advice import (
    GPT3_RATES,
    advice,
    chinchilla_tokens,
    critical_batch,
    deepseek,
    gpt3_learning_rate,
    logged_noise_scale,
    scaled_learning_rates,
    step_law,
)


def test_gpt3s_table_and_between():
    for size, rate in GPT3_RATES.items():
        assert gpt3_learning_rate(size).value == pytest.approx(rate)
    assert 1e-4 < gpt3_learning_rate(10e9).value < 1.2e-4
    assert gpt3_learning_rate(1e6).value == 6e-4 and gpt3_learning_rate(1e13).value == pytest.approx(6e-5)


def test_dense_rules_take_the_parameters_that_a_token_uses():
    config = preset_config("qwen3-30b-a3b")
    first, second, *_ = advice(config)
    assert first == chinchilla_tokens(config.n_active_parameters)
    assert second == gpt3_learning_rate(config.n_active_parameters)


LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False}
# arXiv:2401.02954, table 2: the authors' own two models, on 2T tokens
DEEPSEEK = [
    ({"n_layers": 30, "hidden_size": 4096, "n_heads": 32, "ffn_hidden_size": 11008}, 4.2e-4, 2304),
    ({"n_layers": 95, "hidden_size": 8192, "n_heads": 64, "n_kv_heads": 8, "ffn_hidden_size": 22016}, 3.2e-4, 4608),
]


@pytest.mark.parametrize("sizes, rate, samples", DEEPSEEK)
def test_deepseeks_own_models(sizes, rate, samples):
    config = GPTConfig(vocab_size=102400, seq_length=4096, **sizes, **LLAMA)
    found, batch = deepseek(config, 2e12)
    assert found.value == pytest.approx(rate, rel=0.02)
    assert batch.value / config.seq_length == pytest.approx(samples, rel=0.05)


def test_step_law_does_not_count_the_vocabulary():
    config = preset_config("megatron-1.7b")
    rate, batch = step_law(config, 1e11)
    assert (rate, batch) == step_law(preset_config("megatron-1.7b", vocab_size=10), 1e11)
    # by hand: exp(ln 1.79 - 0.713 ln 1.5297e9 + 0.307 ln 1e11), and exp(ln 0.58 + 0.571 ln 1e11)
    assert rate.value == pytest.approx(1.207e-3, rel=2e-3) and batch.value == pytest.approx(1.108e6, rel=2e-3)


def test_chinchilla():
    """arXiv:2203.15556: 70B parameters on 1.4T tokens."""
    assert chinchilla_tokens(70e9).value == 1.4e12


def test_rules_for_another_batch():
    linear, root = scaled_learning_rates(1e-3, 32, 128)
    assert linear.value == 4e-3 and root.value == 2e-3 and "1706.02677" in linear.source
    for noise, like in ((1e9, 4e-3), (1e-9, 1e-3), (128, 1e-3 * 5 / 2)):
        assert scaled_learning_rates(1e-3, 32, 128, noise)[2].value == pytest.approx(like)
    with pytest.raises(ValueError, match="must be positive"):
        scaled_learning_rates(1e-3, 32, 0)


def test_the_critical_batch_is_the_logged_noise_scale(tmp_path):
    rows = [{"step": 1, "noise_scale": 7.0}, {"step": 2, "noise_scale": 48.0}, {"step": 3, "noise_scale": None}]
    (tmp_path / "norms.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scale = logged_noise_scale(tmp_path)
    assert [each.value for each in critical_batch(scale, 48)] == [48, 2, 2]
    assert [each.value for each in critical_batch(scale, 16)] == [48, 4, pytest.approx(4 / 3)]
    (tmp_path / "norms.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="train with --log.noise-interval"):
        logged_noise_scale(tmp_path)


def test_every_number_is_printed_with_its_source():
    found = list(advice(preset_config("gpt2-1.5b")))
    assert all("arXiv:" in str(each) and each.value > 0 for each in found) and len(found) == 7
    assert str(found[0]).startswith("tokens for the least loss by FLOPs: 31,152,224,000 tokens  [arXiv:2203.15556")
    more = {each.what: each.value for each in advice(preset_config("gpt2-1.5b"), 1e12)}
    changed = {each.what for each in found if more[each.what] != each.value}
    assert changed == {
        f"{what}, {rule}" for what in ("peak learning rate", "batch") for rule in ("DeepSeek LLM", "Step Law")
    }
