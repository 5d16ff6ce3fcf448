"""What layers keep under a memory budget: monotone, no slower than one way for all, and the fastest of all mixes.

`python -m checks.budgets` counts the peaks of real steps.
"""

import dataclasses
import itertools
import random
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from turns import in_turns

from tpformer.config import PLAIN, PRESETS, SCHEDULES, RunConfig, build_config, keep_text, preset_config, to_toml
from tpformer.planner import memory_budget, stage_mixes
from tpformer.planner.devices import load_device
from tpformer.planner.keep_choice import FINEST, _ordered, _Step, choose, peak, ways_of
from tpformer.planner.memory_budget import least, uniform, with_budget
from tpformer.planner.rank_choice import Rank
from tpformer.planner.rank_memory import predicted_memory
from tpformer.planner.software import ours
from tpformer.planner.step_time import StepModel
from tpformer.planner.units import stage_ranges, with_keep

H100 = load_device("h100")
LLAMA = {
    "vocab_size": 32000, "seq_length": 2048, "hidden_size": 2048, "n_heads": 16, "n_kv_heads": 4, "norm": "rmsnorm",
    "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
}  # fmt: skip
MOE = {**LLAMA, "n_experts": 8, "experts_per_token": 2, "expert_ffn_size": 1024, "first_dense_layers": 2}
LARGE = [
    ("llama3-8b", {"data_parallel_shard": 8, "zero_stage": 2}),
    ("llama3-8b", {"data_parallel_shard": 8, "zero_stage": 3}),
    ("llama3-70b", {"tensor_parallel": 8, "data_parallel_shard": 8, "zero_stage": 3}),
    ("llama3-70b", {"tensor_parallel": 8, "data_parallel_shard": 2, "pipeline_parallel": 4}),
]
# a schedule, stages a rank, and layers: a few of them in each stage
SEVERAL = [
    *((name, 2, 9) for name in ("Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV")),
    ("Interleaved1F1B", 3, 12), ("LoopedBFS", 3, 9), ("InterleavedZeroBubble", 4, 9),
]  # fmt: skip


def configuration(model: dict, n_layers: int, **parallel) -> RunConfig:
    train = {"global_batch_size": 64, "microbatch_size": 2, "dtype": "bfloat16", "device": "cuda"}
    return build_config({"model": {**model, "n_layers": n_layers}, "parallel": parallel, "train": train})


def of_preset(preset: str, **parallel) -> RunConfig:
    model = preset_config(preset)
    if model.position == "rope":
        model = dataclasses.replace(model, seq_length=8192)
    values = {each.name: getattr(model, each.name) for each in dataclasses.fields(model)}
    train = {"global_batch_size": 64, "microbatch_size": 1, "dtype": "bfloat16", "device": "cuda"}
    given = {name: value for name, value in values.items() if value is not None}
    return build_config({"model": given, "parallel": parallel, "train": train})


def seconds(config: RunConfig) -> float:
    return StepModel(config, H100, ours(config.parallel, H100)).step().seconds


def drawn(seed: int) -> RunConfig:
    """A layout of any schedule and ZeRO stage, on some of the axes."""
    draw = random.Random(seed)
    model, schedule = draw.choice([LLAMA, MOE]), draw.choice([None, *(name for name in SCHEDULES if name != "naive")])
    parallel: dict = {"tensor_parallel": draw.choice([1, 2]), "zero_stage": draw.choice([0, 1, 2, 3])}
    parallel["data_parallel_replicate" if parallel["zero_stage"] == 0 else "data_parallel_shard"] = 2
    if schedule is not None:
        parallel |= {"pipeline_parallel": 2, "pipeline_schedule": schedule}
        if SCHEDULES[schedule].splits_backward:
            parallel["zero_stage"] = min(1, parallel["zero_stage"])
    elif draw.random() < 0.3:
        parallel |= {"context_parallel": 2, "zero_stage": 3}
        parallel.pop("data_parallel_replicate", None)
    if model is MOE and draw.random() < 0.5:
        parallel["expert_parallel"] = 2
    return configuration(model, draw.choice([4, 8]), **parallel)


