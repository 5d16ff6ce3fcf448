"""What the planner says of Muon: its matrices are those of built models, owners and bytes those that are really chosen,
and its seconds follow from them."""

import dataclasses
import re
from collections import Counter

import pytest
import torch
from small_runs import build, run_config
from testing import on_every_rank
from torch.distributed.tensor import Replicate, Shard
from turns import in_turns

from checks.budgets import Alive
from tpformer.config import OptimizerSection, build_config, preset_config
from tpformer.models import GPT, GPTConfig
from tpformer.parallel.owners import Laid, assign, busiest
from tpformer.planner import muon
from tpformer.planner.counting import OF_OWNERS
from tpformer.planner.devices import load_device
from tpformer.planner.dry_run import count_rank, plan_config
from tpformer.planner.muon import muon_seconds, muon_workspace, sent_elements, stage_matrices
from tpformer.planner.placement import placement
from tpformer.planner.report import rank_lines
from tpformer.planner.step_time import StepModel
from tpformer.training.muon import cost, hidden_matrices

SIZES = {"vocab_size": 64, "seq_length": 16, "n_layers": 3, "hidden_size": 32, "n_heads": 4}
GATED = {**SIZES, "activation": "swiglu", "norm": "rmsnorm", "bias": False, "position": "rope", "n_kv_heads": 2}
MODELS = {
    "GPT-2": SIZES,
    "gated": {**GATED, "head_dim": 12, "ffn_hidden_size": 80},
    "experts": {**GATED, "n_experts": 4, "expert_ffn_size": 24, "shared_expert_size": 16, "first_dense_layers": 1},
}


