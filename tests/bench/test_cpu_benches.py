"""What the benches of the CPU compare, count, refuse and predict, at tiny sizes.

Belongs here: what is particular to one of them. Their results and pages: test_results.py.
"""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from live import Live
from test_results import PROBLEMS
from testing import ROUNDING, build_small_split, on_every_rank
from torch import Tensor, nn
from turns import of_turn

from bench import bubbles, in_place, pretrain
from bench.__main__ import BENCHES
from bench.data_parallel import messages, strategies
from bench.families.cells import ERROR, REFUSED, RIGHT, WRONG, Cell, joined
from bench.families.models import FAMILIES
from bench.families.training import compare_runs, in_float64, train, worst_of
from bench.layer_memory import Layer, expected_items
from bench.plain import check_against_plain
from harness.runner import main
from tpformer.config import OptimizerSection
from tpformer.distributed import build_mesh
from tpformer.lessons.algorithms import Traffic
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import Action
from tpformer.planner import schedule_order, simulate
from tpformer.training.setup import build_model

SMALL = GPTConfig(vocab_size=257, seq_length=16, n_layers=1, hidden_size=32, n_heads=2)


def test_in_place_has_its_row(forked, monkeypatch):
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 1024}
    monkeypatch.setattr(in_place, "SIZES", small)
    (row,) = in_place.rows(True)
    assert (row["provider"], row["baseline"], row["bar"]) == (in_place.OURS, in_place.THEIRS, 1.2)
    assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"] and row["value"] > 0


class Toy(nn.Module):
    """Its loss is its weight times the ids, and `noticed` is the share of the gradient that it gets."""

    def __init__(self, weight: float, noticed: float) -> None:
        super().__init__()
        self.weight, self.noticed = nn.Parameter(torch.tensor(weight)), noticed

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        weight = self.weight * self.noticed + self.weight.detach() * (1 - self.noticed)
        return SimpleNamespace(loss=(weight * input_ids).sum())


def test_in_place_refuses_another_loss_or_gradient():
    right, ids = Toy(1.0, 1.0), torch.arange(4)
    in_place.compare({in_place.OURS: right, in_place.THEIRS: Toy(1.0, 1.0)}, ids)
    for other, what in ((Toy(1.01, 1.0), "loss: error"), (Toy(1.0, 0.99), "gradient of weight: error")):
        with pytest.raises(AssertionError, match=what):
            in_place.compare({in_place.OURS: other, in_place.THEIRS: right}, ids)


def step(schedule: str, stages: int, gap: float = 0.0) -> list[Action]:
    """As simulated, with a gap between all starts that theory knows nothing of."""
    actions = simulate(schedule_order(schedule, 4, 8, stages), lambda step: 0.2 if step.kind == "B" else 0.1)
    return [a._replace(start=a.start * (1 + gap), end=a.start * (1 + gap) + a.end - a.start) for a in actions]


def test_bubbles_are_required_to_be_within_a_part_of_the_share_and_of_the_order():
    case = bubbles.ScheduleCase("ZBVZeroBubble", 8, 0.1)
    row, close, far = (bubbles.make_row(case, 1, step("ZBVZeroBubble", 2, gap)) for gap in (0.0, 0.002, 0.005))
    assert row["measured_share"] == row["simulated_share"] == row["formula_share"] == 0.05882 and row["ok"]
    assert close["ok"] and 0.02 < close["relative"] < 0.05
    assert not far["ok"] and far["relative"] > 0.05 and far["difference"] < 0.01
    actions, case = step("1F1B", 1), bubbles.ScheduleCase("1F1B", 8, 0.1)
    assert bubbles.make_row(case, 1, actions)["formula_share"] == 0.27273
    other = [a._replace(microbatch=1 - a.microbatch) if a[1] == 3 and a[2] < 2 and a[3] == "F" else a for a in actions]
    with pytest.raises(ValueError, match="1F1B: rank 3 ran"):
        bubbles.make_row(case, 1, other)


def test_bubbles_that_miss_are_measured_again_within_the_budget():
    gaps = [0.5, 0.01, 0.4, 0.7, 0.015, 0.5]  # GPipe passes at once, 1F1B the fourth time; it does not the last time

    def call(name: str) -> list[list[Action]]:
        actions = step(name.split()[0], 1, gaps.pop(0))
        return [[action for action in actions if action.rank == rank] for rank in range(4)]

    ranks, cases = SimpleNamespace(call=call), [bubbles.ScheduleCase(name, 8, 0.1) for name in ("1F1B", "GPipe")]
    found = bubbles.measure(ranks, cases, 60)
    assert [(row["steps"], row["ok"]) for row, _ in found.values()] == [(4, True), (1, True)]
    ((row, actions),) = bubbles.measure(ranks, cases[:1], 0).values()
    assert not row["ok"] and row["steps"] == 1 and len(actions) == 64 and not gaps