def check_budgets(config: RunConfig, number: int) -> None:
    """The rules of a property test: from all kept down to the least, peaks and seconds go one way."""
    config.parallel.check()
    low, high = least(config)[0], peak(with_keep(config, "keep"))
    last = None
    for n in range(number):
        room = high + (low * (1 + 1e-9) - high) * n / (number - 1)
        found, alike = choose(config, H100, room), uniform(config, H100, room)
        if found is None:  # one way in all layers but the last may need less than mixes in order
            assert alike is None
            continue
        assert found.memory <= room * (1 + 1e-9), found
        assert found.memory == peak(with_keep(config, found.keep))
        assert alike is None or found.seconds <= alike.seconds * (1 + 1e-9), (found, alike)
        assert last is None or found.seconds >= last.seconds * (1 - 1e-9), (found, last)
        assert last is None or found.memory <= last.memory, (found, last)
        last = found


@pytest.mark.parametrize("seed", [3, *in_turns([1, 2, 6, 4, 5, 0, 7], first=0)])
def test_a_smaller_budget_takes_no_less_time_and_holds(seed):
    check_budgets(drawn(seed), 4)


@pytest.mark.parametrize("seed", range(20))
def test_steps_are_in_order_where_those_of_the_fastest_mixes_are_not(seed):
    """Steps that need less and, but for some, take longer: some rooms would be slower than smaller ones, and are not.
    Where none of them would be, each room has its own."""
    draw, faults = random.Random(seed), 0 if seed == 0 else 0.3
    needs, seconds = sorted(draw.sample(range(1, 4096), 60), reverse=True), [1.0]
    for _ in needs[1:]:
        seconds.append(seconds[-1] + draw.choice([0.0, 0.001, 0.1]) * (-1 if draw.random() < faults else 1))
    stairs = [
        _Step(1.0 if at == 0 else max(1.0, taken), float(at), -float(need * FINEST * 2), str(need))
        for at, (need, taken) in enumerate(zip(needs, seconds, strict=True))
    ]

    def fastest(room: float) -> _Step:
        return next(step for step in stairs if step.memory <= room)

    low, high = max(stairs[-1], stairs[0]), stairs[0]
    rooms = [step.memory + more for step in stairs for more in (0, FINEST)]
    found = [_ordered(fastest, low, high, room) for room in rooms]
    for room, step, other in zip(rooms, found, found[2:] + found[-1:] * 2, strict=True):
        assert step.memory <= room and step.seconds <= other.seconds and step.memory >= other.memory
    below = [step.memory - 1 for step in stairs[:-1]]
    assert all(_ordered(fastest, low, high, room).memory <= room for room in below)
    alone = [fastest(room) for room in rooms]
    assert (found == alone) == (faults == 0)


def test_the_choice_is_the_best_of_all_mixes_of_a_small_stage():
    """Each of the few mixes of four layers is looked at, one by one. The search finds the best of them, also where it
    treats them as too many for that."""
    config, many = configuration(LLAMA, 4, data_parallel_shard=2, zero_stage=2), mock.Mock(return_value=True)
    ways = ways_of(config)
    every = []
    for mix in itertools.combinations_with_replacement(range(len(ways)), 4):
        changed = with_keep(config, keep_text([ways[way] for way in mix]))
        every.append((seconds(changed), peak(changed), len(set(mix))))
    low, high, beyond = min(need for _, need, _ in every), max(need for _, need, _ in every), 0
    stairs = [each for each in every if not any(other[:2] < each[:2] and other[1] <= each[1] for other in every)]
    several = [need for _, need, ways_of_mix in stairs if ways_of_mix > 3]
    for room in [*several[:3], *(low + share * (high - low) for share in (0.05, 0.3, 0.5, 0.7, 0.95))]:
        best = min(each for each in every if each[1] <= room)
        of_three = min(each for each in every if each[1] <= room and each[2] <= 3)
        beyond += best[0] < of_three[0]
        with mock.patch.object(stage_mixes, "many", many), mock.patch.object(stage_mixes, "FEW", 0):
            searched = choose(config, H100, room)
        for found in (choose(config, H100, room), searched):
            assert found is not None and found.seconds == pytest.approx(best[0], rel=1e-9) and found.short == 0
        with mock.patch.object(stage_mixes, "MOST", 0):
            bounded = choose(config, H100, room)
        assert bounded is not None and bounded.seconds == pytest.approx(of_three[0], rel=1e-9)
        assert bounded.seconds * (1 - bounded.short) <= best[0] * (1 + 1e-3), "the bound is one"
    assert beyond, "one has more than three ways"


