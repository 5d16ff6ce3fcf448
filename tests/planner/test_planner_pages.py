"""What pages say of costs, bytes, advice and placement is what the planner's functions give."""

import re
import shlex
from pathlib import Path

import pytest

from tpformer.cli.plan import plan_command
from tpformer.config import build_config, read_toml
from tpformer.models import preset_config
from tpformer.planner.advice import advice, scaled_learning_rates
from tpformer.planner.costs import arithmetic_table, cost_lines, flops_by_rule, pipeline_speedup, training_cost
from tpformer.planner.dry_run import plan_config
from tpformer.planner.placement import TRANSFERS, across_nodes_lines, axis_bytes

ROOT = Path(__file__).parents[2]
GPT3 = preset_config("gpt3-175b")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def block(lines) -> str:
    return "```\n" + "".join(f"{line}\n" for line in lines) + "```"


def test_costs_and_advice():
    text = page("budget.md")
    one = training_cost(flops_by_rule(GPT3.n_parameters, 300e9), 1, 28e12, 1.5)
    many = training_cost(flops_by_rule(175e9, 300e9, recompute=True), 1024, 140e12, 2.0)
    blocks = (cost_lines(one), cost_lines(many), advice(GPT3, 300e9), scaled_learning_rates(1e-3, 8, 64, 30))
    for lines in blocks:
        assert (wanted := block(lines)) in text, wanted
    for name, row in arithmetic_table(GPT3, 8).items():
        assert f"| {name} | {' | '.join(f'{each:.2f}' for each in row)} |" in text


def example(name: str, **parallel):
    return plan_config(build_config(read_toml(ROOT / f"examples/{name}.toml"), {"parallel": parallel}))


def test_placement():
    assert (wanted := block(across_nodes_lines(example("gpt_145b")))) in page("placement.md"), wanted


def test_strategies():
    text = page("strategies.md")
    replicas = axis_bytes(example("gpt_1.7b"))["dp_replicate"]
    shares = {"data_parallel_replicate": 1, "data_parallel_shard": 32}
    first, second, third = (axis_bytes(example("gpt_1.7b", **shares, zero_stage=z))["dp_shard"] for z in (1, 2, 3))
    assert first / replicas == pytest.approx(0.75) and "three quarters of what replicas send" in text
    assert first == second < third  # one microbatch
    several = {**shares, "zero_stage": 2}
    halved = build_config(
        read_toml(ROOT / "examples/gpt_1.7b.toml"), {"parallel": several, "train": {"microbatch_size": 8}}
    )
    assert axis_bytes(plan_config(halved))["dp_shard"] > 1.5 * first
    assert TRANSFERS[True]["none"] / TRANSFERS[False]["none"] == 1.25 and "a quarter more" in text
    assert f"{pipeline_speedup(4, 9):.1f} times as fast" in text


COMMANDS = re.findall(r"```bash\ntpformer plan (.*)\n```\n```\n((?:.*\n)*?)```", page("strategies.md"))


@pytest.mark.proof
@pytest.mark.parametrize("command, printed", COMMANDS, ids=range(len(COMMANDS)))
def test_crossovers(command, printed, capsys):
    plan_command(shlex.split(command))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if " is the fastest" in line or line.startswith("no layout works")] == (
        printed.splitlines()
    )