def test_bubbles_are_written_with_their_timelines(forked, tmp_path, monkeypatch):
    short = {"NAMES": ("1F1B",), "MICROBATCHES": (8,), "SHORTEST": 0.01, "LENGTHENED": 0.0, "BUDGET": 0.0}
    for name, value in {**short, "BAR": -1.0}.items():  # what no share can be within
        monkeypatch.setattr(bubbles, name, value)
    assert main(["bubbles"], BENCHES, tmp_path) == 1
    (row,) = json.loads((tmp_path / "cpu" / "bubbles.json").read_text())["rows"]
    assert row["seconds"] == 0.01 and row["steps"] == 1 and row["span"] > 33 * 0.01 and 0 < row["measured_share"] < 1
    ElementTree.parse(tmp_path / "cpu" / "pipeline_1F1B.svg")
    assert len(json.loads((tmp_path / "cpu" / "pipeline_1F1B.json").read_text())["traceEvents"]) > 64


@pytest.mark.timeout(300)
def test_messages_are_counted_and_a_wrong_formula_is_named(forked, monkeypatch, capsys):
    right = messages.cost_of
    assert right("all_pairs", 4, 4).values == 48 and right("hierarchical", 4, 4).values == 24

    def cost_of(name: str, size: int, values: int) -> Traffic:
        return Traffic(6, 24, 25, 6) if (name, size) == ("ring", 4) else right(name, size, values)

    monkeypatch.setattr(messages, "TIMED", (256, 4096))
    monkeypatch.setattr(messages, "cost_of", cost_of)
    assert main(["data_parallel", "--quick", "--only", "messages"], BENCHES) == 1
    said = [line for line in capsys.readouterr().out.splitlines() if "formula says" in line]
    assert said == ["data_parallel: ring on 4 ranks is not as its formula says"]


@of_turn(0)
@pytest.mark.timeout(300)
def test_strategies_train_and_send_their_share(forked, monkeypatch):
    for name, value in {"QUICK_STEPS": 4, "DEPTHS": (4,), "build_stdlib": build_small_split}.items():
        monkeypatch.setattr(strategies, name, value)
    content = strategies.measure(quick=True)
    sent = {row["strategy"]: row["bytes"] for row in content["strategies"]}
    whole = sent["synchronous"]
    assert sent["bfloat16"] == pytest.approx(whole / 2, rel=0.01) and sent["int8"] < 0.27 * whole
    assert sent["stale server"] == pytest.approx(2 * whole, rel=0.01), "a push and a pull for each worker, four updates"
    assert sent["top-k 1 %"] < 0.06 * whole and sent["PowerSGD 4"] < 0.12 * whole
    # 4 minibatches are fewer than a deep pipeline has in flight
    assert strategies.problems(content) == ["4 stages hold [1, 2, 2, 1] versions"]


def test_models_of_pretrain_are_the_named_ones():
    gpt2, large = pretrain.GPT2, pretrain.LARGE
    sizes = {model.name: round(model.config.n_parameters / 1e6) for model in (gpt2, large)}
    assert sizes == {"GPT-2 124M": 124, "GPT 1.3B": 1316}
    config = pretrain.run_config(large, 300, Path("data/train"))
    assert config.model.hidden_size == 2048 and config.data.train == ("data/train",) and config.train.steps == 300
    assert config.optimizer == OptimizerSection(lr=large.lr, warmup_steps=30)


def run_small(results: Path) -> None:
    """The bench, made smaller: --quick, which writes nothing, then as a whole. It joins and leaves a process group, and
    so has a process of its own."""
    pretrain.build_stdlib, pretrain.STEPS = build_small_split, 6
    pretrain.MODELS = {"cpu": (pretrain.Model("small", SMALL, 2, 1e-3),)}
    assert main(["pretrain", "--quick"], BENCHES, results) == 0 and not results.exists()
    sys.exit(main(["pretrain"], BENCHES, results))


