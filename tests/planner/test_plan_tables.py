"""What `tpformer plan` shows of memory budgets and of kinds of layouts is what is found behind it."""

import dataclasses
import re

import pytest
from test_search import question

from tpformer.cli.plan import Plan, _question, plan_command
from tpformer.config import build_config, check_config, read_toml
from tpformer.planner import search as planner
from tpformer.planner.candidates import Space
from tpformer.planner.comparison import Compared, compare, crossovers, within
from tpformer.planner.keep_choice import choose
from tpformer.planner.layouts import layout_text, parse_layout, with_layout
from tpformer.planner.memory_budget import MARGIN, least, lowering, peak, room
from tpformer.planner.memory_budget import size as of_budget
from tpformer.planner.report import size
from tpformer.planner.units import with_keep

GPT2 = ["--preset", "gpt2-124m", "--batch", "16", "--gpus"]


@pytest.fixture
def said(capsys: pytest.CaptureFixture):
    """What a plan prints."""

    def run(*options: str) -> str:
        plan_command([*GPT2, *options])
        return capsys.readouterr().out

    return run


def test_budgets_have_the_choice_the_floor_and_what_lowers_it(said) -> None:
    printed = said("1", "--explain", "microbatch=8", "--memory-budget", "3GB, 4GB,40GB")
    asked = _question(Plan(preset="gpt2-124m", gpus=1, batch=16))
    config = with_layout(asked.config, parse_layout("microbatch=8"))
    small, tight, whole = re.findall(r"^ *(?:3|4|40)GB .*$", printed, re.MULTILINE)
    assert small.split()[-3:] == ["does", "not", "fit"] and small.count(" - ") == 3
    best = choose(config, asked.device, room(4e9, False))
    assert best is not None and tight.split()[-2:] == [of_budget(best.memory), best.keep] and best.seconds > 0
    assert whole.count("+0.0%") == 3 and whole.split()[-2:] == [of_budget(peak(config)), "keep"]
    floor, keep = least(config)
    assert f"The least that works is {of_budget(floor / (1 - MARGIN))}, with keep = {keep!r}." in printed
    lower = dict(lowering(config))
    assert lower["microbatch_size = 4"] == least(with_layout(config, parse_layout("microbatch=4")))[0] < floor
    for change, nbytes in lower.items():
        assert (f"{change}: {of_budget(nbytes / (1 - MARGIN))}" in printed) == (nbytes < floor)
    assert layout_text(with_keep(config, "4*full,8*keep")).endswith(",microbatch=8,keep=4*full/8*keep")
    sharded = with_layout(asked._replace(gpus=2).config, parse_layout("dp=2,zero=3,microbatch=4"))
    assert {change for change, _ in lowering(sharded)} == {"cpu_offload = true", "microbatch_size = 2"}
    on_cpu = dataclasses.replace(sharded, train=dataclasses.replace(sharded.train, device="cpu"))
    assert {change for change, _ in lowering(on_cpu)} == {"microbatch_size = 2"}


def test_kinds_have_their_best_layouts_beside_the_fastest(said) -> None:
    kinds = ["zero=1", "zero=3", "tp=3"]
    printed = said("2", "--within", ";".join(kinds))
    swept = said("2", "--sweep", "batch=16,32", "--within", ";".join(kinds))
    best = compare(_question(Plan(preset="gpt2-124m", gpus=2, batch=16)), "", kinds).best
    most = max(choice.tokens for choice in best.values() if choice is not None)
    for kind, choice in best.items():
        row = next(line.split() for line in printed.splitlines() if line.startswith(f"   {kind} "))
        if choice is None:
            assert row[1:] == ["does", "not", "work"]
        else:
            assert row[1:4] == [layout_text(choice.config), f"{choice.tokens:,.0f}", f"{choice.tokens / most:.0%}"]
            assert row[-2:] == size(choice.memory.total).split()
    assert best["tp=3"] is None and "zero=1 is the fastest, by " in printed
    assert [line.split()[:2] for line in swept.splitlines() if "not work" in line] == [["16", "tp=3"], ["32", "tp=3"]]


def test_a_step_that_is_recorded_leaves_no_layout_out(tmp_path) -> None:
    """Only pipelines were planned for a file with log.timeline_step, and nothing said so."""
    file = tmp_path / "run.toml"
    file.write_text('[model]\npreset = "gpt2-124m"\n[train]\nglobal_batch_size = 8\n[log]\ntimeline_step = 5\n')
    for layout, step in (("dp=2", 0), ("pp=2", 5)):
        out = tmp_path / f"{layout}.toml"
        plan_command([str(file), "--gpus", "2", "--explain", layout, "--out", str(out)])
        config = build_config(read_toml(out))
        check_config(config, trains=False)
        assert config.log.timeline_step == step


def test_settings_that_no_layout_can_have_are_named(tmp_path) -> None:
    """More GPUs or another batch were advised."""
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npreset = "gpt2-124m"\n[train]\nsteps = 10\nglobal_batch_size = 8\n[log]\nprofile_step = 20\n'
    )
    with pytest.raises(ValueError, match="log.profile_step=20 is after the last step"):
        plan_command([str(file), "--gpus", "2"])


def test_kinds_are_compared():
    asked = question(gpus=4, batch=64, space=Space(microbatch=(1, 4), zero=(0, 1), offload=("none",)))
    rows = [compare(asked, "", ["pp=1", "pp=2|4,schedule=1F1B|ZBVZeroBubble", "tp=16"])]
    first, second, none = rows[0].best.values()
    every = planner.brute_force(asked, 10**6)
    for found, chosen in ((first, lambda p: p == 1), (second, lambda p: p in (2, 4))):
        own = [each for each in every if chosen(each.config.parallel.pipeline_parallel)]
        best = next(each for each in own if each.config.parallel.pipeline_schedule in ("1F1B", "ZBVZeroBubble"))
        assert found is not None and found.key == best.key
    assert none is None and rows[0].winner == "pp=1"
    lead = first.tokens / second.tokens - 1
    assert list(crossovers("", rows)) == [f"pp=1 is the fastest, by {lead:.1%}"]
    alone = Compared("9", {"pp=1": first, "tp=16": None})
    lines = list(crossovers("gpus", [alone, alone._replace(value="12"), Compared("8", {"tp=16": None})]))
    assert lines == ["pp=1 is the fastest at gpus = 9 to 12, and no other works", "no layout works at gpus = 8"]
    assert within(asked, "zero=1|3").space.zero == (1, 3)
