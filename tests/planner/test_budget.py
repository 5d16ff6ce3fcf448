"""What trainings cost, and published rules of advice: the numbers of their authors, of docs/planner.md, and by hand."""

import json
from pathlib import Path

import pytest

from tpformer.models import GPTConfig, preset_config
from tpformer.planner import advice, costs

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
GPT3 = preset_config("gpt3-175b")
WEEK = 7 * 24 * costs.HOUR
PRINTED = 175e9  # GPT-3's parameters, as its paper's title row prints them
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False}


def test_the_page_has_what_the_functions_give():
    one = costs.training_cost(costs.flops_by_rule(GPT3.n_parameters, 300e9), 1, 28e12, 1.5)
    many = costs.training_cost(costs.flops_by_rule(PRINTED, 300e9, recompute=True), 1024, 140e12, 2.0)
    scaled = advice.scaled_learning_rates(1e-3, 8, 64, 30)
    for lines in (costs.cost_lines(one), costs.cost_lines(many), advice.advice(GPT3, 300e9), scaled):
        block = "```\n" + "".join(f"{line}\n" for line in lines) + "```"
        assert block in PAGE, block
    for name, row in costs.arithmetic_table(GPT3, 8).items():
        assert f"| {name} | {' | '.join(f'{each:.2f}' for each in row)} |" in PAGE
    assert round(many.days) == 34, "arXiv:2104.04473, section 5.1"
    assert len(list(costs.cost_lines(many._replace(price_per_hour=None)))) == 2


# arXiv:2104.04473, table 1: the times on 8 and on 32 devices
@pytest.mark.parametrize("name, unit, on_8, on_32", [
    ("megatron-1.7b", WEEK, "6.0", "1.5"),
    ("megatron-18.4b", WEEK, "65", "16"),
    ("megatron-76.1b", costs.YEAR, "5.2", "1.3"),
    ("megatron-1008b", costs.YEAR, "68.5", "17"),
])  # fmt: skip
def test_training_times_of_table_1(name, unit, on_8, on_32):
    """8 T P / (n X), with the parameters as the table prints them: in billions, to one digit."""
    flops = costs.flops_by_rule(round(preset_config(name).n_parameters, -8), 300e9, recompute=True)
    for devices, printed in ((8, on_8), (32, on_32)):
        seconds = costs.training_cost(flops, devices, 140e12).seconds
        assert f"{seconds / unit:.{len(printed.partition('.')[2])}f}" == printed


def test_gpt3s_table_and_between():
    for size, rate in advice.GPT3_RATES.items():
        assert advice.gpt3_learning_rate(size).value == pytest.approx(rate)
    assert 1e-4 < advice.gpt3_learning_rate(10e9).value < 1.2e-4
    assert advice.gpt3_learning_rate(1e6).value == 6e-4 and advice.gpt3_learning_rate(1e13).value == pytest.approx(6e-5)


# arXiv:2401.02954, table 2: the authors' own two models, on 2T tokens
@pytest.mark.parametrize("sizes, rate, samples", [
    ({"n_layers": 30, "hidden_size": 4096, "n_heads": 32, "ffn_hidden_size": 11008}, 4.2e-4, 2304),
    ({"n_layers": 95, "hidden_size": 8192, "n_heads": 64, "n_kv_heads": 8, "ffn_hidden_size": 22016}, 3.2e-4, 4608),
])  # fmt: skip
def test_deepseeks_own_models(sizes, rate, samples):
    config = GPTConfig(vocab_size=102400, seq_length=4096, **sizes, **LLAMA)
    found, batch = advice.deepseek(config, 2e12)
    assert found.value == pytest.approx(rate, rel=0.02)
    assert batch.value / config.seq_length == pytest.approx(samples, rel=0.05)


def test_step_law_does_not_count_the_vocabulary():
    rate, batch = advice.step_law(preset_config("megatron-1.7b"), 1e11)
    assert (rate, batch) == advice.step_law(preset_config("megatron-1.7b", vocab_size=10), 1e11)
    # by hand: exp(ln 1.79 - 0.713 ln 1.5297e9 + 0.307 ln 1e11), and exp(ln 0.58 + 0.571 ln 1e11)
    assert rate.value == pytest.approx(1.207e-3, rel=2e-3) and batch.value == pytest.approx(1.108e6, rel=2e-3)


def test_between_the_linear_rule_and_the_same_rate():
    for noise, like in ((1e9, 4e-3), (1e-9, 1e-3), (128, 1e-3 * 5 / 2)):
        assert advice.scaled_learning_rates(1e-3, 32, 128, noise)[2].value == pytest.approx(like)


def test_the_critical_batch_is_the_logged_noise_scale(tmp_path):
    rows = [{"step": 1, "noise_scale": 7.0}, {"step": 2, "noise_scale": 48.0}, {"step": 3, "noise_scale": None}]
    (tmp_path / "norms.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scale = advice.logged_noise_scale(tmp_path)
    assert [each.value for each in advice.critical_batch(scale, 48)] == [48, 2, 2]
    assert [each.value for each in advice.critical_batch(scale, 16)] == [48, 4, pytest.approx(4 / 3)]


def test_advice_is_of_the_parameters_that_a_token_uses():
    config = preset_config("qwen3-30b-a3b")
    first, second, *_ = advice.advice(config)
    assert first == advice.chinchilla_tokens(config.n_active_parameters)
    assert second == advice.gpt3_learning_rate(config.n_active_parameters)
    assert advice.chinchilla_tokens(70e9).value == 1.4e12, "arXiv:2203.15556: 70B parameters on 1.4T tokens"


def test_only_some_rules_depend_on_tokens():
    found, more = ({each.what: each.value for each in advice.advice(GPT3, *tokens)} for tokens in ((), (1e12,)))
    assert {what for what in found if more[what] != found[what]} == {
        f"{what}, {rule}" for what in ("peak learning rate", "batch") for rule in ("DeepSeek LLM", "Step Law")
    }


def test_what_has_no_answer_is_refused(tmp_path):
    (tmp_path / "norms.jsonl").write_text('{"step": 1}\n')
    for call, message in (
        (lambda: costs.training_cost(1e20, 0, 1e12), "never finish"),
        (lambda: costs.training_cost(1e20, 8, 0.0), "never finish"),
        (lambda: costs.pipeline_speedup(4, 3), "give at least 4"),
        (lambda: advice.scaled_learning_rates(1e-3, 32, 0), "must be positive"),
        (lambda: advice.logged_noise_scale(tmp_path), "train with --log.noise-interval"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