class Every(NamedTuple):
    """All mixes of a rank's stages, one by one: the ways and columns of each stage, bytes, and seconds."""

    rank: Rank
    mixes: list[np.ndarray]
    values: list[np.ndarray]
    needs: np.ndarray
    seconds: np.ndarray


def in_stages(schedule: str, stages: int, n_layers: int, **model: int) -> RunConfig:
    parallel = {"pipeline_parallel": 2, "pipeline_schedule": schedule, "pipeline_stages_per_rank": stages}
    return configuration({**LLAMA, **model}, n_layers, **parallel)


def every_mix(schedule: str, stages: int, n_layers: int, number: int) -> Every:
    config = with_keep(in_stages(schedule, stages, n_layers), "keep")
    ways = ways_of(config)
    rank = Rank(config, number, StepModel(config, H100, ours(config.parallel, H100)), ways)
    each = [np.array([*itertools.combinations_with_replacement(range(len(ways)), s.n)]) for s in rank.stages]
    places = np.indices([len(mixes) for mixes in each]).reshape(stages, -1)
    columns = [stage.columns(mixes) for stage, mixes in zip(rank.stages, each, strict=True)]
    costs = [stage.cost(values) for stage, values in zip(rank.stages, columns, strict=True)]
    held = [rank._holds(index, values) for index, values in enumerate(columns)]
    needs = np.full(places.shape[1], -np.inf)
    for moment, fixed in enumerate(rank.fixed):
        needs = np.maximum(needs, fixed + sum(part[at, moment] for part, at in zip(held, places, strict=True)))
    pick = [[part[at] for part, at in zip(parts, places, strict=True)] for parts in (each, columns, costs)]
    return Every(rank, pick[0], pick[1], needs, np.sum(pick[2], 0))


@pytest.mark.parametrize("number", [0, *in_turns([1], first=4)])
@pytest.mark.parametrize("schedule, stages, n_layers", SEVERAL)
def test_stages_of_one_rank_have_mixes_of_their_own(schedule, stages, n_layers, number):
    """Two to four stages of one to three layers: all their mixes are looked at one by one. None of them is faster than
    the bound, nor than it and what its stages are above it; and prices say most of what fitting takes."""
    rank, mixes, values, needs, seconds = every_mix(schedule, stages, n_layers, number)
    differ, floor, slack = 0, needs.min(), 1e-9 * rank.slowest
    lost = spent = 0.0
    for room in [floor * (1 + 1e-12), floor - 1, *np.linspace(floor, needs[seconds.argmin()], 8)[1:-1]]:
        found = rank.choose(room + rank.base)
        if room < floor:
            assert found is None
            continue
        fits = np.flatnonzero(needs <= room)
        best = fits[seconds[fits].argmin()]
        assert found is not None and found.seconds == pytest.approx(seconds[best], rel=1e-9)
        assert found.least == found.seconds
        rank.known.clear()
        less = rank.choose(found.need * (1 + 1e-12))
        assert less is not None and all(map(np.array_equal, less.ways, found.ways)), "of equally fast ones the same"
        differ += len({frozenset(each[best].tolist()) for each in mixes}) > 1
        bound, layer, above = rank._prices.bound(room, [each[best] for each in mixes]), 0, 0.0
        for index, (stage, ways) in enumerate(zip(rank.stages, mixes, strict=True)):
            columns = values[index][fits]
            paid = stage.cost(columns) + rank._holds(index, columns) @ bound.bytes - bound.least[index]
            layers = bound.above[ways[fits], layer + np.arange(stage.n)].sum(1)
            assert (layers <= paid + slack).all(), "layers are together no more above than their stage"
            layer, above = layer + stage.n, above + paid
        assert (bound.seconds + above <= seconds[fits] + slack).all(), "no mix that fits is faster"
        lost, spent = lost + seconds[best] - bound.seconds, spent + seconds[best] - seconds.min()
    assert lost < 0.6 * spent or spent == 0, (lost, spent)
    assert differ or schedule != "Interleaved1F1B", "no stage wants another mix than the other one"


