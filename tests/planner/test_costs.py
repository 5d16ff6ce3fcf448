"""What published trainings cost follows from the formulas. The numbers on the right are theirs."""

import pytest

from tpformer.models import GPTConfig, preset_config
from tpformer.planner.costs import (
    ARITHMETIC,
    HOUR,
    YEAR,
    arithmetic_table,
    cost_lines,
    flops_by_rule,
    model_flops_utilization,
    our_bytes,
    pipeline_speedup,
    training_cost,
)

GPT3 = preset_config("gpt3-175b")
WEEK = 7 * 24 * HOUR
PRINTED = 175e9  # GPT-3's parameters, as its paper's title row prints them


def test_gpt3():
    assert f"{GPT3.n_parameters / 1e9:.0f}" == f"{PRINTED / 1e9:.0f}"
    float32, paper = ARITHMETIC[0], ARITHMETIC[2]
    assert float32.parameters * PRINTED == 700e9
    assert all(counted.nbytes(0, 1) * PRINTED > 2e12 for counted in (float32, paper))
    flops = flops_by_rule(GPT3.n_parameters, 300e9)
    assert f"{flops:.2e}" == "3.14e+23"
    cost = training_cost(flops, 1, 28e12, price_per_hour=1.5)
    assert cost.device_years == pytest.approx(355, abs=1)
    assert cost.price == pytest.approx(4.6e6, rel=0.02)
    many = training_cost(flops, 1024, 28e12)
    assert many.days * 1024 == pytest.approx(cost.days) and many.device_years == pytest.approx(cost.device_years)
    # arXiv:2104.04473, section 5.1: 34 days on 1024 A100s at 140 TFLOP/s, with forwards computed twice
    assert round(training_cost(flops_by_rule(PRINTED, 300e9, recompute=True), 1024, 140e12).days) == 34
    assert many.price is None and len(list(cost_lines(many))) == 2
    assert list(cost_lines(cost))[1:] == [
        f"predicted: {cost.days:,.1f} days, {cost.device_years:.1f} device-years",
        f"predicted: ${cost.price:,.0f} at $1.50 an hour for each",
    ]


@pytest.mark.parametrize(
    "name, unit, on_8, on_32",
    [
        ("megatron-1.7b", WEEK, "6.0", "1.5"),
        ("megatron-18.4b", WEEK, "65", "16"),
        ("megatron-76.1b", YEAR, "5.2", "1.3"),
        ("megatron-1008b", YEAR, "68.5", "17"),
    ],
)
def test_training_times_of_table_1(name, unit, on_8, on_32):
    """8 T P / (n X), with the parameters as the table prints them: in billions, to one digit."""
    parameters = round(preset_config(name).n_parameters, -8)
    flops = flops_by_rule(parameters, 300e9, recompute=True)
    for devices, printed in ((8, on_8), (32, on_32)):
        seconds = training_cost(flops, devices, 140e12).seconds
        assert f"{seconds / unit:.{len(printed.partition('.')[2])}f}" == printed


# arXiv:2205.05198, table 5: GPUs, batch, seconds of an iteration with sequence parallelism, MFU in percent
TABLE_5 = [
    (GPTConfig(vocab_size=51200, seq_length=2048, n_layers=48, hidden_size=6144, n_heads=64), 8, 4, 1.10, 41.65),
    (preset_config("gpt3-175b", vocab_size=51200), 64, 64, 13.75, 51.39),
    (preset_config("megatron-529.6b"), 280, 280, 37.83, 56.05),
    (preset_config("megatron-1008b"), 512, 512, 71.49, 56.27),
]


@pytest.mark.parametrize("config, devices, batch, seconds, percent", TABLE_5)
def test_utilization_of_table_5(config, devices, batch, seconds, percent):
    found = model_flops_utilization(config, batch * config.seq_length, seconds, devices, 312e12)
    assert round(100 * found, 2) == percent


def test_the_speed_up_of_a_pipeline():
    assert pipeline_speedup(4, 9) == 3.0
    assert pipeline_speedup(1, 5) == 1 and pipeline_speedup(8, 8) == pytest.approx(64 / 15)
    with pytest.raises(ValueError, match="give at least 4"):
        pipeline_speedup(4, 3)


def test_bytes_of_a_parameter():
    table = arithmetic_table(GPT3, 4)
    assert [row[0] for row in table.values()] == [16, 24, 16, 20, 18]
    assert table["16 bits: 2M + 2M + 16M"] == [20, 8, 6.5, 5]
    # docs/zero.md: 18 M; 12 M/N + 6 M; 16 M/N + 2 M; 16 M/N and what is gathered
    assert table["tpformer, bfloat16"][:3] == [18, 9, 6] and 4 < table["tpformer, bfloat16"][3] < 4.1
    assert our_bytes(GPT3, 1, 1000) == pytest.approx(6.012)


def test_what_never_finishes_is_refused():
    for devices, speed in ((0, 1e12), (8, 0.0)):
        with pytest.raises(ValueError, match="never finish"):
            training_cost(1e20, devices, speed)