def config_of(parallel: dict, model: dict = SIZES, **train):
    values = {"global_batch_size": 64, "microbatch_size": 1, "device": "cuda", "dtype": "bfloat16", **train}
    sections = {"model": model, "parallel": parallel, "optimizer": {"name": "muon"}, "train": values}
    return plan_config(build_config(sections))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_the_matrices_are_those_of_the_built_model(model):
    config = GPTConfig(**model)
    part = GPT(config, device="meta")
    found, together = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for name, stacked in hidden_matrices(part).items():
        *leads, rows, columns = part.get_parameter(name).shape
        found[rows // stacked, columns] += stacked * (leads[0] if leads else 1)
    for shapes in stage_matrices(config, range(config.n_layers)):
        for shape, number in shapes:
            together[shape] += number
    assert together == found


def test_owners_of_8b_on_64_ranks():
    """The planner's are those of tpformer.parallel."""
    model = preset_config("llama3-8b")
    dense, experts = stage_matrices(model, range(model.n_layers))
    assert not experts
    place = Replicate(), Shard(0)
    every = [Laid(shape, tuple(range(64)), (8, 8), place) for shape, number in dense for _ in range(number)]
    jobs = assign(every, [1] * len(every), cost)
    most, mean = busiest(jobs, 64, cost)
    assert most / mean <= 1.1
    device = dataclasses.replace(load_device("h100"), capability=None)  # without tiles seconds are as FLOPs
    predicted = muon.owners(dense, 64, device)
    assert predicted.busiest / predicted.mean == pytest.approx(most / mean, rel=0.02) and 4 <= predicted.rounds <= 6
    parallel = {"data_parallel_shard": 8, "data_parallel_replicate": 8, "zero_stage": 2}
    config = config_of(parallel, {"preset": "llama3-8b"})
    elements = [0.0, 0.0]
    for job in jobs:
        for source, target, number in job.sends():
            elements[source == job.owner and target != job.owner] += number / 64
    assert list(sent_elements(config, range(model.n_layers))) == pytest.approx(elements, rel=1e-9)


def test_a_dry_run_says_what_a_rank_sends():
    """Each of four ranks owns half a layer's matrices, in elements."""
    config = config_of({"tensor_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3})
    count = count_rank(config, 1)
    (found,) = count.matrices
    layers = range(config.model.n_layers)
    elements = sum(rows * columns * number for (rows, columns), number in stage_matrices(config.model, layers)[0])
    assert sent_elements(config, layers) == (elements / 4 * 3 / 4, elements / 4 * 3 / 4)
    assert found.to_owners + found.back == pytest.approx(2 * 2 * elements / 4 * 3 / 4, rel=0.2)
    lines = [line for line in rank_lines(config, count, None, 1e12) if "Muon, stage 0: the busiest owner has" in line]
    assert len(lines) == 1 and f" in {found.rounds} rounds; this rank sends " in lines[0]


@pytest.mark.parametrize("pipeline", in_turns([1, 2], first=1))
def test_lists_of_collectives_have_its_all_to_alls(pipeline):
    """Over all axes of a stage: what each rank sends, and in the mean what the placement says of any."""
    layout = {"data_parallel_shard": 2, "data_parallel_replicate": 2, "zero_stage": 2, "pipeline_parallel": pipeline}
    config = config_of(layout, {**SIZES, "n_layers": 4})
    axes, total, ranks = "dp_replicate x dp_shard", 0.0, range(4)
    for rank in ranks:
        count = count_rank(config, rank)
        own = {call: times for call, times in count.collectives.items() if call.operation in OF_OWNERS}
        (found,) = count.matrices
        assert {(call.axis, call.operation) for call in own} == {(axes, name) for name in OF_OWNERS}
        assert set(own.values()) == {found.rounds}
        sent = sum(times * call.nbytes for call, times in own.items())
        assert found.to_owners + found.back - sent < 2 * found.rounds, "but for rounding down"
        lines = "\n".join(rank_lines(config, count, None, 1))
        assert re.search(rf"^  {axes} from_owners +{found.rounds} ", lines, re.M)
        total += found.to_owners + found.back
    adamw = dataclasses.replace(config, optimizer=OptimizerSection())
    (sent,) = [each.sent for each in placement(config, 8) if each.axis == axes]
    assert sent == pytest.approx(total / len(ranks))
    others = [each for each in placement(config, 8) if each.axis != axes]
    assert [(each.axis, each.sent) for each in others] == [(each.axis, each.sent) for each in placement(adamw, 8)]


def test_seconds_and_bytes_of_a_step():
    device = load_device("h100")
    parallel = ({"data_parallel_shard": ranks, "zero_stage": 1} for ranks in (1, 8))
    one, many = (config_of(each, {"preset": "llama3-8b"}) for each in parallel)
    layers = range(one.model.n_layers)
    dense, _ = stage_matrices(one.model.architecture, layers)
    alone = sum(number * muon.iteration_seconds(*shape, device) for shape, number in dense)
    assert muon_seconds(one, [layers], device) == pytest.approx(alone)
    assert muon_seconds(many, [layers], device) < 1.5 / 8 * muon_seconds(one, [layers], device)
    slow = dataclasses.replace(device, gpus_per_node=1, network=1e8)
    assert muon_seconds(many, [layers], slow) > 5 * muon_seconds(many, [layers], device)
    slower = dataclasses.replace(slow, machine=slow.machine._replace(flops=slow.machine.flops / 2))
    assert muon_seconds(many, [layers], slower) > muon_seconds(many, [layers], slow), "a round is behind"
    adamw = dataclasses.replace(many, optimizer=dataclasses.replace(many.optimizer, name="adamw"))
    step, other = (StepModel(each, device).step() for each in (many, adamw))
    assert step.optimizer > other.optimizer and step.compute == other.compute
    biggest = 14336 * 4096
    assert 2 * 3 * biggest < muon_workspace(many, [layers]) < 2 * 9 * biggest
    single = dataclasses.replace(many, optimizer=dataclasses.replace(many.optimizer, muon_dtype="float32"))
    assert muon_workspace(single, [layers]) == 2 * muon_workspace(many, [layers])


WORKED = {  # six layers: on four ranks nine rounds, of which three in a row are of the largest matrices
    1: [("float32", {}), ("bfloat16", {})],
    2: [("float32", {"data_parallel_replicate": 2}), ("bfloat16", {"tensor_parallel": 2})],
    4: [
        ("float32", {"tensor_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3}),
        ("bfloat16", {"data_parallel_shard": 2, "data_parallel_replicate": 2, "zero_stage": 2}),
        ("bfloat16", {"data_parallel_replicate": 4}),
    ],
}


@on_every_rank(1, *in_turns([2, 4], first=0))
def test_a_real_step_takes_the_bytes_of_the_formula():
    """Each storage that a step makes is counted, but for the 4 bytes of its flag. The least of some steps, as gloo's
    threads may keep a message for a moment longer."""
    sizes = {**SIZES, "n_layers": 6}
    for dtype, parallel in WORKED[torch.distributed.get_world_size()]:
        config = run_config(parallel, sizes, {"name": "muon", "muon_dtype": dtype})
        model, (optimizer,) = build(config)
        peaks = []
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            with Alive() as alive:
                there = alive.now
                optimizer.step()
            peaks.append(alive.peak - there - 4)
        assert min(peaks[1:]) == muon_workspace(config, [range(6)]), (dtype, parallel)