@pytest.mark.parametrize("schedule, stages, n_layers", SEVERAL)
def test_what_a_rank_needs_is_what_is_predicted_of_it(schedule, stages, n_layers):
    """Of any mixes. What a stage holds beside its layers may be below zero: its output is freed, so that a moment with
    more microbatches in flight is not always the fuller one."""
    config = in_stages(schedule, stages, n_layers, seq_length=8192)
    ways, draw = ways_of(config), random.Random(0)
    plain = StepModel(with_keep(config, "keep"), H100, ours(config.parallel, H100))
    for number in (0, 1):
        rank = Rank(config, number, plain, ways)
        for _ in range(8):
            mixes = [np.sort(draw.choices(range(len(ways)), k=stage.n)) for stage in rank.stages]
            values = [stage.columns(mix[None]) for stage, mix in zip(rank.stages, mixes, strict=True)]
            kept = [PLAIN] * n_layers
            for stage, mix in zip(rank.stages, mixes, strict=True):
                kept[stage.layers.start : stage.layers.stop] = [ways[way] for way in mix]
            predicted = predicted_memory(with_keep(config, keep_text(kept)), number).total
            assert rank.base + rank._needs(values)[0] == pytest.approx(predicted, rel=1e-9)


SHARDS = {"data_parallel_shard": 4, "zero_stage": 1}
LONG = [
    {"pipeline_parallel": 2, "pipeline_schedule": schedule, **more}
    for schedule in ("DualPipeV", "InterleavedZeroBubble") for more in ({}, SHARDS)
]  # fmt: skip
HALVED = {**SHARDS, "pipeline_parallel": 4, "pipeline_schedule": "ZBVZeroBubble", "tensor_parallel": 2}


@pytest.mark.parametrize("preset, parallel, shares", [
    # of 24 layers a stage, with two stages a rank, one keeps next to nothing, and the other one may keep all
    ("megatron-310.1b", LONG[0], [1e-9]), *in_turns((("megatron-310.1b", each, [1e-9]) for each in LONG[1:]), first=0),
    # where what is offloaded takes longest, the last layers but one hold most, while they are in their backward
    ("megatron-3.6b", {**SHARDS, "zero_stage": 3}, [0.1]),
    *in_turns((("megatron-3.6b", {**SHARDS, "zero_stage": stage}, [0.1]) for stage in (1, 2)), first=1),
    # halving asks for a room just below what the fullest rank needs: its least is by a rounding more than the step's
    ("mistral-7b-v0.3", HALVED, [0.3]), *in_turns(((*each, [0.05, 0.2, 0.4, 0.6, 0.8]) for each in LARGE), first=5),
])  # fmt: skip
def test_large_models_have_the_fastest_mix(preset, parallel, shares):
    """Of up to 80 layers all mixes are too many to look at; that none is faster is proven by prices."""
    config = of_preset(preset, **parallel)
    low, high = least(config)[0], peak(with_keep(config, "keep"))
    for share in shares:
        found = choose(config, H100, low + share * (high - low))
        assert found is not None and found.short == 0, (share, found)


def test_each_pipeline_rank_has_its_own_mix():
    """The last rank has one microbatch in flight, and keeps all."""
    config = configuration(LLAMA, 16, pipeline_parallel=4)
    whole = [peak(with_keep(config, "keep")), least(config)[0]]
    found = choose(config, H100, 0.4 * whole[0] + 0.6 * whole[1])
    assert found is not None
    ways = dataclasses.replace(config.parallel, keep=found.keep).kept(16)
    mixes = [[str(ways[layer]) for layer in stage] for stage in stage_ranges(config.model, "parameters", 4)]
    assert set(mixes[-1]) == {"keep"} and len(set(map(tuple, mixes))) > 2