def test_pretrain_ends_and_writes_every_row(commands, tmp_path):
    code, out, err = commands.call(run_small, tmp_path / "results", CUDA_VISIBLE_DEVICES="").finish()
    assert code in (0, 1), err
    path = tmp_path / "results" / "cpu" / "pretrain.json"
    ElementTree.parse(path.with_suffix(".svg"))
    result = json.loads(path.read_text())
    head = "schema bench description date machine commit dirty versions note"
    assert list(result)[:9] == head.split() and result["bench"] == "pretrain"
    assert code == bool(PROBLEMS["pretrain"](result)), "few steps may miss what is required"
    assert "nothing is written: called with an option" in out
    assert "pretrain: small: final loss" in out and "not below 0.8 of" in out
    (row,) = result["rows"]
    assert len(row["losses"]) == row["steps"] == 6 and row["first_loss"] == row["losses"][0]
    assert row["final_loss"] == pytest.approx(math.fsum(row["losses"]) / 6)
    assert row["mfu"] is None and row["peak_bytes"] > 2**26
    assert row["tokens_per_second"] > 0 and row["saved_bytes"] > 0 and 2 < row["unigram_entropy"] < 4


@on_every_rank(1)
def test_copies_of_parameters_do_not_count_as_saved():
    """By what bfloat16 models keep of a forward."""
    saved, ids, mesh = [], torch.randint(257, (2, 17)), build_mesh("cpu", tensor_parallel=1)
    for n_layers in (1, 3):
        model = pretrain.Model("small", replace(SMALL, n_layers=n_layers), 2, 1e-3)
        config = pretrain.run_config(model, 1, Path("unused"))
        options = replace(config, train=replace(config.train, dtype="bfloat16"))
        saved.append(pretrain.saved_bytes(build_model(options, mesh), ids))
    assert saved[1] - saved[0] == 2 * 2 * sum(expected_items(Layer("layer", SMALL, 1)).values())  # of 2 samples each


def test_the_most_bytes_alive_at_once_by_hand():
    before = torch.ones(1000)
    with Live([before]) as live:
        x = torch.ones(250)  # 1000 bytes
        y = x + 1  # 2000
        del x
        z = torch.cat([y, y])  # 3000
        z[3:].add_(1)  # a view, and memory that is there
        del y
        before.mul_(2)
        torch.ones(125)  # 2500
    assert live.peak == 3000


def test_another_model_than_the_plain_one_is_refused():
    config = GPTConfig(vocab_size=13, vocab_multiple=8, seq_length=6, n_layers=2, hidden_size=16, n_heads=2)
    model = GPT(config, dtype=torch.float64)
    batch = torch.randint(13, (2, 7), generator=torch.Generator().manual_seed(0))
    loss, norm = check_against_plain(model, batch, clip_norm=1.0, tolerance=ROUNDING)
    assert float(loss) > 0 and float(norm) > 0
    model.layers["1"].input_layernorm.eps = 1e-4
    with pytest.raises(AssertionError, match="error .* is right"):
        check_against_plain(model, batch, clip_norm=1.0, tolerance=ROUNDING)


def test_what_is_missing_or_differs_is_wrong():
    x = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert str(worst_of({"x": x + 4e-3}, {"x": x}, "forward:")) == "forward: x is off by 0.001 times its largest value"
    assert not worst_of({"x": x * (1 + 1e-10)}, {"x": x}, "").wrong
    assert not worst_of({"x": x * 1e-14}, {"x": x * 0}, "", noise=1e-13).wrong
    for found in ({}, {"x": x, "y": x}, {"x": x[:1]}, {"x": x * torch.nan}, {"x": x + 1e-8}):
        assert worst_of(found, {"x": x}, "").wrong, found


def test_a_gradient_of_zero_that_should_not_be_is_found(tmp_path):
    with in_float64():
        family = next(family for family in FAMILIES if family.name == "Qwen3")
        family.save(tmp_path)
        expected = train(family.load(tmp_path), family.batch())
        other = family.load(tmp_path)
        other.get_parameter("model.layers.1.self_attn.q_norm.weight").register_hook(torch.zeros_like)
        forward, gradients, parameters, last = compare_runs(train(other, family.batch()), expected)
    assert not forward.wrong and parameters.wrong and last.wrong
    assert str(gradients) == "gradient of model.layers.1.self_attn.q_norm.weight is off by 1 times its largest value"


def test_nothing_is_rounded_to_float32():
    x = torch.tensor(1 + 2**-40, dtype=torch.float64)
    with in_float64():
        same = (x.float(), x.to(torch.float32), x[None].softmax(0, dtype=torch.float32) * x, torch.ones(1) * x)
    assert all(y.dtype == torch.float64 and y == x for y in same) and x.float() == 1


def test_the_worst_rank_decides():
    right, wrong = Cell(RIGHT, share=0.5), Cell(WRONG, "a gradient", 0.5)
    assert joined([right, wrong]) == wrong
    assert joined([Cell(REFUSED, "no")] * 2).verdict == REFUSED
    assert joined([right, Cell(REFUSED, "no")]).reason == "only some ranks refuse: no"
    assert joined([Cell(REFUSED, "no"), Cell(ERROR, "what")]).verdict == ERROR
