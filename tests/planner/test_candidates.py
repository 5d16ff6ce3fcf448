"""Layouts of experts: which ranks may share them, and what a plan says of the tokens that these exchange."""

import dataclasses
import re
from collections import Counter

import pytest
from commands import ROOT
from test_search import exchanging, laid_out, of_experts, question

from tpformer.config import read_toml
from tpformer.ops.row_exchange import share_of_rank
from tpformer.planner import search as planner
from tpformer.planner.candidates import Question, shapes
from tpformer.planner.comparison import within
from tpformer.planner.layouts import layout_text, parse_layout
from tpformer.planner.plan_report import parts


def without_gathers(asked: Question) -> dict[str, int]:
    """What a search says of tensor-parallel ranks that the experts cannot be divided among, and how often."""
    dropped, words = Counter[str](), "tp does not divide the experts"
    list(shapes(asked, dropped))
    return {reason.removeprefix(words).lstrip(", "): n for reason, n in dropped.items() if reason.startswith(words)}


@pytest.mark.parametrize("n_experts", [8, 6])
def test_experts_are_shared_by_ranks_that_divide_them(n_experts):
    asked = of_experts(n_experts, 40e9)
    sizes = {values["tp"] for values in planner.every_layout(asked)}
    assert sizes == {t for t in (1, 2, 3, 4, 6) if n_experts % t == 0 and 8 % t == 0}
    assert list(without_gathers(asked)) == ["and ep, whose ranks exchange tokens, was left out"] * (n_experts == 6)
    reason = planner.refusal_of(asked, laid_out(asked, "tp=4,dp=3"))
    assert ("whole experts" in str(reason)) == (n_experts == 6)


def test_experts_are_shared_by_ranks_that_exchange_tokens():
    """Any ranks of a stage that divide the 6 experts; ZeRO 0 makes replicas, of which only some can be taken."""
    asked = exchanging(40e9)
    found = {(each["tp"], each["dp"], each["ep"], each["zero"]) for each in planner.every_layout(asked)}
    assert {ep for tp, dp, ep, _ in found if tp == 4 and dp == 3} == {1, 2, 3, 6}
    assert {zero for tp, dp, ep, zero in found if (tp, dp, ep) == (4, 3, 3)} == {1, 2, 3}, "3 of 4 x 3 replicas"
    assert {ep for tp, dp, ep, _ in found if tp == 1 and dp == 12} == {None, 2, 3, 6}
    config = laid_out(asked, "dp=12,ep=6,zero=1")
    assert config.parallel.expert_parallel == 6 and "dp=12,ep=6,zero=1" in layout_text(config)
    assert parse_layout("tp=2,ep=none") == {"tp": 2, "ep": None} and within(asked, "ep=none|6").space.ep == (None, 6)
    assert "cannot be divided among expert_parallel=4" in str(planner.refusal_of(asked, laid_out(asked, "dp=12,ep=4")))
    assert without_gathers(asked) == {"without ep, whose ranks exchange tokens": 2}, "tp 4 and 12, which others serve"
    layout = dataclasses.replace(asked.config.parallel, sequence_parallel=False)
    same_tokens = asked._replace(config=dataclasses.replace(asked.config, parallel=layout))
    assert without_gathers(same_tokens) == {"and ep takes sequence_parallel": 2}
    without = question(gpus=2)
    assert {each["ep"] for each in planner.every_layout(without)} == {None}
    assert "without experts would do nothing" in str(planner.refusal_of(without, laid_out(without, "dp=2,ep=2")))


def test_a_plan_says_what_exchanges_take_and_what_would_help():
    """Qwen3-235B-A22B on 256 GPUs: between nodes they take several times as long as the experts' GEMMs."""
    asked = question({"preset": "qwen3-235b-a22b", "seq_length": 4096}, 256, 1024)
    layouts = (laid_out(asked, f"tp=2,pp=8,dp=16,zero=1{ep}") for ep in (",ep=32", ",ep=8", ""))
    pages = (parts(planner.evaluate(asked, each), asked, 1e9, None) for each in layouts)
    far, near, gathered = (page.get("Exchange of tokens for experts, predicted") for page in pages)
    assert gathered is None
    first, longer, nearer, once = far
    took, gemms = (float(re.search(pattern, first)[1]) for pattern in ("take ([0-9.]+) ms, ", "GEMMs ([0-9.]+) ms; "))
    within_node = float(re.search("take ([0-9.]+) ms", nearer)[1])
    assert took > 3 * gemms and first.endswith("75% of it to other nodes") and "for longer than" in longer
    assert nearer.startswith("with ep=8, in one node") and f"take {within_node:.1f} ms, " in near[0]
    assert near[0].endswith(" 0% of it to other nodes") and len(near) == 1
    share = 4 * share_of_rank(8, 128, 4) / (32 * share_of_rank(8, 128, 32))
    assert f"sent once to each node would be {share:.2f} of the bytes" in once


def test_the_page_has_the_models_figures():
    """Of 4,096 rows of a rank, in one sample."""
    presets = {name: {"preset": name.lower().replace(" ", "-")} for name in ("Mixtral 8x7B", "Qwen3-30B-A3B")}
    presets["Qwen3-235B-A22B"] = {"preset": "qwen3-235b-a22b"}
    presets["like DeepSeek-V3"] = read_toml(ROOT / "examples/deepseek_v3_like.toml")["model"]
    text = (ROOT / "docs/planner.md").read_text().split("| model | ep |")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n\n")[0].splitlines()[2:]]
    assert [row[0] for row in rows[:3]] == [*presets][:3] and len(rows) == 6
    for name, ep, *cells in rows:
        asked = question({**presets[name], "seq_length": 4096}, 64, 64)
        layer = planner.model_of(asked, laid_out(asked, f"dp=64,ep={ep},zero=1")).layer
        outside = 1 - asked.device.spread(int(ep), 1)[0] / int(ep)
        seconds = [f"{1e3 * each:.1f} ms" for each in (layer.exchanging(), layer.experts_gemms())]
        assert cells == [f"{layer.exchanged_bytes() / 1e6:.0f} MB", f"{100 * outside:.0f} %", *seconds]