@pytest.mark.parametrize("preset", in_turns(PRESETS))
def test_every_preset_in_every_schedule(preset):
    """A third of the schedules for each preset, with a ZeRO stage each; three neighbours have all schedules."""
    place = list(PRESETS).index(preset)
    for number, schedule in list(enumerate([None, *(name for name in SCHEDULES if name != "naive")]))[place % 3 :: 3]:
        stage = (number + place) % 4
        splits = schedule is not None and SCHEDULES[schedule].splits_backward
        parallel: dict = {"zero_stage": min(1, stage) if splits else stage, "tensor_parallel": 1}
        parallel["data_parallel_shard" if parallel["zero_stage"] else "data_parallel_replicate"] = 4
        pipeline = {} if schedule is None else {"pipeline_parallel": 2, "pipeline_schedule": schedule}
        check_budgets(of_preset(preset, **parallel, **pipeline), 3)


def budgeted(budget: str, directory: str = "runs/none", **more) -> RunConfig:
    model = {**LLAMA, "n_layers": 4, "seq_length": 256, "hidden_size": 256, "n_heads": 4, "vocab_size": 512}
    train = {"global_batch_size": 4, "microbatch_size": 4, "device": "cpu", "dtype": "float32"}
    run = {"dir": directory, **{key: more.pop(key) for key in ("resume",) if key in more}}
    return build_config({"model": model, "train": train, "parallel": {"memory_budget": budget, **more}, "run": run})


def test_a_budget_becomes_keep_and_a_resumed_run_chooses_nothing_again(tmp_path):
    plain = budgeted("")
    low, high = least(plain)[0], peak(with_keep(plain, "keep"))
    text = f"{0.5 * (low + high):.0f}"
    config, lines = with_budget(budgeted(text, str(tmp_path)))
    assert "*" in config.parallel.keep and config.parallel.memory_budget == text
    assert lines[-1].startswith(f"parallel.memory_budget = '{text}': layers keep {config.parallel.keep}; predicted ")
    assert with_budget(config) == (config, []), "nothing is chosen twice"
    # the run began with another mix, on another device say
    began = with_keep(config, "2*full,2*keep")
    (tmp_path / "config.toml").write_text(to_toml(began))
    resumed, lines = with_budget(budgeted(text, str(tmp_path), resume=True))
    assert resumed.parallel.keep == "2*full,2*keep" and lines == []
    (tmp_path / "config.toml").write_text(to_toml(with_keep(began, "keep")))  # in another layout that fitted, say
    fewer, lines = with_budget(budgeted(text, str(tmp_path), resume=True))
    assert fewer.parallel.keep == config.parallel.keep and "the run kept keep, which needs" in lines[0]
    other, lines = with_budget(budgeted(f"{1.1 * high:.0f}", str(tmp_path), resume=True))
    assert other.parallel.keep == "keep" and lines, "another budget chooses"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_budget_is_for_the_device_that_a_run_without_one_gets(device):
    """A GPU's bfloat16 takes half of a CPU's float32, and a CPU neither packs nor offloads."""
    plain = budgeted("85MiB")
    train = dataclasses.replace(plain.train, dtype=None)
    unset, named = (dataclasses.replace(plain, train=dataclasses.replace(train, device=d)) for d in (None, device))
    with mock.patch.object(memory_budget, "device_type", lambda config: device):
        chosen, lines = with_budget(unset)
    expected, said = with_budget(named)
    assert (chosen.parallel, lines) == (expected.parallel, said)
    assert chosen.train.device is None, "the run finds its own"


@pytest.mark.parametrize("budget, more, words", [
    ("5MiB", {}, r"is too small: this run needs \d.* with keep = '\S+', .* of it for model s.*microbatch_size = 2 \("),
    ("5MiB", {"keep": "keep"}, "parallel.keep='keep' is predicted to need .*leave keep out to choose again"),
    ("50%", {}, "is a share of a GPU's memory, and there is none"),
    # the remedy is the budget's, not the planner's
    *(("40GiB", {"exchange": each, "data_parallel_replicate": 2}, f"'{each}' has no model .*: leave the budget out")
      for each in ("int8", "sync_server")),
])  # fmt: skip
def test_a_budget_that_nothing_fits_names_what_would_help(budget, more, words):
    with pytest.raises(ValueError, match=words):
        with_budget(budgeted(budget, **more))
